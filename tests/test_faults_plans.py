"""Plans of faults as plain data: to JSON and back, and what is refused with what words."""

from __future__ import annotations

import json

import pytest

from kvsched.faults import (
    Abort,
    FailCall,
    FailLoad,
    FailRequest,
    FaultError,
    FaultPlan,
    FaultWatch,
    HoldExecution,
    HoldResult,
    HoldTransfer,
    fault_from_dict,
    fault_to_dict,
)

EVERY_KIND = (
    FailCall(3),
    FailRequest("r1", 2),
    FailRequest("r1", 2, until_step=5),
    HoldResult(4, 2),
    HoldExecution(2, "load_landed", {"request": "r2"}),
    HoldExecution(2, "step_scheduled"),
    Abort("r0", 7),
    FailLoad("r0"),
    FailLoad("r0", occurrence=2, block=1),
    HoldTransfer("r0", "save", 3),
)


def test_a_plan_survives_the_way_to_json_and_back(tmp_path):
    plan = FaultPlan(EVERY_KIND)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert FaultPlan.load(path) == plan
    assert FaultPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("fault", EVERY_KIND, ids=lambda fault: fault.kind)
def test_the_plain_form_of_a_fault(fault):
    data = fault_to_dict(fault)
    assert data["kind"] == fault.kind
    assert fault_from_dict(json.loads(json.dumps(data))) == fault


def test_fields_with_defaults_may_be_left_out():
    assert fault_from_dict({"kind": "fail_load", "request": "r0"}) == FailLoad("r0", 1, 0)
    assert fault_from_dict({"kind": "fail_request", "request": "r0", "step": 2}) == FailRequest("r0", 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"kind": "fail_everything"}, r"unknown kind of fault 'fail_everything'; known kinds: fail_call, "),
        ({}, r"unknown kind of fault None"),
        ({"kind": "fail_call"}, r"fail_call: a field is missing; fields: call"),
        ({"kind": "fail_call", "call": 1, "cal": 2}, r"fail_call: unknown field cal; fields: call"),
        ({"kind": "fail_call", "call": 0}, r"fail_call: call is 0; it must be a whole number from 1 on"),
        ({"kind": "fail_call", "call": "3"}, r"fail_call: call is '3'; it must be a whole number"),
        ({"kind": "fail_call", "call": True}, r"fail_call: call is True; it must be a whole number"),
        ({"kind": "fail_call", "call": None}, r"fail_call: call is None; it must be a whole number"),
        ({"kind": "hold_result", "step": 1, "steps": 0}, r"hold_result: steps is 0"),
        ({"kind": "abort", "request": 5, "step": 1}, r"abort: request is 5; give a request's id"),
        ({"kind": "fail_load", "request": "r", "block": -1}, r"fail_load: block is -1; it must be .* from 0 on"),
        ({"kind": "fail_request", "request": "r", "step": 5, "until_step": 4}, r"until_step is 4, before step 5"),
        (
            {"kind": "hold_execution", "step": 1, "until": "the_end"},
            r"hold_execution: until is 'the_end'; name an event: run_started, ",
        ),
        (
            {"kind": "hold_execution", "step": 1, "until": "load_landed", "where": {"req": "r"}},
            r"hold_execution: load_landed has no req; its fields: step, request",
        ),
        (
            {"kind": "hold_execution", "step": 1, "until": "load_landed", "where": "r"},
            r"hold_execution: where is 'r'; give",
        ),
        (
            {"kind": "hold_transfer", "request": "r", "transfer": "copy", "steps": 1},
            r"hold_transfer: transfer is 'copy'; choose 'load' or 'save'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(data, words):
    with pytest.raises(FaultError, match=words):
        fault_from_dict(data)


def test_a_plan_made_in_code_is_checked_too():
    with pytest.raises(FaultError, match="call is 0"):
        FaultPlan((FailCall(0),))
    with pytest.raises(FaultError, match="call is -1"):
        FaultWatch().add(FailCall(-1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as a plan of faults"),
        ("[]", "a plan of faults is a JSON object with 'version' and 'faults'"),
        ('{"faults": []}', "plan has version None; this kvsched reads version 1"),
        ('{"version": 2, "faults": []}', "plan has version 2; this kvsched reads version 1"),
        ('{"version": 1}', "'faults' is None; give a list of faults"),
        ('{"version": 1, "faults": {"kind": "abort"}}', "'faults' is .*; give a list of faults"),
        ('{"version": 1, "faults": ["abort"]}', "'abort' is no fault"),
        ('{"version": 1, "fault": [], "faults": []}', "unknown entry fault; it holds"),
    ],
)
def test_a_file_that_holds_no_plan_is_named(tmp_path, text, words):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(FaultError, match=words):
        FaultPlan.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FaultError, match=r"none\.json: cannot be read as a plan of faults"):
        FaultPlan.load(tmp_path / "none.json")


def test_the_watch_tells_what_came_to_pass_first_and_what_did_not():
    watch = FaultWatch((FailCall(2), FailRequest("r1", 3, until_step=4), Abort("r0", 9)))
    assert watch.fails_slots
    assert watch.slots_fault("r0", 1, 1) is None
    assert watch.slots_fault("r0", 2, 1) == FailCall(2)
    assert watch.note(FailCall(2), 1)
    assert [watch.slots_fault("r1", 7, step) is not None for step in (2, 3, 4, 5)] == [False, True, True, False]
    assert watch.note(FailRequest("r1", 3, until_step=4), 3)
    assert not watch.note(FailRequest("r1", 3, until_step=4), 4)
    assert watch.fired == [(FailCall(2), 1), (FailRequest("r1", 3, until_step=4), 3)]
    assert watch.never_fired == [Abort("r0", 9)]
    assert not FaultWatch((Abort("r0", 1),)).fails_slots
