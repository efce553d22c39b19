"""Public reports on KV connectors that need the scheduler only: C37, C38, C40, C41, C43."""

from __future__ import annotations

import pytest

from kvsched.connector.scripted import KvRule
from kvsched.step import ScheduledStep, Transfers
from tests.drive import Drive, scheduled


def turn_with_loads(drive: Drive, airborne: list[str]) -> ScheduledStep:
    """One call at depth 1; loads started before it land with it."""
    step = drive.schedule()
    landed = tuple(airborne)
    airborne[:] = [load.request_id for load in step.loads if load.asynchronous]
    if step.is_empty:
        drive.report(recving=landed)
    else:
        drive.deliver(Transfers(finished_recving=landed))
    return step


def run_with_loads(drive: Drive, limit: int = 200) -> list[str]:
    """Run to the end; returns the ids in the order in which they finished. At no time may nothing run, nothing be
    loaded, and blocks be held."""
    airborne: list[str] = []
    while drive.scheduler.has_unfinished():
        assert len(drive.calls) < limit, "not finished"
        turn_with_loads(drive, airborne)
        held = drive.scheduler.config.num_usable_blocks - drive.free
        assert drive.running or airborne or not held or drive.scheduler.landed, "blocks are held, and nothing goes on"
    return [event.request for event in drive.happened("request_finished")]


@pytest.mark.parametrize("reserve", [True, False])
def test_c37_an_asynchronous_load_leaves_room_for_those_admitted_before(reserve):
    """A loads 4 blocks and needs 1 more to run; B would load 3 and need 1 more; 7 are usable."""
    rules = {"A": KvRule(external_tokens=16), "B": KvRule(external_tokens=12)}
    drive = Drive(7, rules=rules, reserve_full_isl=reserve)
    drive.add("A", 18, 2)
    drive.add("B", 14, 2)
    drive.schedule()
    assert (drive.loading, drive.waiting, drive.free) == (["A"], ["B"], 3)
    assert drive.requests["B"].block_ids == []
    drive.report(recving=("A",))
    assert run_with_loads(drive) == ["A", "B"]
    assert [load.request_id for load in drive.connector.loads] == ["A", "B"]
    assert drive.free == 7


def test_c38_a_load_reserves_the_whole_prefill():
    """A: 12 blocks, 4 of them loaded. B: 10, 6 loaded. With A in, 4 of 16 are left for others: B waits."""
    rules = {"A": KvRule(external_tokens=16), "B": KvRule(external_tokens=24)}
    drive = Drive(16, rules=rules)
    drive.add("A", 48, 1)
    drive.add("B", 40, 1)
    drive.schedule()
    assert (drive.loading, drive.waiting, drive.free) == (["A"], ["B"], 12)
    (failed,) = drive.happened("slots_failed")
    assert (failed.request, failed.needed, failed.free) == ("B", 6, 4)
    assert drive.requests["B"].block_ids == []
    drive.report(recving=("A",))
    assert run_with_loads(drive) == ["A", "B"]


def test_c38_at_the_scale_of_the_report():
    """2,048 blocks of 16: 512 + 736 would be held, 799 be free, and neither prefill could end."""
    size = 16
    rules = {"A": KvRule(external_tokens=512 * size), "B": KvRule(external_tokens=736 * size)}
    drive = Drive(2047, rules=rules, block_size=size, max_model_len=32768, max_num_batched_tokens=8192)
    drive.add("A", (512 + 800) * size, 1)
    drive.add("B", (736 + 800) * size, 1)
    drive.schedule()
    assert (drive.loading, drive.waiting, drive.free) == (["A"], ["B"], 2047 - 512)
    drive.report(recving=("A",))
    assert run_with_loads(drive) == ["A", "B"]


