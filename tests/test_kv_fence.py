"""The fence: sequence numbers, deferred frees, the order in which they return."""

from __future__ import annotations

import pytest

from kvsched.kv.fence import Fence
from kvsched.kv.pool import BlockPool
from kvsched.request import Request, SamplingParams


def holder(fence: Fence, pool: BlockPool, name: str, count: int, seq: int) -> tuple[Request, list[int]]:
    """A request that holds `count` blocks and was last scheduled in step `seq`."""
    request = Request(name, [1], SamplingParams())
    request.last_sched_seq = seq
    return request, pool.allocate(count)[0]


def test_what_no_step_in_flight_can_write_returns_at_once():
    pool = BlockPool(9)
    fence = Fence(pool, True, None)
    fence.next_seq()
    request, table = holder(fence, pool, "r", 3, seq=1)
    assert not fence.can_free_now(request)
    fence.advance(1)
    assert fence.can_free_now(request)
    fence.release(request, table, "finished", 1)
    assert pool.num_free == 8
    assert not fence.deferred


def test_deferred_frees_wait_behind_the_newest_step_and_return_in_order():
    """
        step 1, 2 scheduled    a (last in 1) goes: behind 2, the newest, not behind 1
        step 3 scheduled       b goes: behind 3
        1 processed            nothing returns
        2 processed            a returns
        3 processed            b returns
    """
    pool = BlockPool(9)
    events: list = []
    fence = Fence(pool, True, events.append)
    assert [fence.next_seq(), fence.next_seq()] == [1, 2]
    a, table_a = holder(fence, pool, "a", 2, seq=1)
    b, table_b = holder(fence, pool, "b", 3, seq=2)
    fence.release(a, table_a, "preempted", 2)
    assert fence.next_seq() == 3
    fence.release(b, table_b, "aborted", 3)
    assert [tuple(entry) for entry in fence.deferred] == [(2, "a", tuple(table_a)), (3, "b", tuple(table_b))]
    free = []
    for _ in range(3):
        fence.advance(4)
        free.append(pool.num_free)
    assert free == [3, 5, 8]
    assert list(pool.free_ids()) == [*reversed(table_b), *reversed(table_a), 6, 7, 8], "tail first, to the front"
    kinds = [event.kind for event in events]
    assert kinds[:3] == ["blocks_released", "blocks_released", "fence_advanced"]
    assert kinds[3:] == ["fence_advanced", "blocks_freed", "fence_advanced", "blocks_freed"]
    assert [event.fence for event in events if event.kind == "blocks_released"] == [2, 3]


def test_an_entry_still_fenced_keeps_those_behind_it():
    """Fences never decrease, so the first that must wait ends the walk."""
    pool = BlockPool(9)
    fence = Fence(pool, True, None)
    fence.next_seq()
    fence.next_seq()
    for name in ("a", "b"):
        request, table = holder(fence, pool, name, 1, seq=2)
        fence.release(request, table, "finished", 2)
    fence.advance(2)
    assert len(fence.deferred) == 2
    fence.advance(2)
    assert not fence.deferred


def test_an_empty_table_adds_no_entry():
    pool = BlockPool(9)
    events: list = []
    fence = Fence(pool, True, events.append)
    fence.next_seq()
    request, _ = holder(fence, pool, "r", 0, seq=1)
    fence.release(request, [], "preempted", 1)
    assert not fence.deferred
    assert events == []


def test_off_it_counts_nothing_and_defers_nothing():
    pool = BlockPool(9)
    fence = Fence(pool, False, None)
    assert [fence.next_seq(), fence.next_seq()] == [0, 0]
    request, table = holder(fence, pool, "r", 2, seq=7)
    fence.release(request, table, "finished", 1)
    assert (fence.sched_seq, pool.num_free) == (0, 8)


def test_more_processed_than_scheduled_is_noticed():
    fence = Fence(BlockPool(9), True, None)
    with pytest.raises(AssertionError, match="more steps processed than scheduled"):
        fence.advance(1)


def test_shared_blocks_stay_with_their_other_holders():
    pool = BlockPool(9)
    events: list = []
    fence = Fence(pool, False, events.append)
    a, table = holder(fence, pool, "a", 2, seq=0)
    pool.cache(table[0], b"x")
    pool.touch(table[:1])
    fence.release(a, table, "finished", 1)
    (freed,) = [event for event in events if event.kind == "blocks_freed"]
    assert (freed.front, freed.back, freed.shared) == ((table[1],), (), (table[0],))
    fence.release(Request("b", [1], SamplingParams()), table[:1], "finished", 1)
    assert events[-1].back == (table[0],)
