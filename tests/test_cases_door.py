"""Public reports on limits and on requests that must be refused: C14, C15, C16, C17, C33, C34.

What vLLM 0.32 does with them is shown on the bare scheduler; what kvsched must do, at the engine's door.
"""

from __future__ import annotations

import pytest

from kvsched.config import ConfigError
from kvsched.engine import Engine
from kvsched.request import RequestRefused, SamplingParams
from tests.drive import Drive, scheduled

PROMPT = list(range(100, 400))


def engine(usable: int, depth: int = 1, **settings: object) -> Engine:
    return Engine.synthetic(usable + 1, block_size=4, max_in_flight=depth, enable_prefix_caching=False, **settings)


def usage(engine: Engine) -> float:
    pool = engine.scheduler.kv.pool
    return 1 - pool.num_free / engine.config.num_usable_blocks


def test_c14_the_bare_scheduler_hangs_on_a_prompt_larger_than_the_pool():
    drive = Drive(4)
    drive.add("big", 20, 2)
    drive.add("small", 4, 2)
    for _ in range(20):
        assert drive.turn().is_empty
    assert drive.waiting == ["big", "small"]
    assert drive.free == 4


def test_c14_the_engine_refuses_a_prompt_larger_than_the_pool():
    with engine(4) as e:
        with pytest.raises(RequestRefused, match=r"'big'.* 20 tokens need 5 blocks of 4.*has 4 usable.*num_blocks"):
            e.add_request("big", PROMPT[:20])
        (small,) = e.generate([PROMPT[:4]], SamplingParams(max_tokens=2), request_ids=["small"])
        assert len(small.token_ids) == 2


def test_c14_the_numbers_of_the_report():
    with (
        Engine.synthetic(50) as e,
        pytest.raises(RequestRefused, match=r"1002 tokens need 63 blocks of 16, the pool has 49"),
    ):
        e.add_request("r", range(1002))


def test_c15_the_bare_scheduler_preempts_the_only_request_for_ever():
    drive = Drive(4)
    drive.add("grow", 10, 20)
    for _ in range(7):
        assert not drive.turn().is_empty
    assert len(drive.emitted["grow"]) == 7
    step = drive.turn()
    assert step.step == 8
    assert step.preempted == ("grow",)
    assert drive.free == 4
    for _ in range(20):
        assert drive.turn().is_empty


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_c15_the_engine_ends_a_request_that_outgrows_the_pool(depth):
    with engine(4, depth) as e:
        (grow,) = e.generate([PROMPT[:10]], SamplingParams(max_tokens=20))
        assert len(grow.token_ids) == 7
        assert grow.finish_reason == "pool"
        assert grow.num_preemptions == 0
        assert usage(e) == 0
    with engine(4, depth) as e:
        (exact,) = e.generate([PROMPT[:10]], SamplingParams(max_tokens=7))
        assert exact.token_ids == grow.token_ids
        assert exact.finish_reason == "length"
        assert exact.num_preemptions == 0


def test_c16_the_null_block_is_not_counted_as_usable():
    with pytest.raises(ConfigError, match=r"16 needs 4 blocks of 4, but only 3 of the 4 blocks are usable"):
        engine(3, max_model_len=16)
    with engine(4, max_model_len=16) as e:
        e.add_request("r", PROMPT[:15], SamplingParams(max_tokens=1))
        step = e.schedule()
        assert scheduled(step) == {"r": 15}
        assert usage(e) == 1.0
        assert 0 not in step.new_requests[0].block_ids
        e.deliver()
        assert usage(e) == 0.0
        assert e.output("r").finish_reason == "length"


def test_c17_the_bare_scheduler_never_schedules_a_prompt_above_the_budget():
    drive = Drive(59, enable_chunked_prefill=False, max_num_batched_tokens=16)
    drive.add("A", 20, 2)
    for _ in range(20):
        assert drive.turn().is_empty
    assert drive.free == 59


