"""A memory in which it shows whether every token attended to the right keys and values.

The KV of position p stands for everything it depends on: it is a hash of tokens 0..p. A step that computes positions
[a, b) first reads the slots of [0, a) through the request's block table; if one of them holds anything but the hash of
the request's own tokens, what the step writes and samples is garbage, and the read is a violation. The token sampled
after position p is a function of the hash at p. So a request's output is exact if and only if no token of it ever
attended to a wrong slot, and `expected_output` knows it without any scheduler.

`MemoryModel` is the memory and its compute; `MemoryRunner` and `MemoryWorker` put it behind the engine;
`tests/memory_rig.py` drives a bare scheduler on it in random order, as the real thing might go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from kvsched.runner.base import Gate
from kvsched.step import Load, ScheduledStep, StepResult, Transfers

VOCAB = 40


class Garbage(NamedTuple):
    """What a slot holds that is no KV of its position. load: the failed load it goes back to, None if it is no load's
    fault."""

    load: int | None
    note: str


class Violation(NamedTuple):
    """A step read a slot that held something else than the KV of the request's own tokens."""

    step: int
    request: str
    position: int
    block: int
    found: object


def kv_at(before: int, token: int) -> int:
    """The KV of a position, given that of the position before it (0 for the first) and its token."""
    return hash((before, token))


def token_after(kv: int) -> int:
    """The token sampled after a position."""
    return kv % VOCAB


