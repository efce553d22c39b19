"""What can be seen at one moment of a run: requests, queues, pool, steps in flight.

Owns: `State`, `RequestState` and the records they hold.
Knows nothing about: how events change it (`fold`), files, the live scheduler.
Invariants: a copy is independent of its original and costs little (pages, request records, tables and outputs are
shared until one side changes them). Queues are kept as tickets, not as lists: a request's `ticket` orders it within
its queue, a free block's place orders it within the free queue; smaller goes first. To go to the front is to take
the next lower number, so nothing ever moves.

    place[block]  >= 0   free: its ticket in the free queue      < 0   held: -place references

To those who look, everything here is read-only; only `fold.apply` writes.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from kvsched.config import NULL_BLOCK
from kvsched.request import FINISHED_FROM, RequestStatus
from kvsched.trace.events import StepScheduled
from kvsched.trace.names import Names
from kvsched.trace.paged import Paged

_FIRST_TICKET = 1 << 40


class Queue(IntEnum):
    """Where a request stands in line. LOADING holds those that wait while they hold blocks."""

    NONE = 0
    WAITING = 1
    LOADING = 2
    RUNNING = 3


Ticket = int | tuple[int, float, str]
"""Order within a queue: a number, or (priority, arrival_time, request id)."""


class RequestState:
    """One request at that moment; counters are named as on `kvsched.request.Request`.

    number: its place in order of arrival. load_landed: its load was reported, it can be promoted.
    kept: finished, its blocks stay until its save has been sent. finish_time: None while it lives.
    """

    __slots__ = (
        "arrival_time",
        "drop_stale_output",
        "finish_time",
        "id",
        "is_prefill_chunk",
        "kept",
        "last_sched_seq",
        "load_landed",
        "max_tokens",
        "num_blocks",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_output_tokens",
        "num_preemptions",
        "num_stale_output_tokens",
        "number",
        "output_log",
        "priority",
        "prompt",
        "queue",
        "status",
        "table_log",
        "ticket",
    )

    def __init__(
        self, number: int, name: str, prompt_token_ids: tuple[int, ...], max_tokens: int, priority: int, arrival: float
    ) -> None:
        self.number = number
        self.id = name
        self.prompt = array("q", prompt_token_ids)
        self.max_tokens = max_tokens
        self.priority = priority
        self.arrival_time = arrival
        self.status = RequestStatus.WAITING
        self.queue = Queue.NONE
        self.ticket: Ticket = 0
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0
        self.drop_stale_output = False
        self.last_sched_seq = 0
        self.is_prefill_chunk = False
        self.num_preemptions = 0
        self.load_landed = False
        self.kept = False
        self.finish_time: float | None = None
        # Shared with other states of the same run, which may have written beyond our end.
        self.table_log = array("q")
        self.num_blocks = 0
        self.output_log = array("q")
        self.num_output_tokens = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        """Its prompt's tokens (a copy)."""
        return self.prompt.tolist()

    @property
    def block_ids(self) -> list[int]:
        """Its block table (a copy)."""
        return self.table_log[: self.num_blocks].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens it was given so far (a copy)."""
        return self.output_log[: self.num_output_tokens].tolist()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt) + self.num_output_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.status >= FINISHED_FROM

    @property
    def is_settled(self) -> bool:
        """Whether it has ended and no block, save or step of it is left."""
        return self.is_finished and not (self.num_blocks or self.kept or self.num_in_flight_tokens)

    def clone(self) -> RequestState:
        """A copy that can be written; the logs stay shared."""
        twin = RequestState.__new__(RequestState)
        for name in RequestState.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def __repr__(self) -> str:
        tokens = f"{self.num_computed_tokens} of {self.num_tokens} tokens computed"
        return f"RequestState({self.id!r}, {self.status.name}, {tokens}, {self.num_blocks} blocks)"


class Flight(NamedTuple):
    """A non-empty step whose output has not been processed.

    seq: its number at the fence, 0 if the fence does not count it. numbers, tables: per scheduled request, its number
    in order of arrival and the log that its block table was in.
    """

    scheduled: StepScheduled
    seq: int
    numbers: tuple[int, ...]
    tables: tuple[array[int], ...]

    @property
    def step(self) -> int:
        """Number of the `schedule()` call."""
        return self.scheduled.step

    def writes(self, block_size: int) -> Iterator[tuple[str, array[int]]]:
        """Per scheduled request: the blocks whose slots this step fills.

            table    [ 7 ][ 3 ][ 9 ][ 4 ]       block_size 4, start 6, 7 tokens: slots 6..12
            filled          ====  ==== =         blocks 3, 9 and 4
        """
        e = self.scheduled
        for request, n, start, table in zip(e.request_ids, e.num_tokens, e.starts, self.tables, strict=True):
            yield request, table[start // block_size : -(-(start + n) // block_size)]


class Deferred(NamedTuple):
    """Released blocks (order of the table) that wait until step `fence` has been processed. step: released in."""

    fence: int
    request: str
    block_ids: tuple[int, ...]
    step: int


class Transfer(NamedTuple):
    """A load or a save under way. step: the `schedule()` call that it goes with; after_step: a load starts when the
    saves up to that step have been copied out."""

    request: str
    block_ids: tuple[int, ...]
    step: int
    asynchronous: bool
    after_step: int = 0


class BlockView(NamedTuple):
    """One block. position: how many free blocks are handed out before it, None if it is not free; owners: requests
    with it in their table; kept_for: those of them that are finished and wait for a save; fences: the fences of
    the deferred frees it is in; writing: steps in flight that fill slots of it."""

    block: int
    refs: int
    owners: tuple[str, ...]
    cached_as: bytes | None
    position: int | None
    fences: tuple[int, ...]
    kept_for: tuple[str, ...]
    writing: tuple[int, ...]
    loading_for: tuple[str, ...]
    saving_for: tuple[str, ...]


_COPIED = (
    "config", "block_size", "num_blocks", "async_scheduling", "fence_on", "by_priority", "index", "step", "time",
    "sched_step_seq", "processed_step_seq", "num_free", "first_free_ticket", "last_free_ticket",
    "first_ticket", "last_ticket", "num_waiting", "num_loading", "num_running", "num_finished",
    "num_preemptions", "num_slot_calls", "num_failed_calls", "num_guard_stops", "num_output_tokens",
    "num_empty_steps", "first_unsettled", "set_back", "names",
)  # fmt: skip


class State:
    """See the module's text. An empty State has no pool yet; `run_started` gives it one.

    index: events applied. step: `schedule()` calls begun. num_output_tokens: tokens delivered, of all requests.
    num_slot_calls, num_failed_calls: calls for slots made by finished passes, and failed ones of all.
    """

    def __init__(self) -> None:
        self.config: Mapping[str, Any] = {}
        self.block_size = 1
        self.num_blocks = 0
        self.async_scheduling = False
        self.by_priority = False
        self.fence_on = False
        self.index = self.step = 0
        self.time = 0.0
        self.sched_step_seq = self.processed_step_seq = 0
        self.num_free = 0
        self.first_free_ticket = self.last_free_ticket = _FIRST_TICKET
        self.first_ticket = self.last_ticket = _FIRST_TICKET
        self.num_waiting = self.num_loading = self.num_running = self.num_finished = 0
        self.num_preemptions = self.num_slot_calls = self.num_failed_calls = self.num_guard_stops = 0
        self.num_output_tokens = self.num_empty_steps = 0
        self.first_unsettled = 0
        # Numbers of requests that go to the front of the waiting ones when the pass ends.
        self.set_back: tuple[int, ...] = ()
        self.names = Names()
        self.places: Paged[int] = Paged(array("q"))
        self.block_hashes: Paged[bytes | None] = Paged([])
        self.requests: Paged[RequestState] = Paged([])
        self.flights: list[Flight] = []
        self.deferred: list[Deferred] = []
        self.loads: dict[str, Transfer] = {}
        self.saves: list[Transfer] = []
        self.mine: dict[int, RequestState] = {}
        self._rows: tuple[tuple[int, ...], list[RequestState]] = ((), [])
        self.free_order: deque[tuple[int, int]] | None = None

    def copy(self) -> State:
        """An independent copy; costs about one pointer per 128 blocks and requests."""
        twin = State.__new__(State)
        for name in _COPIED:
            setattr(twin, name, getattr(self, name))
        twin.places = self.places.copy()
        twin.block_hashes = self.block_hashes.copy()
        twin.requests = self.requests.copy()
        twin.flights = self.flights.copy()
        twin.deferred = self.deferred.copy()
        twin.loads = self.loads.copy()
        twin.saves = self.saves.copy()
        self.mine = {}
        twin.mine = {}
        self._rows = twin._rows = ((), [])
        twin.free_order = None
        return twin

    # ---- requests and queues

    def find(self, request: str) -> int | None:
        """Number in order of arrival of the (newest) request of that id."""
        return self.names.find(request, len(self.requests))

    def request(self, request: str) -> RequestState:
        """The (newest) request of that id. Raises KeyError if there is none at this moment."""
        number = self.find(request)
        if number is None:
            raise KeyError(f"no request {request!r} has arrived before event {self.index}")
        return self.requests[number]

    def unsettled(self) -> Iterator[RequestState]:
        """Requests that live, hold blocks or have a step in flight (and some that are through), by arrival."""
        return self.requests.iterate(self.first_unsettled)

    def queue(self, queue: Queue) -> list[RequestState]:
        """The requests in a queue, in the order in which they will be taken (running: order of admission)."""
        return sorted((r for r in self.unsettled() if r.queue == queue), key=_ticket)

    @property
    def running(self) -> list[str]:
        """Ids in order of admission."""
        return [r.id for r in self.queue(Queue.RUNNING)]

    @property
    def waiting(self) -> list[str]:
        """Ids in the order in which they will be looked at."""
        return [r.id for r in self.queue(Queue.WAITING)]

    @property
    def loading(self) -> list[str]:
        """Ids of those that wait while they hold blocks, in the order in which they will be looked at."""
        return [r.id for r in self.queue(Queue.LOADING)]

    @property
    def finished(self) -> list[str]:
        """Ids of finished requests, by arrival."""
        return [r.id for r in self.requests if r.is_finished]

    def steps_in_flight(self, request: str) -> list[int]:
        """Steps in flight that scheduled the request."""
        return [flight.step for flight in self.flights if request in flight.scheduled.request_ids]

    # ---- the pool

    def refs(self, block: int) -> int:
        """References held on a block."""
        return max(-self.places[block], 0)

    def hash_of(self, block: int) -> bytes | None:
        """The content hash under which the prefix cache knows the block."""
        return self.block_hashes[block]

    def cached_blocks(self) -> dict[int, bytes]:
        """Hash by block, of all blocks in the prefix cache."""
        return {block: content_hash for block, content_hash in enumerate(self.block_hashes) if content_hash}

    def free_queue(self) -> list[int]:
        """Free blocks in the order in which they will be handed out."""
        return [block for _, block in sorted((place, block) for block, place in enumerate(self.places) if place >= 0)]

    def next_free(self, count: int) -> list[int]:
        """The blocks that would be handed out next, fewer than `count` if there are fewer.

        The first call sorts the free queue; from then on this state keeps it in order, and a call costs `count`.
        """
        places = self.places
        if self.free_order is None:
            self.free_order = deque(sorted((place, block) for block, place in enumerate(places) if place >= 0))
        order = self.free_order
        found: list[tuple[int, int]] = []
        while order and len(found) < count:
            ticket, block = order.popleft()
            if places[block] == ticket:  # else it has left the queue since
                found.append((ticket, block))
        order.extendleft(reversed(found))
        return [block for _, block in found]

    def owners(self) -> dict[int, list[str]]:
        """By block: the requests with it in their table."""
        owners: dict[int, list[str]] = {}
        for r in self.unsettled():
            for block in r.block_ids:
                owners.setdefault(block, []).append(r.id)
        return owners

    def pending(self) -> list[Flight]:
        """Steps that may still write: in flight, and not yet counted by the fence as processed."""
        return [flight for flight in self.flights if not 0 < flight.seq <= self.processed_step_seq]

    def writing(self) -> dict[int, list[int]]:
        """By block: steps that may still fill slots of it."""
        steps: dict[int, list[int]] = {}
        for flight in self.pending():
            for _, blocks in flight.writes(self.block_size):
                for block in blocks:
                    steps.setdefault(block, []).append(flight.step)
        return steps

    def fences(self) -> dict[int, list[int]]:
        """By block: fences of the deferred frees it is in."""
        fences: dict[int, list[int]] = {}
        for entry in self.deferred:
            for block in entry.block_ids:
                fences.setdefault(block, []).append(entry.fence)
        return fences

    def block(self, block: int) -> BlockView:
        """Everything about one block. Raises IndexError for a block that is not in the pool."""
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} is not in the pool of {self.num_blocks} blocks (0..{self.num_blocks - 1})")
        place = self.places[block]
        owners = [r for r in self.unsettled() if block in r.block_ids]
        return BlockView(
            block,
            0 if block == NULL_BLOCK else self.refs(block),
            tuple(r.id for r in owners),
            self.hash_of(block),
            sum(1 for other in self.places if 0 <= other < place) if place >= 0 else None,
            tuple(entry.fence for entry in self.deferred if block in entry.block_ids),
            tuple(r.id for r in owners if r.kept),
            tuple(self.writing().get(block, ())),
            tuple(load.request for load in self.loads.values() if block in load.block_ids),
            tuple(save.request for save in self.saves if block in save.block_ids),
        )

    def __repr__(self) -> str:
        return (
            f"State(event {self.index}, step {self.step}: {self.num_running} running, {self.num_waiting} waiting,"
            f" {self.num_loading} loading, {self.num_free} free blocks, {len(self.flights)} steps in flight)"
        )

    # ---- written by fold alone

    def own(self, number: int) -> RequestState:
        """The request's record, made private to this state."""
        r = self.mine.get(number)
        if r is None:
            r = self.requests[number].clone()
            self.requests[number] = r
            self.mine[number] = r
        return r

    def own_all(self, numbers: tuple[int, ...]) -> list[RequestState]:
        """`own` of each, to be read only as a list; steps that follow one another mostly have the same requests."""
        if self._rows[0] is not numbers:
            self._rows = numbers, [self.own(number) for number in numbers]
        return self._rows[1]


def _ticket(r: RequestState) -> Any:
    return r.ticket


def grown(log: array[int], size: int, more: tuple[int, ...]) -> array[int]:
    """A log that starts with log[:size] and `more`: `log` itself, unless another state has gone another way there."""
    if len(log) == size:
        log.extend(more)
        return log
    fresh = array("q", more)
    if log[size : size + len(more)] == fresh:
        return log
    return log[:size] + fresh
