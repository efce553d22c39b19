"""Faults carried out by the engine: each kind comes to pass where it says, or is reported as never come to pass."""

from __future__ import annotations

import pytest

from kvsched.engine import Engine, EngineStuck
from kvsched.faults import (
    Abort,
    FailCall,
    FailLoad,
    FailRequest,
    FaultError,
    FaultNeverFired,
    FaultPlan,
    HoldExecution,
    HoldResult,
    HoldTransfer,
)
from kvsched.request import SamplingParams
from kvsched.runner.synthetic import CostModel

PROMPTS = [list(range(7 * i, 7 * i + 7)) for i in range(3)]
EIGHT = SamplingParams(max_tokens=8)


def engine_with(*faults: object, depth: int = 2, usable: int = 40, **settings: object) -> Engine:
    options = {"faults": FaultPlan(faults)}
    return Engine.synthetic(usable + 1, block_size=4, max_in_flight=depth, options=options, **settings)


def run(engine: Engine) -> Engine:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{i}", prompt, EIGHT)
    engine.drain()
    return engine


def happened(engine: Engine, kind: str) -> list:
    return [event for event in engine.events if event.kind == kind]


def exact(engine: Engine) -> bool:
    reference = run(engine_with(depth=1))
    return all(engine.output(f"r{i}").token_ids == reference.output(f"r{i}").token_ids for i in range(3))


@pytest.mark.parametrize(
    "fault",
    [
        FailCall(5),
        FailRequest("r1", 3, until_step=4),
        HoldResult(2, 3),
        HoldExecution(2, "step_scheduled", {"step": 3}),
        Abort("r1", 4),
    ],
    ids=lambda fault: fault.kind,
)
def test_a_fault_that_came_to_pass_is_told_once_and_not_reported(fault, recwarn):
    engine = engine_with(fault)
    engine.generate(PROMPTS, EIGHT)
    assert [event.fault["kind"] for event in happened(engine, "fault_injected")] == [fault.kind]
    assert engine.faults_never_fired == []
    assert [w for w in recwarn if w.category is FaultNeverFired] == []


@pytest.mark.parametrize(
    "fault",
    [
        FailCall(500),
        FailRequest("nobody", 1),
        FailRequest("r1", 500),
        HoldResult(500, 1),
        HoldExecution(500, "step_scheduled"),
        Abort("nobody", 1),
        Abort("r1", 500),
        FailLoad("r1"),
        HoldTransfer("r1", "load", 2),
    ],
    ids=str,
)
def test_a_fault_that_never_came_to_pass_is_reported(fault):
    engine = engine_with(fault)
    with pytest.warns(FaultNeverFired, match=f"never came to pass: {type(fault).__name__}"):
        engine.generate(PROMPTS, EIGHT)
    assert engine.faults_never_fired == [fault]
    assert happened(engine, "fault_injected") == []


def test_fail_call_fails_the_stated_call():
    engine = run(engine_with(FailCall(5), depth=1))
    (failed,) = happened(engine, "slots_failed")
    assert (failed.call, failed.request, failed.injected, failed.waiting) == (5, "r1", True, False)
    assert [event.request for event in happened(engine, "preempted")] == ["r2"]
    assert exact(engine)


def test_fail_call_of_a_waiting_request_ends_the_pass_and_preempts_nobody():
    engine = run(engine_with(FailCall(2), depth=1))
    (failed,) = happened(engine, "slots_failed")
    assert (failed.request, failed.waiting) == ("r1", True)
    assert happened(engine, "preempted") == []
    assert happened(engine, "step_scheduled")[0].request_ids == ("r0",)
    assert exact(engine)


def test_fail_request_fails_every_call_of_that_request_in_its_steps():
    engine = run(engine_with(FailRequest("r0", 3, until_step=5), depth=1))
    steps = happened(engine, "step_scheduled")
    failed = {event.step for event in happened(engine, "slots_failed") if event.request == "r0"}
    assert failed == {3, 4, 5}
    assert all("r0" not in step.request_ids for step in steps if step.step in failed)
    assert "r0" in steps[5].request_ids
    assert exact(engine)


def test_hold_result_holds_a_result_and_those_behind_it():
    engine = engine_with(HoldResult(2, 3), depth=4, landing=1)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{i}", prompt, EIGHT)
    delivered = []
    for _ in range(8):
        engine.step()
        delivered.append([event.delivered for event in happened(engine, "step_delivered")])
    #        turn  1   2    3    4    5    6          without the fault, step 2 would land in turn 3
    assert delivered[:6] == [[], [1], [1], [1], [1], [1, 2, 3, 4, 5]]
    engine.drain()
    assert exact(engine)


def test_hold_result_with_a_full_pipe_schedules_nothing_and_the_turn_passes():
    engine = engine_with(HoldResult(1, 3), depth=2, landing=1)
    engine.add_request("r0", PROMPTS[0], EIGHT)
    in_flight, calls = [], []
    for _ in range(6):
        engine.step()
        in_flight.append(engine.num_in_flight)
        calls.append(engine.scheduler.step)
    assert calls == [1, 2, 2, 2, 3, 4]
    assert in_flight == [1, 2, 2, 2, 1, 1]
    engine.drain()
    assert len(engine.output("r0").token_ids) == 8


