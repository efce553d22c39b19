"""Public reports on limits, placeholders, late output, prefix cache and aborts that concern the scheduler itself:
C18, C20, C25, C26, C27, C28, C30, C31, C32."""

from __future__ import annotations

import pytest

from tests.drive import Drive, scheduled


@pytest.mark.parametrize("depth", [1, 2])
def test_c18_nothing_is_scheduled_beyond_max_model_len(depth):
    drive = Drive(59, depth, max_model_len=16)
    request = drive.add("A", 10, 100)
    while drive.scheduler.has_unfinished():
        step = drive.turn()
        assert all(count > 0 for count in step.num_scheduled_tokens)
        assert request.num_computed_tokens <= 15
        assert len(request.block_ids) <= 4
    assert len(drive.emitted["A"]) == 6
    assert request.status.finish_reason == "length"
    assert len(drive.non_empty) == 6


def test_c20_a_prompt_that_is_cached_in_full_still_computes_its_last_block():
    prompt = list(range(50, 66))
    drive = Drive(19, enable_prefix_caching=True, token=lambda request_id, index: 900 + index)
    drive.add("A", prompt, 2)
    drive.run()

    request = drive.add("B", prompt, 2)
    step = drive.schedule()
    assert scheduled(step) == {"B": 4}
    assert step.num_computed_tokens == (12,)
    assert request.num_computed_tokens == 16
    drive.deliver()
    drive.run()
    assert drive.emitted["B"] == drive.emitted["A"]

    drive.add("C", [*prompt, 66], 2)
    step = drive.schedule()
    assert scheduled(step) == {"C": 1}
    assert step.num_computed_tokens == (16,)
    drive.deliver()
    drive.run()
    for step in drive.non_empty:
        assert all(count > 0 for count in step.num_scheduled_tokens)


@pytest.mark.parametrize(("depth", "steps"), [(1, 3), (2, 3), (3, 4)])
def test_c25_a_step_too_many_changes_nothing(depth, steps):
    """At depth 3 the test for "its last token is in flight" is conservative, as in vLLM 0.32: one wasted step."""
    drive = Drive(8, depth)
    drive.add("A", 4, 3)
    drive.run()
    assert len(drive.emitted["A"]) == 3
    assert len(drive.non_empty) == steps
    assert drive.free == 8


@pytest.mark.parametrize(("depth", "steps"), [(1, 3), (2, 4), (3, 5)])
def test_c26_a_stop_token_is_found_while_later_steps_are_in_flight(depth, steps):
    drive = Drive(8, depth, token=lambda request_id, index: 2 if index == 2 else 7)
    request = drive.add("A", 4, 20, stop_token_ids=(2,))
    while not request.is_finished:
        drive.turn()
    drive.add("B", 4, 1)
    step = drive.turn()
    assert scheduled(step) == {"B": 4}, "the next request is not delayed by leftovers"
    drive.run()
    assert drive.emitted["A"] == [7, 7, 2]
    assert request.status.finish_reason == "stop"
    assert len([step for step in drive.non_empty if "A" in step.request_ids]) == steps
    assert drive.free == 8


def late_output(drop: bool) -> Drive:
    drive = Drive(6, 2, drop_stale_output=drop)
    drive.add("A", 8, 10)
    drive.add("B", 8, 10)
    return drive


def test_c27_output_that_lands_after_a_preemption_is_delivered_once():
    """B is preempted in call 6 while step 5 is in flight.

        call 6    B loses its blocks; step 5 still owes it a token: stale
        step 5 processed   the token is delivered, no counter changes
        call 12   A has ended; B resumes with 8 + 5 tokens
    """
    drive = late_output(drop=False)
    b = drive.requests
    for _ in range(5):
        drive.turn()
    step = drive.schedule()
    assert step.step == 6
    assert step.preempted == ("B",)
    assert (b["B"].num_output_placeholders, b["B"].num_computed_tokens, b["B"].num_stale_output_tokens) == (0, 0, 1)
    assert len(drive.emitted["B"]) == 4
    drive.deliver()
    assert len(drive.emitted["B"]) == 5
    assert (b["B"].num_output_placeholders, b["B"].num_computed_tokens, b["B"].num_stale_output_tokens) == (0, 0, 0)
    drive.run()
    (resumed,) = [step for step in drive.calls for data in step.new_requests if data.resumed]
    assert resumed.step == 12
    assert scheduled(resumed) == {"B": 13}
    assert drive.emitted == {"A": [1000 + i for i in range(10)], "B": [2000 + i for i in range(10)]}
    assert (b["A"].num_preemptions, b["B"].num_preemptions) == (0, 1)
    assert len(drive.calls) == 17
    assert drive.free == 6


