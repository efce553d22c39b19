"""The export to Chrome's trace format is well formed and says what happened."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from kvsched.trace import events as ev
from kvsched.trace.perfetto import to_chrome, write_chrome
from kvsched.trace.plain import TraceError
from tests.drive import Drive
from tests.trace_runs import head, recorded

_FIELDS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "i": {"ph", "s", "name", "pid", "tid", "ts", "args"},
    "b": {"ph", "cat", "name", "id", "pid", "tid", "ts", "args"},
    "e": {"ph", "cat", "name", "id", "pid", "tid", "ts", "args"},
    "s": {"ph", "cat", "name", "id", "pid", "tid", "ts"},
    "f": {"ph", "cat", "name", "id", "pid", "tid", "ts", "bp"},
}


@pytest.fixture(scope="module")
def run() -> list[ev.Event]:
    """A random run that has preempted behind the fence and been stopped by the guard."""
    wanted = {"preempted", "guard_stopped", "slots_failed", "load_failed"}
    for seed in range(400):
        events = recorded(seed, 300, defer_block_free=True, max_in_flight=3, guard="stop_retry")
        if wanted <= {event.kind for event in events} and any(e.kind == "blocks_released" and e.fence for e in events):
            return events
    raise AssertionError("no such run")


@pytest.fixture(scope="module")
def entries(run) -> list[dict[str, Any]]:
    return to_chrome(run)["traceEvents"]


def _phase(entries: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["ph"] == phase]


def test_every_entry_has_the_fields_of_its_phase(entries, run):
    assert {entry["ph"] for entry in entries} == set(_FIELDS)
    for entry in entries:
        assert set(entry) == _FIELDS[entry["ph"]], entry
        assert entry.get("ts", 0) >= 0
        assert entry.get("dur", 0) >= 0
    processes = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    assert processes == {1: "device", 2: "scheduler", 3: "requests"}
    named = {(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in entries if e["pid"] == 3} - {(3, 0)} <= named
    requests = [e["args"]["name"] for e in entries if e["name"] == "thread_name" and e["pid"] == 3]
    assert requests == list(dict.fromkeys(e.request for e in run if isinstance(e, ev.RequestAdded)))


@pytest.mark.parametrize("clock", ["engine", "order"])
def test_slices_of_a_track_never_overlap(run, clock):
    tracks = defaultdict(list)
    for entry in _phase(to_chrome(run, clock)["traceEvents"], "X"):
        tracks[entry["pid"], entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    assert len(tracks) > 3
    for slices in tracks.values():
        for (_, end), (begin, _) in pairwise(slices):
            assert begin >= end - 1e-6


def test_every_delivered_step_is_a_slice_on_the_device_and_on_its_requests(entries, run):
    scheduled = {e.step: e for e in run if isinstance(e, ev.StepScheduled) and e.request_ids}
    delivered = [e.delivered for e in run if isinstance(e, ev.StepDelivered) and e.request_ids]
    device = [e for e in _phase(entries, "X") if e["pid"] == 1]
    assert [e["args"]["step"] for e in device] == delivered
    assert [e["args"]["tokens"] for e in device] == [sum(scheduled[step].num_tokens) for step in delivered]
    rows = sum(len(scheduled[step].request_ids) for step in delivered)
    assert len([e for e in _phase(entries, "X") if e["pid"] == 3]) == rows
    assert sorted(e["id"] for e in _phase(entries, "b")) == sorted(scheduled)
    assert [e["id"] for e in _phase(entries, "e")] == delivered


def test_deferred_frees_are_arrows_from_release_to_return(entries, run):
    released = [e for e in run if isinstance(e, ev.BlocksReleased) and e.fence]
    returned = [e for e in run if isinstance(e, ev.BlocksFreed) and e.fence]
    starts, ends = _phase(entries, "s"), _phase(entries, "f")
    assert len(starts) == len(released)
    assert len(ends) == len(returned) > 0
    begun = {entry["id"]: entry["ts"] for entry in starts}
    assert len(begun) == len(starts)
    for entry in ends:
        assert entry["ts"] > begun[entry["id"]]
    slices = {(e["ts"], e["name"]) for e in _phase(entries, "X") if e["pid"] == 2}
    assert {ts for ts, _ in slices} == {e["ts"] for e in starts + ends}  # each arrow begins and ends on a slice


def test_counters_follow_the_scheduler(entries, run):
    counters = defaultdict(list)
    for entry in _phase(entries, "C"):
        ((name, value),) = entry["args"].items()
        assert name == entry["name"]
        counters[name].append(value)
    assert set(counters) == {"free blocks", "fence lag", "deferred blocks"}
    told = iter(counters["free blocks"])
    for event in run:
        if event.kind in ("step_scheduled", "fence_advanced", "blocks_freed", "blocks_released"):
            value = next(told)
            if event.kind == "step_scheduled":
                assert value == event.free
    assert max(counters["fence lag"]) == 3
    assert max(counters["deferred blocks"]) > 0


def test_what_went_wrong_is_an_instant_on_its_request(entries, run):
    names = [e["name"] for e in _phase(entries, "i")]
    for name, kind in (
        ("preempted", "preempted"),
        ("no slots", "slots_failed"),
        ("guard stopped the retry", "guard_stopped"),
        ("load failed", "load_failed"),
    ):
        assert names.count(name) == sum(event.kind == kind for event in run) > 0
    assert sum(name.startswith("finished: ") for name in names) == sum(e.kind == "request_finished" for e in run)


def test_a_recording_without_a_clock_is_put_in_order():
    drive = Drive(20, 2)
    drive.events.insert(0, head(drive.scheduler))
    drive.add("a", 5, 5)
    drive.run()
    with pytest.raises(TraceError, match=r"tells no times.*clock='order'"):
        to_chrome(drive.events)
    entries = to_chrome(drive.events, "order")["traceEvents"]
    times = [e["ts"] for e in _phase(entries, "b")]
    assert times == sorted(set(times))


def test_it_is_written_as_json(tmp_path, run):
    write_chrome(tmp_path / "run.json", run)
    data = json.loads((tmp_path / "run.json").read_text())
    assert data == json.loads(json.dumps(to_chrome(run)))
    assert data["displayTimeUnit"] == "ms"