def test_hold_execution_keeps_a_step_and_all_behind_it_from_being_computed():
    """Steps cost 1 s each. Step 2 may run only when step 4 has been scheduled."""
    engine = engine_with(
        HoldExecution(2, "step_scheduled", {"step": 4}), depth=4, landing=3, cost=CostModel(fixed_s=1.0)
    )
    engine.add_request("r0", PROMPTS[0], EIGHT)
    for turn in range(1, 4):
        engine.step()
        assert [entry.is_gated for entry in engine._in_flight] == [False, True, False][:turn]
    futures = [entry.future for entry in engine._in_flight]
    assert [future.done() for future in futures] == [True, False, False]
    engine.deliver()
    with pytest.raises(ValueError, match=r"step 2 is held by a fault until step_scheduled \{'step': 4\}"):
        engine.deliver()
    engine.step()
    assert [future.done() for future in futures] == [True, True, True]
    engine.drain()
    assert len(engine.output("r0").token_ids) == 8


def test_hold_execution_until_an_abort_of_another():
    engine = engine_with(HoldExecution(2, "request_finished", {"request": "r1"}), Abort("r1", 4), depth=4)
    run(engine)
    held = next(event for event in happened(engine, "step_delivered") if event.delivered == 2)
    ended = next(event for event in happened(engine, "request_finished") if event.request == "r1")
    assert engine.events.index(held) > engine.events.index(ended)
    assert engine.output("r1").finish_reason == "abort"
    reference = run(engine_with(depth=1))
    for request_id in ("r0", "r2"):
        assert engine.output(request_id).token_ids == reference.output(request_id).token_ids


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_gate_that_nothing_opens_ends_in_an_error_that_names_it(depth):
    engine = engine_with(HoldExecution(2, "load_landed", {"request": "r9"}), depth=depth)
    engine.add_request("r0", PROMPTS[0], EIGHT)
    with pytest.raises(EngineStuck, match=r"held steps: step 2 waits for load_landed \{'request': 'r9'\}"):
        engine.drain()
    engine.close()


def test_closing_opens_what_is_held():
    engine = engine_with(HoldExecution(1, "load_landed", {"request": "r9"}))
    engine.add_request("r0", PROMPTS[0], EIGHT)
    engine.step()
    entry = engine._in_flight[0]
    engine.close()
    assert entry.gate.is_open
    assert entry.future.done()


def test_abort_comes_right_before_the_stated_call():
    engine = run(engine_with(Abort("r1", 4)))
    steps = happened(engine, "step_scheduled")
    assert "r1" in steps[2].request_ids
    assert "r1" not in steps[3].request_ids
    ended = next(event for event in happened(engine, "request_finished") if event.request == "r1")
    assert (ended.step, ended.reason) == (3, "abort")
    assert engine.output("r1").finish_reason == "abort"


def test_faults_can_be_added_while_running():
    engine = engine_with()
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{i}", prompt, EIGHT)
    engine.step()
    engine.inject(FailRequest("r0", 3, until_step=3))
    engine.inject(Abort("r2", 4))
    with pytest.raises(FaultError, match="step is 0"):
        engine.inject(Abort("r2", 0))
    engine.drain()
    assert {event.request for event in happened(engine, "slots_failed")} == {"r0"}
    assert engine.output("r2").finish_reason == "abort"
    assert engine.faults_never_fired == []


def test_an_engine_without_events_says_what_it_cannot_hold_for():
    engine = Engine.synthetic(40, options={"record": False})
    with pytest.raises(ValueError, match="hold_execution waits for an event, but this engine has none"):
        engine.inject(HoldExecution(1, "step_scheduled"))
    planned = FaultPlan((HoldExecution(2, "step_scheduled", {"step": 3}),))
    engine = Engine.synthetic(40, max_in_flight=2, options={"record": False, "faults": planned})
    engine.generate(PROMPTS, EIGHT)
    assert engine.events == []
    assert engine.faults_never_fired == []


def test_the_same_plan_gives_the_same_run():
    plan = (FailCall(7), HoldResult(3, 2), HoldExecution(5, "step_scheduled", {"step": 6}), Abort("r2", 6))
    runs = [run(engine_with(*plan, usable=9)).events for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_fault_in_an_empty_step_counts_steps_as_the_scheduler_does():
    """max_num_seqs 1 at depth 2: while r0's last token is in flight the call is empty, but it is a step."""
    engine = engine_with(Abort("r1", 10), max_num_seqs=1)
    run(engine)
    steps = happened(engine, "step_scheduled")
    assert steps[8].request_ids == ()
    ended = next(event for event in happened(engine, "request_finished") if event.request == "r1")
    assert ended.step == 9
