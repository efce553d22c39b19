"""Random plans of faults on a memory that shows wrong reads: tokens stay exact, the books balance, nothing hangs."""

from __future__ import annotations

import random

import pytest

from kvsched.connector.scripted import KvRule
from kvsched.faults import Abort, FailCall, FailLoad, FailRequest, Fault, HoldExecution, HoldResult, HoldTransfer
from tests.memory_bench import Bench
from tests.memory_rig import check_books

IDS = [f"r{i}" for i in range(8)]


def random_fault(rng: random.Random, depth: int) -> Fault:
    request, step = rng.choice(IDS), rng.randint(1, 15)
    faults: list[Fault] = [
        FailCall(rng.randint(1, 40)),
        FailRequest(request, step, step + rng.randint(0, 4)),
        HoldResult(step, rng.randint(1, 4)),
        Abort(request, step),
        FailLoad(request, rng.randint(1, 2), rng.randint(0, 2)),
        HoldTransfer(request, "load", rng.randint(1, 4)),
    ]
    if depth > 1:  # with one step in flight the next is not scheduled before this one has been computed
        faults.append(HoldExecution(step, "step_scheduled", {"step": step + 1}))
    return rng.choice(faults)


def random_rule(rng: random.Random) -> KvRule:
    return KvRule(
        external_tokens=rng.randint(0, 20),
        asynchronous=rng.random() < 0.5,
        unknown_lookups=rng.choice([0, 0, 2]),
        once=rng.random() < 0.5,
    )


def random_bench(rng: random.Random) -> Bench:
    depth = rng.randint(1, 4)
    rules = {i: random_rule(rng) for i in IDS if rng.random() < 0.7}
    return Bench(
        rng.randint(8, 20),
        rules,
        fails={(i, 1): rng.randint(0, 2) for i in IDS if rng.random() < 0.3},
        eager=rng.random() < 0.5,
        landing=rng.randrange(depth),
        transfer_landing=rng.choice([0, 1, 3]),
        faults=tuple(random_fault(rng, depth) for _ in range(rng.randint(0, 5))),
        max_in_flight=depth,
        policy=rng.choice(["fcfs", "priority"]),
        guard=rng.choice(["stop_retry", "stop_retry", "none"]),
        max_num_batched_tokens=rng.choice([6, 16, 64]),
        max_num_seqs=rng.choice([2, 16]),
        block_size=rng.choice([2, 4]),
        reserve_full_isl=rng.random() < 0.7,
        async_scheduling=depth > 1 or rng.random() < 0.5,
        load_failure_policy=rng.choice(["recompute", "recompute", "fail"]),
        enable_prefix_caching=rng.random() < 0.8,
    )


@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_exact_whatever_breaks(seed):
    rng = random.Random(seed)
    bench = random_bench(rng)
    engine = bench.engine
    text = [rng.randrange(40) for _ in range(30)]
    wanted = {}
    for i in IDS:
        prompt = text[: rng.randint(1, min(24, engine.config.num_usable_slots - 2))]
        prompt[rng.randrange(len(prompt))] = rng.randrange(40)
        wanted[i] = rng.randint(1, 12)
        bench.add(i, prompt, wanted[i])
        for _ in range(rng.randint(0, 2)):
            engine.step()
    while engine.has_unfinished_requests() or engine.num_in_flight:
        engine.step()
        check_books(engine.scheduler)
        assert engine.ticks < 2000
    engine.drain()
    assert bench.wrong() == {}
    for i in IDS:
        output = engine.output(i)
        assert output.finish_reason in ("length", "pool", "abort", "error")
        assert len(output.token_ids) == wanted[i] or output.finish_reason != "length"
    assert engine.scheduler.kv.pool.num_free == engine.config.num_usable_blocks
