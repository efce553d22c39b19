"""Traces as files: exact there and back, and every damage named with file, line and remedy."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsched.trace import events as ev
from kvsched.trace.log import CHUNK, EventLog
from kvsched.trace.plain import TraceCutWarning, TraceError, from_plain, to_plain
from kvsched.trace.reader import read_events, read_trace
from kvsched.trace.writer import TraceWriter, write_trace
from tests.conftest import repository
from tests.trace_runs import make_head, recorded

_WHOLE = st.integers(-(2**40), 2**40)
_NUMBER = st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | _WHOLE | _NUMBER | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: _WHOLE,
    bool: st.booleans(),
    bool | None: st.none() | st.booleans(),
    float: _NUMBER,
    str: st.text(max_size=12),
    tuple[int, ...]: st.lists(_WHOLE, max_size=4).map(tuple),
    tuple[str, ...]: st.lists(st.text(max_size=5), max_size=4).map(tuple),
    tuple[bytes, ...]: st.lists(st.binary(max_size=8), max_size=3).map(tuple),
    tuple[tuple[int, ...], ...]: st.lists(st.lists(_WHOLE, max_size=3).map(tuple), max_size=4).map(tuple),
    frozenset[int]: st.frozensets(_WHOLE, max_size=4),
    frozenset[str]: st.frozensets(st.text(max_size=5), max_size=4),
    Mapping[str, Any]: st.dictionaries(st.text(max_size=5), _JSON, max_size=4),
}


def _events_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.tuples(*(_VALUES[hints[name]] for name in cls._fields)).map(lambda row: cls(*row))


_ANY_EVENT = st.one_of([_events_of(cls) for cls in ev.EVENT_TYPES.values()])


@given(event=_ANY_EVENT)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_every_event_comes_back_from_its_json(event):
    back = from_plain(json.loads(json.dumps(to_plain(event))))
    assert back == event
    assert type(back) is type(event)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_run_comes_back_exactly(tmp_path, suffix):
    events = recorded(5)
    assert len(events) > 100
    write_trace(tmp_path / f"run{suffix}", events)
    assert list(read_events(tmp_path / f"run{suffix}")) == events
    assert list(read_trace(tmp_path / f"run{suffix}")) == events


def test_equal_runs_give_equal_files(tmp_path):
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_trace(tmp_path / name, recorded(3))
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_what_a_step_wrote_can_be_read_before_the_file_is_closed(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    writer = TraceWriter(path)
    writer.append(make_head())
    writer.append(ev.CacheReset(0))
    writer.append(ev.StepScheduled(1, 0, (), (), (), frozenset(), 0, 8, 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceCutWarning)  # a compressed file without its end is a cut one
        assert len(list(read_events(path))) == 3
    writer.close()
    assert len(list(read_events(path))) == 3


def test_a_killed_writer_leaves_a_readable_file(tmp_path):
    script = """
import os, signal, sys
from kvsched.trace.writer import TraceWriter
from tests.trace_runs import recorded
writer = TraceWriter(sys.argv[1])
writer.extend(recorded(5)[:60])
writer.flush()
writer._file.write(b'{"kind":"step_sch')
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "run.jsonl.gz"
    here = {**os.environ, "PYTHONPATH": str(repository())}
    done = subprocess.run([sys.executable, "-c", script, str(path)], cwd=repository(), env=here, check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.warns(TraceCutWarning) as caught:
        events = list(read_events(path))
    assert events == recorded(5)[:60]
    assert any("line 61" in str(w.message) for w in caught)


def test_a_cut_last_line_is_a_warning_at_every_byte(tmp_path):
    events = recorded(5)[:6]
    path = tmp_path / "run.jsonl"
    write_trace(path, events)
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        if end in (last, len(whole) - 1):  # nothing of the line is there, or only its line end is missing
            assert list(read_events(path)) == events[: 5 if end == last else 6]
            continue
        with pytest.warns(TraceCutWarning, match="line 6: the last line was cut"):
            assert list(read_events(path)) == events[:5]


def test_a_compressed_file_can_be_cut_anywhere(tmp_path):
    events = recorded(5)[:40]
    path = tmp_path / "run.jsonl.gz"
    write_trace(path, events)
    whole = path.read_bytes()
    for end in range(len(whole) // 2, len(whole) - 1, 37):
        path.write_bytes(whole[:end])
        with pytest.warns(TraceCutWarning, match="cut"):
            read = list(read_events(path))
        assert read == events[: len(read)]
        assert read


_HEAD = json.dumps(to_plain(make_head()))
_RESET = '{"kind":"cache_reset","step":1}'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "line 1: no complete event.*record it again"),
        ([_RESET], "line 1: a trace opens with run_started, not 'cache_reset'"),
        (["[1, 2]"], "line 1: a trace opens with run_started"),
        ([_HEAD.replace('"version": 1', '"version": 2')], "line 1: written in version 2.*up to 1: upgrade"),
        ([_HEAD.replace('"version": 1', '"version": "1"')], "line 1: version is '1'"),
        ([_HEAD.replace('"version": 1', '"version": 0')], "line 1: version is 0"),
        ([_HEAD, _HEAD], "line 2: a second run starts here.*split"),
        ([_HEAD, ""], "line 2: empty; the file was damaged.*the 1 lines above are sound"),
        ([_HEAD, _RESET[:-3], _RESET], "line 2: not JSON.*restore it"),
        ([_HEAD, "17"], "line 2: an event must be a JSON object"),
        ([_HEAD, "[" * 100_000], "line 2: not JSON"),
        ([_HEAD, '{"kind":"exec","step":1}'], "line 2: unknown kind of event 'exec'; this version knows run_started,"),
        ([_HEAD, '{"kind":["x"],"step":1}'], r"line 2: unknown kind of event \['x'\]"),
        ([_HEAD, '{"step":1}'], "line 2: unknown kind of event None"),
        ([_HEAD, '{"kind":"cache_reset"}'], "line 2: cache_reset lacks its field step"),
        ([_HEAD, '{"kind":"cache_reset","step":1,"x":2}'], "line 2: cache_reset has no field x; it has step"),
        ([_HEAD, '{"kind":"cache_reset","step":true}'], "line 2: cache_reset.step must be an integer, not True"),
        ([_HEAD, '{"kind":"cache_reset","step":1.0}'], "line 2: cache_reset.step must be an integer, not 1.0"),
        ([_HEAD, '{"kind":"load_landed","step":1,"request":7}'], "load_landed.request must be a string, not 7"),
        ([_HEAD, '{"kind":"blocks_uncached","step":1,"block_ids":[1,"2"]}'], "must be a list of integers"),
        ([_HEAD, '{"kind":"blocks_uncached","step":1,"block_ids":{}}'], "block_ids must be a list of integers"),
        (
            [_HEAD, '{"kind":"blocks_cached","step":1,"request":"r","first":0,"block_ids":[1],"hashes":["xy"]}'],
            "hashes must be a list of hex strings",
        ),
        ([_HEAD, '{"kind":"fault_injected","step":1,"fault":[]}'], "fault_injected.fault must be an object"),
        ([_HEAD, '{"kind":"fault_injected","step":1,"fault":{"p":NaN}}'], "line 2: not JSON"),
        ([_HEAD, '{"kind":"fence_advanced","step":1,"processed":36893488147419103232}'], "must be an integer"),
    ],
)
def test_damage_is_named(tmp_path, lines, message):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(TraceError, match=message) as error:
        list(read_events(path))
    assert str(path) in str(error.value)


