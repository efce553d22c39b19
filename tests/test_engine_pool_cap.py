"""A request that outgrows the whole pool ends there, after the same token at every depth; nothing else ends one so."""

from __future__ import annotations

import pytest

from kvsched.engine import Engine
from kvsched.faults import FailCall, FailRequest, FaultPlan
from kvsched.request import SamplingParams

GROWS = SamplingParams(max_tokens=100)
USABLE, SIZE = 6, 4


def engine(depth: int, faults: tuple = (), **settings: object) -> Engine:
    return Engine.synthetic(
        USABLE + 1, block_size=SIZE, max_in_flight=depth, options={"faults": FaultPlan(faults)}, **settings
    )


def num_tokens_that_fit(prompt: int) -> int:
    """Every slot holds the KV of one token; the token sampled after the last slot needs none."""
    return USABLE * SIZE + 1 - prompt


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("prompt", [1, 10, 23, 24])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_it_ends_after_the_same_token_at_every_depth(depth, prompt, async_scheduling):
    (output,) = engine(depth, async_scheduling=async_scheduling).generate([range(prompt)], GROWS)
    assert len(output.token_ids) == num_tokens_that_fit(prompt)
    assert output.finish_reason == "pool"
    assert output.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("guard", ["stop_retry", "none"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_two_that_outgrow_the_pool_both_end_there(depth, guard, policy):
    e = engine(depth, guard=guard, policy=policy, defer_block_free=True)
    outputs = e.generate([range(9), range(50, 60)], GROWS, priorities=[1, 0])
    assert [len(output.token_ids) for output in outputs] == [num_tokens_that_fit(9), num_tokens_that_fit(10)]
    assert {output.finish_reason for output in outputs} == {"pool"}
    assert e.scheduler.kv.pool.num_free == USABLE


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_tighter_limit_keeps_its_own_reason(depth):
    exact = num_tokens_that_fit(10)
    (output,) = engine(depth).generate([range(10)], SamplingParams(max_tokens=exact))
    assert (len(output.token_ids), output.finish_reason) == (exact, "length")
    (output,) = engine(depth, max_model_len=20).generate([range(10)], GROWS)
    assert (len(output.token_ids), output.finish_reason) == (10, "length")


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_stop_token_in_the_last_place_is_a_stop(depth, async_scheduling):
    last = num_tokens_that_fit(10) - 1
    e = Engine.synthetic(
        USABLE + 1, block_size=SIZE, max_in_flight=depth, async_scheduling=async_scheduling,
        token_fn=lambda _, position: 2 if position == 10 + last else 7,
    )  # fmt: skip
    (output,) = e.generate([range(10)], SamplingParams(max_tokens=100, stop_token_ids=(2,)))
    assert (len(output.token_ids), output.finish_reason) == (last + 1, "stop")


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "faults",
    [tuple(FailCall(n) for n in range(2, 30, 3)), (FailRequest("r0", 3, until_step=9), FailRequest("r1", 5, 7))],
)
def test_an_injected_failure_never_ends_a_request(depth, faults):
    e = engine(depth, faults)
    e.add_request("r0", range(4), SamplingParams(max_tokens=8))
    e.add_request("r1", range(50, 54), SamplingParams(max_tokens=8))
    e.drain()
    outputs = [e.output("r0"), e.output("r1")]
    assert {(len(output.token_ids), output.finish_reason) for output in outputs} == {(8, "length")}

    e = engine(depth, faults)
    e.add_request("r0", range(10), GROWS)
    e.drain()
    alone = e.output("r0")
    assert (len(alone.token_ids), alone.finish_reason) == (num_tokens_that_fit(10), "pool")
    assert alone.num_preemptions > 0, "the failures made it preempt itself, and go on"
