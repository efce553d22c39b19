"""A step while it is being decided: what `ScheduledStep` will be made of.

Owns: `Draft`. Knows nothing about: how decisions are made.
Invariants: `requests` and `counts` are parallel; `budget` is what is left of the token budget.
"""

from __future__ import annotations

from kvsched.request import Request
from kvsched.step import ScheduledStep


class Draft:
    """The step under decision; thrown away once it is frozen."""

    __slots__ = (
        "allocate_calls_before",
        "budget",
        "chunk_cap",
        "counts",
        "new_blocks",
        "joined",
        "prefill_chunks",
        "preempted",
        "requests",
        "step",
    )

    def __init__(self, step: int, budget: int, chunk_cap: int, allocate_calls: int) -> None:
        self.step = step
        self.budget = budget
        self.chunk_cap = chunk_cap
        self.allocate_calls_before = allocate_calls
        self.requests: list[Request] = []
        self.counts: list[int] = []
        self.prefill_chunks: list[Request] = []
        self.new_blocks: dict[str, tuple[int, ...]] = {}
        self.joined: list[Request] = []
        self.preempted: list[str] = []

    def take_out(self, request: Request) -> int | None:
        """Unschedule a victim: its tokens return to the budget, its new blocks leave the step. Returns its
        tokens, None if it was not scheduled in this step."""
        if request not in self.requests:
            return None
        i = self.requests.index(request)
        del self.requests[i]
        count = self.counts.pop(i)
        self.budget += count
        self.new_blocks.pop(request.id, None)
        if request in self.prefill_chunks:
            self.prefill_chunks.remove(request)
        return count


class InFlight:
    """A non-empty step whose output has not been processed. seq: its number at the fence, 0 if not counted."""

    __slots__ = ("counts", "requests", "seq", "step")

    def __init__(self, step: ScheduledStep, seq: int, requests: list[Request], counts: list[int]) -> None:
        self.step = step
        self.seq = seq
        self.requests = requests
        self.counts = counts
