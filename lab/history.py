"""A packed history, read back: the frames, what happened in them, and the state at any of them.

Owns: the reader of the layout in `lab.pack`, and the tables for a whole history (steps, waits behind the fence).
Knows nothing about: events, schedulers, drawing. `lab/widgets/history.js` is its twin in the browser.
Invariants: a History never changes. `at(frame)` is a function of the bytes and the frame alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lab.columns import BLOCK_COLUMNS, REQUEST_COLUMNS, ROW_FIELDS, FrameKind, Row
from lab.fold import Cells
from lab.pack import HEADER, Tag


class RequestHead(NamedTuple):
    """What never changes about a request."""

    id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    arrival_time: float


class Written(NamedTuple):
    """What a step does for one request: tokens computed, and the blocks it writes."""

    request: int
    num_tokens: int
    blocks: tuple[int, ...]


class RowRead(NamedTuple):
    """One row of a frame. values: by the names in ROW_FIELDS."""

    kind: Row
    values: dict[str, int]


class FrameRead(NamedTuple):
    """One frame. At its end: at: events applied; fenced: whether the fence is on; processed, newest: its numbers; free:
    free blocks.
    changes: where its changes start in the bytes."""

    step: int
    kind: FrameKind
    at: int
    fenced: bool
    processed: int
    newest: int
    free: int
    rows: tuple[RowRead, ...]
    changes: int


@dataclass(slots=True)
class Step:
    """One schedule() call. frame: at whose end it is decided; delivered: frame at whose end its output has been
    processed, None while it is in flight (and for ever if it is empty)."""

    number: int
    seq: int
    frame: int
    calls: int
    free: int
    time: float
    written: tuple[Written, ...]
    delivered: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all its requests."""
        return sum(written.num_tokens for written in self.written)


@dataclass(slots=True)
class Wait:
    """Blocks of one request behind the fence, from the frame of their release to that of their return."""

    request: int
    num_blocks: int
    fence: int
    reason: str
    released: int
    returned: int | None = None


class State(NamedTuple):
    """All columns at the end of a frame: blocks[column, block], requests[column, request]."""

    frame: int
    blocks: Cells
    requests: Cells

    def block(self, name: str) -> Cells:
        """One of the blocks' columns, by name."""
        cells: Cells = self.blocks[BLOCK_COLUMNS.index(name)]
        return cells

    def request(self, name: str) -> Cells:
        """One of the requests' columns, by name."""
        cells: Cells = self.requests[REQUEST_COLUMNS.index(name)]
        return cells


@dataclass(slots=True)
class _Reader:
    data: bytes
    at: int

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def signed(self) -> int:
        code = self.number()
        return code >> 1 if not code & 1 else -(code + 1 >> 1)