def test_c28_dropping_late_output_costs_compute_and_nothing_else():
    deliver, drop = late_output(drop=False), late_output(drop=True)
    for drive, owned, prefill in ((deliver, 5, 13), (drop, 4, 12)):
        drive.run()
        step, data = next((s, d) for s in drive.calls for d in s.new_requests if d.resumed)
        assert len(data.token_ids) - data.num_prompt_tokens == owned
        assert scheduled(step)["B"] == prefill
    assert deliver.emitted == drop.emitted

    # Only the count of work done twice tells the two runs apart: 12 positions in both, and one sample.
    assert recompute_counter(deliver) == (12, 0)
    assert recompute_counter(drop) == (12, 1)
    assert (num_samples(deliver), num_samples(drop)) == (20, 21)
    assert (len(deliver.non_empty), len(drop.non_empty)) == (15, 16)


def recompute_counter(drive: Drive) -> tuple[int, int]:
    """From events alone: positions whose KV was thrown away, and tokens in flight whose output was."""
    preemptions = drive.happened("preempted")
    return sum(e.computed for e in preemptions), sum(e.stale for e in preemptions if e.dropped)


def num_samples(drive: Drive) -> int:
    return sum(len(step.request_ids) - len(step.prefill_chunks) for step in drive.calls)


def test_c30_requests_that_wait_for_their_last_output_hold_seq_slots():
    """A last, empty call collects what is in flight: six calls against the three that schedule, and that one."""
    assert batch_sizes(1, "running") == [2, 2, 2]
    assert batch_sizes(2, "running") == [2, 0, 2, 0, 2, 0]
    assert batch_sizes(2, "scheduled") == [2, 2, 2, 0]


def batch_sizes(depth: int, seq_slots: str) -> list[int]:
    drive = Drive(59, depth, max_num_seqs=2, seq_slots=seq_slots)
    for i in range(6):
        drive.add(f"r{i}", 4, 1)
    drive.run()
    assert all(len(tokens) == 1 for tokens in drive.emitted.values())
    return [len(step.request_ids) for step in drive.calls]


def test_c31_abort_while_two_steps_are_in_flight():
    drive = Drive(8, 2)
    drive.add("A", 6, 10)
    drive.add("B", 6, 3)
    drive.schedule()
    drive.schedule()
    assert drive.free == 4
    assert drive.scheduler.finish_requests(["A"]) == ["A"]
    assert drive.free == 6
    assert "A" not in drive.scheduler.requests
    drive.deliver()
    drive.deliver()
    drive.run()
    assert drive.emitted["A"] == []
    assert len(drive.emitted["B"]) == 3
    assert drive.free == 8
    drive.schedule()
    told = [request_id for step in drive.calls for request_id in step.finished_request_ids]
    assert sorted(told) == ["A", "B"]


def test_c32_aborting_what_is_not_there_is_a_no_op():
    drive = Drive(6, 2, max_num_seqs=2)
    drive.add("A", 8, 10)
    drive.add("B", 8, 10)
    drive.add("C", 4, 2)
    abort = drive.scheduler.finish_requests
    assert abort(["nope"]) == []
    drive.turn()
    assert drive.waiting == ["C"]
    assert abort(["C", "C"]) == ["C"]
    assert abort(["C"]) == []
    assert (drive.waiting, drive.running, drive.free) == ([], ["A", "B"], 2)
    while drive.requests["B"].num_preemptions == 0:
        drive.turn()
    assert drive.waiting == ["B"]
    before = drive.free
    assert abort(["B"]) == ["B"]
    assert (drive.waiting, drive.running, drive.free) == ([], ["A"], before)
    drive.run()
    assert abort(["A"]) == []
    assert len(drive.emitted["A"]) == 10
    assert drive.free == 6
