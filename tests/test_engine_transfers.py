"""The desk of transfers by itself: when each load and final save is reported, and whether it is waited for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvsched.faults import FailLoad, FaultWatch, HoldTransfer
from kvsched.step import NO_TRANSFERS, Load, Save, ScheduledStep, Transfers
from kvsched.transfers import TransferDesk


class FakeWorker:
    """Transfers end when the test, or somebody who waits, says so. A load in `fails` ends with those blocks invalid."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.waited: list[str] = []
        self.fails: dict[str, frozenset[int]] = {}
        self.saves: set[str] = set()
        self._ended: list[str] = []
        self.closed = 0

    def start_loads(self, loads: Sequence[Load]) -> None:
        self.started += [load.request_id for load in loads]

    def before_step(self, step: ScheduledStep) -> frozenset[int]:
        raise AssertionError("the runner calls this, not the desk")

    def end(self, *request_ids: str) -> None:
        self._ended += request_ids

    def poll(self) -> Transfers:
        ended, self._ended = self._ended, []
        loads = tuple(i for i in ended if i not in self.saves)
        invalid = frozenset().union(*(self.fails.get(i, frozenset()) for i in loads))
        return Transfers(loads, tuple(i for i in ended if i in self.saves), invalid)

    def wait(self, request_id: str) -> None:
        self.waited.append(request_id)
        self.end(request_id)

    def close(self) -> None:
        self.closed += 1


def load(request_id: str, *blocks: int, asynchronous: bool = True, after_step: int = 0) -> Load:
    return Load(request_id, blocks, (b"",) * len(blocks), 0, 4 * len(blocks), asynchronous, after_step)


def step_with(*loads: Load, saves: tuple[Save, ...] = ()) -> ScheduledStep:
    return ScheduledStep(1, 0, (), (), (), frozenset(), {}, (), (), (), 0, loads, saves)


def desk_of(landing: int | None, *faults: object) -> tuple[TransferDesk, FakeWorker, list]:
    worker, told = FakeWorker(), []
    return TransferDesk(worker, landing, FaultWatch(faults), told.append), worker, told


def final_save(worker: FakeWorker, request_id: str) -> Save:
    worker.saves.add(request_id)
    return Save(request_id, (9,), (b"",), True)


def test_with_a_stated_landing_a_transfer_is_waited_for_and_reported_then():
    desk, worker, _ = desk_of(2)
    assert not desk.pending
    desk.start(step_with(load("a", 1, 2)), tick=5)
    assert worker.started == ["a"]
    worker.end("a")
    assert desk.collect(5) == desk.collect(6) == NO_TRANSFERS, "it has ended, but is not due"
    assert desk.pending
    assert desk.collect(7) == Transfers(("a",))
    assert not desk.pending

    desk.start(step_with(load("b", 3)), tick=8)
    assert desk.collect(9) == NO_TRANSFERS
    assert worker.waited == []
    assert desk.collect(10) == Transfers(("b",))
    assert worker.waited == ["b"]


def test_reports_come_in_the_order_of_the_starts():
    desk, worker, _ = desk_of(1)
    desk.start(step_with(load("a", 1), load("b", 2), saves=(final_save(worker, "s"),)), tick=1)
    desk.start(step_with(load("c", 3)), tick=1)
    worker.end("c", "b")
    assert desk.collect(2) == Transfers(("a", "b", "c"), ("s",))


def test_live_what_has_ended_is_reported_and_nothing_is_waited_for():
    desk, worker, _ = desk_of(None)
    desk.start(step_with(load("a", 1), load("b", 2)), tick=1)
    assert desk.collect(2) == NO_TRANSFERS
    worker.end("b")
    assert desk.collect(3) == Transfers(("b",))
    assert worker.waited == []


