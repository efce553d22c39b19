"""The waiting queues against a plain list, and the choices that need no state."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsched.request import Request, SamplingParams
from kvsched.sched.policy import choose_victim, last_token_in_flight, reserved_blocks
from kvsched.sched.queue import make_queue


def request(name: str, priority: int = 0, arrival: float = 0.0) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=4), priority=priority, arrival_time=arrival)


def rank(r: Request) -> tuple[int, float, str]:
    return (r.priority, r.arrival_time, r.id)


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(st.data())
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_queue_does_what_a_list_does(policy, data):
    queue, model = make_queue(policy), []
    everybody = [request(f"r{i}", data.draw(st.integers(0, 2)), float(data.draw(st.integers(0, 2)))) for i in range(8)]
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "put_back", "remove", "take"]))
        outside = [r for r in everybody if r not in model]
        if action in ("add", "put_back") and outside:
            r = data.draw(st.sampled_from(outside))
            getattr(queue, action)(r)
            model.insert(0 if action == "put_back" else len(model), r)
            if policy == "priority":
                model.sort(key=rank)
        elif action == "remove" and model:
            r = data.draw(st.sampled_from(model))
            queue.remove(r)
            model.remove(r)
        elif action == "take" and model:
            assert queue.head() is model[0]
            queue.remove(model.pop(0))
        assert list(queue) == model
        assert len(queue) == len(model)
        assert bool(queue) == bool(model)
        assert [r in queue for r in everybody] == [r in model for r in everybody]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_id_used_again_is_another_request(policy):
    queue = make_queue(policy)
    first, second = request("r"), request("r")
    queue.add(first)
    queue.remove(first)
    queue.add(second)
    assert second in queue
    assert first not in queue
    assert "r" not in queue
    assert queue.head() is second
    assert list(queue) == [second]


def test_requests_of_one_rank_can_be_told_apart_by_nothing_and_still_be_ordered():
    """A removed entry lies in the heap beside its successor of the same rank: they must never be compared."""
    queue = make_queue("priority")
    for _ in range(5):
        r = request("r")
        queue.add(request("a", priority=-1))
        queue.add(r)
        queue.remove(r)
        queue.remove(queue.head())
    queue.add(r)
    assert queue.head() is r


def test_the_heap_does_not_keep_what_was_removed():
    queue = make_queue("priority")
    for i in range(2000):
        queue.add(request(f"keep{i % 10}", priority=-1)) if i < 10 else None
        r = request(f"r{i}", priority=1)
        queue.add(r)
        queue.remove(r)
    assert len(queue) == 10
    assert len(queue._heap) < 200


# ---- choices


def test_the_victim():
    running = [request("a", 1, 0.0), request("b", 2, 1.0), request("c", 2, 5.0), request("d", 0, 9.0)]
    assert choose_victim("fcfs", running).id == "d"
    assert choose_victim("priority", running).id == "c"
    running = [request("a"), request("b")]
    assert choose_victim("priority", running).id == "a", "of equals the one admitted first"


@pytest.mark.parametrize(
    ("computed", "owed", "is_in_flight"), [(3, 0, False), (5, 1, False), (6, 1, True), (6, 2, False), (7, 2, True)]
)
def test_whether_the_last_token_is_in_flight(computed, owed, is_in_flight):
    """3 prompt tokens and at most 4 more: the step that computes position 5 samples the last one."""
    r = request("r")
    r.num_computed_tokens, r.num_output_placeholders = computed, owed
    assert last_token_in_flight(r) == is_in_flight


def test_reserved_blocks():
    a, b, c = (Request(name, [0] * n, SamplingParams()) for name, n in (("a", 17), ("b", 4), ("c", 100)))
    a.block_ids, b.block_ids = [1, 2], [3, 4]
    assert reserved_blocks([], 1000, 4) == 0
    assert reserved_blocks([a], 1000, 4) == 3
    assert reserved_blocks([a, b], 1000, 4) == 3, "more than needed is not counted against others"
    assert reserved_blocks([a, b, c], 1000, 4) == 3 + 25
    assert reserved_blocks([a, b, c], 40, 4) == 3 + 10
