"""Latencies by the benchmark's definitions, and preemptions counted once."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from kvsched.engine import Engine
from kvsched.request import SamplingParams
from kvsched.runner.synthetic import CostModel
from kvsched.trace import events as ev
from kvsched.trace.metrics import percentiles, request_metrics, run_metrics
from tests.drive import Drive
from tests.trace_runs import head, make_head, recorded


def _step(step: int, time: float, start: int, n: int = 1) -> ev.StepScheduled:
    return ev.StepScheduled(step, step, ("r",), (n,), (start,), frozenset(), 1, 0, time)


def _delivered(step: int, time: float, *tokens: int) -> ev.StepDelivered:
    return ev.StepDelivered(step, step, ("r",), (tokens,), time)


def clock_of_c49() -> list[ev.Event]:
    """Arrival 0, first schedule 1, first token 2, preempted 4, resumed 7, last token 10, 9 tokens."""
    events: list[ev.Event] = [
        make_head(),
        ev.RequestAdded(0, "r", (1, 2, 3, 4), {}, 0, 0.0, 0.0),
        ev.Admitted(1, "r", False, 0, 0, 0),
        _step(1, 1.0, 0, 4),
        _delivered(1, 2.0, 10),
        _step(2, 2.0, 4),
        _delivered(2, 3.0, 11),
        _step(3, 3.0, 5),
        _delivered(3, 4.0, 12),
        ev.SlotsFailed(4, "r", 4, 1, 0, False, False),
        ev.Preempted(4, "r", "r", 6, 0, False, 1, "kv_full"),
        ev.SlotsFailed(5, "r", 5, 1, 0, False, True),
        ev.GuardStopped(5, "r", "r", 5, 4),
        ev.Admitted(7, "r", True, 0, 0, 0),
        _step(7, 7.0, 0, 7),
    ]
    for i in range(6):
        time = 8.0 + i * 0.4
        events += [_delivered(7 + i, time, 20 + i), _step(8 + i, time, 7 + i)]
    events = events[:-1]
    last = events.pop()
    assert isinstance(last, ev.StepDelivered)
    return [*events, last._replace(time=10.0), ev.RequestFinished(13, "r", "length", 9, 10.0)]


def test_c49_a_preemption_restarts_no_clock_and_counts_once():
    (r,) = request_metrics(clock_of_c49())
    assert (r.queue, r.prefill, r.ttft, r.decode, r.inference, r.e2el) == (1.0, 1.0, 2.0, 8.0, 9.0, 10.0)
    assert r.num_output_tokens == 9
    assert r.tpot == (10 - 2) / 8 == 1.0
    assert r.preemptions == ["kv_full"]
    assert r.itl[:2] == [1.0, 1.0]
    assert r.itl[2] == 4.0  # the gap of the preemption: last token at 4, next one at 8
    assert math.isclose(sum(r.itl), 8.0)
    run = run_metrics(clock_of_c49())
    assert run.preemptions == {"kv_full": 1}
    assert Counter(r.num_preemptions for r in run.requests) == {1: 1}
    assert (run.num_failed_calls, run.num_guard_stops, run.num_preemptions) == (2, 1, 1)
    assert (run.duration, run.output_throughput, run.request_throughput) == (10.0, 0.9, 0.1)


def test_c49_reasons_add_up():
    reasons = ("kv_full", "priority", "cache_reset", "kv_full")
    more = [ev.Preempted(4, "r", "r", 6, 0, False, 2 + i, reason) for i, reason in enumerate(reasons)]
    run = run_metrics(clock_of_c49()[:-1] + more)
    assert run.preemptions == {"kv_full": 3, "priority": 1, "cache_reset": 1}
    assert run.num_preemptions == sum(run.preemptions.values()) == 5


def test_recomputed_tokens_are_those_below_the_high_mark():
    """Scheduled 0..5, then 0..12 again from scratch: 6 of the second 13 had been scheduled before."""
    run = run_metrics(clock_of_c49())
    (r,) = run.requests
    assert r.num_scheduled_tokens == 4 + 1 + 1 + 7 + 5
    assert r.num_recomputed_tokens == 6
    assert run.recompute_tax == 6 / 18


def test_latencies_that_have_not_ended_are_none():
    (r,) = request_metrics(clock_of_c49()[:2])
    assert (r.queue, r.prefill, r.ttft, r.decode, r.inference, r.tpot, r.e2el) == (None,) * 7
    (r,) = request_metrics(clock_of_c49()[:5])
    assert (r.queue, r.ttft, r.decode, r.tpot, r.e2el) == (1.0, 2.0, 0.0, None, None)
    aborted = [*clock_of_c49()[:9], ev.RequestFinished(4, "r", "abort", 3, 4.0)]
    assert [r.e2el for r in request_metrics(aborted)] == [None]
    assert run_metrics(aborted).completed == []


def test_an_empty_run_measures_nothing():
    run = run_metrics([make_head()])
    assert (run.duration, run.output_throughput, run.recompute_tax, run.num_steps) == (0.0, 0.0, 0.0, 0)
    assert all(math.isnan(value) for value in run.percentiles("ttft"))


def test_counts_agree_with_the_scheduler():
    drive = Drive(9, 2, max_num_seqs=4, defer_block_free=True)
    drive.events.insert(0, head(drive.scheduler))
    for i in range(5):
        drive.add(f"r{i}", 7, 9)
    drive.run()
    run = run_metrics(drive.events)
    assert drive.preemptions > 0
    assert run.num_preemptions == drive.preemptions
    assert [r.num_preemptions for r in run.requests] == [r.num_preemptions for r in drive.requests.values()]
    assert run.num_output_tokens == sum(map(len, drive.emitted.values())) == 45
    assert run.num_steps == len(drive.calls)
    assert run.num_empty_steps == len(drive.calls) - len(drive.non_empty)
    assert sum(r.num_scheduled_tokens for r in run.requests) == drive.num_tokens_computed
    ideal = sum(7 + 9 - 1 for _ in range(5))
    assert run.num_recomputed_tokens == drive.num_tokens_computed - ideal


def test_hits_and_loads_are_counted_apart():
    added = ev.RequestAdded(0, "r", tuple(range(20)), {}, 0, 0.0, 0.0)
    parked = ev.Parked(1, "r", (1, 2, 3), 4, 8)
    events = [make_head(num_blocks=12), added, parked, ev.LoadLanded(2, "r"), ev.Admitted(3, "r", False, 12, 0, 0)]
    (r,) = request_metrics(events)
    assert (r.num_hit_tokens, r.num_loaded_tokens) == (4, 8)
    (r,) = request_metrics([*events[:2], ev.Admitted(1, "r", False, 8, 8, 0)])
    assert (r.num_hit_tokens, r.num_loaded_tokens) == (8, 0)


def test_c51_a_report_is_consistent_with_itself():
    """Throughput, TTFT, TPOT and E2EL of one run are tied to each other: that is how a broken report is caught."""
    engine = Engine.synthetic(200, cost=CostModel(0.01, 1e-4), block_size=4, max_num_seqs=16, max_model_len=64)
    with engine:
        engine.generate([[i, 2, 3, 4, 5] for i in range(16)], SamplingParams(max_tokens=40, ignore_eos=True))
    run = run_metrics(engine.events)
    assert run.num_output_tokens == 16 * 40
    for r in run.requests:
        assert r.ttft is not None
        assert r.tpot is not None
        assert r.ttft + (40 - 1) * r.tpot == pytest.approx(r.e2el, rel=1e-9)
        assert r.queue + r.inference == pytest.approx(r.e2el, rel=1e-9)
    duration = run.num_output_tokens / run.output_throughput
    assert duration == pytest.approx(run.duration)
    assert 1.0 <= duration / run.percentiles("e2el").p99 < 1.05  # all requests start together


@pytest.mark.parametrize("size", [1, 2, 3, 100, 101])
def test_percentiles_are_numpys(size):
    values = [random.Random(size).random() for _ in range(size)]
    expected = (np.mean(values), *np.percentile(values, [50, 90, 99]), max(values))
    assert np.allclose(percentiles(values), expected, rtol=1e-12)


def test_percentiles_of_a_run_are_over_what_ended_normally():
    run = run_metrics(recorded(12, 400))
    done = [r for r in run.requests if r.finish_reason in ("stop", "length")]
    assert 0 < len(done) < len(run.requests)
    assert run.percentiles("ttft").maximum == max(r.ttft for r in done if r.ttft is not None)
    assert run.percentiles("e2el").mean == pytest.approx(np.mean([r.e2el for r in done]))
    assert run.percentiles("itl").maximum == max(gap for r in done for gap in r.itl)
