"""The fix this project is about: stop retrying a failed allocation when the victim's blocks are behind the fence.

The race, two steps in flight (s: `sched_step_seq`, p: `processed_step_seq`):

    call 1   schedule r0 r1 r2        s=1 p=0
    call 2   schedule r0 r1 r2        s=2 p=0    both in flight; step 1 is processed: p=1
    call 3   a call for slots fails. Every victim was last scheduled in step 2, and 2 > p: its blocks would go
             to the queue of deferred frees, not to the pool
               without the guard: the victim is preempted all the same. It loses its computed tokens, and the
               retry finds no block more than before (it passes here only because the pool is ample)
               with the guard: stop. Nobody loses anything
             step 2 is processed: p=2. From here on a victim's blocks come back at once
    call 4   ordinary preemption, if slots are still lacking

The injected failure stands for a pool that is full; the pool is ample, so that one failure is all there is.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.drive import Drive, scheduled

POLICIES = ["fcfs", "priority"]


def before_call_3(guard: str, policy: str, fail: tuple[int, ...]) -> Drive:
    """Three requests running, step 2 in flight. fail: which of the calls for slots made from here on fail, from 1.

    Under PRIORITY r0 has the largest priority value, and it stands first: it came a step before the others.
    """
    failing: set[int] = set()
    drive = Drive(59, 2, guard=guard, policy=policy, defer_block_free=True, fail_calls=failing)
    drive.add("r0", 7, 8, priority=9)
    if policy == "priority":
        drive.turn()
    drive.add("r1", 7, 8, priority=1)
    drive.add("r2", 7, 8, priority=2)
    drive.turn()
    if policy == "fcfs":
        drive.turn()
    assert drive.running == ["r0", "r1", "r2"]
    assert (drive.scheduler.kv.fence.sched_seq, drive.scheduler.kv.fence.processed_seq) == (2, 1)
    failing.update(drive.scheduler.allocate_calls + number for number in fail)
    return drive


def state(drive: Drive) -> dict[str, Any]:
    """Queues, pool, deferred frees, and per request all that a step changes."""
    return {
        "queues": (drive.running, drive.waiting),
        "free": list(drive.scheduler.kv.pool.free_ids()),
        "deferred": drive.deferred,
        "requests": {
            r.id: (r.status, list(r.block_ids), r.num_computed_tokens, r.num_output_placeholders, r.num_preemptions)
            for r in drive.requests.values()
        },
    }


def test_fcfs_without_the_guard():
    drive = before_call_3("none", "fcfs", fail=(1,))
    step = drive.schedule()
    assert step.allocate_calls == 3
    assert step.preempted == ("r2",)
    assert scheduled(step) == {"r0": 1, "r1": 1}
    assert drive.waiting == ["r2"]


def test_fcfs_with_the_guard():
    drive = before_call_3("stop_retry", "fcfs", fail=(1,))
    before = state(drive)
    step = drive.schedule()
    assert step.allocate_calls == 1
    assert step.is_empty
    assert step.preempted == ()
    assert state(drive) == before


def test_priority_without_the_guard():
    """The victim r0 had its token already: it leaves the step, and the loop goes on behind the trigger r1."""
    drive = before_call_3("none", "priority", fail=(2,))
    step = drive.schedule()
    assert step.allocate_calls == 4
    assert step.preempted == ("r0",)
    assert scheduled(step) == {"r1": 1, "r2": 1}
    (event,) = drive.happened("unscheduled")
    assert (event.request, event.num_tokens) == ("r0", 1)
    assert "r0" not in step.new_block_ids
    assert drive.waiting == ["r0"]


def test_priority_with_the_guard():
    drive = before_call_3("stop_retry", "priority", fail=(2,))
    before = state(drive)
    step = drive.schedule()
    assert step.allocate_calls == 2
    assert scheduled(step) == {"r0": 1}, "what was scheduled before the stop stays; nothing of the trigger r1"
    assert step.preempted == ()
    after = state(drive)
    assert after["queues"] == before["queues"]
    assert after["deferred"] == []
    assert {i: after["requests"][i] for i in ("r1", "r2")} == {i: before["requests"][i] for i in ("r1", "r2")}


@pytest.mark.parametrize(("policy", "fail", "left"), [("fcfs", 1, 64), ("priority", 2, 63)])
def test_a_stop_leaves_the_budget_to_waiting_requests(policy, fail, left):
    """Seen from outside: a long prompt that waits takes all the budget that the stop left."""
    drive = before_call_3("stop_retry", policy, fail=(fail,))
    drive.add("long", 100, 1, priority=3)
    step = drive.schedule()
    assert scheduled(step)["long"] == left
    assert step.total_tokens == 64


@pytest.mark.parametrize("policy", POLICIES)
def test_without_the_guard_a_preemption_ends_admission(policy):
    drive = before_call_3("none", policy, fail=(1 if policy == "fcfs" else 2,))
    drive.add("long", 100, 1, priority=3)
    assert "long" not in scheduled(drive.schedule())


@pytest.mark.parametrize(
    ("policy", "fail", "victim", "others"),
    [("fcfs", (1, 2), "r2", {"r0": 1, "r1": 1}), ("priority", (2, 4), "r0", {"r1": 1, "r2": 1})],
)
def test_after_the_fence_has_advanced_preemption_is_ordinary(policy, fail, victim, others):
    """The same call fails once more after the output has been processed: now the victim's blocks come back."""
    drive = before_call_3("stop_retry", policy, fail=fail)
    drive.schedule()
    assert drive.preemptions == 0
    while drive.in_flight:
        drive.deliver()
    assert drive.scheduler.kv.fence.sched_seq == drive.scheduler.kv.fence.processed_seq
    held = len(drive.requests[victim].block_ids)
    free = drive.free
    step = drive.schedule()
    assert step.preempted == (victim,)
    assert scheduled(step) == others
    assert drive.deferred == []
    assert drive.free == free + held - sum(map(len, step.new_block_ids.values()))
    drive.deliver()
    drive.run()
    assert drive.emitted == {f"r{i}": [1000 * (i + 1) + k for k in range(8)] for i in range(3)}
    assert drive.free == 59


@pytest.mark.parametrize("policy", POLICIES)
def test_a_failure_with_nothing_in_flight_is_no_matter_of_the_guard(policy):
    fail = (1,) if policy == "fcfs" else (2,)
    logs = []
    for guard in ("none", "stop_retry"):
        drive = before_call_3(guard, policy, fail=fail)
        while drive.in_flight:
            drive.deliver()
        drive.run()
        assert drive.preemptions == 1
        logs.append(drive.log())
    assert logs[0] == logs[1]
