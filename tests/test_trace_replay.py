"""Any moment of a recording, reached from keyframes, is the moment itself."""

from __future__ import annotations

import random

import pytest

from kvsched.trace import log as log_module
from kvsched.trace import replay as replay_module
from kvsched.trace.fold import apply, fold
from kvsched.trace.plain import TraceError
from kvsched.trace.replay import Replay
from kvsched.trace.state import State
from kvsched.trace.writer import write_trace
from tests.test_trace_fold import _looks
from tests.trace_runs import make_head, recorded


@pytest.fixture(params=[1, 2_000, 10**9], ids=["a keyframe after every chunk", "some keyframes", "no keyframe"])
def bytes_per_keyframe(request, monkeypatch):
    monkeypatch.setattr(log_module, "CHUNK", 4)
    monkeypatch.setattr(replay_module, "_BYTES_PER_KEYFRAME", request.param)
    return request.param


def test_seeking_gives_the_state_of_a_straight_fold(bytes_per_keyframe):
    events = recorded(4)
    replay = Replay(events)
    assert len(replay) == len(events)
    assert (len(replay._keyframes) > 1) == (bytes_per_keyframe < 10**9)
    states, straight = [], State()
    for event in [*events, None]:
        states.append(_looks(straight))
        if event is not None:
            apply(straight, event)
    places = list(range(len(events) + 1))
    for order in (places, places[::-1], random.Random(1).sample(places, len(places))):
        for index in order:
            state = replay.state_at(index)
            assert state.index == index
            assert _looks(state) == states[index]


def test_what_is_given_out_is_the_callers_own(bytes_per_keyframe):
    events = recorded(4)
    replay = Replay(events)
    half = len(events) // 2
    fold(events[half:], replay.state_at(half))
    assert _looks(replay.state_at(half)) == _looks(fold(events[:half]))


def test_a_state_after_a_step_is_the_one_when_its_call_ended():
    events = recorded(6)
    replay = Replay(events)
    assert replay.num_steps == sum(event.kind == "step_scheduled" for event in events)
    for step in range(1, replay.num_steps + 1):
        index = replay.index_of_step(step)
        assert (events[index - 1].kind, events[index - 1].step) == ("step_scheduled", step)
        assert replay.state_at_step(step).step == step
        assert replay.step_at(index) == step
        assert replay.step_at(index - 1) == step - 1
    assert replay.state_at_step(0).step == 0
    assert events[replay.index_of_step(0)].step == 1


def test_kinds_are_indexed():
    events = recorded(6)
    replay = Replay(events)
    for kind in {event.kind for event in events}:
        assert list(replay.indexes(kind)) == [i for i, event in enumerate(events) if event.kind == kind]
    assert list(Replay(events[:1]).indexes("preempted")) == []
    with pytest.raises(ValueError, match="no kind of event 'unheard_of'; there are run_started,"):
        replay.indexes("unheard_of")


def test_a_recording_may_grow():
    events = recorded(9)
    growing = Replay()
    for i, event in enumerate(events):
        growing.append(event)
        if i % 50 == 0:
            assert _looks(growing.state_at(i + 1)) == _looks(fold(events[: i + 1]))
    assert _looks(growing.state_at(len(events))) == _looks(fold(events))
    assert list(growing.events) == events


def test_a_file_opens_as_the_recording_it_is(tmp_path):
    events = recorded(8)
    write_trace(tmp_path / "run.jsonl.gz", events)
    replay = Replay.open(tmp_path / "run.jsonl.gz")
    assert list(replay.events) == events
    assert _looks(replay.state_at(100)) == _looks(fold(events[:100]))


def test_places_that_are_not_there_are_refused():
    replay = Replay(recorded(4))
    for index in (-1, len(replay) + 1):
        with pytest.raises(IndexError, match=f"index {index} is not in the recording of {len(replay)} events"):
            replay.state_at(index)
    for step in (-1, replay.num_steps + 1):
        with pytest.raises(IndexError, match=f"it has steps 0 to {replay.num_steps}"):
            replay.state_at_step(step)


def test_an_event_that_cannot_be_folded_is_not_taken_in():
    replay = Replay([make_head()])
    with pytest.raises(TraceError, match="a second run_started"):
        replay.append(make_head())
    assert len(replay) == len(replay.events) == 1
    assert replay.state_at(1).num_free == 8
