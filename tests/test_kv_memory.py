"""Every token attends to the right keys and values, whatever happens: random runs on a memory in which it shows.

Each run is one seed (printed when it fails): prefix sharing, preemption, deferred frees, loads beside the compute
that land at any time or fail, aborts. See tests/memory_model.py for what "right" means.
"""

from __future__ import annotations

import pytest

from kvsched.config import SchedulerConfig
from kvsched.connector.scripted import KvRule
from kvsched.request import SamplingParams
from kvsched.step import Load, RequestData, ScheduledStep
from tests.memory_model import Garbage, MemoryModel, expected_output
from tests.memory_rig import Arrival, Chances, Rig, WrongToken, random_rig

SEEDS = 150


@pytest.mark.parametrize("mode", ["plain", "loads", "failing"])
@pytest.mark.parametrize("part", range(5))
def test_random_runs_read_no_wrong_slot(mode, part):
    covered = {"preempted": 0, "deferred": 0, "hits": 0, "failed": 0, "loads": 0}
    for seed in range(part * SEEDS // 5, (part + 1) * SEEDS // 5):
        print("seed", seed)
        rig = random_rig(seed, mode)
        rig.run()
        rig.check_outputs()
        assert rig.wrong_reads() == []
        kinds = [event.kind for event in rig.events]
        covered["preempted"] += kinds.count("preempted")
        covered["hits"] += kinds.count("blocks_hit")
        covered["loads"] += kinds.count("load_started")
        covered["failed"] += kinds.count("load_failed")
        covered["deferred"] += sum(e.fence > 0 for e in rig.events if e.kind == "blocks_released")
    assert covered["preempted"] > 10
    assert covered["hits"] > 10
    assert (covered["loads"] > 10) == (mode != "plain")
    assert (covered["deferred"] > 10) == (mode != "plain"), "the fence is on only with a connector that loads"
    assert (covered["failed"] > 10) == (mode == "failing")


# ---- the memory itself can tell


def one_row(request_id: str, start: int, count: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> ScheduledStep:
    data = RequestData(request_id, tokens, blocks, start, len(tokens), SamplingParams(), False)
    return ScheduledStep(1, 0, (request_id,), (count,), (start,), frozenset(), {}, (data,), (), (), 1)


def test_the_memory_knows_the_expected_output():
    memory = MemoryModel(8, 4)
    prompt = (5, 6, 7, 8, 9)
    assert memory.compute(one_row("a", 0, 5, prompt, (3, 1))) == (tuple(expected_output(prompt, 1)),)
    assert memory.violations == []


def test_the_memory_sees_a_slot_of_another_request():
    memory = MemoryModel(8, 4)
    memory.compute(one_row("a", 0, 5, (5, 6, 7, 8, 9), (3, 1)))
    assert memory.compute(one_row("b", 4, 1, (5, 6, 0, 8, 9), (3, 2))) == ((-1,),)
    (violation,) = memory.violations
    assert (violation.request, violation.position, violation.block) == ("b", 2, 3)


def test_the_memory_sees_a_slot_that_was_never_written_and_spreads_the_damage():
    memory = MemoryModel(8, 4)
    memory.compute(one_row("a", 4, 1, (5, 6, 7, 8, 9), (3, 1)))
    assert memory.violations[0].found is None
    assert isinstance(memory.slots[1][0], Garbage)


def test_the_memory_sees_a_failed_load():
    memory = MemoryModel(8, 4)
    tokens = (5, 6, 7, 8, 9, 10, 11, 12, 13)
    load = Load("a", (3, 1), (b"", b""), 0, 8, False)
    memory.fill(load, tokens, 7, fails_from=1)
    memory.compute(one_row("a", 8, 1, tokens, (3, 1, 2)))
    (violation,) = memory.violations
    assert (violation.position, violation.found.load) == (4, 7)


def race_rig(seed: int, fence: bool) -> Rig:
    """Long prompts that are aborted in flight, loads that write at once: the fence has work to do."""
    config = SchedulerConfig(
        num_blocks=9, block_size=4, max_num_batched_tokens=12, max_in_flight=3, defer_block_free=fence,
        enable_prefix_caching=False,
    )  # fmt: skip
    arrivals = [Arrival(f"r{i}", tuple(range(i, i + 20)), 4) for i in range(12)]
    rules = {f"r{i}": KvRule(external_tokens=16) for i in range(1, 12, 2)}
    weights = {"arrive": 1, "schedule": 4, "compute": 0.3, "write": 4, "deliver": 0.5}
    return Rig(seed, config, arrivals, rules, Chances(weights, abort=0.05))


@pytest.mark.parametrize("fence", [True, False])
def test_without_the_fence_steps_in_flight_overwrite_what_a_load_has_filled(fence):
    """The same runs: with the fence no wrong read in any, without it there are some, and wrong tokens."""
    wrong_reads = wrong_tokens = 0
    for seed in range(40):
        rig = race_rig(seed, fence)
        try:
            rig.run()
        except WrongToken:
            wrong_tokens += 1
        wrong_reads += bool(rig.wrong_reads())
    assert (wrong_reads == 0) == fence
    assert (wrong_tokens == 0) == fence