@pytest.mark.parametrize("caching", [False, True])
def test_c40_a_load_that_can_be_served_once_is_not_asked_for_again(caching):
    """A takes a third block in call 6; R, which has decoded 3 tokens, is preempted for it."""
    rules = {"R": KvRule(external_tokens=15, once=True)}
    drive = Drive(7, rules=rules, whole_blocks=False, enable_prefix_caching=caching)
    drive.add("A", 4, 7)
    request = drive.add("R", 16, 8)
    airborne: list[str] = []
    for _ in range(5):
        turn_with_loads(drive, airborne)
    assert len(drive.emitted["R"]) == 3
    assert drive.running == ["A", "R"]
    step = turn_with_loads(drive, airborne)
    assert step.preempted == ("R",)
    assert request.num_tokens == 19
    run_with_loads(drive)
    back = drive.happened("admitted")[-1]
    assert (back.request, back.resumed, back.external) == ("R", True, 0)
    resumed = next(step for step in drive.calls for data in step.new_requests if data.resumed)
    assert scheduled(resumed)["R"] == 19 - back.local
    assert back.local == 0 if not caching else back.local > 0
    assert [load.request_id for load in drive.connector.loads] == ["R"]
    assert [event.request for event in drive.happened("parked")] == ["R"]
    assert drive.emitted["R"] == [2000 + i for i in range(8)]


def failed_load(policy: str) -> Drive:
    rules = {"R": KvRule(external_tokens=12, once=True)}
    drive = Drive(8, rules=rules, whole_blocks=False, load_failure_policy=policy)
    drive.add("other", 4, 3)
    request = drive.add("R", 12, 2)
    drive.schedule()
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    assert request.num_computed_tokens == 11
    assert len(request.block_ids) == 3
    assert drive.free == 4
    invalid = frozenset(request.block_ids)
    drive.deliver(Transfers(finished_recving=("R",), invalid_block_ids=invalid))
    return drive


def test_c41_a_failed_load_is_recomputed():
    drive = failed_load("recompute")
    assert drive.loading == ["R"]
    step = drive.schedule()
    assert scheduled(step) == {"other": 1, "R": 12}
    assert step.num_computed_tokens == (4, 0)
    drive.deliver()
    drive.run()
    assert_failed_once(drive)
    assert drive.emitted["R"] == [2000, 2001]
    assert drive.requests["R"].status.finish_reason == "length"
    assert drive.free == 8


def test_c41_a_failed_load_ends_the_request():
    drive = failed_load("fail")
    assert drive.requests["R"].status.finish_reason == "error"
    assert drive.free == 7, "the other request holds one"
    assert drive.loading == drive.waiting == []
    drive.run()
    assert_failed_once(drive)
    assert drive.emitted["R"] == []
    assert drive.free == 8


def assert_failed_once(drive: Drive) -> None:
    assert [event.request for event in drive.happened("load_failed")] == ["R"]
    assert [request_id for request_id, _ in drive.connector.failed] == ["R"]
    assert drive.emitted["other"] == [1000, 1001, 1002]
    assert drive.requests["other"].num_preemptions == 0


def test_c41_alone_in_the_pool_everything_returns_at_once():
    drive = Drive(8, rules={"R": KvRule(external_tokens=12)}, whole_blocks=False, load_failure_policy="fail")
    request = drive.add("R", 12, 2)
    drive.schedule()
    output = drive.report(recving=("R",), invalid=frozenset(request.block_ids))
    assert output.finished == {"R": "error"}
    assert drive.free == 8


def test_c43_external_tokens_that_end_inside_a_block():
    drive = Drive(8, rules={"R": KvRule(external_tokens=6)}, whole_blocks=False, enable_prefix_caching=True)
    request = drive.add("R", 12, 2)
    drive.schedule()
    (load,) = drive.connector.loads
    assert (load.num_tokens, len(load.block_ids)) == (6, 2)
    assert drive.scheduler.kv.pool.num_cached == 0
    drive.report(recving=("R",))
    step = drive.schedule()
    assert scheduled(step) == {"R": 6}
    assert step.num_computed_tokens == (6,)
    by_load, by_step = drive.happened("blocks_cached")
    assert by_load.block_ids == (request.block_ids[0],)
    assert by_step.block_ids == tuple(request.block_ids[1:3])
    drive.deliver()
    drive.run()
    assert drive.emitted["R"] == [1000, 1001]
