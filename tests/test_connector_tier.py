"""The scheduler's half of a store, on the bare scheduler: what is saved when, found, loaded, evicted."""

from __future__ import annotations

from typing import Any

import pytest

from kvsched.connector.tier import TierConnector
from kvsched.kv.hashing import request_block_hashes
from kvsched.request import Request, RequestStatus, SamplingParams
from kvsched.sched.scheduler import Scheduler
from kvsched.step import Load, Save, ScheduledStep, StepResult, Transfers
from tests.drive import Drive, scheduled

SIZE = 4


class TierDrive(Drive):
    """A scheduler over a store that holds `room` blocks; nobody moves bytes, the test says what has landed."""

    def __init__(self, usable: int, depth: int = 1, *, room: int = 100, stored: Any = (), **settings: Any) -> None:
        options = {k: settings.pop(k) for k in ("asynchronous", "min_tokens_to_load") if k in settings}
        super().__init__(usable, depth, defer_block_free=depth > 1, **settings)
        known = [(key, 1) for prompt in stored for key in keys(prompt)]
        self.tier = TierConnector(SIZE, 1, room, stored=known, **options)
        self.scheduler = Scheduler(self.scheduler.config, connector=self.tier, emit=self.events.append)


def keys(tokens: list[int]) -> list[bytes]:
    """Content hashes of the full blocks of a sequence."""
    return request_block_hashes(Request("x", tokens, SamplingParams()), len(tokens) // SIZE, SIZE)


def saved(step: ScheduledStep) -> list[tuple[str, tuple[int, ...], bool]]:
    return [(save.request_id, save.block_ids, save.final) for save in step.saves]


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


# ---- looking up


@pytest.mark.parametrize(
    ("length", "stored", "expected"),
    [
        (11, 12, 8),  # the third block is not full in the prompt
        (12, 12, 8),  # the last known token is always computed
        (13, 12, 12),
        (13, 8, 8),
        (13, 3, 0),
        (4, 4, 0),
    ],
)
def test_a_lookup_finds_the_longest_run_and_leaves_the_last_token(length, stored, expected):
    drive = TierDrive(20, stored=[prompt(stored)])
    request = drive.add("a", prompt(length), 2)
    assert drive.tier.lookup(request, 0) == (expected, True)


def test_a_gap_ends_the_run_unless_the_local_hit_covers_it():
    drive = TierDrive(20)
    request = drive.add("a", prompt(17), 2)
    for i in (0, 2, 3):
        drive.tier.index.add(keys(prompt(16))[i], 1)
    assert drive.tier.lookup(request, 0).num_tokens == 4
    assert drive.tier.lookup(request, 4).num_tokens == 0
    assert drive.tier.lookup(request, 8).num_tokens == 8


def test_a_short_run_is_computed_rather_than_loaded():
    drive = TierDrive(20, stored=[prompt(16)], min_tokens_to_load=12, asynchronous=False)
    request = drive.add("a", prompt(17), 2)
    assert drive.tier.lookup(request, 4) == (12, False)
    assert drive.tier.lookup(request, 8) == (0, False)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="capacity_bytes is 9, but one stored block takes 10"):
        TierConnector(SIZE, 10, 9)
    with pytest.raises(ValueError, match="min_tokens_to_load"):
        TierConnector(SIZE, 10, 10, min_tokens_to_load=-1)


# ---- saving


def test_a_block_is_saved_with_the_step_after_the_one_that_computed_it():
    """Prompt of 10 tokens, 4 a step; then decode fills the third block with tokens 10 and 11.

    step          1       2       3        4        5         6
    computes   [0, 4)  [4, 8)  [8, 10)  [10, 11) [11, 12)  [12, 13)
    saves                 0       1                           2
    """
    drive = TierDrive(20, max_num_batched_tokens=4)
    request = drive.add("a", prompt(10), 4)
    steps = [drive.turn() for _ in range(6)]
    blocks = [[block for save in step.saves for block in save.block_ids] for step in steps]
    assert blocks == [[], [1], [2], [], [], [3]]
    assert [key for step in steps for save in step.saves for key in save.keys] == keys(request.token_ids[:12])


def test_blocks_hit_in_the_step_that_computes_them_are_saved_only_afterwards():
    """b hits blocks that a computes in the same step: copied out before that step they would be garbage."""
    drive = TierDrive(20, enable_prefix_caching=True)
    drive.add("a", prompt(9), 3)
    drive.add("b", prompt(9), 3)
    first = drive.turn()
    assert scheduled(first) == {"a": 9, "b": 1}
    assert first.saves == ()
    second = drive.turn()
    assert saved(second) == [("a", (1, 2), False)]  # once: b's blocks have the same keys