def test_live_the_first_is_waited_for_when_nothing_else_goes_on_and_nothing_has_ended():
    desk, worker, _ = desk_of(None)
    desk.start(step_with(load("a", 1), load("b", 2)), tick=1)
    worker.end("b")
    assert desk.collect(2, wait=True) == Transfers(("b",)), "one has ended: go on with that"
    assert worker.waited == []
    assert desk.collect(3, wait=True) == Transfers(("a",))
    assert worker.waited == ["a"]


@pytest.mark.parametrize("landing", [None, 0])
def test_what_happens_in_compute_order_is_not_waited_for_while_compute_is_held(landing):
    desk, worker, _ = desk_of(landing)
    save = final_save(worker, "s")
    desk.start(step_with(load("behind", 1, after_step=3), saves=(save,)), tick=1)
    assert not desk.can_move(compute_held=True)
    assert desk.can_move(compute_held=False)
    assert desk.collect(2, wait=True, compute_held=True) == NO_TRANSFERS
    assert worker.waited == []
    desk.start(step_with(load("free", 2)), tick=2)
    assert desk.can_move(compute_held=True)
    assert desk.collect(3, wait=True, compute_held=True) == Transfers(("free",))
    assert worker.waited == ["free"]
    assert desk.collect(4, wait=True).finished_recving == ("behind",)


def test_saves_that_are_not_final_are_nobodys_business():
    desk, _, _ = desk_of(1)
    desk.start(step_with(saves=(Save("a", (1,), (b"",), False),)), tick=1)
    assert not desk.pending


@pytest.mark.parametrize("transfer", ["load", "save"])
def test_a_held_transfer_is_due_later(transfer):
    fault = HoldTransfer("a", transfer, 3)
    desk, worker, told = desk_of(1, fault)
    if transfer == "load":
        desk.start(step_with(load("a", 1)), tick=1)
    else:
        desk.start(step_with(saves=(final_save(worker, "a"),)), tick=1)
    assert told == [fault]
    assert all(desk.collect(tick) == NO_TRANSFERS for tick in (2, 3, 4))
    report = desk.collect(5)
    assert (report.finished_recving, report.finished_sending) == ((("a",), ()) if transfer == "load" else ((), ("a",)))


def test_a_hold_concerns_the_named_kind_of_the_named_request_only():
    desk, _, told = desk_of(1, HoldTransfer("a", "save", 3), HoldTransfer("b", "load", 3))
    desk.start(step_with(load("a", 1)), tick=1)
    assert desk.collect(2) == Transfers(("a",))
    assert told == []


def test_failed_blocks_are_reported_with_the_load_they_belong_to():
    desk, worker, _ = desk_of(None)
    worker.fails["a"] = frozenset({2})
    desk.start(step_with(load("a", 1, 2)), tick=1)
    worker.end("a")
    assert desk.collect(2) == Transfers(("a",), (), frozenset({2}))


def test_planned_failures_are_added_from_the_stated_block_on():
    fault = FailLoad("a", occurrence=2, block=1)
    desk, worker, told = desk_of(0, fault)
    worker.fails["a"] = frozenset({1})
    assert desk.start(step_with(load("a", 1, 2, 3)), tick=1) == frozenset()
    assert desk.collect(1) == Transfers(("a",), (), frozenset({1}))
    assert told == []
    desk.start(step_with(load("a", 1, 2, 3)), tick=2)
    assert desk.collect(2) == Transfers(("a",), (), frozenset({1, 2, 3}))
    assert told == [fault]


def test_planned_failures_of_synchronous_loads_go_with_their_step():
    desk, worker, _ = desk_of(0, FailLoad("a", block=1))
    assert desk.start(step_with(load("a", 1, 2, 3, asynchronous=False)), tick=1) == frozenset({2, 3})
    assert worker.started == ["a"]
    assert not desk.pending


def test_a_report_of_what_was_not_started_is_noticed():
    desk, worker, _ = desk_of(0)
    worker.end("ghost")
    with pytest.raises(AssertionError, match="a transfer of 'ghost' that was not started"):
        desk.collect(1)


def test_closing_closes_the_worker():
    desk, worker, _ = desk_of(0)
    desk.close()
    assert worker.closed == 1
