"""The protocols of KV connectors: the scheduler's half and the worker's half.

Owns: `SchedulerConnector`, `WorkerConnector`, `Lookup`, `ConnectorPair`.
Knows nothing about: tensors, queues, how blocks are stored.
Invariants: the scheduler's half sees ids and hashes only. Loads run beside the compute stream, not ordered
with it (that is why frees are deferred); saves copy in compute order, before the step that carries them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvsched.request import Request
from kvsched.step import Load, Save, ScheduledStep, StepResult, Transfers


class Lookup(NamedTuple):
    """Tokens that exist outside, beyond the local prefix hit. None: not known yet, ask again next pass."""

    num_tokens: int | None
    asynchronous: bool = False


class SchedulerConnector(Protocol):
    """The scheduler's half: asked and told by the scheduler, in its thread."""

    can_load: bool
    """Whether it can fill blocks; together with several steps in flight this turns deferred frees on."""

    def lookup(self, request: Request, num_local_tokens: int) -> Lookup:
        """How many tokens beyond `num_local_tokens` (a multiple of the block size) it can load."""
        ...

    def load_admitted(self, request: Request, block_ids: Sequence[int], num_local: int, num_external: int) -> None:
        """Blocks were allocated for an admitted request, external hit or not: `block_ids` is its whole table,
        tokens [num_local, num_local + num_external) are to be loaded (num_external may be 0)."""
        ...

    def step_transfers(self, step: ScheduledStep) -> tuple[tuple[Load, ...], tuple[Save, ...]]:
        """Called once at the end of every `schedule()`, empty ones included: what to start with it."""
        ...

    def step_processed(self, step: ScheduledStep, result: StepResult) -> None:
        """The output of a step has been processed by the scheduler (tokens known, blocks written)."""
        ...

    def request_preempted(self, request: Request, block_ids: Sequence[int]) -> bool:
        """A request is about to lose its blocks. True: its stale output must be dropped (the connector hands
        the blocks over as they are)."""
        ...

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """A request ended, in whatever way (`request.status` says how). True: keep its blocks until its save is
        reported as sent; heeded after a normal finish only."""
        ...

    def load_failed(self, request: Request, block_ids: Sequence[int]) -> None:
        """Those blocks of a request could not be filled."""
        ...


class WorkerConnector(Protocol):
    """The worker's half: moves the bytes. `before_step` is called by the runner, everything else by the engine."""

    def start_loads(self, loads: Sequence[Load]) -> None:
        """Begin to fill blocks, beside the compute stream, when the step that carries them is submitted; a load with
        an `after_step` as soon as the saves of that step have been copied out."""
        ...

    def before_step(self, step: ScheduledStep) -> frozenset[int]:
        """Called in compute order right before the step is computed: snapshot the blocks of its saves (they are sent
        on in the background), then wait for its synchronous loads. Returns blocks that could not be loaded."""
        ...

    def poll(self) -> Transfers:
        """Asynchronous loads and final saves that have ended since the last call; failed blocks as invalid."""
        ...

    def wait(self, request_id: str) -> None:
        """Block until the asynchronous load, or the final save, of this request has ended; the next `poll`
        reports it."""
        ...

    def close(self) -> None:
        """Finish or cancel transfers, stop threads. May be called twice."""
        ...


class ConnectorPair(NamedTuple):
    """The two halves of a KV connector. transfer_landing: engine steps from the start of an asynchronous load or
    a final save to its report; None: with a stated landing of steps 1, else as they end."""

    scheduler: SchedulerConnector
    worker: WorkerConnector | None
    transfer_landing: int | None = None
