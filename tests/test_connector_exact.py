"""Tokens stay exact with a connector on: damaged stores, failing loads, slow transfers, aborts, preempting pools.

Each seed is one run of a tiny model: pool, depth, policy, prefix cache, guard, kind of loads, room of the store,
faults, arrivals and aborts are drawn from it. Blocks are really damaged (bits are flipped in the store), besides the
faults that report failures. Every request's tokens are those of transformers' generate, as far as it got; no block is
lost.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch

from kvsched import invariants
from kvsched.config import SchedulerConfig
from kvsched.engine import Engine
from kvsched.experiment import exactness
from kvsched.experiment.prompts import PROMPTS
from kvsched.faults import Abort, FailCall, FailLoad, Fault, FaultNeverFired, FaultPlan, HoldResult, HoldTransfer
from kvsched.request import SamplingParams
from kvsched.runner.models import DEFAULT_MODEL
from kvsched.runner.torch_exactness import ModelUnderTest
from kvsched.runner.torch_runner import create_runner
from tests.runner_torch import loaded, prompt_of, reference
from tests.tier_media import FlakyMedium, pair_on

MODEL = "random:llama-tiny"
MOST_TOKENS = 40
_MOST_TURNS = 6000


def some_prompts() -> list[list[int]]:
    """14 prompts of 1 to 77 tokens; many share a beginning."""
    draw = random.Random(7)
    shared = [prompt_of(70, seed=100), prompt_of(70, seed=101)]
    lengths = [(draw.choice((0, 8, 17, 32, 48)), draw.randrange(1, 30)) for _ in range(14)]
    return [shared[i % 2][:common] + prompt_of(own, seed=i) for i, (common, own) in enumerate(lengths)]


PROMPT_IDS = some_prompts()


class Arrival(NamedTuple):
    turn: int
    id: str
    prompt: list[int]
    max_tokens: int
    priority: int


def draw_config(draw: random.Random) -> SchedulerConfig:
    """A pool that holds one request at least; the fence is on whenever steps may be in flight."""
    mode = draw.random() < 0.67
    depth = draw.choice((1, 2, 3, 4)) if mode else draw.choice((1, 2))
    size = draw.choice((4, 8))
    longest = max(map(len, PROMPT_IDS)) + MOST_TOKENS
    return SchedulerConfig(
        num_blocks=-(-longest // size) + 1 + draw.choice((1, 3, 8, 20)),
        block_size=size,
        max_model_len=longest + 1,
        enable_prefix_caching=draw.random() < 0.6,
        max_in_flight=depth,
        async_scheduling=mode,
        max_num_batched_tokens=draw.choice((24, 64, 256)),
        max_num_seqs=draw.choice((3, 8, 16)),
        policy=draw.choice(("fcfs", "priority")),
        guard=draw.choice(("stop_retry", "stop_retry", "none")),
        defer_block_free=True if depth > 1 else draw.choice((True, False, "auto")),
        reserve_full_isl=draw.random() < 0.7,
        drop_stale_output=draw.random() < 0.3,
    )


def draw_arrivals(draw: random.Random) -> list[Arrival]:
    turns = sorted(draw.choice((0, 0, draw.randrange(60))) for _ in range(draw.randrange(8, 18)))
    return [
        Arrival(turn, f"q{i}", draw.choice(PROMPT_IDS), draw.randrange(1, MOST_TOKENS + 1), draw.randrange(3))
        for i, turn in enumerate(turns)
    ]


def draw_faults(draw: random.Random, ids: list[str]) -> FaultPlan:
    faults: list[Fault] = [FailCall(draw.randrange(1, 200)) for _ in range(draw.randrange(6))]
    for request in ids:
        if draw.random() < 0.2:
            faults.append(FailLoad(request, draw.randrange(1, 3), draw.randrange(3)))
        if draw.random() < 0.2:
            faults.append(HoldTransfer(request, "load", draw.randrange(1, 6)))
        if draw.random() < 0.3:
            faults.append(HoldTransfer(request, "save", draw.randrange(1, 6)))
        if draw.random() < 0.2:
            faults.append(Abort(request, draw.randrange(2, 90)))
    if draw.random() < 0.3:
        faults.append(HoldResult(draw.randrange(2, 30), draw.randrange(1, 4)))
    return FaultPlan(tuple(faults))


def serve(engine: Engine, arrivals: list[Arrival], reset_at: int | None) -> None:
    """Requests arrive at their turns; at one turn the prefix cache is reset and everybody preempted."""
    todo = list(arrivals)
    for turn in range(_MOST_TURNS):
        while todo and todo[0].turn <= turn:
            one = todo.pop(0)
            sampling = SamplingParams(max_tokens=one.max_tokens, ignore_eos=True)
            engine.add_request(one.id, one.prompt, sampling, priority=one.priority)
        if turn == reset_at:
            engine.scheduler.reset_prefix_cache(preempt_running=True)
        engine.step()
        if not todo and not engine.has_unfinished_requests():
            break
    else:
        raise AssertionError(f"not finished after {_MOST_TURNS} turns")
    engine.drain()


def check_outputs(engine: Engine, arrivals: list[Arrival]) -> None:
    for one in arrivals:
        output = engine.output(one.id)
        expected = reference(MODEL, one.prompt, MOST_TOKENS)[: one.max_tokens]
        ended = output.finish_reason == "abort"
        assert list(output.token_ids) == (expected[: len(output.token_ids)] if ended else expected), one


def check_rest(engine: Engine, tier: Any) -> None:
    """Nothing is held, kept or pinned for ever; the events tell of no breach."""
    scheduler = engine.scheduler
    assert scheduler.kv.pool.num_free == engine.config.num_usable_blocks
    assert [scheduler.kept_for_save, scheduler.awaiting_load, list(scheduler.kv.fence.deferred)] == [{}, {}, []]
    assert [tier._loading, tier._tracked, tier.index._pins] == [{}, {}, {}]
    assert [str(violation) for violation in invariants.check_all(engine.events, every=5)] == []


def one_run(seed: int, device: str = "cpu") -> Counter[str]:
    draw = random.Random(seed)
    config = draw_config(draw)
    arrivals = draw_arrivals(draw)
    faults = draw_faults(draw, [one.id for one in arrivals])
    live = draw.random() < 0.25
    landing = None if live else draw.choice((config.max_in_flight - 1, 0))
    reset_at = draw.randrange(10, 80) if draw.random() < 0.2 else None
    runner = create_runner(
        loaded(MODEL), device=device, num_blocks=config.num_blocks, block_size=config.block_size,
        max_model_len=config.max_model_len,
    )  # fmt: skip
    runner.cache.poison()
    room = draw.choice((3, 20, 1000))
    medium = FlakyMedium(runner.cache.shape, room, runner.cache.device, draw.choice((0, 0.1, 0.4)), seed)
    kind = draw.random() < 0.6
    pair = pair_on(runner, medium, room, asynchronous=kind, min_tokens_to_load=draw.choice((0, 0, 12)))
    print(f"seed {seed}: {config}, asynchronous {kind}, room {room}, landing {landing}")
    with Engine(config, runner, connector=pair, faults=faults, landing=landing) as engine:
        serve(engine, arrivals, reset_at)
        check_outputs(engine, arrivals)
        check_rest(engine, pair.scheduler)
        counts = Counter(event.kind for event in engine.events)
    return counts + Counter(damaged=medium.num_damaged)


def test_tokens_are_exact_whatever_happens_to_blocks():
    counts: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FaultNeverFired)
        for seed in range(8):
            counts += one_run(seed)
    print(dict(counts))
    # What is promised was really tried.
    for kind in ("load_landed", "load_failed", "save_sent", "blocks_kept", "preempted", "damaged"):
        assert counts[kind] >= 4, kind


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_exact_on_a_gpu(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FaultNeverFired)
        assert one_run(seed, "cuda")["step_delivered"] > 0


SMALL_PLAN = (
    {"connector": "asynchronous", "depth": 3, "caching": False},
    {"connector": "synchronous", "depth": 2, "caching": True},
)


@pytest.fixture(scope="module")
def smollm2() -> ModelUnderTest:
    """Three short prompts, of two to three blocks."""
    return ModelUnderTest(DEFAULT_MODEL, PROMPTS[:3], 12)


@pytest.mark.parametrize("settings", SMALL_PLAN, ids=lambda settings: str(settings["connector"]))
def test_smollm2_is_exact_with_a_tier(smollm2, settings):
    """The wide plan is `kvsched exactness --connector`."""
    settings = {
        "pool": "preempting", "mode": "async", "guard": "stop_retry", "fence": True, "budget": 96, "policy": "fcfs",
        "failures": "calls", "aborts": "others", "store": "warm", "loads": "fail at random", "transfers": "slow",
    } | settings  # fmt: skip
    report = exactness.run(settings, smollm2.references, smollm2.make_runner)
    print(report)
    assert report.wrong == ()
    assert report.compared + 12 * report.ties >= 36
    assert report.loads > 0
    assert report.failed_loads > 0
    assert report.aborted > 0
