"""Public reports on preemption and deferred frees: C01, C02, C03, C05, C07."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.drive import Drive, scheduled

GUARDS = ["none", "stop_retry"]


def burst(guard: str, *, count: int, max_tokens: int, usable: int, depth: int, **settings: object) -> Drive:
    """`count` requests of 7 prompt tokens, submitted together; under PRIORITY request i has priority i."""
    drive = Drive(usable, depth, guard=guard, **settings)
    for i in range(count):
        drive.add(f"r{i}", 7, max_tokens, priority=i if settings.get("policy") == "priority" else 0)
    return drive


def up_to_call_3(guard: str, policy: str) -> Drive:
    """C01 after its third call.

        call 1   prefills r0..r3, two blocks each: free 0         in flight: 1
        call 2   decodes all four                                 in flight: 1 2, then 1 is processed
        call 3   r0 needs a third block; every victim was last
                 scheduled in step 2, which is still in flight
    """
    drive = burst(guard, count=4, max_tokens=8, usable=8, depth=2, defer_block_free=True, policy=policy)
    drive.turn()
    assert scheduled(drive.calls[0]) == dict.fromkeys(["r0", "r1", "r2", "r3"], 7)
    assert drive.free == 0
    drive.turn()
    assert scheduled(drive.calls[1]) == dict.fromkeys(["r0", "r1", "r2", "r3"], 1)
    drive.schedule()
    return drive


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_c01_base_preempts_everybody_behind_the_fence(policy):
    drive = up_to_call_3("none", policy)
    step = drive.calls[2]
    assert step.total_tokens == 0
    assert sorted(step.preempted) == ["r0", "r1", "r2", "r3"]
    assert drive.free == 0
    assert [entry[0] for entry in drive.deferred] == [2, 2, 2, 2]
    drive.deliver()
    drive.run()
    assert drive.preemptions == 4
    assert_c01_ends(drive)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_c01_the_guard_waits_for_the_fence(policy):
    drive = up_to_call_3("stop_retry", policy)
    step = drive.calls[2]
    assert step.total_tokens == 0
    assert step.preempted == ()
    assert drive.running == ["r0", "r1", "r2", "r3"]
    assert drive.waiting == []
    assert {r.status.name for r in drive.requests.values()} == {"RUNNING"}
    assert drive.deferred == []
    (stop,) = drive.happened("guard_stopped")
    assert (stop.request, stop.victim, stop.fence, stop.processed) == ("r0", "r3", 2, 1)

    drive.deliver()
    drive.turn()
    assert scheduled(drive.calls[3]) == {"r0": 1, "r1": 1}
    assert drive.calls[3].preempted == ("r3", "r2")
    assert drive.waiting == ["r2", "r3"]
    assert drive.free == 2
    drive.run()
    assert drive.preemptions == 2
    assert_c01_ends(drive)


def assert_c01_ends(drive: Drive) -> None:
    assert {i: len(tokens) for i, tokens in drive.emitted.items()} == dict.fromkeys(["r0", "r1", "r2", "r3"], 8)
    assert len(drive.calls) == 17
    assert drive.free == 8
    assert drive.deferred == []


C02 = {"count": 8, "max_tokens": 24, "usable": 20}


@pytest.mark.parametrize(("depth", "base", "fixed"), [(1, 9, 9), (2, 28, 9), (3, 25, 8)])
def test_c02_the_guard_changes_only_the_overlapped_case(depth, base, fixed):
    logs = []
    for guard, preemptions in zip(GUARDS, (base, fixed), strict=True):
        drive = burst(guard, depth=depth, defer_block_free=True, **C02)
        drive.run()
        assert drive.preemptions == preemptions
        assert [len(tokens) for tokens in drive.emitted.values()] == [24] * 8
        assert drive.free == 20
        assert drive.deferred == []
        logs.append(drive.log())
    assert (logs[0] == logs[1]) == (depth == 1)
    if depth == 1:
        assert len(logs[0]) == 58


@pytest.mark.parametrize(("depth", "calls"), [(2, 62), (3, 66)])
def test_c02_without_deferred_frees_the_guard_changes_nothing(depth, calls):
    base, fixed = (burst(guard, depth=depth, **C02) for guard in GUARDS)
    base.run()
    fixed.run()
    assert base.log() == fixed.log()
    assert base.preemptions == 9
    assert len(base.calls) == calls


def aborted_with_two_steps_in_flight(defer: bool) -> Drive:
    drive = Drive(8, 2, defer_block_free=defer)
    drive.add("A", 10, 8)
    drive.add("B", 4, 2)
    assert scheduled(drive.schedule()) == {"A": 10, "B": 4}
    assert drive.free == 4
    assert scheduled(drive.schedule()) == {"A": 1, "B": 1}
    assert drive.free == 3
    return drive


def test_c03_freed_blocks_wait_for_the_steps_that_may_write_them():
    """A is aborted while two steps that write its blocks are in flight.

        step 1   A10 B4   in flight
        step 2   A1  B1   in flight
        abort A           its 3 blocks wait behind step 2
        step 1 processed  they still wait
        step 2 processed  they return
    """
    drive = aborted_with_two_steps_in_flight(defer=True)
    blocks = tuple(drive.requests["A"].block_ids)
    assert drive.scheduler.finish_requests(["A"]) == ["A"]
    assert drive.free == 3
    assert drive.deferred == [(2, "A", blocks)]
    assert len(blocks) == 3
    assert "A" not in drive.scheduler.requests

    drive.add("C", 8, 2)
    step = drive.schedule()  # takes 2 of the 3 free blocks, none of A's
    assert not set(step.new_requests[0].block_ids) & set(blocks)
    drive.scheduler.finish_requests(["C"])
    drive.deliver()
    assert drive.free == 1  # C's two wait behind step 3
    assert drive.deferred[0] == (2, "A", blocks)
    drive.deliver()
    assert not drive.requests["B"].block_ids
    assert set(drive.scheduler.kv.pool.free_ids()) >= set(blocks)


def test_c03_counts():
    drive = aborted_with_two_steps_in_flight(defer=True)
    drive.scheduler.finish_requests(["A"])
    drive.deliver()
    assert drive.free == 3
    output = drive.deliver()
    assert output.finished == {"B": "length"}
    assert drive.free == 8
    assert drive.deferred == []


def test_c03_without_deferred_frees_the_blocks_return_at_once():
    drive = aborted_with_two_steps_in_flight(defer=False)
    drive.scheduler.finish_requests(["A"])
    assert drive.free == 6


def zero_progress(drive: Drive) -> int:
    """Calls that preempt and schedule nothing: the alarm rule."""
    return sum(bool(step.preempted) and step.is_empty for step in drive.calls)


C05 = {"count": 12, "max_tokens": 24, "usable": 17, "defer_block_free": True}


def test_c05_one_step_in_flight_is_the_sentinel():
    base, fixed = (burst(guard, depth=1, **C05) for guard in GUARDS)
    for drive in (base, fixed):
        drive.run()
        assert drive.preemptions == 17
        assert len(drive.calls) == 100
        assert not any(step.is_empty for step in drive.calls)
    assert base.log() == fixed.log()


@pytest.mark.parametrize(
    ("guard", "preemptions", "most", "computed", "stalls"), [("none", 47, 7, 995, 4), ("stop_retry", 19, 3, 578, 0)]
)
def test_c05_preempted_again_and_again(guard, preemptions, most, computed, stalls):
    drive = burst(guard, depth=2, **C05)
    drive.run()
    assert drive.preemptions == preemptions
    assert max(request.num_preemptions for request in drive.requests.values()) == most
    assert drive.num_tokens_computed == computed
    assert zero_progress(drive) == stalls
    assert len(drive.calls) == 113
    empty = [step.step for step in drive.calls if step.is_empty]
    assert len(empty) == 5
    assert all(later - earlier > 1 for earlier, later in pairwise(empty))
    assert [len(tokens) for tokens in drive.emitted.values()] == [24] * 12


def test_c07_a_victim_before_the_cursor_makes_nobody_be_skipped():
    """PRIORITY: the victim A stands at index 0, before B, which is being scheduled.

        running   [A, B, C]     cursor at B (A is skipped: its last token is in flight)
        no block for B: A leaves   [B, C]     cursor must fall back to B's new index, or C is never looked at
    """
    drive = Drive(6, 2, policy="priority")
    drive.add("A", 4, 4, priority=9)
    drive.turn()
    drive.add("B", 6, 8, priority=0)
    drive.add("C", 5, 8, priority=1)
    while len(drive.calls) < 4:
        drive.turn()
    assert drive.running == ["A", "B", "C"]
    step = drive.schedule()
    assert step.step == 5
    assert step.preempted == ("A",)
    assert scheduled(step) == {"B": 1, "C": 1}
    assert drive.free == 1
    assert drive.waiting == ["A"]
    drive.deliver()
    assert len(drive.emitted["A"]) == 4
    assert drive.requests["A"].status.finish_reason == "length"
    assert drive.requests["A"].num_preemptions == 1
    assert drive.waiting == []
    assert drive.running == ["B", "C"]
    drive.run()
    assert {i: len(tokens) for i, tokens in drive.emitted.items()} == {"A": 4, "B": 8, "C": 8}
    assert [step.step for step in drive.calls if "C" in step.preempted] == [9]
    assert drive.free == 6