@pytest.mark.parametrize(("budget", "fits"), [(16, 16), (2048, 2048)])
def test_c17_without_chunked_prefill_the_budget_bounds_max_model_len(budget, fits):
    """Upstream: prompts of 2,048 tokens ran, one of 2,049 never did."""
    settings = {"enable_chunked_prefill": False, "max_num_batched_tokens": budget}
    with pytest.raises(ConfigError, match=rf"max_num_batched_tokens is {budget} and max_model_len {budget + 1}"):
        engine(1000, max_model_len=budget + 1, **settings)
    refusal = f"{budget + 1} tokens, max_model_len is {budget}"
    with engine(1000, max_model_len=budget, **settings) as e, pytest.raises(RequestRefused, match=refusal):
        e.add_request("A", range(budget + 1))
    drive = Drive(1000, **settings)
    drive.add("A", fits, 1)
    assert scheduled(drive.turn()) == {"A": fits}


def test_c33_a_second_live_request_with_the_same_id():
    with engine(8) as e:
        e.add_request("X", PROMPT[:4], SamplingParams(max_tokens=4))
        e.step()
        before = list(e.scheduler.requests["X"].block_ids)
        with pytest.raises(RequestRefused, match=r"'X' is in use; wait until it ends, or choose another id"):
            e.add_request("X", PROMPT[:4])
        assert list(e.scheduler.requests["X"].block_ids) == before
        e.drain()
        first = e.output("X")
        assert len(first.token_ids) == 4
        assert usage(e) == 0
        e.add_request("X", PROMPT[:4], SamplingParams(max_tokens=2))
        e.step()
        assert len(e.scheduler.requests["X"].block_ids) == 1
        e.drain()
        assert e.output("X").token_ids == first.token_ids[:2]
        assert e.scheduler.kv.pool.num_free == 8


def test_c34_requests_that_cannot_be_served_are_refused_and_others_go_on():
    with engine(8, max_model_len=16) as e:
        e.add_request("other", PROMPT[:4], SamplingParams(max_tokens=4))
        e.step()
        with pytest.raises(RequestRefused, match=r"'empty'.*prompt is empty"):
            e.add_request("empty", [], SamplingParams(max_tokens=4))
        with pytest.raises(RequestRefused, match="max_tokens is 0"):
            e.add_request("none", PROMPT[:4], SamplingParams(max_tokens=0))
        with pytest.raises(RequestRefused, match=r"'long'.* 16 tokens, max_model_len is 16"):
            e.add_request("long", PROMPT[:16], SamplingParams(max_tokens=4))
        e.drain()
        assert len(e.output("other").token_ids) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be an integer of 64 bits"),
        ({"max_tokens": 2**63}, "max_tokens is 9223372036854775808"),
        ({"stop_token_ids": (3, -(2**70))}, "stop_token_ids holds -1180591620717411303424"),
        ({"temperature": float("inf")}, "temperature is inf; it must be 0 .greedy. or above, and finite"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_numbers_that_a_trace_or_a_device_cannot_hold_are_refused(settings, message):
    with pytest.raises(RequestRefused, match=message):
        SamplingParams(**settings)


def test_tokens_and_priorities_that_cannot_be_are_refused_and_others_go_on():
    with engine(8) as e:
        e.add_request("other", PROMPT[:4], SamplingParams(max_tokens=4))
        for prompt, message in (([1, -2], "token 1 of the prompt is -2"), ([2**63], "token 0 of the prompt is 9223")):
            with pytest.raises(RequestRefused, match=f"'bad': {message}"):
                e.add_request("bad", prompt)
        with pytest.raises(RequestRefused, match="'bad': priority is 9223372036854775808"):
            e.add_request("bad", PROMPT[:4], priority=2**63)
        e.drain()
        assert len(e.output("other").token_ids) == 4


def test_c34_the_bare_scheduler_checks_nothing():
    drive = Drive(8)
    drive.add("empty", [], 4)
    with pytest.raises(AssertionError, match="empty: nothing to schedule"):
        drive.schedule()
