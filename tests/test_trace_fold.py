"""The state folded from events alone equals the scheduler's own, and can be copied for next to nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsched.conformance.replay import Replay as LiveReplay
from kvsched.conformance.replay import load_recording
from kvsched.request import RequestStatus
from kvsched.trace import events as ev
from kvsched.trace.fold import _HANDLERS, apply, fold
from kvsched.trace.names import Names
from kvsched.trace.paged import PAGE, Paged
from kvsched.trace.plain import TraceError
from kvsched.trace.state import Queue, State
from tests.conftest import repository
from tests.trace_runs import RandomRun, differences, head, make_head, recorded


def _recordings() -> list[Path]:
    folders = (repository().parent / "shared" / "conformance", repository() / "tests" / "data" / "conformance")
    return next((found for folder in folders if (found := sorted(folder.glob("vllm-*.json.gz")))), [])


def _part(number: int, parts: int) -> list[Path]:
    found = _recordings()[number::parts]
    if not found:
        pytest.skip("no recordings of the real scheduler here (shared/conformance)")
    return found


# ---- equal to the live scheduler


@pytest.mark.parametrize("part", range(4))
def test_recordings_fold_to_the_live_state(part):
    """Every fourth recording of the real scheduler, compared after every event of it."""
    for path in _part(part, 4):
        recording = load_recording(path)
        told: list[ev.Event] = []
        live = LiveReplay(recording, told.append)
        state = fold([head(live.scheduler)])
        for number, event in enumerate(recording["events"]):
            live.apply(event)
            fold(told, state)
            told.clear()
            assert not differences(live.scheduler, state), f"{path.name}, after event {number} ({event['do']})"


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_random_runs_fold_to_the_live_state(seed):
    run, state, done = RandomRun(seed), State(), 0
    for number, action in enumerate(run.play()):
        fold(run.events[done:], state)
        done = len(run.events)
        assert not differences(run.scheduler, state), f"seed {seed}, after action {number} ({action})"


def test_random_runs_see_everything():
    """The comparison above would be worth little if the runs never came to these."""
    kinds: set[str] = set()
    for seed in range(60):
        kinds |= {event.kind for event in recorded(seed)}
    assert set(ev.EVENT_TYPES) - kinds <= {"fault_injected"}  # a bare scheduler knows no fault plan


def test_every_kind_of_event_is_folded():
    assert set(_HANDLERS) == set(ev.EVENT_TYPES.values())


def test_turning_the_fence_on_counts_the_steps_in_flight():
    for seed in range(40):
        run = RandomRun(seed, defer_block_free=False, max_in_flight=3)
        state, done, turned = State(), 0, False
        for _ in run.play(60):
            if len(run.in_flight) == 3 and not turned:
                run.scheduler.configure(defer_block_free=True)
                turned = True
            elif turned and len(run.in_flight) == 2:
                run.scheduler.configure(defer_block_free=False)
            fold(run.events[done:], state)
            done = len(run.events)
            assert not differences(run.scheduler, state), f"seed {seed}"


# ---- by hand


def _add(name: str, step: int = 0, prompt: int = 6, time: float = 0.0, priority: int = 0) -> ev.RequestAdded:
    return ev.RequestAdded(step, name, tuple(range(prompt)), {"max_tokens": 4}, priority, time, time)


def _step(step: int, seq: int, names: tuple[str, ...], counts: tuple[int, ...], starts: tuple[int, ...]) -> ev.Event:
    return ev.StepScheduled(step, seq, names, counts, starts, frozenset(), len(names), 0, float(step))


STORY = [
    make_head(num_blocks=9, defers_frees=True),
    _add("a"),
    _add("b", time=1.0),
    ev.BlocksAllocated(1, "a", (1, 2), ()),
    ev.BlocksCached(1, "a", 0, (1,), (b"one",)),
    ev.Admitted(1, "a", False, 0, 0, 0),
    ev.BlocksHit(1, "b", (1,)),
    ev.BlocksAllocated(1, "b", (3,), ()),
    ev.Admitted(1, "b", False, 4, 4, 0),
    _step(1, 1, ("a", "b"), (6, 2), (0, 4)),
    ev.Preempted(2, "b", "a", 6, 2, False, 1, "kv_full"),
    ev.BlocksReleased(2, "b", (1, 3), 1, "preempted"),
    _step(2, 1, (), (), ()),
]


def test_a_deferred_free_keeps_its_references_until_the_fence_has_passed():
    state = fold(STORY)
    assert (state.running, state.waiting, state.num_free) == (["a"], ["b"], 5)
    assert state.refs(1) == 2
    assert state.owners() == {1: ["a"], 2: ["a"]}
    assert state.fences() == {1: [1], 3: [1]}
    assert [tuple(entry) for entry in state.deferred] == [(1, "b", (1, 3), 2)]
    assert state.writing() == {1: [1], 2: [1], 3: [1]}
    fold([ev.FenceAdvanced(2, 1), ev.BlocksFreed(2, "b", (3,), (), (1,), 1)], state)
    assert (state.deferred, state.refs(1), state.num_free, state.writing()) == ([], 1, 6, {})
    assert state.free_queue() == [3, 4, 5, 6, 7, 8]
    fold([ev.StepDelivered(2, 1, ("a", "b"), ((50,), (60,)), 2.0)], state)
    assert state.flights == []
    b = state.request("b")
    assert (b.output_token_ids, b.num_stale_output_tokens, b.status) == ([60], 0, RequestStatus.PREEMPTED)


def test_one_block_seen_from_all_sides():
    state = fold(STORY)
    assert tuple(state.block(1)) == (1, 2, ("a",), b"one", None, (1,), (), (1,), (), ())
    assert tuple(state.block(3)) == (3, 1, (), None, None, (1,), (), (1,), (), ())
    assert state.block(5).position == 1
    assert tuple(state.block(0)) == (0, 0, (), None, None, (), (), (), (), ())
    for outside in (-1, 9):
        with pytest.raises(IndexError, match=r"block -?\d is not in the pool of 9 blocks"):
            state.block(outside)


def test_loads_and_saves_are_seen_on_their_blocks():
    state = fold(
        [
            make_head(),
            _add("a"),
            ev.BlocksAllocated(1, "a", (1, 2), ()),
            ev.Parked(1, "a", (1, 2), 0, 5),
            ev.LoadStarted(1, "a", (1, 2), 5, True),
            ev.SaveStarted(1, "a", (2,)),
        ]
    )
    assert (state.block(2).loading_for, state.block(2).saving_for) == (("a",), ("a",))
    assert (state.loading, state.request("a").queue) == (["a"], Queue.LOADING)
    fold([_step(1, 0, (), (), ()), ev.StepDelivered(2, 1, (), (), 0.0), ev.LoadLanded(2, "a")], state)
    assert (state.block(2).loading_for, state.block(2).saving_for) == ((), ())
    assert state.request("a").load_landed


def test_an_empty_step_ends_no_transfer_of_a_step_in_flight():
    """Synchronous loads and saves go with their step; an empty step may report others before it."""
    state = fold([*STORY[:9], ev.LoadStarted(1, "a", (2,), 2, False), ev.SaveStarted(1, "a", (1,)), STORY[9]])
    fold([_step(2, 1, (), (), ()), ev.StepDelivered(2, 2, (), (), 2.0)], state)
    assert (list(state.loads), len(state.saves)) == (["a"], 1)
    fold([ev.FenceAdvanced(2, 1), ev.StepDelivered(2, 1, ("a", "b"), ((50,), (60,)), 2.0)], state)
    assert (state.loads, state.saves) == ({}, [])


def test_priority_orders_the_waiting_ones():
    events = [make_head(policy="priority"), _add("x", priority=2), _add("z", priority=1), _add("y", priority=1)]
    assert fold(events).waiting == ["y", "z", "x"]
    assert fold([*events, _add("w", priority=1, time=-1.0)]).waiting == ["w", "y", "z", "x"]


def test_an_id_may_come_again_after_its_end():
    state = fold([make_head(), _add("a"), ev.RequestFinished(0, "a", "abort", 0, 1.0), _add("a", prompt=9)])
    assert state.waiting == ["a"]
    assert state.request("a").num_tokens == 9
    assert [r.status for r in state.requests] == [RequestStatus.ABORTED, RequestStatus.WAITING]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([ev.CacheReset(0)], "event 0 is cache_reset; a trace opens with run_started"),
        ([make_head(), make_head()], "event 1: a second run_started"),
        ([make_head(), ev.LoadLanded(1, "x")], "event 1 speaks of request 'x', which has not been added"),
        ([make_head(), _step(1, 0, ("x",), (1,), (0,))], "event 1 speaks of request 'x'"),
        ([make_head(), _add("a"), ev.BlocksAllocated(1, "a", (9,), ())], "event 2 names a block outside the pool of 9"),
        ([make_head(), _add("a"), ev.BlocksAllocated(1, "a", (-1,), ())], "event 2 names a block outside the pool"),
        ([make_head(), _add("a"), _step(1, 0, ("a",), (1, 2), (0,))], "event 2 does not make sense .zip"),
        ([make_head(), ev.SaveStarted(1, "x", (1,))], "event 1 speaks of request 'x'"),
        ([make_head(), _add("a"), ev.RequestFinished(1, "a", "tired", 0, 0.0)], "finished for 'tired'; known: stop"),
        ([ev.RunStarted(0, 1, {"num_blocks": 4}, "x", {})], "config has no block_size of 1 or more .*None"),
        ([make_head(), ev.ConfigChanged(1, {"defer_block_free": "auto"})], "defer_block_free='auto', but not whether"),
        ([*STORY, ev.StepDelivered(3, 1, ("a",), ((1,),), 0.0)], "step 1 delivers other requests than it scheduled"),
    ],
)
def test_events_that_make_no_sense_are_refused(events, message):
    with pytest.raises(TraceError, match=message):
        fold(events)


# ---- copies


def _looks(state: State) -> tuple[object, ...]:
    requests = [
        (r.id, r.status, r.ticket, r.block_ids, r.output_token_ids, r.num_computed_tokens, r.num_in_flight_tokens)
        for r in state.requests
    ]
    pool = (state.free_queue(), state.cached_blocks(), list(state.places))
    return requests, pool, state.deferred[:], [f.step for f in state.flights], repr(state), state.first_unsettled


def test_a_copy_and_its_original_never_touch_each_other():
    """Three ways on from one state: the recorded one twice, and another run's events in between."""
    events, cut = recorded(11), 120
    trunk = fold(events[:cut])
    as_it_was = _looks(trunk)
    first, second = trunk.copy(), trunk.copy()
    fold(events[cut:], first)
    assert _looks(trunk) == as_it_was
    fold(events[cut:], second)
    assert _looks(second) == _looks(first) == _looks(fold(events))
    fold(events[cut:], trunk)
    assert _looks(trunk) == _looks(first)


