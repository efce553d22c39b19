"""The engine with a connector whose loads really fill a memory (tests/memory_model.py): failed loads, the race that
the fence closes, and the desk that reports transfers."""

from __future__ import annotations

import random

import pytest

from kvsched.connector.scripted import KvRule
from kvsched.faults import Abort, FailLoad, HoldExecution, HoldTransfer
from kvsched.request import RequestRefused
from tests.memory_bench import Bench
from tests.memory_model import expected_output

# ---- failed loads


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("eager", [True, False])
def test_tokens_are_exact_after_a_synchronous_load_failed(depth, bad, eager):
    """R runs on a bad block for `depth` steps. (vLLM 0.32 loses a token here, or never schedules R again.)"""
    rule = KvRule(external_tokens=11, asynchronous=False, once=True)
    bench = Bench(
        20, {"R": rule}, fails={("R", 1): bad}, eager=eager, max_in_flight=depth, landing=depth - 1,
        max_num_batched_tokens=8,
    )  # fmt: skip
    right = expected_output(range(100, 114), 9)
    bench.add("other", list(range(50, 57)), 12)
    bench.add("R", list(range(100, 114)), 9)
    bench.add("stops", list(range(100, 114)), 9, stop_token_ids=(right[4],))
    bench.engine.drain()
    assert bench.wrong() == {}
    assert bench.engine.output("R").token_ids == tuple(right)
    assert list(bench.engine.output("stops").token_ids) == right[: right.index(right[4]) + 1]
    assert len(bench.engine.output("other").token_ids) == 12
    assert "R" in [event.request for event in bench.happened("load_failed")]
    assert bench.memory.violations, "steps in flight did compute on the bad block"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_policy_fail_ends_the_request_with_an_error_and_keeps_its_right_tokens(asynchronous):
    rule = KvRule(external_tokens=8, asynchronous=asynchronous)
    bench = Bench(20, {"R": rule}, fails={("R", 1): 1}, load_failure_policy="fail")
    bench.add("other", list(range(50, 57)), 6)
    bench.add("R", list(range(100, 114)), 9)
    bench.engine.drain()
    assert bench.engine.output("R").finish_reason == "error"
    assert bench.engine.output("R").token_ids == ()
    assert bench.engine.output("other").finish_reason == "length"
    assert bench.wrong() == {}
    assert bench.engine.scheduler.kv.pool.num_free == 20


@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_exact_in_random_runs_with_failing_loads(seed):
    rng = random.Random(seed)
    ids = [f"r{i}" for i in range(10)]
    rules = {i: KvRule(rng.randint(0, 20), rng.random() < 0.5, once=rng.random() < 0.5) for i in ids}
    depth = rng.randint(1, 4)
    bench = Bench(
        rng.randint(12, 20), rules,
        fails={(i, 1): rng.randint(0, 2) for i in ids if rng.random() < 0.4},
        eager=rng.random() < 0.5, max_in_flight=depth, landing=rng.randint(0, depth - 1),
        transfer_landing=rng.randint(0, 5), policy=rng.choice(["fcfs", "priority"]),
        max_num_batched_tokens=rng.choice([8, 64]),
        faults=(Abort(rng.choice(ids), rng.randint(1, 12)),),
    )  # fmt: skip
    text = [rng.randrange(40) for _ in range(30)]
    for i in ids:
        prompt = text[: rng.randint(1, 24)]
        prompt[rng.randrange(len(prompt))] = rng.randrange(40)
        bench.add(i, prompt, rng.randint(1, 12))
    bench.engine.drain()
    assert bench.wrong() == {}
    assert bench.engine.scheduler.kv.pool.num_free == bench.engine.config.num_usable_blocks


# ---- the race


def stale_write_race(fence: bool) -> Bench:
    """A prefill chunk of an aborted request writes late, over what a load has filled for somebody else.

        step 1   V computes its first chunk, held until L's load has landed
        abort V  its blocks return at once (fence off), or wait for step 1 (fence on)
        step 2   L is parked; its load fills blocks: V's old ones (fence off)
        landed   step 1 goes on and writes V's keys and values over them
        step 3   L computes on them
    """
    bench = Bench(
        12, {"L": KvRule(external_tokens=16)}, landing=1, transfer_landing=0, defer_block_free=fence,
        max_num_batched_tokens=16, enable_prefix_caching=False,
        faults=(HoldExecution(1, "load_landed", {"request": "L"}), Abort("V", 2)),
    )  # fmt: skip
    bench.add("V", list(range(200, 231)), 4)
    bench.engine.step()
    bench.add("L", list(range(100, 118)), 4)
    bench.engine.drain()
    return bench


def test_the_race_falsifies_tokens_without_the_fence():
    bench = stale_write_race(fence=False)
    assert bench.wrong() == {"L": 0}
    first = bench.memory.violations[0]
    (load,) = bench.connector.loads
    assert (first.request, first.position, first.block) == ("L", 0, load.block_ids[0])
    assert first.block in bench.happened("blocks_allocated")[0].block_ids


def test_with_the_fence_the_same_script_gives_exact_tokens():
    bench = stale_write_race(fence=True)
    assert bench.wrong() == {}
    assert bench.memory.violations == []
    (load,) = bench.connector.loads
    assert not set(load.block_ids) & set(bench.happened("blocks_allocated")[0].block_ids)


# ---- the desk