@dataclass(slots=True)
class History:
    """What `lab.pack.Packer` wrote.

    head: config, source and meta of the run. requests: in the order of their arrival.
    steps: by number. waits: in the order of their release.
    Raises ValueError for bytes that are no history, or one of another version.
    """

    data: bytes
    head: dict[str, Any] = field(default_factory=dict)
    requests: list[RequestHead] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    frames: list[FrameRead] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    _keyframes: list[tuple[int, int]] = field(default_factory=list)
    _last_written: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = bytes(self.data)
        if not self.data.startswith(HEADER):
            raise ValueError(f"these bytes are no history of version {HEADER[-2]}: they begin with {self.data[:6]!r}")
        reader = _Reader(self.data, len(HEADER))
        while reader.at < len(self.data):
            tag = Tag(reader.number())
            length = reader.number()
            end = reader.at + length
            self._take_chunk(tag, reader, end)
            reader.at = end

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block 0 included."""
        return int(self.head["config"]["num_blocks"])

    def name(self, ref: int) -> str:
        """Id of a request as rows and owners name it (1 + index); "" for 0."""
        return self.requests[ref - 1].id if ref else ""

    def at(self, frame: int) -> State:
        """The state at the end of a frame. Raises IndexError when there is no such frame."""
        if not 0 <= frame < len(self.frames):
            raise IndexError(f"there is no frame {frame}; this history has {len(self.frames)}")
        known, offset = max((key for key in self._keyframes if key[0] <= frame), default=(-1, -1))
        state = State(
            frame,
            np.zeros((len(BLOCK_COLUMNS), self.num_blocks), np.int32),
            np.zeros((len(REQUEST_COLUMNS), len(self.requests)), np.int32),
        )
        if known >= 0:
            self._apply_changes(_Reader(self.data, offset), state)
        for read in self.frames[known + 1 : frame + 1]:
            self._apply_changes(_Reader(self.data, read.changes), state)
        return state

    # ---- reading

    def _take_chunk(self, tag: Tag, reader: _Reader, end: int) -> None:
        if tag is Tag.FRAME:
            self._take_frame(reader)
        elif tag is Tag.KEYFRAME:
            self._keyframes.append((len(self.frames) - 1, reader.at))
        else:
            value = json.loads(self.data[reader.at : end])
            if tag is Tag.HEAD:
                self.head = value
            elif tag is Tag.REQUESTS:
                self.requests += [RequestHead(*row) for row in value]
            else:
                self.words += value

    def _take_frame(self, reader: _Reader) -> None:
        step, kind, num_events = reader.number(), FrameKind(reader.number()), reader.number()
        fenced, processed, newest, free = (reader.number() for _ in range(4))
        rows = tuple(self._take_row(reader) for _ in range(reader.number()))
        at = num_events + (self.frames[-1].at if self.frames else 0)
        self.frames.append(FrameRead(step, kind, at, bool(fenced), processed, newest, free, rows, reader.at))

    def _take_row(self, reader: _Reader) -> RowRead:
        kind = Row(reader.number())
        values = {name: reader.number() for name in ROW_FIELDS[kind]}
        frame = len(self.frames)
        if kind is Row.SCHEDULED:
            numbers = values["number"], values["seq"], frame, values["calls"], values["free"]
            self.steps[values["number"]] = Step(*numbers, values["time"] / 1e6, self._take_written(reader))
        elif kind is Row.DELIVERED and values["number"] in self.steps:
            self.steps[values["number"]].delivered = frame
        elif kind is Row.COUNTED:
            self.steps[values["number"]].seq = values["seq"]
        elif kind is Row.RELEASED:
            reason = self.words[values["reason"]]
            self.waits.append(Wait(values["request"] - 1, values["blocks"], values["fence"], reason, frame))
        elif kind is Row.RETURNED:
            self._end_wait(values["request"] - 1, values["fence"], frame)
        return RowRead(kind, values)

    def _take_written(self, reader: _Reader) -> tuple[Written, ...]:
        written = []
        request = 0
        for _ in range(reader.number()):
            request += reader.signed()
            code = reader.number()
            if code & 1:
                blocks = [self._last_written[request]]
            else:
                runs = [(reader.number(), reader.number()) for _ in range(reader.number())]
                blocks = [block for first, length in runs for block in range(first, first + length)]
            if blocks:
                self._last_written[request] = blocks[-1]
            written.append(Written(request, code >> 1, tuple(blocks)))
        return tuple(written)

    def _end_wait(self, request: int, fence: int, frame: int) -> None:
        """The oldest wait of this request at this fence is over."""
        for wait in reversed(self.waits):
            if wait.returned is None and (wait.request, wait.fence) == (request, fence):
                wait.returned = frame
                return

    def _apply_changes(self, reader: _Reader, state: State) -> None:
        mask = reader.number()
        for column in range(len(BLOCK_COLUMNS) + len(REQUEST_COLUMNS)):
            if not mask >> column & 1:
                continue
            is_block = column < len(BLOCK_COLUMNS)
            cells = state.blocks[column] if is_block else state.requests[column - len(BLOCK_COLUMNS)]
            at = 0
            for _ in range(reader.number()):
                at += reader.number()
                length = reader.number()
                cells[at : at + length] += reader.signed()
                at += length
