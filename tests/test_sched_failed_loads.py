"""Where kvsched leaves the reference: failed loads and never-filled blocks must not falsify a token or hang the run.

The directed scenarios behind what the random runs of tests/test_kv_memory.py found. Block size 4.
"""

from __future__ import annotations

import pytest

from kvsched.connector.scripted import KvRule
from kvsched.step import Transfers
from kvsched.trace.fold import fold
from tests.drive import Drive, scheduled
from tests.trace_runs import differences, head

PROMPT = list(range(500, 524))
ONCE = KvRule(external_tokens=8, asynchronous=False, once=True)


def deliver_failed(drive: Drive, *blocks: int) -> None:
    drive.deliver(Transfers(invalid_block_ids=frozenset(blocks)))


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_running_request_is_cut_and_its_steps_in_flight_are_dropped(depth, bad):
    """R loads 8 tokens in step 1 and runs; the failure is reported with step 1, `depth` steps later.

        step 1        load [0, 8), compute [8, 10)   samples token 0   in flight
        step 2 .. d   one token each, on the bad block                 in flight
        step 1 processed: cut to 4 * bad; all d steps are stale and dropped, nothing is owed
        step d + 1    computes [4 * bad, 10)         samples token 0 again
    """
    drive = Drive(12, depth, rules={"R": ONCE}, enable_prefix_caching=True)
    request = drive.add("R", PROMPT[:10], 6)
    while len(drive.in_flight) < depth:
        drive.schedule()
    assert drive.calls[0].num_computed_tokens == (8,)
    deliver_failed(drive, request.block_ids[bad])
    assert request.num_computed_tokens == 4 * bad
    assert request.num_output_placeholders == 0
    assert request.num_stale_output_tokens == request.num_in_flight_tokens == depth - 1
    assert request.drop_stale_output == (depth > 1)
    (event,) = drive.happened("load_failed")
    assert (event.valid, event.dropped) == (4 * bad, 2 + depth - 1)

    step = drive.schedule()
    assert step.num_computed_tokens == (4 * bad,)
    assert scheduled(step) == {"R": 10 - 4 * bad}
    drive.run()
    assert drive.emitted["R"] == [1000 + i for i in range(6)]
    assert request.num_preemptions == 0
    assert drive.free == 12


def test_a_block_computed_again_in_part_only_is_not_found():
    """Budget 6: the recomputation first covers [0, 6), block 1 is right up to its middle. Then R is aborted."""
    drive = Drive(12, rules={"R": ONCE}, enable_prefix_caching=True, max_num_batched_tokens=6)
    request = drive.add("R", PROMPT[:10], 6)
    drive.schedule()
    deliver_failed(drive, *request.block_ids[:2])
    assert scheduled(drive.schedule()) == {"R": 6}
    drive.deliver()
    drive.scheduler.finish_requests(["R"])
    drive.add("S", PROMPT[:10], 1)
    assert drive.schedule().num_computed_tokens == (4,)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_load_of_an_aborted_request_is_not_found(policy):
    """R is aborted while its load is in flight. Its blocks stand in the prefix cache, with what it computed on them."""
    drive = Drive(12, 2, rules={"R": ONCE}, enable_prefix_caching=True, load_failure_policy=policy, exact=True)
    request = drive.add("R", PROMPT[:14], 6)
    drive.schedule()
    bad = request.block_ids[1]
    drive.scheduler.finish_requests(["R"])
    deliver_failed(drive, bad)
    assert drive.happened("load_failed") == []
    drive.add("S", PROMPT[:14], 1)
    assert drive.schedule().num_computed_tokens == (4,), "the first block is right, the second and the third are not"
    assert drive.requests["S"].block_ids[1] != bad


def test_a_preempted_request_is_not_given_what_was_computed_on_a_failed_load():
    """No guard: R preempts itself while step 1, which carries its load, is in flight."""
    drive = Drive(4, 2, rules={"R": ONCE._replace(external_tokens=4)}, guard="none", exact=True)
    drive.add("A", PROMPT[:7], 2)
    request = drive.add("R", PROMPT[:8], 3)
    drive.schedule()
    bad = request.block_ids[0]
    step = drive.schedule()
    assert step.preempted == ("R",)
    assert request.num_stale_output_tokens == 4
    deliver_failed(drive, bad)
    assert drive.emitted["R"] == []
    (event,) = drive.happened("load_failed")
    assert (event.request, event.block_ids, event.dropped) == ("R", (bad,), 4)
    drive.run()
    assert drive.emitted["R"] == [2000, 2001, 2002]


def test_a_waiting_request_that_holds_a_bad_block_is_cut():
    """C, its own load landed but without a slot to run, leads its table with a block whose load fails later.

        step 1   B prefills                                       in flight: 1
        step 2   B decodes; A starts, block a1 is loaded; C hits a1 and is parked for a load of its own
        step 1 processed, with C's load
        step 3   B, A (takes the last block); C is promoted, gets no slots, keeps what it holds
        step 2 processed: a1 could not be filled
    """
    rules = {"A": KvRule(external_tokens=4, asynchronous=False, once=True), "C": KvRule(external_tokens=8, once=True)}
    drive = Drive(6, 3, rules=rules, enable_prefix_caching=True, exact=True)
    drive.add("B", list(range(4)), 3)
    drive.schedule()
    drive.add("A", PROMPT[:8], 3)
    request = drive.add("C", [*PROMPT[:4], *range(900, 908)], 3)
    drive.schedule()
    bad = drive.requests["A"].block_ids[0]
    assert request.block_ids[0] == bad
    drive.deliver(Transfers(finished_recving=("C",)))
    drive.schedule()
    assert drive.free == 0
    assert (drive.loading, request.status.name) == (["C"], "WAITING")
    deliver_failed(drive, bad)
    assert (request.num_computed_tokens, request.block_ids) == (0, [])
    drive.run()
    assert drive.emitted["C"] == [3000, 3001, 3002]
    back = next(e for e in drive.happened("admitted") if e.request == "C")
    assert back.local in (0, 4)
    assert drive.free == 6


