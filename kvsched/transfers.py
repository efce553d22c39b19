"""Which loads and saves are in the air, and when each is reported to the scheduler.

Owns: the list of asynchronous loads and final saves that were started and not reported yet.
Knows nothing about: how bytes move; scheduling.
Invariants: every transfer is reported once, in the order in which transfers were started among those that are
due. With a stated landing (deterministic runs) a transfer is reported exactly that many engine steps after it
was started, and the engine waits for it then; live, it is reported as it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvsched.connector.base import WorkerConnector
from kvsched.faults import FailLoad, Fault, FaultWatch, HoldTransfer
from kvsched.step import Load, ScheduledStep, Transfers


@dataclass(slots=True)
class _InAir:
    """in_compute_order: a save, or a load behind a save: it cannot end while the steps before it are held."""

    request_id: str
    is_load: bool
    blocks: tuple[int, ...]
    due: int
    in_compute_order: bool
    ended: bool = False
    invalid: frozenset[int] = frozenset()


class TransferDesk:
    """Started transfers of one engine. landing: engine steps from start to report; None: as they end.

    note_fault: called with each fault that comes to pass.
    """

    def __init__(
        self, worker: WorkerConnector, landing: int | None, watch: FaultWatch, note_fault: Callable[[Fault], None]
    ) -> None:
        self._worker = worker
        self._landing = landing
        self._watch = watch
        self._note_fault = note_fault
        self._in_air: list[_InAir] = []
        self._num_loads: dict[str, int] = {}

    @property
    def pending(self) -> bool:
        """Whether anything has been started and not reported."""
        return bool(self._in_air)

    def can_move(self, compute_held: bool) -> bool:
        """Whether anything in the air can end by itself, given that a step waits at a gate or not."""
        return any(not (entry.in_compute_order and compute_held) for entry in self._in_air)

    def start(self, step: ScheduledStep, tick: int) -> frozenset[int]:
        """Start a step's loads and note its final saves; call it when the step is submitted.

        Returns the blocks of synchronous loads that a fault makes fail: to be reported with the step's result.
        """
        failed: set[int] = set()
        for load in step.loads:
            bad = self._planned_failures(load)
            if load.asynchronous:
                due = self._due(load.request_id, "load", tick)
                entry = _InAir(load.request_id, True, load.block_ids, due, load.after_step > 0, invalid=bad)
                self._in_air.append(entry)
            else:
                failed |= bad
        for save in step.saves:
            if save.final:
                due = self._due(save.request_id, "save", tick)
                self._in_air.append(_InAir(save.request_id, False, save.block_ids, due, True))
        if step.loads:
            self._worker.start_loads(step.loads)
        return frozenset(failed)

    def collect(self, tick: int, *, wait: bool = False, compute_held: bool = False) -> Transfers:
        """What is to be reported now.

        wait: nothing else can go on, so wait for the first transfer that may be reported (live runs).
        compute_held: a step waits at a gate; what happens in compute order cannot be waited for.
        """
        due = [entry for entry in self._in_air if entry.due <= tick]
        self._poll()
        late = [entry for entry in due if not entry.ended and not (entry.in_compute_order and compute_held)]
        if self._landing is None:
            wait = wait and not any(entry.ended for entry in due)
            late = late[:1] if wait else []
        for entry in late:
            self._worker.wait(entry.request_id)
        self._poll()
        report = [entry for entry in due if entry.ended]
        self._in_air = [entry for entry in self._in_air if entry not in report]
        invalid = frozenset().union(*(entry.invalid for entry in report))
        loads = tuple(entry.request_id for entry in report if entry.is_load)
        saves = tuple(entry.request_id for entry in report if not entry.is_load)
        return Transfers(loads, saves, invalid)

    def close(self) -> None:
        """Stop the worker."""
        self._worker.close()

    def _poll(self) -> None:
        ended = self._worker.poll()
        for request_ids, is_load in ((ended.finished_recving, True), (ended.finished_sending, False)):
            for request_id in request_ids:
                entry = self._find(request_id, is_load)
                entry.ended = True
                entry.invalid |= ended.invalid_block_ids & frozenset(entry.blocks)

    def _find(self, request_id: str, is_load: bool) -> _InAir:
        for entry in self._in_air:
            if entry.request_id == request_id and entry.is_load == is_load and not entry.ended:
                return entry
        raise AssertionError(f"the connector reports a transfer of {request_id!r} that was not started")

    def _due(self, request_id: str, transfer: str, tick: int) -> int:
        due = tick + (self._landing or 0)
        for fault in self._watch.of(HoldTransfer):
            if fault.request == request_id and fault.transfer == transfer:
                self._note_fault(fault)
                due += fault.steps
        return due

    def _planned_failures(self, load: Load) -> frozenset[int]:
        number = self._num_loads[load.request_id] = self._num_loads.get(load.request_id, 0) + 1
        bad: frozenset[int] = frozenset()
        for fault in self._watch.of(FailLoad):
            if fault.request == load.request_id and fault.occurrence == number and fault.block < len(load.block_ids):
                self._note_fault(fault)
                bad |= frozenset(load.block_ids[fault.block :])
        return bad
