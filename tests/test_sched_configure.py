"""Changes while running: guard, fence and depth; and the prefix cache emptied."""

from __future__ import annotations

import pytest

from kvsched.config import ConfigError
from kvsched.connector.scripted import KvRule
from tests.drive import Drive, scheduled


def two_in_flight(defer: bool | str = True, **settings: object) -> Drive:
    """A and B decode; steps 2 and 3 are in flight."""
    drive = Drive(12, 2, defer_block_free=defer, **settings)
    drive.add("A", 7, 8)
    drive.add("B", 7, 8)
    drive.turn()
    drive.turn()
    drive.schedule()
    assert len(drive.in_flight) == 2
    return drive


def test_turning_the_fence_off_returns_all_deferred_blocks_at_once():
    drive = two_in_flight()
    drive.scheduler.finish_requests(["B"])
    blocks = set(drive.deferred[0][2])
    assert drive.free == 6
    drive.scheduler.configure(defer_block_free=False)
    assert drive.deferred == []
    assert drive.free == 9
    assert blocks <= set(drive.scheduler.kv.pool.free_ids())
    drive.run()
    assert drive.emitted["A"] == [1000 + i for i in range(8)]
    assert drive.free == 12


def test_turning_the_fence_on_counts_the_steps_in_flight():
    """Steps 2 and 3, scheduled without a fence, get the sequence numbers 1 and 2 when it goes up."""
    drive = two_in_flight(defer=False)
    fence = drive.scheduler.kv.fence
    assert (fence.sched_seq, fence.processed_seq) == (0, 0)
    drive.scheduler.configure(defer_block_free=True)
    assert (fence.sched_seq, fence.processed_seq) == (2, 0)
    drive.scheduler.finish_requests(["B"])
    assert [entry[0] for entry in drive.deferred] == [2]
    drive.deliver()
    assert (fence.processed_seq, len(drive.deferred)) == (1, 1)
    drive.deliver()
    assert (fence.processed_seq, drive.deferred) == (2, [])
    drive.run()
    assert drive.emitted["A"] == [1000 + i for i in range(8)]
    assert drive.free == 12


def test_the_fence_off_and_on_again_with_the_same_steps_in_flight():
    drive = two_in_flight()
    fence = drive.scheduler.kv.fence
    assert (fence.sched_seq, fence.processed_seq) == (3, 1)
    drive.scheduler.configure(defer_block_free=False)
    drive.deliver()
    drive.schedule()  # a step without a number between numbered ones
    drive.scheduler.configure(defer_block_free=True)
    assert (fence.sched_seq, fence.processed_seq) == (4, 2)
    drive.scheduler.finish_requests(["B"])
    assert [entry[0] for entry in drive.deferred] == [4]
    drive.run()
    assert fence.processed_seq == fence.sched_seq
    assert drive.free == 12


def test_auto_follows_the_depth_when_a_connector_loads():
    drive = Drive(12, 1, defer_block_free="auto", rules={"Z": KvRule(external_tokens=4)})
    assert not drive.scheduler.kv.fence.on
    drive.scheduler.configure(max_in_flight=2)
    assert drive.scheduler.kv.fence.on
    drive.scheduler.configure(max_in_flight=1)
    assert not drive.scheduler.kv.fence.on
    drive = Drive(12, 1, defer_block_free="auto")
    drive.scheduler.configure(max_in_flight=2)
    assert not drive.scheduler.kv.fence.on, "without a connector there is nothing to fear"


def test_the_guard_can_be_switched_in_mid_run():
    """C01 with the guard taken out for one call: exactly then everybody is preempted."""
    drive = Drive(8, 2, defer_block_free=True)
    for i in range(4):
        drive.add(f"r{i}", 7, 8)
    drive.turn()
    drive.turn()
    assert drive.schedule().preempted == ()
    drive.scheduler.configure(guard="none")
    assert len(drive.schedule().preempted) == 4
    drive.scheduler.configure(guard="stop_retry")
    drive.deliver()
    drive.run()
    assert [len(tokens) for tokens in drive.emitted.values()] == [8] * 4
    changes = [event.changes for event in drive.happened("config_changed")]
    assert changes == [{"guard": "none"}, {"guard": "stop_retry"}]


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "policy", "max_model_len", "nonsense"])
def test_other_settings_cannot_change(name):
    drive = two_in_flight()
    with pytest.raises(ValueError, match=f"{name} cannot change while running; only .*guard.* can"):
        drive.scheduler.configure(**{name: 4})


def test_a_wrong_value_changes_nothing():
    drive = two_in_flight()
    before = drive.scheduler.config
    with pytest.raises(ConfigError, match="max_in_flight is 0; it must be at least 1"):
        drive.scheduler.configure(guard="none", max_in_flight=0)
    assert drive.scheduler.config is before
    assert drive.happened("config_changed") == []


# ---- the prefix cache emptied


def test_the_prefix_cache_is_not_emptied_while_blocks_are_in_use():
    drive = Drive(12, 2, enable_prefix_caching=True)
    drive.add("A", 9, 4)
    drive.turn()
    assert drive.scheduler.reset_prefix_cache() is False
    assert drive.scheduler.kv.pool.num_cached == 2
    drive.run()
    assert drive.scheduler.reset_prefix_cache() is True
    assert drive.scheduler.kv.pool.num_cached == 0
    assert [event.step for event in drive.happened("cache_reset")] == [drive.scheduler.step]
    drive.add("B", [100_000 + i for i in range(9)], 1)
    assert scheduled(drive.schedule()) == {"B": 9}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_emptied_with_running_requests_these_start_anew_and_their_stale_output_is_dropped(depth):
    drive = Drive(12, depth, enable_prefix_caching=True)
    for name in ("A", "B"):
        drive.add(name, 9, 8)
    for _ in range(4):
        drive.turn()
    emitted = {name: list(tokens) for name, tokens in drive.emitted.items()}
    in_flight = len(drive.in_flight)
    assert drive.scheduler.reset_prefix_cache(preempt_running=True) is True
    assert drive.waiting == ["A", "B"], "in the order in which they ran"
    assert {event.reason for event in drive.happened("preempted")} == {"cache_reset"}
    assert {event.dropped for event in drive.happened("preempted")} == {in_flight > 0}
    while drive.in_flight:
        drive.deliver()
    assert drive.emitted == emitted, "what was in flight is dropped"
    drive.run()
    assert drive.emitted == {"A": [1000 + i for i in range(8)], "B": [2000 + i for i in range(8)]}
    assert drive.free == 12


def test_emptied_behind_the_fence_the_cache_waits_for_the_steps_in_flight():
    """The blocks of the preempted requests are still deferred: nothing is forgotten yet, and the answer says so."""
    drive = two_in_flight(enable_prefix_caching=True)
    assert drive.scheduler.reset_prefix_cache(preempt_running=True) is False
    while drive.in_flight:
        drive.deliver()
    assert drive.free == 12
    assert drive.scheduler.reset_prefix_cache() is True
    drive.run()
    assert drive.emitted == {"A": [1000 + i for i in range(8)], "B": [2000 + i for i in range(8)]}
