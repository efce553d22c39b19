"""A runner without a model: tokens from a hash, time from a cost model.

Owns: `CostModel`, `SyntheticRunner` and its virtual clock.
Knows nothing about: torch, real time, threads.
Invariants: the token at a position depends on the request's id, its seed and that position alone; so does nothing
on the order of steps, and two runs are equal to the byte. Steps execute one after the other on one virtual device:

        submit at s, device free at f, gate opened at g:   start = max(s, f, g),   end = start + cost

A step is computed as soon as nothing gates it or a step before it; its future then holds the result, whose
`finished_at` may lie ahead of the clock. The host moves the clock with `advance` when it takes the result.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import NamedTuple

from kvsched.connector.base import WorkerConnector
from kvsched.runner.base import Gate
from kvsched.step import NO_TRANSFERS, ScheduledStep, StepResult, Transfers

TokenFn = Callable[[str, int], int]
"""(request id, position) -> token."""

_MASK = (1 << 64) - 1


class CostModel(NamedTuple):
    """Seconds that a step takes: fixed_s + per_token_s x tokens + per_kv_token_s x KV tokens read.

    A request that computes positions [a, b) reads the KV of b tokens. A step without tokens costs nothing.
    """

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    per_kv_token_s: float = 0.0

    def seconds(self, step: ScheduledStep) -> float:
        """Duration of one step."""
        if step.is_empty:
            return 0.0
        num_tokens = step.total_tokens
        num_kv_tokens = num_tokens + sum(step.num_computed_tokens)
        return self.fixed_s + self.per_token_s * num_tokens + self.per_kv_token_s * num_kv_tokens


class _Queued(NamedTuple):
    step: ScheduledStep
    gate: Gate | None
    submitted_at: float
    future: Future[StepResult]


class SyntheticRunner:
    """A `Runner` of tokens that mean nothing, in virtual time.

    cost: how long steps take. vocab_size: tokens lie in [0, vocab_size). token_fn: tokens of your own choice
    instead of the hash (a script, say). connector: its `before_step` is called in compute order.
    """

    def __init__(
        self,
        cost: CostModel | None = None,
        vocab_size: int = 32_000,
        *,
        token_fn: TokenFn | None = None,
        connector: WorkerConnector | None = None,
    ) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 1")
        self.cost = cost if cost is not None else CostModel()
        if min(self.cost) < 0:
            raise ValueError(f"{self.cost} has a negative cost; time only runs forward")
        self.vocab_size = vocab_size
        self.connector = connector
        self.token_fn = token_fn
        self._keys: dict[str, int] = {}
        self._now = 0.0
        self._device_free = 0.0
        self._queue: deque[_Queued] = deque()
        self._draining = False
        self._closed = False

    def fresh(self, **_: int) -> SyntheticRunner:
        """Another runner of the same cost and tokens, without a connector; the pool is nothing to it."""
        return SyntheticRunner(self.cost, self.vocab_size, token_fn=self.token_fn)

    def submit(self, step: ScheduledStep, gate: Gate | None = None) -> Future[StepResult]:
        """See `Runner.submit`. Without a gate in the way the future is done on return."""
        if self._closed:
            raise RuntimeError("the runner is closed; make a new one")
        future: Future[StepResult] = Future()
        future.set_running_or_notify_cancel()
        self._queue.append(_Queued(step, gate, self._now, future))
        if gate is not None:
            gate.on_open(self._drain)
        self._drain()
        return future

    def now(self) -> float:
        """Virtual seconds since the runner was made."""
        return self._now

    def advance(self, to: float) -> None:
        """Move the clock forward to `to`; a time that has passed changes nothing."""
        self._now = max(self._now, to)

    def close(self) -> None:
        """Cancel what is still gated, and open the gates."""
        self._closed = True
        queued, self._queue = self._queue, deque()
        for item in queued:
            item.future.set_exception(CancelledError(f"the runner was closed before step {item.step.step} ran"))
            if item.gate is not None:
                item.gate.open()

    def _drain(self) -> None:
        """Compute queued steps up to the first one that is gated. A gate opened meanwhile is seen by the loop."""
        if self._draining:
            return
        self._draining = True
        try:
            while self._queue and (self._queue[0].gate is None or self._queue[0].gate.is_open):
                item = self._queue.popleft()
                try:
                    result = self._compute(item)
                except Exception as error:  # noqa: BLE001 - handed on to whoever takes the result
                    item.future.set_exception(error)
                else:
                    item.future.set_result(result)
        finally:
            self._draining = False

    def _compute(self, item: _Queued) -> StepResult:
        step = item.step
        ready = item.submitted_at if item.gate is None else max(item.submitted_at, self._now)
        started = max(ready, self._device_free)
        transfers = NO_TRANSFERS
        if self.connector is not None:
            invalid = self.connector.before_step(step)
            transfers = Transfers(invalid_block_ids=invalid) if invalid else NO_TRANSFERS
        tokens = self._tokens(step)
        finished = started + self.cost.seconds(step)
        self._device_free = finished
        return StepResult(step.step, tokens, transfers, started, finished)

    def _tokens(self, step: ScheduledStep) -> tuple[tuple[int, ...], ...]:
        for request_id in (*step.finished_request_ids, *step.preempted):
            self._keys.pop(request_id, None)
        for data in step.new_requests:
            self._keys[data.id] = _request_key(data.id, data.sampling.seed or 0)
        columns = zip(step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True)
        return tuple(
            () if request_id in step.prefill_chunks else (self._token(request_id, start + count),)
            for request_id, start, count in columns
        )

    def _token(self, request_id: str, position: int) -> int:
        if self.token_fn is not None:
            return self.token_fn(request_id, position)
        if request_id not in self._keys:
            raise ValueError(f"{request_id} is scheduled, but no step handed it over in new_requests")
        return _mix(self._keys[request_id] + position) % self.vocab_size


def _request_key(request_id: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mix(value: int) -> int:
    """A 64-bit hash (the finalizer of splitmix64): neighbouring values come out unrelated."""
    value = (value * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
