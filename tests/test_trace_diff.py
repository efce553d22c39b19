"""Where two recordings part."""

from __future__ import annotations

import pytest

from kvsched.trace import events as ev
from kvsched.trace.diff import diff
from kvsched.trace.fold import fold
from kvsched.trace.plain import TraceError
from tests.drive import Drive
from tests.trace_runs import head, make_head, recorded


def _fix_run(guard: str) -> list[ev.Event]:
    """Three requests running in an ample pool, two steps in flight; the next call for slots after that fails."""
    fails: set[int] = set()
    drive = Drive(40, 2, guard=guard, defer_block_free=True, fail_calls=fails, max_num_seqs=8)
    drive.events.insert(0, head(drive.scheduler))
    for name in "abc":
        drive.add(name, 6, 6)
    drive.schedule()
    fails.add(drive.scheduler.allocate_calls + 1)
    drive.run()
    return drive.events


def test_a_run_does_not_differ_from_itself():
    found = diff(recorded(3), iter(recorded(3)))
    assert found.is_empty
    assert (found.first, found.settings, found.counts) == (None, {}, {})
    assert str(found) == "no difference"


def test_the_guard_off_and_on_part_where_the_call_failed():
    off, on = _fix_run("none"), _fix_run("stop_retry")
    found = diff(off, on)
    assert found.settings == {"guard": ("none", "stop_retry")}
    first = found.first
    assert first is not None
    assert isinstance(first.a, ev.Preempted)
    assert isinstance(first.b, ev.GuardStopped)
    assert first.fields == ()
    assert off[first.index - 1] == on[first.index - 1]
    assert off[first.index - 1].kind == "slots_failed"
    assert first.before.running == ["a", "b", "c"]
    assert repr(first.before) == repr(fold(off[: first.index]))
    assert found.counts["preempted"][0] >= 1
    assert found.counts["preempted"][1] == 0
    assert found.counts["guard_stopped"] == (0, 1)
    for text in ("setting guard: 'none' | 'stop_retry'", f"event {first.index}, after step", "number of preempted: "):
        assert text in str(found)


def test_differing_fields_are_named():
    a = recorded(3)
    index = next(i for i, event in enumerate(a) if event.kind == "step_scheduled" and event.request_ids)
    b = [*a[:index], a[index]._replace(free=99, calls=7), *a[index + 1 :]]
    found = diff(a, b)
    assert found.first is not None
    assert (found.first.index, found.first.fields) == (index, ("calls", "free"))
    assert found.counts == {}
    assert f"free {a[index].free} | 99" in str(found)


def test_clocks_do_not_count_unless_asked_for():
    a = recorded(3)
    b = [event._replace(time=event.time + 1) if hasattr(event, "time") else event for event in a]
    assert diff(a, b).is_empty
    found = diff(a, b, ignore=())
    assert found.first is not None
    assert found.first.fields == ("time",)


@pytest.mark.parametrize("swap", [False, True])
def test_a_run_that_ends_early_differs_there(swap):
    long, short = recorded(3), recorded(3)[:50]
    found = diff(short, long) if swap else diff(long, short)
    assert found.first is not None
    assert found.first.index == 50
    assert {found.first.a, found.first.b} == {long[50], None}
    assert sum(abs(a - b) for a, b in found.counts.values()) == len(long) - 50
    assert "None" in str(found)


def test_what_cannot_be_folded_is_an_error():
    broken = [make_head(), ev.LoadLanded(1, "nobody"), ev.CacheReset(1)]
    with pytest.raises(TraceError, match="nobody"):
        diff(broken, broken)