def test_decoded_blocks_are_saved_once_their_tokens_are_known():
    """Two steps in flight: position 7 is computed before the host knows its token.

    call               1        2        3        4        5
    computes        [0, 6)   [6, 7)   [7, 8)   [8, 9)   [9, 10)
    known before       6        6        7        8        9
    saves                    block 0                    block 1
    """
    drive = TierDrive(20, 2)
    request = drive.add("a", prompt(6), 8)
    steps = [drive.turn() for _ in range(5)]
    assert [step.num_computed_tokens for step in steps] == [(0,), (6,), (7,), (8,), (9,)]
    assert [len(step.saves) for step in steps] == [0, 1, 0, 1, 0]
    assert steps[3].saves[0].keys == tuple(keys(request.token_ids[:8])[1:])


def test_a_preempted_request_is_saved_in_the_step_that_gives_its_blocks_away():
    """C45: b (2 full blocks) is preempted; in the same call a gets one of its blocks."""
    drive = TierDrive(4, max_num_batched_tokens=20, reserve_full_isl=False)
    drive.add("a", prompt(8), 6)
    drive.add("b", prompt(8, 50), 6)
    drive.turn()
    b_blocks = tuple(drive.requests["b"].block_ids)
    step = drive.turn()
    assert step.preempted == ("b",)
    assert set(step.new_block_ids["a"]) <= set(b_blocks)
    assert ("b", b_blocks, False) in saved(step)
    assert drive.tier.lookup(drive.requests["b"], 0).num_tokens == 8


def test_after_a_normal_finish_blocks_not_yet_saved_are_kept_until_sent():
    drive = TierDrive(20)
    request = drive.add("a", prompt(8), 1)
    drive.turn()
    assert request.status is RequestStatus.LENGTH_CAPPED
    assert drive.free == 18
    step = drive.schedule()
    assert step.is_empty
    assert saved(step) == [("a", (1, 2), True)]
    drive.scheduler.update(step, StepResult(step.step, (), Transfers(finished_sending=("a",))))
    assert drive.free == 20


def test_nothing_is_kept_if_everything_was_saved():
    drive = TierDrive(20)
    drive.add("a", prompt(8), 3)
    drive.run()
    assert drive.free == 20
    assert [save.final for step in drive.calls for save in step.saves] == [False]


def test_an_aborted_request_is_not_saved():
    drive = TierDrive(20)
    drive.add("a", prompt(8), 5)
    drive.schedule()
    drive.scheduler.finish_requests(["a"])
    drive.deliver()
    assert drive.schedule().saves == ()
    assert len(drive.tier.index) == 0


# ---- room


def test_the_longest_unused_is_evicted_and_named_in_the_save():
    drive = TierDrive(20, room=3, stored=[prompt(8, 900)])
    old = keys(prompt(8, 900))
    drive.add("a", prompt(9), 3)
    drive.turn()
    (save,) = drive.turn().saves
    assert save.evicted == (old[0],)
    assert list(drive.tier.index) == [old[1], *reversed(keys(prompt(8)))]


def test_a_block_is_not_stored_at_the_cost_of_its_own_beginning():
    drive = TierDrive(20, room=2)
    drive.add("a", prompt(17), 3)
    drive.turn()
    (save,) = drive.turn().saves
    assert save.keys == tuple(keys(prompt(8)))
    assert drive.tier.lookup(drive.add("b", prompt(17), 1), 0).num_tokens == 8


def test_blocks_of_a_load_in_the_air_are_not_evicted():
    drive = TierDrive(20, room=2, stored=[prompt(8)])
    drive.add("a", prompt(9), 3)
    assert drive.schedule().loads[0].keys == tuple(keys(prompt(8)))
    drive.add("b", prompt(9, 50), 3)
    drive.turn()
    assert drive.turn().saves == ()  # no room: both keys are being loaded
    assert set(drive.tier.index) == set(keys(prompt(8)))


def test_what_does_not_fit_at_the_start_is_evicted():
    tier = TierConnector(SIZE, 2, 6, stored=[(b"a", 2), (b"b", 3), (b"c", 3), (b"huge", 9)])
    assert list(tier.index) == [b"b", b"c"]
    assert tier.take_evicted() == (b"a", b"huge")
    assert tier.take_evicted() == ()


# ---- loads behind saves


def preempt_b(drive: TierDrive) -> ScheduledStep:
    """Two steps in flight: b's prompt (8 tokens) is computed in step 1; refused a slot in call 2, which is empty, it is
    preempted, and its blocks 1 and 2 are saved with that call."""
    drive.add("b", prompt(8, 50), 6)
    drive.schedule()
    drive.deliver()
    drive.scheduler.slots_fault = lambda request, _, step: request == "b" and step == 2
    second = drive.schedule()
    assert second.is_empty
    assert saved(second) == [("b", (1, 2), False)]
    return second


