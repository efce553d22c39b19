"""History as bytes: keyframes and deltas, small enough to send and quick enough to scrub.

Owns: the layout below, `Packer` (events → bytes, a piece at a time) and the varint codec.
Knows nothing about: what the cells mean (`lab.fold`), who reads them (`lab.history`, `lab/widgets/history.js`).
Invariants: a history is MAGIC, VERSION, then chunks; the pieces that `feed` returns, put one behind the other, are that
history; a reader that stops between two chunks holds a valid, shorter one.

Layout, version 1. Little-endian. `v` is an unsigned LEB128 number, `z` a zigzag-coded signed one in the same groups.

    history   "KVLH"  u16 version  chunk*
    chunk     u8 tag  v length  payload
    HEAD      JSON {"config", "source", "meta"}: the run's head; the first chunk, once
    REQUESTS  JSON [[id, num_prompt_tokens, max_tokens, priority, arrival_time], …]: appended to the table of requests
    WORDS     JSON [word, …]: appended to the table of words
    FRAME     v step  v kind  v events  v fenced  v processed  v newest  v free  v num_rows  row*  changes
    KEYFRAME  changes from all zeros to the state after the frame before it

              events in this frame; at its end: whether the fence is on (1), its two numbers, free blocks
    row       u8 kind  v field…            as many as ROW_FIELDS[kind] names
              SCHEDULED then has  v num_requests, and for each  z request (index, less the one before)
              v num_tokens * 2 + 1                              it writes the last block it wrote before, and no other
              v num_tokens * 2  v num_runs  (v first  v length)…   it writes these blocks
    changes   v mask  column*       bit c of mask: column c changes; blocks' columns first, then requests'
    column    v num_runs  (v gap  v length  z difference)…
              `length` cells, `gap` behind the end of the run before, all change by `difference`

A column that grows by one for everybody who runs is one run of three bytes, whatever their number; that is why columns
are coded as differences. A keyframe is written when the frames since the last one have grown to twice its size:
keyframes add at most half to the size, and a jump reads three keyframes' worth at most.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from kvsched.trace.events import RunStarted
from lab.columns import FrameKind, Row
from lab.fold import Cells, Fold, Frame, Written

MAGIC = b"KVLH"
VERSION = 1
HEADER = MAGIC + VERSION.to_bytes(2, "little")

_LEAST_BETWEEN_KEYFRAMES = 8192
_FRAMES_PER_KEYFRAME = 2
"""Bytes of frames that must stand behind each byte of keyframes."""


class Tag(IntEnum):
    """Kinds of chunks."""

    HEAD = 1
    REQUESTS = 2
    WORDS = 3
    FRAME = 4
    KEYFRAME = 5


class FrameRef(NamedTuple):
    """Where a frame stands: the step's number, what ended it, and how many events have been applied at its end."""

    step: int
    kind: FrameKind
    at: int


class Packer:
    """Turns events into a history, as they come.

    data: everything so far. frames: one entry per frame.
    """

    def __init__(self) -> None:
        self.data = bytearray(HEADER)
        self.frames: list[FrameRef] = []
        self._fold = Fold()
        self._num_requests = 0
        self._num_words = 0
        self._differ = Differ()
        self._last_written: dict[int, int] = {}
        self._since_keyframe = 0
        self._keyframe_due = _LEAST_BETWEEN_KEYFRAMES

    @property
    def num_events(self) -> int:
        """Events taken so far."""
        return self._fold.state.index

    def feed(self, events: Iterable[Any]) -> bytes:
        """Take more events; the chunks that tell them. What is left open at the end becomes a frame of its own.

        Raises TraceError for events that cannot be folded, such as a history that does not start with `run_started`.
        """
        start = len(self.data)
        fold = self._fold
        for event in events:
            if fold.begins_frame(event):
                self._end_open_frame()
            fold.apply(event)
            if isinstance(event, RunStarted):
                head = {"config": dict(event.config), "source": event.source, "meta": dict(event.meta)}
                self._write_json(Tag.HEAD, head)
        self._end_open_frame()
        return bytes(self.data[start:])

    def frame_of_step(self, step: int) -> int:
        """Index of the last frame of a step (of the last step before it that has one); 0 if there is none."""
        low, high = 0, len(self.frames)
        while low < high:
            middle = (low + high) // 2
            if self.frames[middle].step <= step:
                low = middle + 1
            else:
                high = middle
        return max(0, low - 1)

    # ---- chunks

    def _end_open_frame(self) -> None:
        if self.num_events > (self.frames[-1].at if self.frames else 0):
            self._write_frame(self._fold.cut())

    def _write_frame(self, frame: Frame) -> None:
        fold = self._fold
        self._write_new_requests()
        words = fold.rows.words.words
        if len(words) > self._num_words:
            self._write_json(Tag.WORDS, words[self._num_words :])
            self._num_words = len(words)
        state, num_before = fold.state, self.frames[-1].at if self.frames else 0
        numbers = [frame.step, frame.kind, frame.at - num_before]
        numbers += int(state.fence_on), state.processed_step_seq, state.sched_step_seq, state.num_free
        _add_rows(numbers, frame, self._last_written)
        self._differ.add_changes(numbers, (fold.blocks, frame.blocks), (fold.requests, frame.requests))
        payload = varints(numbers)
        self._write_chunk(Tag.FRAME, payload)
        self.frames.append(FrameRef(frame.step, frame.kind, frame.at))
        self._since_keyframe += len(payload)
        if self._since_keyframe >= self._keyframe_due:
            self._write_keyframe(fold)

    def _write_new_requests(self) -> None:
        requests = self._fold.state.requests
        new = [requests[number] for number in range(self._num_requests, len(requests))]
        if new:
            heads = [(r.id, r.num_prompt_tokens, r.max_tokens, r.priority, r.arrival_time) for r in new]
            self._write_json(Tag.REQUESTS, heads)
            self._num_requests += len(new)

    def _write_keyframe(self, fold: Fold) -> None:
        """Write a keyframe, or, if it is still too large for that, wait until enough frames stand behind it."""
        numbers: list[int] = []
        everything = ((cells, range(cells.shape[1])) for cells in (fold.blocks, fold.requests))
        Differ().add_changes(numbers, *everything)
        payload = varints(numbers)
        self._keyframe_due = max(_LEAST_BETWEEN_KEYFRAMES, _FRAMES_PER_KEYFRAME * len(payload))
        if self._since_keyframe >= self._keyframe_due:
            self._write_chunk(Tag.KEYFRAME, payload)
            self._since_keyframe = 0

    def _write_json(self, tag: Tag, value: Any) -> None:
        self._write_chunk(tag, json.dumps(value, separators=(",", ":"), default=str).encode())

    def _write_chunk(self, tag: Tag, payload: bytes) -> None:
        self.data.append(tag)
        self.data += varints([len(payload)])
        self.data += payload


