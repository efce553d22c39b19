"""Queues of waiting requests: first come first served, or by priority.

Owns: the order of waiting requests. Knows nothing about: blocks, budgets.
Invariants: a request stands in at most one queue, once. Adding, taking the head and removing a request cost
the same (PRIORITY: logarithmically more) however many wait.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from kvsched.config import Policy
from kvsched.request import Request


class WaitingQueue(Protocol):
    """What the scheduler asks of a queue."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they will be taken."""
        ...

    def __contains__(self, request: object) -> bool:
        """Whether this very request stands here."""
        ...

    def head(self) -> Request:
        """The next request; it stays."""
        ...

    def add(self, request: Request) -> None:
        """A request arrives."""
        ...

    def put_back(self, request: Request) -> None:
        """To the front (FCFS), or back into the order (PRIORITY)."""
        ...

    def remove(self, request: Request) -> None:
        """Take it out, wherever it stands."""
        ...


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._requests.get(request.id) is request

    def head(self) -> Request:
        return next(iter(self._requests.values()))

    def add(self, request: Request) -> None:
        self._requests[request.id] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.id] = request
        self._requests.move_to_end(request.id, last=False)

    def remove(self, request: Request) -> None:
        del self._requests[request.id]


_Entry = tuple[int, float, str, int, Request]


class PriorityQueue:
    """Ordered by (priority, arrival_time, request id), smaller first: a heap from which removed entries are
    dropped when they come up. A serial number keeps a dead entry and its successor from being compared further."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._live: dict[str, _Entry] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._live.values()))

    def __contains__(self, request: object) -> bool:
        entry = self._live.get(request.id) if isinstance(request, Request) else None
        return entry is not None and entry[-1] is request

    def head(self) -> Request:
        heap, live = self._heap, self._live
        while live.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][-1]

    def add(self, request: Request) -> None:
        self._serial += 1
        entry = (request.priority, request.arrival_time, request.id, self._serial, request)
        self._live[request.id] = entry
        heapq.heappush(self._heap, entry)

    put_back = add

    def remove(self, request: Request) -> None:
        entry = self._live.pop(request.id)
        if self._heap[0] is entry:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)


def make_queue(policy: Policy) -> WaitingQueue:
    """An empty queue of the policy's kind."""
    return FcfsQueue() if policy == "fcfs" else PriorityQueue()