def test_bytes_that_are_no_text_are_damage(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(_HEAD.encode() + b"\n\xff\xfe\x00\n")
    with pytest.raises(TraceError, match="line 2: not JSON"):
        list(read_events(path))


def test_a_damaged_compressed_file_is_an_error(tmp_path):
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(_HEAD.encode())
    with pytest.raises(TraceError, match=r"damaged compressed data.*restore"):
        list(read_events(path))
    data = bytearray(gzip.compress((_HEAD + "\n" + (_RESET + "\n") * 500).encode()))
    data[-6] ^= 0xFF  # the checksum
    path.write_bytes(bytes(data))
    with pytest.raises(TraceError, match="damaged compressed data"):
        list(read_events(path))


def test_events_before_the_damage_are_read(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(f"{_HEAD}\n{_RESET}\nnonsense\n")
    events = read_events(path)
    assert [next(events).kind, next(events).kind] == ["run_started", "cache_reset"]
    with pytest.raises(TraceError, match="line 3"):
        next(events)


@pytest.mark.parametrize("name", ["run.json", "run", "run.jsonl.bz2"])
def test_other_suffixes_are_refused(tmp_path, name):
    with pytest.raises(TraceError, match=r"ends in \.jsonl or \.jsonl\.gz; rename it"):
        TraceWriter(tmp_path / name)
    with pytest.raises(TraceError, match="rename it"):
        list(read_events(tmp_path / name))
    assert not (tmp_path / name).exists()


def test_a_trace_opens_with_its_head(tmp_path):
    with TraceWriter(tmp_path / "run.jsonl") as writer:
        with pytest.raises(TraceError, match="event 0 is cache_reset; a trace opens with run_started"):
            writer.append(ev.CacheReset(0))
        writer.append(make_head())
        with pytest.raises(TraceError, match=r"event 1 is run_started; .* holds one run"):
            writer.append(make_head())


@pytest.mark.parametrize(
    "event",
    [
        ev.FaultInjected(1, {"at": float("nan")}),
        ev.FaultInjected(1, {"what": object()}),
        ev.RequestFinished(1, "r", "stop", 3, float("inf")),
    ],
)
def test_what_json_cannot_hold_is_refused_when_written(tmp_path, event):
    with TraceWriter(tmp_path / "run.jsonl") as writer:
        writer.append(make_head())
        with pytest.raises(TraceError, match=f"{event.kind} has no JSON form"):
            writer.append(event)
        writer.append(ev.CacheReset(0))
    assert [event.kind for event in read_events(tmp_path / "run.jsonl")] == ["run_started", "cache_reset"]


def test_nothing_is_written_after_the_end(tmp_path):
    with TraceWriter(tmp_path / "run.jsonl") as writer:
        writer.append(make_head())
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.append(ev.CacheReset(0))


# ---- the log in memory


def test_a_log_is_a_list_of_its_events():
    events = recorded(7, 600)
    assert len(events) > 3 * CHUNK
    log = EventLog(events)
    assert len(log) == len(events)
    assert list(log) == events
    assert [type(event) for event in log] == [type(event) for event in events]
    for index in (0, CHUNK - 1, CHUNK, len(events) - 1, -1, -len(events)):
        assert log[index] == events[index]
    for window in (slice(3, 700), slice(None, None, 91), slice(-5, None), slice(9, 2), slice(700, 3, -100)):
        assert log[window] == events[window]
    with pytest.raises(IndexError, match=f"event {len(events)} of {len(events)}"):
        log[len(events)]


@given(event=_ANY_EVENT)
@settings(max_examples=100, derandomize=True, deadline=None)
def test_a_packed_chunk_holds_any_event(event):
    assert EventLog([event] * CHUNK)[7] == event