def test_a_load_waits_for_the_save_that_brings_it():
    """b comes back for the blocks just saved, and is given others."""
    drive = TierDrive(9, 2, enable_prefix_caching=True)
    second = preempt_b(drive)
    drive.scheduler.kv.pool.uncache(1)  # so that it is not found here
    (load,) = drive.schedule().loads
    assert (load.request_id, load.keys, load.after_step) == ("b", tuple(keys(prompt(8, 50))), second.step)
    assert not {1, 2} & set(load.block_ids)


def test_a_load_waits_for_the_save_that_still_reads_its_blocks():
    """c, which the store knew before, is given b's blocks."""
    drive = TierDrive(4, 2, stored=[prompt(8)], policy="priority")
    second = preempt_b(drive)
    drive.add("c", prompt(9), 2, priority=-1)
    (load,) = drive.schedule().loads
    assert (load.request_id, load.after_step) == ("c", second.step)
    assert set(load.block_ids) == {1, 2}


def test_a_load_starts_at_once_when_the_saves_have_been_copied_out():
    drive = TierDrive(20)
    drive.add("a", prompt(9), 4)
    drive.turn()
    drive.turn()  # saves 2 blocks
    drive.add("b", prompt(9), 4)
    (load,) = drive.schedule().loads
    assert (load.request_id, load.num_tokens, load.after_step) == ("b", 8, 0)


# ---- loads that fail


def test_what_could_not_be_loaded_is_not_offered_again():
    drive = TierDrive(20, stored=[prompt(12)])
    request = drive.add("a", prompt(13), 3)
    (load,) = drive.schedule().loads
    drive.report(recving=("a",), invalid=frozenset(load.block_ids[1:2]))
    assert request.num_computed_tokens == 4
    lost = keys(prompt(12))[1]
    assert lost not in drive.tier.index
    drive.turn()
    (save,) = drive.turn().saves
    assert (save.keys, save.evicted) == ((lost,), (lost,))  # the bad copy goes, the block is stored anew


def test_an_aborted_load_that_failed_is_forgotten_too():
    drive = TierDrive(20, stored=[prompt(12)])
    drive.add("a", prompt(13), 3)
    (load,) = drive.schedule().loads
    drive.scheduler.finish_requests(["a"])
    assert drive.free == 17
    drive.schedule()
    drive.report(recving=("a",), invalid=frozenset(load.block_ids))
    assert drive.free == 20
    assert len(drive.tier.index) == 0


def test_nothing_is_saved_that_rests_on_a_load_which_may_yet_fail():
    """Three steps in flight, synchronous loads. a loads in step 1; b hits those blocks in step 2."""
    drive = TierDrive(40, 3, stored=[prompt(8)], asynchronous=False, enable_prefix_caching=True)
    drive.add("a", prompt(13), 6)
    first = drive.schedule()
    assert [load.asynchronous for load in first.loads] == [False]
    drive.add("b", prompt(17), 6)
    second = drive.schedule()
    assert scheduled(second)["b"] == 17 - 12
    third = drive.schedule()
    assert (second.saves, third.saves) == ((), ())
    drive.deliver(Transfers(invalid_block_ids=frozenset(first.loads[0].block_ids)))
    assert drive.requests["a"].num_computed_tokens == 0
    drive.run()
    told = [save for step in drive.calls for save in step.saves]
    assert {key for save in told for key in save.keys} >= set(keys(prompt(16)))  # saved after recomputation
    assert all(not step.saves for step in drive.calls[:4])


def test_a_synchronous_load_that_landed_lifts_the_ban():
    drive = TierDrive(40, stored=[prompt(8)], asynchronous=False)
    drive.add("a", prompt(13), 6)
    drive.turn()
    (save,) = drive.turn().saves
    assert save.keys == tuple(keys(prompt(12))[2:])


def test_a_request_may_load_again_while_its_first_synchronous_load_is_in_flight():
    drive = TierDrive(40, 2, stored=[prompt(8)], asynchronous=False)
    request = drive.add("a", prompt(13), 6)
    first = drive.schedule()
    drive.scheduler.reset_prefix_cache(preempt_running=True)  # drops stale output, so that it can come back at once
    second = drive.schedule()
    assert [len(step.loads) for step in (first, second)] == [1, 1]
    drive.run()
    assert request.num_output_tokens == 6


def test_the_records_of_transfers_have_a_quiet_default():
    assert Load("a", (), (), 0, 0, True).after_step == 0
    assert Save("a", (), (), False).evicted == ()
