"""The packed history says what the fold of the events says, whole or in pieces, and stays small."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvsched.trace.events import StepScheduled
from kvsched.trace.replay import Replay
from kvsched.trace.state import Queue, State
from lab.columns import REQUEST_COLUMNS, BlockFlag, FrameKind
from lab.history import History
from lab.pack import HEADER, Packer, Tag, pack, varints
from tests.lab_runs import crowd, large
from tests.trace_runs import recorded

SEEDS = range(24)


def assert_says_the_same(history: History, frame: int, state: State) -> None:
    """Every cell at a frame, against the folded state at the same event."""
    at = history.at(frame)
    fences, owners, writing = state.fences(), state.owners(), state.writing()
    loading = {block for load in state.loads.values() for block in load.block_ids}
    for block in range(1, state.num_blocks):
        flags = BlockFlag(int(at.block("flags")[block]))
        owner = history.name(int(at.block("owner")[block]))
        assert at.block("refs")[block] == state.refs(block)
        assert (BlockFlag.CACHED in flags) == (state.hash_of(block) is not None)
        assert (BlockFlag.FENCED in flags) == (block in fences and block not in owners)
        assert (BlockFlag.LOADING in flags) == (block in loading)
        assert at.block("fence")[block] == (fences[block][-1] if block in fences else 0)
        assert owner in owners.get(block, []) or (block not in owners and bool(owner) == (block in fences))
    for number, request in enumerate(state.requests):
        cells = {name: int(at.request(name)[number]) for name in REQUEST_COLUMNS}
        assert cells["status"] == request.status + 1
        assert cells["queue"] == request.queue
        assert cells["computed"] == request.num_computed_tokens
        assert cells["known"] == request.num_tokens
        assert cells["blocks"] == request.num_blocks
        assert cells["in_flight"] == request.num_in_flight_tokens
        assert cells["stale"] == request.num_stale_output_tokens
        assert cells["preemptions"] == request.num_preemptions
        assert cells["steps"] == sum(number in flight.numbers for flight in state.flights)
    assert not at.request("status")[len(state.requests) :].any(), "a request is there before it arrives"
    read = history.frames[frame]
    fence = state.fence_on, state.processed_step_seq, state.sched_step_seq
    assert (read.fenced, read.processed, read.newest, read.free) == (*fence, state.num_free)
    in_flight = {s.number for s in history.steps.values() if s.written and s.frame <= frame and is_open(s, frame)}
    assert in_flight == {flight.step for flight in state.flights}
    written = {b for number in in_flight for w in history.steps[number].written for b in w.blocks}
    assert set(writing) <= written


def is_open(step, frame) -> bool:
    return step.delivered is None or step.delivered > frame


@pytest.mark.parametrize("seed", SEEDS)
def test_every_frame_says_what_the_events_say(seed):
    """Loads, saves, aborts, failed calls, both policies, changed settings: all that can be in a recording."""
    events = recorded(seed)
    history, replay = History(pack(events)), Replay(events)
    print(f"seed {seed}: {len(events)} events, {len(history.frames)} frames")
    for frame, read in enumerate(history.frames):
        assert_says_the_same(history, frame, replay.state_at(read.at))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_tickets_order_the_queues(policy):
    events = recorded(3, policy=policy)
    history, replay = History(pack(events)), Replay(events)
    for frame, read in enumerate(history.frames):
        state, at = replay.state_at(read.at), history.at(frame)
        for queue in (Queue.RUNNING, Queue.WAITING, Queue.LOADING):
            members = np.flatnonzero(at.request("queue") == queue).tolist()
            if policy == "priority" and queue is not Queue.RUNNING:
                heads = history.requests
                members.sort(key=lambda i: (heads[i].priority, heads[i].arrival_time, heads[i].id))
            else:
                members.sort(key=lambda i: at.request("ticket")[i])
            assert [history.requests[i].id for i in members] == [r.id for r in state.queue(queue)]


def test_pieces_put_together_are_the_history():
    events = crowd().events[:]
    rng = random.Random(5)
    packer, pieces, at = Packer(), bytearray(HEADER), 0
    while at < len(events):
        end = at + rng.randrange(1, 9)
        pieces += packer.feed(events[at:end])
        at = end
        assert bytes(pieces) == bytes(packer.data)
        assert packer.num_events == min(at, len(events))
    history, replay = History(bytes(pieces)), Replay(events)
    assert history.frames[-1].at == len(events)
    for frame, read in enumerate(history.frames):
        assert_says_the_same(history, frame, replay.state_at(read.at))


def test_feeding_nothing_makes_no_frame():
    packer = Packer()
    packer.feed(crowd().events[:])
    frames = list(packer.frames)
    assert packer.feed([]) == b""
    assert packer.frames == frames


def test_frames_end_where_somebody_could_look():
    """Each schedule() call ends a frame, and each processed output with the requests that end by it."""
    session = crowd()
    history, events = History(pack(session.events[:])), session.events[:]
    scheduled = [f.at for f in history.frames if f.kind is FrameKind.SCHEDULED]
    assert scheduled == [i + 1 for i, event in enumerate(events) if isinstance(event, StepScheduled)]
    delivered = [f for f in history.frames if f.kind is FrameKind.DELIVERED]
    assert len(delivered) == sum(event.kind == "step_delivered" for event in events)
    finished = [i for i, event in enumerate(events) if event.kind == "request_finished"]
    assert finished
    for i in finished:
        frame = next(f for f in history.frames if f.at > i)
        assert frame.kind is FrameKind.DELIVERED


def test_a_step_is_found_at_its_last_frame():
    packer = Packer()
    packer.feed(crowd().events[:])
    for step in range(packer.frames[-1].step + 1):
        frame = packer.frame_of_step(step)
        assert packer.frames[frame].step == step
        assert frame + 1 == len(packer.frames) or packer.frames[frame + 1].step == step + 1
    assert packer.frame_of_step(10_000) == len(packer.frames) - 1


def test_waits_behind_the_fence_go_from_release_to_return():
    session = crowd()
    history = History(pack(session.events[:]))
    released = [e for e in session.events if e.kind == "blocks_released" and e.fence]
    assert released
    assert [(history.requests[w.request].id, w.fence, w.num_blocks, w.reason) for w in history.waits] == [
        (e.request, e.fence, len(e.block_ids), e.reason) for e in released
    ]
    for wait in history.waits:
        assert wait.returned is not None
        assert history.frames[wait.returned].processed >= wait.fence > history.frames[wait.returned - 1].processed


def test_keyframes_and_deltas_agree():
    """Seeking from a keyframe gives what folding from the start gives."""
    session = large(num_blocks=600, num_steps=240)
    packer = Packer()
    packer.feed(session.events[:])
    history = History(bytes(packer.data))
    assert len(history._keyframes) >= 2
    without = History(bytes(packer.data))
    without._keyframes.clear()
    for frame in range(0, len(history.frames), 7):
        one, other = history.at(frame), without.at(frame)
        assert (one.blocks == other.blocks).all()
        assert (one.requests == other.requests).all()


def test_ten_thousand_blocks_stay_within_their_bytes_per_step():
    """5 MB for 2,000 steps are 2,500 bytes a step; the whole of it is sent in the browser test."""
    session = large(num_steps=400)
    packer = Packer()
    packer.feed(session.events[:])
    print(f"{len(session.events):,} events, {len(packer.frames):,} frames: {len(packer.data):,} bytes")
    assert len(packer.data) <= 2_500 * session.num_steps


def test_varints_are_leb128():
    rng = random.Random(1)
    numbers = [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**21, 2**28, 2**40, 2**62]
    numbers += [rng.randrange(2 ** rng.randrange(1, 60)) for _ in range(200)]
    coded = varints(numbers)
    decoded, at = [], 0
    while at < len(coded):
        value = shift = 0
        while True:
            byte, at = coded[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        decoded.append(value)
    assert decoded == numbers
    assert varints([300]) == b"\xac\x02"
    assert varints([]) == b""


def test_a_history_cut_between_chunks_is_a_shorter_one():
    data = pack(crowd().events[:])
    whole = History(data)
    ends = [i for i in range(len(HEADER), len(data)) if data[i] == Tag.FRAME and is_history(data[:i])]
    assert ends
    for end in ends[::9]:
        part = History(data[:end])
        assert part.frames == whole.frames[: len(part.frames)]


def is_history(data: bytes) -> bool:
    try:
        History(data)
    except (IndexError, ValueError):
        return False
    return True


@pytest.mark.parametrize("data", [b"", b"KVLH", b"KVLH\x02\x00", b"not a history"])
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match="no history of version 1"):
        History(data)


def test_a_frame_that_is_not_there_is_refused():
    history = History(pack(crowd().events[:]))
    with pytest.raises(IndexError, match=f"this history has {len(history.frames)}"):
        history.at(len(history.frames))
