"""Events folded into columns: what one picture of the scheduler needs, cut into frames.

Owns: the columns of `lab.columns` at the end of a frame, the cutting of history into frames, who holds and who waits
to give back each block. Everything else is read off the state that `kvsched.trace.fold` keeps.
Knows nothing about: bytes, widgets, how anything is drawn.
Invariants: columns are right at a cut, and only then. A frame is a moment at which somebody outside can look: after
every schedule() call, after every processed output (with the requests that end by it), and after what comes between:

    events   add add | schedule … StepScheduled | FenceAdvanced … StepDelivered RequestFinished … | abort | schedule …
    frame       0    |            1             |                       2                          |   3   |     4
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsched.trace import events as ev
from kvsched.trace.fold import apply
from kvsched.trace.state import State
from lab.columns import BLOCK_COLUMNS, REQUEST_COLUMNS, BlockFlag, FrameKind, Row
from lab.rows import FrameRow, RowMaker

Cells = NDArray[np.int32]
Run = tuple[int, int]
"""First block and number of blocks."""

_STATUS, _STEPS, _GIVEN, _TICKET = map(REQUEST_COLUMNS.index, ("status", "steps", "given", "ticket"))
_ATTRIBUTES = {
    "status": "status",
    "queue": "queue",
    "computed": "num_computed_tokens",
    "known": "num_tokens",
    "blocks": "num_blocks",
    "in_flight": "num_in_flight_tokens",
    "stale": "num_stale_output_tokens",
    "preemptions": "num_preemptions",
}
"""Columns that are read off a request as they stand (`status` then goes up by one)."""
_READ_OFF = np.array([REQUEST_COLUMNS.index(column) for column in _ATTRIBUTES])
_read_off = attrgetter(*_ATTRIBUTES.values())
_NOBODY = np.zeros(0, np.intp)
_CACHED, _FENCED, _KEPT, _STALE = map(int, (BlockFlag.CACHED, BlockFlag.FENCED, BlockFlag.KEPT, BlockFlag.STALE))


class Written(NamedTuple):
    """What one request does in a step: tokens computed, and the blocks it writes as runs."""

    request: int
    num_tokens: int
    blocks: tuple[Run, ...]


class Frame(NamedTuple):
    """One frame. at: events applied when it ends. written: what its step writes, if it ends with a scheduled one.
    blocks, requests: indices of all whose cells may have changed, ascending."""

    step: int
    kind: FrameKind
    at: int
    rows: tuple[FrameRow, ...]
    written: tuple[Written, ...]
    blocks: list[int]
    requests: list[int]


class Fold:
    """Applies events one by one; `cut` hands out the frame that ends here.

    blocks: [column, block]; requests: [column, request] (wider than there are requests yet).
    Raises TraceError for events that cannot be folded.
    """

    def __init__(self) -> None:
        self.state = State()
        self.first_ticket = self.state.first_ticket
        self.kind = FrameKind.OUTSIDE
        self.rows = RowMaker(self._ref)
        self.blocks: Cells = np.zeros((len(BLOCK_COLUMNS), 0), np.int32)
        self.requests: Cells = np.zeros((len(REQUEST_COLUMNS), 16), np.int32)
        self._holders: dict[int, list[int]] = {}
        self._waiting: dict[int, list[tuple[int, int]]] = {}
        self._moved: dict[int, set[int]] = {int(flag): set() for flag in (BlockFlag.LOADING, BlockFlag.SAVING)}
        self._kept: set[int] = set()
        self._writes: dict[int, set[int]] = {}
        self._stale: dict[int, int] = {}
        self._touched_blocks: set[int] = set()
        self._touched_requests: set[int] = set()
        self._newest = _NOBODY
        self._scheduled: dict[int, NDArray[np.intp]] = {}
        self._frame_rows: list[FrameRow] = []
        self._written: tuple[Written, ...] = ()

    # ---- in and out

    def begins_frame(self, event: ev.Event) -> bool:
        """Whether the open frame, if there is one, ends before this event."""
        if self.kind is FrameKind.DELIVERED:
            return not _trails_output(event)
        is_new_step = event.step != self.state.step or isinstance(event, ev.FenceAdvanced)
        return self.kind is FrameKind.SCHEDULED or is_new_step

    def apply(self, event: ev.Event) -> None:
        """Take one event."""
        apply(self.state, event)
        self._make_room()
        row = self.rows.row_of(event)
        if row is not None:
            self._frame_rows.append(row)
        if isinstance(event, ev.StepScheduled):
            self._step_scheduled(event)
            self.kind = FrameKind.SCHEDULED
        elif isinstance(event, ev.StepDelivered):
            self._step_delivered(event)
            self.kind = FrameKind.DELIVERED
        else:
            self._touch(event)
            self._move_blocks(event)

    def cut(self) -> Frame:
        """End the open frame here, and bring the columns up to it."""
        self._note_transfers()
        blocks, requests = sorted(self._touched_blocks), sorted(self._touched_requests)
        self._read_blocks(blocks)
        self._read_requests(requests)
        rows, step, at = tuple(self._frame_rows), self.state.step, self.state.index
        frame = Frame(step, self.kind, at, rows, self._written, blocks, requests)
        self.kind = FrameKind.OUTSIDE
        self._frame_rows, self._written = [], ()
        self._touched_blocks.clear()
        self._touched_requests.clear()
        return frame

    def _make_room(self) -> None:
        if len(self.state.requests) > self.requests.shape[1]:
            self.requests = np.concatenate((self.requests, np.zeros_like(self.requests)), axis=1)

    def _ref(self, request: str) -> int:
        number = self.state.find(request)
        return 0 if number is None else number + 1

    # ---- what an event touches

    def _touch(self, event: ev.Event) -> None:
        request = getattr(event, "request", "")
        number = self.state.find(request) if request else None
        if number is not None:
            self._touched_requests.add(number)

    def _step_scheduled(self, event: ev.StepScheduled) -> None:
        self.requests[_GIVEN, self._newest] = 0
        self._touched_requests.update(self._newest.tolist())
        self._newest = _NOBODY
        if not event.request_ids:
            return
        flight = self.state.flights[-1]
        self._newest = self._scheduled[event.step] = np.array(flight.numbers)
        self._touched_requests.update(flight.numbers)
        self.requests[_GIVEN, self._newest] = event.num_tokens
        self.requests[_STEPS, self._newest] += 1
        blocks = [ids for _, ids in flight.writes(self.state.block_size)]
        rows = zip(flight.numbers, event.num_tokens, blocks, strict=True)
        self._written = tuple(Written(number, num, as_runs(ids)) for number, num, ids in rows)
        self._writes[event.step] = set(chain.from_iterable(blocks))

    def _step_delivered(self, event: ev.StepDelivered) -> None:
        numbers = self._scheduled.pop(event.delivered, _NOBODY)
        self.requests[_STEPS, numbers] -= 1
        self._touched_requests.update(numbers.tolist())
        self._writes.pop(event.delivered, None)
        over = [block for block, step in self._stale.items() if step == event.delivered]
        for block in over:
            del self._stale[block]
        self._touched_blocks.update(over)

    def _note_stale(self, blocks: Sequence[int]) -> None:
        """Blocks that are handed out while a step in flight writes them: for whom they belonged to before."""
        for step, written in self._writes.items():
            self._stale.update((block, step) for block in blocks if block in written)

    def _move_blocks(self, event: ev.Event) -> None:
        match event:
            case ev.RunStarted():
                self.blocks = np.zeros((len(BLOCK_COLUMNS), self.state.num_blocks), np.int32)
            case ev.BlocksHit() | ev.BlocksAllocated():
                number = self._ref(event.request) - 1
                for block in event.block_ids:
                    self._holders.setdefault(block, []).append(number)
                self._touched_blocks.update(event.block_ids)
                if isinstance(event, ev.BlocksAllocated):
                    self._note_stale(event.block_ids)
            case ev.BlocksReleased():
                number = self._ref(event.request) - 1
                for block in event.block_ids:
                    self._holders[block].remove(number)
                    self._waiting.setdefault(block, []).append((event.fence, number))
                self._kept.difference_update(event.block_ids)
                self._touched_blocks.update(event.block_ids)
                self._note_wait(Row.RELEASED, number, len(event.block_ids), event.fence, event.reason)
            case ev.BlocksFreed():
                number = self._ref(event.request) - 1
                blocks = (*event.front, *event.back, *event.shared)
                for block in blocks:
                    self._waiting[block].remove((event.fence, number))
                self._touched_blocks.update(blocks)
                self._note_wait(Row.RETURNED, number, len(blocks), event.fence)
            case ev.BlocksKept():
                self._kept.update(event.block_ids)
                self._touched_blocks.update(event.block_ids)
            case ev.BlocksCached() | ev.BlocksUncached():
                self._touched_blocks.update(event.block_ids)
            case ev.CacheReset():
                self._touched_blocks.update(range(self.state.num_blocks))
            case ev.ConfigChanged():
                counted = ((flight.step, flight.seq) for flight in self.state.flights if flight.seq)
                self._frame_rows += (FrameRow(Row.COUNTED, fields) for fields in counted)

    def _note_wait(self, kind: Row, number: int, num_blocks: int, fence: int, reason: str | None = None) -> None:
        if fence:
            words = () if reason is None else (self.rows.word(reason),)
            self._frame_rows.append(FrameRow(kind, (number + 1, num_blocks, fence, *words)))

    # ---- reading the columns off the state

    def _read_requests(self, numbers: list[int]) -> None:
        requests = [self.state.requests[number] for number in numbers]
        cells = np.fromiter(chain.from_iterable(map(_read_off, requests)), np.int32, len(numbers) * len(_READ_OFF))
        at = np.array(numbers, np.intp)
        self.requests[_READ_OFF[:, None], at] = cells.reshape(len(numbers), len(_READ_OFF)).T
        self.requests[_STATUS, at] += 1
        first = self.first_ticket
        self.requests[_TICKET, at] = [r.ticket - first if isinstance(r.ticket, int) else 0 for r in requests]

    def _note_transfers(self) -> None:
        """Blocks whose load or save began or ended since the last cut."""
        transfers = {BlockFlag.LOADING: self.state.loads.values(), BlockFlag.SAVING: self.state.saves}
        for flag, going_on in transfers.items():
            if not going_on and not self._moved[flag]:
                continue
            blocks = {block for transfer in going_on for block in transfer.block_ids}
            self._touched_blocks |= blocks ^ self._moved[flag]
            self._moved[flag] = blocks

    def _read_blocks(self, blocks: list[int]) -> None:
        if blocks:
            self.blocks[:, blocks] = np.array([self._block_cells(block) for block in blocks], np.int32).T

    def _block_cells(self, block: int) -> tuple[int, int, int, int]:
        """In the order of BLOCK_COLUMNS."""
        holders, waiting = self._holders.get(block), self._waiting.get(block)
        owner = holders[0] if holders else waiting[-1][1] if waiting else -1
        flags = _CACHED if self.state.block_hashes[block] else 0
        for flag, blocks in self._moved.items():
            if block in blocks:
                flags |= flag
        if waiting and not holders:
            flags |= _FENCED
        if block in self._kept:
            flags |= _KEPT
        if block in self._stale:
            flags |= _STALE
        return owner + 1, self.state.refs(block), flags, waiting[-1][0] if waiting else 0


def as_runs(blocks: Sequence[int]) -> tuple[Run, ...]:
    """Consecutive ids drawn together: [4, 5, 6, 9] -> ((4, 3), (9, 1))."""
    runs: list[Run] = []
    for block in blocks:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


def _trails_output(event: ev.Event) -> bool:
    """Whether an event behind StepDelivered still belongs to the processing of that output."""
    match event:
        case ev.RequestFinished():
            return event.reason != "abort"
        case ev.BlocksFreed():
            return not event.fence
        case ev.BlocksReleased() | ev.BlocksKept() | ev.BlocksUncached() | ev.LoadLanded() | ev.SaveSent():
            return True
    return False