def expected_output(prompt: Sequence[int], num_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """What a request must generate, whatever the schedule."""
    kv = 0
    for token in prompt:
        kv = kv_at(kv, token)
    output: list[int] = []
    while len(output) < num_tokens and not (output and output[-1] in stop):
        output.append(token_after(kv))
        kv = kv_at(kv, output[-1])
    return output


class _Sequence:
    """What the device knows of a request: its tokens by position (sampled ones included), their KV, its table."""

    def __init__(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self.tokens = list(token_ids)
        self.table = list(block_ids)
        self._kv: list[int] = []

    def kv(self, position: int) -> int:
        """The right KV of a position."""
        while len(self._kv) <= position:
            self._kv.append(kv_at(self._kv[-1] if self._kv else 0, self.tokens[len(self._kv)]))
        return self._kv[position]

    def put(self, position: int, token: int) -> None:
        """A token was sampled for this position; what was there before, and behind it, is void."""
        del self.tokens[position:], self._kv[position:]
        self.tokens.append(token)


class MemoryModel:
    """Slots of a device, and the compute on them. violations: wrong reads, in order."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[list[object]] = [[None] * block_size for _ in range(num_blocks)]
        self.violations: list[Violation] = []
        self._sequences: dict[str, _Sequence] = {}

    def compute(self, step: ScheduledStep) -> tuple[tuple[int, ...], ...]:
        """Run a step's rows in order; returns the tokens sampled per row. Garbage samples a negative token."""
        for request_id in (*step.finished_request_ids, *step.preempted):
            self._sequences.pop(request_id, None)
        for data in step.new_requests:
            self._sequences[data.id] = _Sequence(data.token_ids, data.block_ids)
        for request_id, blocks in step.new_block_ids.items():
            if request_id not in {data.id for data in step.new_requests}:
                self._sequences[request_id].table += blocks
        columns = zip(step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True)
        return tuple(
            self._row(step.step, request_id, start, start + count, request_id not in step.prefill_chunks)
            for request_id, start, count in columns
        )

    def fill(self, load: Load, tokens: Sequence[int], number: int, fails_from: int | None) -> None:
        """Write what a load brings for tokens [start, start + num_tokens); garbage from its block `fails_from` on."""
        sequence = _Sequence(tokens, ())
        first = load.start // self.block_size
        for position in range(load.start, load.start + load.num_tokens):
            index = position // self.block_size - first
            bad = fails_from is not None and index >= fails_from
            content = Garbage(number, f"load {number} of {load.request_id} failed") if bad else sequence.kv(position)
            self.slots[load.block_ids[index]][position % self.block_size] = content

    def _row(self, step: int, request_id: str, start: int, end: int, samples: bool) -> tuple[int, ...]:
        sequence = self._sequences[request_id]
        wrong = self._check(step, request_id, sequence, start)
        for position in range(start, end):
            block = sequence.table[position // self.block_size]
            assert block != 0, f"step {step} writes the null block for {request_id}"
            self.slots[block][position % self.block_size] = wrong or sequence.kv(position)
        if not samples:
            return ()
        token = -1 if wrong else token_after(sequence.kv(end - 1))
        sequence.put(end, token)
        return (token,)

    def _check(self, step: int, request_id: str, sequence: _Sequence, end: int) -> Garbage | None:
        """Read slots [0, end); the garbage to write if one of them is wrong."""
        for position in range(end):
            block = sequence.table[position // self.block_size]
            found = self.slots[block][position % self.block_size]
            if found != sequence.kv(position):
                self.violations.append(Violation(step, request_id, position, block, found))
                if isinstance(found, Garbage):
                    return found
                return Garbage(None, f"step {step}, {request_id} read a wrong slot {position} of block {block}")
        return None


# ---- behind the engine


class _LazyFuture(Future[StepResult]):
    """Computed when somebody asks: as late as can be."""

    def __init__(self, compute: Callable[[], None]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> StepResult:
        if not self.done():
            self._compute()
        return super().result(timeout)


class MemoryRunner:
    """A `Runner` on a `MemoryModel` that computes each step as late as the order allows."""

    def __init__(self, memory: MemoryModel, worker: MemoryWorker | None = None) -> None:
        self.memory = memory
        self.worker = worker
        self._queue: deque[tuple[ScheduledStep, Gate | None, _LazyFuture]] = deque()

    def submit(self, step: ScheduledStep, gate: Gate | None = None) -> Future[StepResult]:
        future = _LazyFuture(lambda: self._compute_through(future))
        self._queue.append((step, gate, future))
        return future

    def now(self) -> float:
        return 0.0

    def advance(self, to: float) -> None:
        """Time does not matter here."""

    def close(self) -> None:
        self._queue.clear()

    def _compute_through(self, wanted: _LazyFuture) -> None:
        while not wanted.done():
            step, gate, future = self._queue.popleft()
            assert gate is None or gate.is_open, f"step {step.step} is computed before {gate.name}"
            invalid = self.worker.before_step(step) if self.worker is not None else frozenset()
            tokens = self.memory.compute(step)
            future.set_result(StepResult(step.step, tokens, Transfers(invalid_block_ids=invalid)))


class MemoryWorker:
    """A `WorkerConnector` that fills a `MemoryModel`: each load at once when it is started, or as late as can be.

    tokens_of: a request's known tokens. fails: (request, number of its load from 1) -> the block of the load, from 0,
    from which on it fails.
    """

    def __init__(
        self,
        memory: MemoryModel,
        tokens_of: Callable[[str], Sequence[int]],
        *,
        eager: bool = True,
        fails: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self.memory = memory
        self.eager = eager
        self.calls: list[tuple[str, Any]] = []
        self._tokens_of = tokens_of
        self._fails = dict(fails or {})
        self._num_loads: dict[str, int] = {}
        self._unfilled: list[tuple[Load, int, int | None]] = []
        self._failed: dict[str, frozenset[int]] = {}
        self._ended: list[str] = []
        self._in_air: list[str] = []

    def start_loads(self, loads: Sequence[Load]) -> None:
        for load in loads:
            number = self._num_loads[load.request_id] = self._num_loads.get(load.request_id, 0) + 1
            fails_from = self._fails.get((load.request_id, number))
            self.calls.append(("start", load.request_id))
            self._unfilled.append((load, number, fails_from))
            if fails_from is not None:
                self._failed[load.request_id] = frozenset(load.block_ids[fails_from:])
            if load.asynchronous:
                self._in_air.append(load.request_id)
        if self.eager:
            self._fill(lambda load: True)

    def before_step(self, step: ScheduledStep) -> frozenset[int]:
        mine = {load.request_id for load in step.loads if not load.asynchronous}
        self._fill(lambda load: load.request_id in mine)
        return frozenset().union(*(self._failed.pop(request_id, frozenset()) for request_id in mine))

    def poll(self) -> Transfers:
        ended, self._ended = tuple(self._ended), []
        invalid = frozenset().union(*(self._failed.pop(request_id, frozenset()) for request_id in ended))
        return Transfers(ended, (), invalid)

    def wait(self, request_id: str) -> None:
        self.calls.append(("wait", request_id))
        self.end(request_id)

    def end(self, request_id: str) -> None:
        """The load of this request ends now."""
        self._fill(lambda load: load.request_id == request_id)
        self._in_air.remove(request_id)
        self._ended.append(request_id)

    def close(self) -> None:
        self.calls.append(("close", None))

    def _fill(self, wanted: Callable[[Load], bool]) -> None:
        for entry in list(self._unfilled):
            load, number, fails_from = entry
            if wanted(load):
                self._unfilled.remove(entry)
                self.memory.fill(load, self._tokens_of(load.request_id), number, fails_from)
