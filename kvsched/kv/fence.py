"""The fence: which steps are in flight, and which freed blocks must wait for them.

Owns: both sequence numbers, the FIFO of deferred frees. It is the only door back into the pool.
Knows nothing about: why blocks are released, what is scheduled next.
Invariants: processed_seq <= sched_seq; the FIFO's fences never decrease; while the fence is off no entry waits.

    sched_seq      1    2    3    4        the newest non-empty step is 4
    processed_seq       2                  outputs of 1 and 2 have been processed
    deferred                 [3: A]        A was last scheduled when 3 was newest: back after 3 is processed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvsched.kv.pool import BlockPool
from kvsched.request import Request
from kvsched.trace.events import BlocksFreed, BlocksReleased, FenceAdvanced


class Deferred(NamedTuple):
    """Blocks (in the order of the table they left) that return once step `fence` has been processed."""

    fence: int
    request_id: str
    block_ids: tuple[int, ...]


class Fence:
    """Counts steps and holds back freed blocks. `on` says whether frees are deferred at all."""

    __slots__ = ("_pool", "deferred", "emit", "on", "processed_seq", "sched_seq")

    def __init__(self, pool: BlockPool, on: bool, emit: Callable[[Any], None] | None) -> None:
        self._pool = pool
        self.on = on
        self.emit = emit
        self.sched_seq = 0
        self.processed_seq = 0
        self.deferred: deque[Deferred] = deque()

    def next_seq(self) -> int:
        """A non-empty step was scheduled: its sequence number; 0 while the fence is off."""
        if self.on:
            self.sched_seq += 1
            return self.sched_seq
        return 0

    def can_free_now(self, request: Request) -> bool:
        """Whether no step in flight can still write this request's blocks."""
        return not self.on or request.last_sched_seq <= self.processed_seq

    def release(self, request: Request, table: Sequence[int], reason: str, step: int) -> None:
        """Let a table go: to the pool now, or behind the newest step."""
        if not table:
            return
        fence = 0 if self.can_free_now(request) else self.sched_seq
        if self.emit is not None:
            self.emit(BlocksReleased(step, request.id, tuple(table), fence, reason))
        if fence:
            self.deferred.append(Deferred(fence, request.id, tuple(table)))
        else:
            self._give_back(request.id, table, 0, step)

    def advance(self, step: int) -> None:
        """The output of a fenced step is being processed: move, and return what no longer has to wait."""
        self.processed_seq += 1
        assert self.processed_seq <= self.sched_seq, "more steps processed than scheduled"
        if self.emit is not None:
            self.emit(FenceAdvanced(step, self.processed_seq))
        while self.deferred and self.deferred[0].fence <= self.processed_seq:
            entry = self.deferred.popleft()
            self._give_back(entry.request_id, entry.block_ids, entry.fence, step)

    def open(self, step: int) -> None:
        """Turn the fence off: everything that waits returns at once."""
        self.on = False
        while self.deferred:
            entry = self.deferred.popleft()
            self._give_back(entry.request_id, entry.block_ids, entry.fence, step)

    def _give_back(self, request_id: str, table: Sequence[int], fence: int, step: int) -> None:
        front, back, shared = self._pool.release(table)
        if self.emit is not None:
            self.emit(BlocksFreed(step, request_id, tuple(front), tuple(back), tuple(shared), fence))
