"""The watchdog for zero progress: a pass that preempts and schedules nothing is told, the third one warns."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path

import pytest

from kvsched.config import SchedulerConfig
from kvsched.engine import Engine
from kvsched.faults import FailCall, FaultPlan
from kvsched.request import SamplingParams
from kvsched.runner.synthetic import SyntheticRunner
from kvsched.trace.events import NoProgress
from kvsched.watchdog import NoProgressWarning
from tests.drive import Drive

RECORDINGS = Path(__file__).parent / "data" / "conformance"


def livelock(guard: str) -> Engine:
    """The workload of the livelock recordings, on an engine, for 300 turns; its arrivals are numbers of steps."""
    recorded = json.loads(gzip.decompress((RECORDINGS / "vllm-base-livelock.json.gz").read_bytes()))
    config = SchedulerConfig(num_blocks=2).with_changes(**recorded["config"], guard=guard)
    faults = FaultPlan(tuple(FailCall(call) for call in recorded["fail_allocate_calls"]))
    runner = SyntheticRunner(vocab_size=400)
    engine = Engine(config, runner, faults=faults, landing=2, max_model_len_is_explicit=False)
    arriving = sorted(recorded["requests"], key=lambda r: r["arrival"])
    for turn in range(300):
        while arriving and arriving[0]["arrival"] <= turn:
            r = arriving.pop(0)
            sampling = SamplingParams(max_tokens=r["max_tokens"], stop_token_ids=tuple(r["stop_token_ids"]))
            engine.add_request(r["id"], r["prompt"], sampling)
        engine.step()
    return engine


def test_the_livelock_is_told_and_the_switch_named():
    with pytest.warns(NoProgressWarning) as caught:
        engine = livelock("none")
    assert engine.has_unfinished_requests()
    told = [event for event in engine.events if isinstance(event, NoProgress)]
    assert len(told) > 20
    assert len(caught) == sum(1 for event in told if event.since_token == 3)
    text = str(caught[-1].message)
    assert text.startswith("no progress: 3 steps since the last token, step ")
    assert "Set guard='stop_retry' (it is 'none')" in text
    assert "wait behind it" in text
    assert all(name in text for name in next(e for e in told if e.since_token == 3).preempted[:2])


def test_with_the_guard_the_same_workload_ends_and_nobody_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoProgressWarning)
        engine = livelock("stop_retry")
    assert not engine.has_unfinished_requests()


def test_a_delivered_token_starts_the_count_again():
    """C01 with the guard taken out: each cascade is the first since a token."""
    drive = Drive(8, 2, defer_block_free=True, guard="none")
    for i in range(4):
        drive.add(f"r{i}", 7, 8)
    drive.run()
    counts = [event.since_token for event in drive.happened("no_progress")]
    steps = {event.step: event for event in drive.happened("step_scheduled")}
    for event in drive.happened("no_progress"):
        assert event.preempted
        assert steps[event.step].request_ids == ()
    assert counts
    assert set(counts) == {1}


def test_the_advice_fits_the_settings():
    """One request that never gets beyond its first chunk, for an injected failure: the guard does not help."""
    faults = FaultPlan(tuple(FailCall(call) for call in range(2, 40, 2)))
    settings = {"max_model_len": 32, "max_num_batched_tokens": 4, "enable_prefix_caching": False}
    config = SchedulerConfig(num_blocks=20, block_size=4).with_changes(defer_block_free=False, **settings)
    engine = Engine(config, SyntheticRunner(), faults=faults, landing=0)
    engine.add_request("a", range(12), SamplingParams(max_tokens=8))
    for _ in range(5):
        engine.step()
    with pytest.warns(NoProgressWarning, match=r"fence is off\. Raise num_blocks \(it is 20\) or lower max_num_seqs"):
        engine.step()