@pytest.mark.parametrize("exact", [True, False])
def test_a_victim_that_leaves_the_step_leaves_no_block_behind_that_was_never_filled(exact):
    """PRIORITY, prompts in chunks of 8. In call 4 V, first in `running`, gets the chunk [24, 32): two blocks, which
    enter the prefix cache at once. Then B needs a block: V is the victim, leaves the step, and B takes the last of its
    blocks. The one before was never filled; it still carries its hash. (The reference finds it.)"""
    drive = Drive(10, policy="priority", enable_prefix_caching=True, long_prefill_token_threshold=8, exact=exact)
    drive.add("V", list(range(500, 533)), 2, priority=9)
    drive.add("X", [1], 1, priority=10)
    drive.turn()
    drive.add("B", list(range(7)), 4, priority=0)
    drive.turn()
    drive.turn()
    assert drive.requests["V"].num_computed_tokens == 24
    step = drive.turn()
    assert step.preempted == ("V",)
    assert [(e.request, e.num_tokens) for e in drive.happened("unscheduled")] == [("V", 8)]
    assert scheduled(step) == {"B": 1}
    drive.run()
    back = drive.happened("admitted")[-1]
    assert (back.request, back.resumed) == ("V", True)
    assert back.local == (24 if exact else 28)


@pytest.mark.parametrize("exact", [True, False])
def test_a_load_that_failed_is_retried_although_its_own_need_counts_against_it(exact):
    """R needs 6 of 8 blocks, 3 of them for its load: with its own need reserved once more it waits for ever (as the
    reference has it)."""
    drive = Drive(8, rules={"R": KvRule(external_tokens=12)}, exact=exact)
    request = drive.add("R", PROMPT, 2)
    drive.schedule()
    drive.report(recving=("R",), invalid=frozenset(request.block_ids))
    drive.schedule()
    if not exact:
        assert drive.turn().is_empty
        assert request.block_ids == []
        return
    assert drive.loading == ["R"]
    assert len(request.block_ids) == 3
    drive.report(recving=("R",))
    drive.run()
    assert drive.emitted["R"] == [1000, 1001]


@pytest.mark.parametrize("exact", [True, False])
def test_who_lacks_slots_is_passed_over_when_nothing_else_goes_on(exact):
    """A holds one block and lacks five; B, behind it, holds four and lacks one of the three free. Nothing runs. (The
    reference stays there for ever.)"""
    rules = {"A": KvRule(external_tokens=4, unknown_lookups=1), "B": KvRule(external_tokens=16)}
    drive = Drive(8, rules=rules, reserve_full_isl=False, policy="priority", exact=exact)
    drive.add("A", PROMPT, 1, priority=0)
    drive.add("B", PROMPT[:17], 1, priority=1)
    drive.schedule()  # A's lookup is not known yet, B is parked
    drive.schedule()  # A is parked
    assert drive.loading == ["A", "B"]
    drive.report(recving=("A", "B"))
    step = drive.schedule()
    if not exact:
        assert step.is_empty
        assert drive.turn().is_empty
        return
    assert scheduled(step) == {"B": 1}
    assert [(e.request, e.reason) for e in drive.happened("skipped")][-1] == ("A", "slots")
    drive.run()
    assert [e.request for e in drive.happened("request_finished")] == ["B", "A"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_failed_load_that_is_not_known_again_waits_with_those_that_hold_nothing(policy):
    """A's load and B's fail from their first block, D's has landed; the connector does not know yet about A and B."""
    failing = KvRule(external_tokens=4, unknown_after_failure=1)
    drive = Drive(20, rules={"A": failing, "B": failing, "D": KvRule(external_tokens=4)}, policy=policy, max_num_seqs=1)
    drive.events.insert(0, head(drive.scheduler))
    for name in "ABD":
        drive.add(name, PROMPT[:9], 1)
    drive.schedule()
    assert drive.loading == ["A", "B", "D"]
    bad = frozenset(drive.requests["A"].block_ids + drive.requests["B"].block_ids)
    drive.report(recving=("A", "B", "D"), invalid=bad)
    drive.add("C", PROMPT[:9], 1)
    assert scheduled(drive.schedule()) == {"D": 5}
    assert (drive.loading, drive.waiting) == ([], ["A", "B", "C"])
    assert differences(drive.scheduler, fold(drive.events)) == {}
    drive.turn()
    assert scheduled(drive.schedule()) == {"C": 9}
    assert drive.loading == ["A", "B"]  # asked again: both are loaded once more


def test_a_call_that_was_made_to_fail_lets_nobody_pass():
    rules = {"A": KvRule(external_tokens=4), "B": KvRule(external_tokens=4)}
    drive = Drive(8, rules=rules, fail_calls={3}, exact=True)
    drive.add("A", PROMPT[:9], 1)
    drive.add("B", PROMPT[:9], 1)
    drive.schedule()
    drive.report(recving=("A", "B"))
    assert drive.schedule().is_empty
    assert drive.loading == ["A", "B"]
    assert scheduled(drive.schedule()) == {"A": 5, "B": 5}