@pytest.mark.parametrize(("transfer_landing", "hold"), [(0, 0), (1, 0), (3, 0), (1, 4)])
def test_a_load_is_reported_after_a_stated_number_of_steps(transfer_landing, hold):
    faults = (HoldTransfer("L", "load", hold),) if hold else ()
    bench = Bench(12, {"L": KvRule(external_tokens=8)}, transfer_landing=transfer_landing, faults=faults)
    bench.add("other", list(range(20)), 12)
    bench.add("L", list(range(100, 110)), 3)
    bench.engine.step()
    (started,) = bench.happened("load_started")
    assert started.step == 1
    bench.engine.drain()
    (landed,) = bench.happened("load_landed")
    # Reports come with a delivery; from the second turn on there is one in each.
    assert landed.step == max(2, 1 + transfer_landing + hold)
    assert bench.wrong() == {}
    assert bench.engine.faults_never_fired == []


def test_without_a_stated_transfer_landing_it_is_one_step_if_results_land_by_steps():
    bench = Bench(12, {"L": KvRule(external_tokens=8)}, landing=1)
    bench.add("other", list(range(20)), 6)
    bench.add("L", list(range(100, 110)), 3)
    bench.engine.drain()
    assert bench.happened("load_landed")[0].step == 2


def test_live_a_load_is_reported_when_it_has_ended_and_waited_for_only_when_nothing_else_goes_on():
    bench = Bench(12, {"L": KvRule(external_tokens=8)}, landing=None, eager=False)
    bench.add("other", list(range(20)), 6)
    bench.add("L", list(range(100, 110)), 3)
    while "other" in bench.engine.scheduler.requests:
        bench.engine.step()
    assert bench.happened("load_landed") == []
    assert ("wait", "L") not in bench.worker.calls
    bench.engine.drain()
    assert bench.worker.calls == [("start", "L"), ("wait", "L")]
    assert bench.wrong() == {}


def test_live_a_load_that_ends_early_is_reported_with_the_next_delivery():
    bench = Bench(12, {"L": KvRule(external_tokens=8)}, landing=None, eager=False)
    bench.add("other", list(range(20)), 12)
    bench.add("L", list(range(100, 110)), 3)
    for _ in range(4):
        bench.engine.step()
    bench.worker.end("L")
    bench.engine.step()
    assert [event.step for event in bench.happened("load_landed")] == [5]
    bench.engine.drain()
    assert ("wait", "L") not in bench.worker.calls
    assert bench.wrong() == {}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_fail_load_fails_the_stated_load_from_the_stated_block_on(asynchronous):
    fault = FailLoad("L", occurrence=1, block=1)
    bench = Bench(12, {"L": KvRule(external_tokens=12, asynchronous=asynchronous)}, faults=(fault,))
    bench.add("L", list(range(100, 114)), 3)
    bench.engine.drain()
    (load,) = bench.connector.loads
    (event,) = bench.happened("load_failed")
    assert event.block_ids == load.block_ids[1:]
    assert event.valid == 4
    assert bench.wrong() == {}
    assert bench.engine.faults_never_fired == []
    assert [e.fault["kind"] for e in bench.happened("fault_injected")] == ["fail_load"]


def test_fail_load_counts_the_loads_of_its_request():
    """The first load fails from its first block on, so the request is looked up afresh; its second load fails, too."""
    faults = (FailLoad("L", 2), FailLoad("L", 1), FailLoad("L", 4), FailLoad("L", 1, block=9))
    bench = Bench(12, {"L": KvRule(external_tokens=12)}, faults=faults)
    bench.add("L", list(range(100, 114)), 3)
    bench.engine.drain()
    assert len(bench.connector.loads) == 3
    assert [event.valid for event in bench.happened("load_failed")] == [0, 0]
    assert bench.wrong() == {}
    assert bench.engine.faults_never_fired == [FailLoad("L", 4), FailLoad("L", 1, block=9)]


def test_an_aborted_request_keeps_its_blocks_until_its_load_reports_back():
    bench = Bench(12, {"L": KvRule(external_tokens=8)}, transfer_landing=3)
    bench.add("other", list(range(20)), 8)
    bench.add("L", list(range(100, 110)), 3)
    bench.engine.step()
    free = bench.engine.scheduler.kv.pool.num_free
    assert bench.engine.abort("L") == ["L"]
    assert bench.engine.scheduler.kv.pool.num_free == free
    with pytest.raises(RequestRefused, match="'L' is in use"):
        bench.add("L", [1, 2, 3], 3)
    while not bench.happened("load_landed"):
        bench.engine.step()
    assert "L" in [e.request for e in bench.happened("blocks_freed")]
    bench.engine.drain()
    bench.prompts["L"] = [7, 8, 9]
    bench.add("L", [7, 8, 9], 3)
    bench.engine.drain()
    assert bench.wrong() == {}


def test_nothing_but_a_load_in_the_air_is_waited_for_not_spun_on():
    bench = Bench(12, {"L": KvRule(external_tokens=8)}, landing=None, eager=False)
    bench.add("L", list(range(100, 110)), 3)
    bench.engine.drain()
    assert bench.engine.ticks < 10
    assert bench.wrong() == {}


def test_closing_the_engine_closes_the_worker():
    bench = Bench(12, {})
    bench.engine.close()
    bench.engine.close()
    assert bench.worker.calls == [("close", None)]
