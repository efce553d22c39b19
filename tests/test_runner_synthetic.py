"""The synthetic runner: tokens from a hash, virtual time, gates, connectors."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import CancelledError

import pytest

from kvsched.request import SamplingParams
from kvsched.runner.base import Gate, Runner
from kvsched.runner.synthetic import CostModel, SyntheticRunner
from kvsched.step import Load, ScheduledStep
from tests.runner_steps import HandHost

COST = CostModel(fixed_s=1.0, per_token_s=0.1, per_kv_token_s=0.01)


def test_it_is_a_runner():
    assert isinstance(SyntheticRunner(), Runner)


def tokens_of(schedule: list[dict[str, int]], seeds: dict[str, int | None]) -> dict[str, list[int]]:
    host = HandHost(SyntheticRunner(vocab_size=1000))
    for request_id, seed in seeds.items():
        host.add(request_id, [1] * 5, SamplingParams(max_tokens=9, seed=seed))
    for counts in schedule:
        host.run(counts)
    return host.outputs


def test_tokens_depend_on_request_position_and_seed_alone():
    together = tokens_of([{"a": 5, "b": 5}, {"b": 1, "a": 1}, {"a": 1, "b": 1}], {"a": None, "b": None})
    chunked = tokens_of(
        [{"a": 2}, {"a": 3, "b": 1}, {"b": 4}, {"a": 1}, {"a": 1, "b": 1}, {"b": 1}], {"a": None, "b": 0}
    )
    assert together == chunked
    assert together["a"] != together["b"]
    assert len({*together["a"], *together["b"]}) == 6
    assert tokens_of([{"a": 5}], {"a": 1})["a"] != together["a"][:1]


def test_tokens_are_the_same_in_every_process():
    script = (
        "from tests.test_runner_synthetic import tokens_of\n"
        "print(tokens_of([{'a': 5, 'b': 5}, {'a': 1, 'b': 1}], {'a': 3, 'b': None}))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_tokens_may_be_scripted():
    host = HandHost(SyntheticRunner(token_fn=lambda request_id, position: position * (2 if request_id == "b" else 1)))
    host.add("a", [1] * 4)
    host.add("b", [1] * 4)
    host.run({"a": 4, "b": 4})
    host.run({"a": 1})
    assert host.outputs == {"a": [4, 5], "b": [8]}


def test_steps_run_one_after_the_other_in_virtual_time():
    """Step 1: 4 tokens, 4 KV tokens read. Step 2 is submitted at once, and waits for the device."""
    runner = SyntheticRunner(COST)
    host = HandHost(runner)
    host.add("a", [1] * 4)
    first, second = host.submit({"a": 4}).result(), host.submit({"a": 1}).result()
    assert (first.started_at, first.finished_at) == (0.0, pytest.approx(1.44))
    assert (second.started_at, second.finished_at) == (first.finished_at, pytest.approx(1.44 + 1.15))
    assert runner.now() == 0.0
    runner.advance(10.0)
    runner.advance(5.0)
    assert runner.now() == 10.0
    host.in_flight.clear()
    assert host.submit({"a": 1}).result().started_at == 10.0


def test_a_gate_holds_its_step_and_all_later_ones():
    runner = SyntheticRunner(COST)
    host = HandHost(runner)
    host.add("a", [1] * 4)
    gate = Gate("somebody says so")
    first, second, third = host.submit({"a": 4}), host.submit({"a": 1}, gate), host.submit({"a": 1})
    assert (first.done(), second.done(), third.done()) == (True, False, False)
    runner.advance(100.0)
    gate.open()
    assert second.result().started_at == 100.0
    assert third.result().started_at == second.result().finished_at


def test_a_gate_opened_by_a_step_lets_the_next_one_go():
    """The connector opens the gate of step 2 while step 1 is being computed."""
    gate = Gate("before step 1")

    class Opens:
        def before_step(self, step: ScheduledStep) -> frozenset[int]:
            gate.open()
            return frozenset()

    runner = SyntheticRunner(connector=Opens())
    hold = Gate("hold step 1")
    host = HandHost(runner)
    host.add("a", [1] * 4)
    first, second = host.submit({"a": 4}, hold), host.submit({"a": 1}, gate)
    hold.open()
    assert first.done()
    assert second.done()


class FailsBlocks:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def before_step(self, step: ScheduledStep) -> frozenset[int]:
        self.steps.append(step.step)
        return frozenset(block for load in step.loads for block in load.block_ids)


def test_the_connector_is_called_in_order_and_its_failures_are_reported():
    connector = FailsBlocks()
    runner = SyntheticRunner(COST, connector=connector)
    host = HandHost(runner)
    host.add("a", [1] * 4)
    load = Load("b", (7, 8), (b"", b""), 0, 8, asynchronous=False)
    empty = runner.submit(host.decide({}, loads=(load,))).result()
    assert empty.transfers.invalid_block_ids == {7, 8}
    assert empty.sampled_token_ids == ()
    assert empty.started_at == empty.finished_at
    assert host.run({"a": 4}).transfers.invalid_block_ids == frozenset()
    assert connector.steps == [1, 2]


def test_a_request_nobody_handed_over_is_an_error_of_its_step():
    runner = SyntheticRunner()
    host = HandHost(runner)
    host.add("a", [1] * 4)
    host.decide({"a": 4})
    with pytest.raises(ValueError, match="a is scheduled, but no step handed it over"):
        host.run({"a": 1})


def test_closing_cancels_what_is_gated():
    runner = SyntheticRunner()
    host = HandHost(runner)
    host.add("a", [1] * 4)
    gate = Gate("never")
    future = host.submit({"a": 4}, gate)
    runner.close()
    runner.close()
    assert gate.is_open
    with pytest.raises(CancelledError, match="before step 1 ran"):
        future.result()
    with pytest.raises(RuntimeError, match="closed"):
        host.submit({"a": 1})


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="vocab_size is 0"):
        SyntheticRunner(vocab_size=0)
    with pytest.raises(ValueError, match="negative cost"):
        SyntheticRunner(CostModel(fixed_s=-1.0))