def test_copies_that_go_different_ways_share_no_output_and_no_name():
    trunk = fold(STORY[:10])
    left, right = trunk.copy(), trunk.copy()
    fold([_add("c"), ev.StepDelivered(1, 1, ("a", "b"), ((50,), (60,)), 0.0), _add("d")], left)
    fold([_add("x"), ev.StepDelivered(1, 1, ("a", "b"), ((51,), (61,)), 0.0)], right)
    fold([ev.BlocksAllocated(2, "a", (4,), ())], left)
    fold([ev.BlocksAllocated(2, "a", (5,), ())], right)
    assert [r.id for r in left.requests] == ["a", "b", "c", "d"]
    assert [r.id for r in right.requests] == ["a", "b", "x"]
    assert (left.request("a").output_token_ids, right.request("a").output_token_ids) == ([50], [51])
    assert (left.request("a").block_ids, right.request("a").block_ids) == ([1, 2, 4], [1, 2, 5])
    assert trunk.request("a").output_token_ids == []
    with pytest.raises(KeyError, match="no request 'c' has arrived"):
        right.request("c")


@given(actions=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3 * PAGE)), max_size=60))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_paged_arrays_are_lists(actions):
    """Appends, writes and copies in any order, against plain lists."""
    paged, plain = [Paged([0] * (PAGE + 3))], [[0] * (PAGE + 3)]
    for which, what, value in actions:
        number = which % len(paged)
        if what == 0 and len(paged) < 4:
            paged.append(paged[number].copy())
            plain.append(plain[number].copy())
        elif what == 1:
            paged[number].append(value)
            plain[number].append(value)
        else:
            paged[number][value % len(plain[number])] = value
            plain[number][value % len(plain[number])] = value
    assert [list(p) for p in paged] == plain
    assert [list(p.iterate(PAGE - 1)) for p in paged] == [p[PAGE - 1 :] for p in plain]
    assert [len(p) for p in paged] == [len(p) for p in plain]


def test_names_are_shared_while_runs_agree():
    names = Names().added("a", 0).added("b", 1)
    assert names.added("b", 1) is names
    other = names.added("c", 1)
    assert other is not names
    assert (names.find("b", 2), other.find("b", 2), other.find("c", 2)) == (1, None, 1)
    again = names.added("a", 2)
    assert (again.find("a", 3), again.find("a", 2), again.find("a", 0)) == (2, 0, None)


def test_next_free_follows_the_queue():
    """Asked at every turn, and of a state that is asked for the first time."""
    state = State()
    for event in recorded(2):
        apply(state, event)
        assert state.next_free(4) == state.free_queue()[:4] == state.copy().next_free(4)
