"""The host-memory tier in an engine on a real (tiny) model: blocks that leave, come back, go bad."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvsched import invariants
from kvsched.config import SchedulerConfig
from kvsched.connector.host import HostTier
from kvsched.engine import Engine, EngineStuck
from kvsched.faults import FailLoad, FailRequest, FaultPlan, HoldExecution, HoldTransfer
from kvsched.kv.hashing import request_block_hashes
from kvsched.request import SamplingParams
from kvsched.runner.torch_runner import create_runner
from kvsched.runner.torch_tiers import HostMedium
from tests.runner_torch import loaded, prompt_of, reference
from tests.tier_media import StoppableMedium, pair_on

MODEL = "random:llama-tiny"
SIZE = 4


@contextmanager
def serving(
    num_blocks: int = 40,
    *,
    room: int = 200,
    asynchronous: bool = True,
    medium: type[HostMedium] = HostMedium,
    faults: Sequence[Any] = (),
    landing: int | None = 1,
    **settings: Any,
):
    """An engine with a host tier of `room` blocks; its medium is `engine.medium`."""
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 64, "max_model_len": 96} | settings
    config = SchedulerConfig(num_blocks=num_blocks, block_size=SIZE).with_changes(**settings)
    runner = create_runner(
        loaded(MODEL), device="cpu", num_blocks=num_blocks, block_size=SIZE, max_model_len=config.max_model_len
    )
    runner.cache.poison()
    store = medium(runner.cache.shape, room, runner.cache.device)
    pair = pair_on(runner, store, room, asynchronous=asynchronous)
    with Engine(
        config, runner, connector=pair, faults=FaultPlan(tuple(faults)), landing=landing,
        max_model_len_is_explicit=False,
    ) as engine:  # fmt: skip
        engine.medium = store
        yield engine
    assert [str(v) for v in invariants.check_all(engine.events)] == []


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def happened(engine: Engine, kind: str, request: str | None = None) -> list[Any]:
    return [e for e in engine.events if e.kind == kind and (request is None or e.request == request)]


def computed(engine: Engine, request: str) -> int:
    """Tokens computed for a request."""
    steps = happened(engine, "step_scheduled")
    return sum(n for e in steps for r, n in zip(e.request_ids, e.num_tokens, strict=True) if r == request)


def block_keys(engine: Engine, request: str, count: int) -> list[bytes]:
    return request_block_hashes(engine._requests[request], count, SIZE)[:count]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_prompt_seen_before_is_loaded(asynchronous):
    prompt = prompt_of(30, seed=1)
    with serving(asynchronous=asynchronous) as engine:
        outputs = engine.generate([prompt], greedy(6), request_ids=["first"])
        outputs += engine.generate([prompt], greedy(6), request_ids=["second"])
        assert [list(o.token_ids) for o in outputs] == [reference(MODEL, prompt, 6)] * 2
        assert computed(engine, "first") == 30 + 5
        assert computed(engine, "second") == 30 - 28 + 5
        (load,) = happened(engine, "load_started")
        assert (load.request, load.num_tokens, load.asynchronous) == ("second", 28, asynchronous)
        assert len(happened(engine, "parked")) == asynchronous


def test_a_preempted_request_loads_instead_of_computing_again():
    """Refused slots in steps 5 and 6 it preempts itself; 24 of its 25 known tokens are computed, the newest block is
    saved with that very step, and in the next one it comes back for all of them."""
    prompt = prompt_of(21, seed=2)
    with serving(faults=[FailRequest("r0", 5, 6)]) as engine:
        (output,) = engine.generate([prompt], greedy(12))
        assert list(output.token_ids) == reference(MODEL, prompt, 12)
        (preempted,), (load,) = happened(engine, "preempted"), happened(engine, "load_started")
        assert preempted.computed == load.num_tokens == 24
        assert (load.step, load.after_step) == (preempted.step + 1, preempted.step)
        assert computed(engine, "r0") == 21 + 11  # nothing twice


def test_c45_a_store_under_way_does_not_see_whom_the_block_went_to():
    """4 usable blocks. Q and R hold 2 each when Q needs a third: R is preempted, and its block goes to Q in the same
    call, while the store (stopped) has not written anything yet."""
    q, r = prompt_of(8, seed=3), prompt_of(8, seed=4)
    settings = {"reserve_full_isl": False, "max_model_len": 16, "landing": 0, "max_in_flight": 1}
    with serving(5, medium=StoppableMedium, **settings) as engine:
        engine.medium.go.clear()
        engine.add_request("Q", q, greedy(5))
        engine.add_request("R", r, greedy(5))
        while not happened(engine, "preempted", "R"):
            engine.step()
        (save,) = happened(engine, "save_started", "R")
        gone = happened(engine, "preempted", "R")[0].step
        taken = [b for e in happened(engine, "blocks_allocated", "Q") if e.step == gone for b in e.block_ids]
        assert set(taken) & set(save.block_ids)
        assert save.step == gone
        while engine.num_in_flight:  # the step that writes Q's tokens into R's block is computed
            engine.deliver()
        engine.medium.go.set()
        engine.drain()
        stored = [engine.medium.get(key).clone() for key in block_keys(engine, "R", 2)]
        assert list(engine.output("Q").token_ids) == reference(MODEL, q, 5)
        assert list(engine.output("R").token_ids) == reference(MODEL, r, 5)
        third = engine.generate([r], greedy(5), request_ids=["third"])
        assert happened(engine, "load_started", "third")
        assert list(third[0].token_ids) == reference(MODEL, r, 5)
    with serving(40) as alone:
        alone.generate([r], greedy(5), request_ids=["R"])
        for mine, expected in zip(stored, [alone.medium.get(key) for key in block_keys(alone, "R", 2)], strict=True):
            assert (mine - expected).abs().max() < 1e-5


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_damaged_block_is_a_failed_load_and_is_computed_again(asynchronous, bad):
    prompt = prompt_of(30, seed=5)
    with serving(asynchronous=asynchronous) as engine:
        engine.generate([prompt], greedy(4), request_ids=["first"])
        key = block_keys(engine, "first", 7)[bad]
        engine.medium.memory[engine.medium.slot_of(key)][1, 2, 0, 1, 3] += 1
        (output,) = engine.generate([prompt], greedy(4), request_ids=["second"])
        assert list(output.token_ids) == reference(MODEL, prompt, 4)
        (failed,) = happened(engine, "load_failed")
        assert (failed.request, failed.valid) == ("second", SIZE * bad)
        (output,) = engine.generate([prompt], greedy(4), request_ids=["third"])
        assert list(output.token_ids) == reference(MODEL, prompt, 4)
        assert computed(engine, "third") == 30 - 28 + 3  # the block was stored anew


@pytest.mark.parametrize("asynchronous", [True, False])
def test_policy_fail_ends_the_request_with_an_error(asynchronous):
    prompt = prompt_of(30, seed=5)
    with serving(asynchronous=asynchronous, load_failure_policy="fail") as engine:
        engine.generate([prompt], greedy(4), request_ids=["first"])
        engine.inject(FailLoad("second", 1, 3))
        (output,) = engine.generate([prompt], greedy(4), request_ids=["second"])
        assert (output.finish_reason, output.token_ids) == ("error", ())
        assert engine.scheduler.kv.pool.num_free == 39
        (output,) = engine.generate([prompt], greedy(4), request_ids=["third"])
        assert list(output.token_ids) == reference(MODEL, prompt, 4)


def test_damage_that_comes_to_light_after_an_abort_reaches_nobody():
    """Synchronous load, prefix cache on, three steps in flight: the request is aborted before its step tells that the
    load has failed. What it left in the prefix cache must not be found."""
    prompt = prompt_of(30, seed=6)
    options = {"asynchronous": False, "enable_prefix_caching": True, "max_in_flight": 3, "landing": 2}
    with serving(**options) as engine:
        engine.generate([prompt], greedy(4), request_ids=["first"])
        engine.scheduler.reset_prefix_cache()
        engine.medium.memory.view(-1)[:] = float("nan")
        engine.add_request("second", prompt, greedy(4))
        engine.schedule()
        engine.add_request("third", [*prompt, 5, 6, 7], greedy(4))
        engine.schedule()
        engine.abort("second", "third")
        engine.drain()
        (output,) = engine.generate([[*prompt, 5, 6, 7, 8]], greedy(4), request_ids=["fourth"])
        assert list(output.token_ids) == reference(MODEL, [*prompt, 5, 6, 7, 8], 4)


def test_a_small_store_evicts_and_tokens_stay_exact():
    prompts = [prompt_of(20 + 3 * i, seed=10 + i) for i in range(6)]
    with serving(18, room=9, max_model_len=64) as engine:
        for turn in range(2):
            ids = [f"r{turn}{i}" for i in range(6)]
            outputs = engine.generate(prompts, greedy(12), request_ids=ids)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert list(output.token_ids) == reference(MODEL, prompt, 12)
        assert len(engine.scheduler.connector.index) == 9
        assert happened(engine, "load_started")
        assert happened(engine, "preempted")


def test_two_runs_decide_alike_whatever_the_speed_of_copies():
    def run(delay: bool) -> list[Any]:
        prompts = [prompt_of(20 + 3 * i, seed=10 + i) for i in range(6)]
        with serving(18, room=30, max_model_len=64, medium=StoppableMedium) as engine:
            for i, prompt in enumerate(prompts):
                engine.add_request(f"r{i}", prompt, greedy(12), arrival_time=float(i))
            while engine.has_unfinished_requests():
                if delay and not engine._desk.pending:
                    engine.medium.go.clear()
                engine.step()
                engine.medium.go.set()
            engine.drain()
            return [event._replace(time=0.0) if hasattr(event, "time") else event for event in engine.events]

    assert run(delay=False) == run(delay=True)


def test_all_blocks_come_back_when_the_engine_is_drained():
    """The last save of the last request goes out although nothing is left to schedule."""
    with serving() as engine:
        engine.generate([prompt_of(8, seed=7)], greedy(1))
        assert engine.scheduler.kept_for_save == {}
        assert engine.scheduler.kv.pool.num_free == 39
        assert [e.request for e in happened(engine, "save_sent")] == ["r0"]
        assert len(engine.scheduler.connector.index) == 2


def test_slow_saves_keep_blocks_and_change_no_token():
    prompt = prompt_of(8, seed=7)
    with serving(faults=[HoldTransfer("r0", "save", 9)]) as engine:
        outputs = engine.generate([prompt, prompt_of(11, seed=8)], [greedy(1), greedy(14)])
        assert list(outputs[0].token_ids) == reference(MODEL, prompt, 1)
        (kept,), (sent,) = happened(engine, "blocks_kept", "r0"), happened(engine, "save_sent", "r0")
        assert sent.step - kept.step > 9


def test_a_hold_that_waits_for_a_load_behind_it_is_told_not_waited_for():
    """Step 5, r1's last, is held until r0's load lands; but that load waits for a save in compute order behind it."""
    hold = HoldExecution(5, "load_landed", {"request": "r0"})
    with serving(faults=[FailRequest("r0", 5, 6), hold]) as engine:
        engine.add_request("r1", prompt_of(5, seed=1), greedy(5))
        engine.add_request("r0", prompt_of(21, seed=2), greedy(12))
        with pytest.raises(EngineStuck, match="load_landed"):
            engine.drain()
        (load,) = happened(engine, "load_started")
        assert load.after_step == 6


def test_from_model_takes_a_tier():
    prompt = prompt_of(20, seed=9)
    with Engine.from_model(
        loaded(MODEL), device="cpu", num_blocks=20, block_size=4, connector=HostTier(capacity_bytes=2**22),
        enable_prefix_caching=False,
    ) as engine:  # fmt: skip
        engine.generate([prompt], greedy(3), request_ids=["a"])
        engine.generate([prompt], greedy(3), request_ids=["b"])
        assert [e.request for e in happened(engine, "load_landed")] == ["b"]