def pack(events: Iterable[Any]) -> bytes:
    """A whole history at once. Raises TraceError as `Packer.feed` does."""
    packer = Packer()
    packer.feed(events)
    return bytes(packer.data)


# ---- the codec


def varints(numbers: Sequence[int]) -> bytes:
    """Unsigned numbers below 2**63 as LEB128, one behind the other."""
    if max(numbers, default=0) < 0x80:
        return bytes(numbers)
    values = np.array(numbers, np.int64)
    size = np.ones(len(values), np.int64)
    for bits in range(7, 63, 7):
        more = values >> bits > 0
        if not more.any():
            break
        size += more
    end = np.cumsum(size)
    out = np.zeros(int(end[-1]), np.uint8)
    for byte in range(int(size.max())):
        has = size > byte
        goes_on = np.where(size[has] > byte + 1, 0x80, 0)
        out[(end - size + byte)[has]] = values[has] >> 7 * byte & 0x7F | goes_on
    return out.tobytes()


def zigzag(value: int) -> int:
    """Signed to unsigned, small for small: 0, -1, 1, -2 … -> 0, 1, 2, 3 …"""
    return value << 1 if value >= 0 else (-value << 1) - 1


class Differ:
    """Remembers columns; tells what changed since. Starts from all zeros."""

    def __init__(self) -> None:
        self._before: list[Cells] = [np.zeros((0, 0), np.int32), np.zeros((0, 0), np.int32)]

    def add_changes(self, numbers: list[int], *after: tuple[Cells, Sequence[int]]) -> None:
        """Append `changes` of the layout, from the arrays of the last call to these. With each array come the indices
        at which it may have changed, ascending."""
        at_mask = len(numbers)
        numbers.append(0)
        first_column = 0
        for which, (cells, touched) in enumerate(after):
            if self._before[which].shape != cells.shape:
                self._before[which] = _widened(self._before[which], cells.shape)
            if len(touched):
                numbers[at_mask] |= _add_runs(numbers, self._before[which], cells, touched) << first_column
            first_column += len(cells)


def _widened(cells: Cells, shape: tuple[int, ...]) -> Cells:
    wide = np.zeros(shape, np.int32)
    wide[: cells.shape[0], : cells.shape[1]] = cells
    return wide


def _add_runs(numbers: list[int], before: Cells, after: Cells, touched: Sequence[int]) -> int:
    """Append each changed column's runs of equal changes; bring `before` up to date. Returns the mask of columns."""
    at = np.array(touched)
    difference = after[:, at] - before[:, at]
    before[:, at] += difference
    column, where = difference.nonzero()
    if not len(column):
        return 0
    value, cell = difference[column, where], at[where]
    goes_on = (cell[1:] == cell[:-1] + 1) & (value[1:] == value[:-1]) & (column[1:] == column[:-1])
    first = np.flatnonzero(np.append(True, ~goes_on))
    length = np.diff(np.append(first, len(cell)))
    column, start, value = column[first], cell[first], value[first]
    gap = start.copy()
    gap[1:] -= np.where(column[1:] == column[:-1], (start + length)[:-1], 0)
    runs = np.stack((gap, length, (value << 1) ^ (value >> 31)), axis=1)
    num_runs = np.bincount(column, minlength=len(after)).tolist()
    mask = end = 0
    for c, num in enumerate(num_runs):
        if num:
            mask |= 1 << c
            numbers.append(num)
            numbers += runs[end : end + num].ravel().tolist()
            end += num
    return mask


def _add_rows(numbers: list[int], frame: Frame, last_written: dict[int, int]) -> None:
    """last_written: the last block each request wrote; brought up to date here."""
    numbers.append(len(frame.rows))
    for row in frame.rows:
        numbers.append(row.kind)
        numbers += row.fields
        if row.kind is Row.SCHEDULED:
            _add_written(numbers, frame.written, last_written)


def _add_written(numbers: list[int], written: Sequence[Written], last_written: dict[int, int]) -> None:
    numbers.append(len(written))
    before = 0
    for request, num_tokens, runs in written:
        numbers.append(zigzag(request - before))
        before = request
        if len(runs) == 1 and runs[0] == (last_written.get(request), 1):
            numbers.append(num_tokens << 1 | 1)
            continue
        numbers += num_tokens << 1, len(runs)
        for run in runs:
            numbers += run
        if runs:
            last_written[request] = sum(runs[-1]) - 1
