"""Scenarios: the smallest file that does a run again, and the test made of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvsched.faults import FailCall, FailRequest, FaultPlan, HoldResult
from kvsched.request import SamplingParams
from lab.scenario import ScenarioError
from lab.session import Session
from tests.house import ROOT
from tests.lab_scenes import busy, c01, outputs, tiny_model_remake


def eventful() -> Session:
    """Everything that a scenario can hold."""
    session = busy(guard="none")
    session.inject(FailCall(9)).inject(FailCall(9999))
    session.step(4)
    session.set_option("max_in_flight", 3)
    session.inject(HoldResult(7, 2))
    session.step(3)
    session.abort("r2")
    session.add_request("late", [5, 6, 7], SamplingParams(max_tokens=3, seed=4), priority=2)
    session.schedule()
    session.deliver()
    session.set_option("guard", "stop_retry")
    session.run()
    return session


def test_a_scenario_does_the_run_again(tmp_path):
    session = eventful()
    session.save_scenario(tmp_path / "s.json")
    again = Session.load_scenario(tmp_path / "s.json")
    assert [*again.events] == [*session.events]
    assert again.position == session.position
    assert again.fork(3, guard="stop_retry").run().why == "end"


def test_it_holds_only_what_is_needed(tmp_path):
    session = c01(guard="none")
    session.run("preempted")
    session.save_scenario(tmp_path / "s.json")
    data = json.loads((tmp_path / "s.json").read_text())
    assert set(data) == {"format", "settings", "script"}
    assert data["settings"] == {
        "num_blocks": 9,
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "guard": "none",
        "defer_block_free": True,
    }
    assert [*data["script"][0]["add"]] == ["request", "prompt", "sampling"]
    assert data["script"][-1] == {"turn": 3}
    session = eventful()
    session.save_scenario(tmp_path / "s.json")
    assert "9999" not in (tmp_path / "s.json").read_text(), "a fault that never came to pass is left out"


def test_it_ends_where_one_looks(tmp_path):
    session = eventful()
    session.seek(5).save_scenario(tmp_path / "s.json")
    again = Session.load_scenario(tmp_path / "s.json")
    assert again.num_steps == 5
    assert [*again.events] == [*session.events][: len(again.events)]
    assert "late" not in (tmp_path / "s.json").read_text()


def test_requests_still_to_come_come(tmp_path):
    session = c01()
    session.add_request("later", [4, 5], SamplingParams(max_tokens=2), at_step=6)
    session.step(2).save_scenario(tmp_path / "s.json")
    again = Session.load_scenario(tmp_path / "s.json")
    again.run()
    session.run()
    assert [*again.events] == [*session.events]


def test_a_plan_given_to_the_engine_is_in_it(tmp_path):
    from kvsched.engine import Engine

    plan = FaultPlan((FailRequest("r0", 2, 3), FailCall(1000)))
    engine = Engine.synthetic(9, block_size=4, options={"faults": plan})
    engine.add_request("r0", range(7), SamplingParams(max_tokens=4))
    session = Session(engine)
    session.run()
    session.save_scenario(tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text())["faults"] == [
        {"kind": "fail_request", "request": "r0", "step": 2, "until_step": 3}
    ]
    assert [*Session.load_scenario(tmp_path / "s.json").events] == [*session.events]


def test_a_run_on_a_model_is_done_again_without_it(tmp_path):
    from kvsched.config import SchedulerConfig

    remake = tiny_model_remake()
    config = SchedulerConfig(num_blocks=13, block_size=4, max_model_len=40, max_num_batched_tokens=16)
    session = Session(remake(config), remake=remake)
    for i in range(4):
        session.add_request(f"r{i}", range(3 + i, 9 + i), SamplingParams(max_tokens=7))
    session.run()
    session.save_scenario(tmp_path / "s.json")
    again = Session.load_scenario(tmp_path / "s.json")
    assert outputs(again) == outputs(session)
    assert [e for e in again.events if e.kind == "blocks_allocated"] == [
        e for e in session.events if e.kind == "blocks_allocated"
    ]
    session.to_pytest(tmp_path / "test_model.py")
    run_alone(tmp_path, "test_model.py")
    session.engine.close()


def run_alone(folder, name: str, expect: int = 0) -> str:
    """Run a written test in a process where neither the lab nor torch can be imported."""
    (folder / "conftest.py").write_text(
        "import sys\nfor name in ('lab', 'torch', 'pandas', 'numpy'): sys.modules[name] = None\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(folder / "none.ini"), name]
    (folder / "none.ini").write_text("[pytest]\n")
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


def test_the_test_runs_by_itself_and_can_fail(tmp_path):
    session = eventful()
    session.to_pytest(tmp_path / "test_report.py")
    assert "1 passed" in run_alone(tmp_path, "test_report.py")
    text = (tmp_path / "test_report.py").read_text()
    assert max(map(len, text.splitlines())) < 400
    (tmp_path / "test_report.py").write_text(text.replace("guard='none'", "guard='stop_retry'", 1))
    assert "assert" in run_alone(tmp_path, "test_report.py", expect=1)


def test_a_test_needs_a_name_that_pytest_finds(tmp_path):
    with pytest.raises(ScenarioError, match="test_"):
        c01().to_pytest(tmp_path / "report.py")


HEAD = '{"format": "kvsched-scenario/1", "settings": {"num_blocks": 9}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "not a scenario"),
        ('{"format": "kvsched-scenario/2"}', "not a scenario in format"),
        (HEAD + "}", "its script is missing"),
        ('{"format": "kvsched-scenario/1", "settings": {}, "script": []}', "num_blocks is missing"),
        (HEAD + ', "script": [], "code": "x"}', "unknown key code"),
        (HEAD + ', "script": [{"go": 1}]}', "entry 1"),
        (HEAD + ', "script": [{"deliver": 1}]}', "nothing is in flight"),
        (HEAD + ', "script": [{"turn": "x"}]}', "entry 1"),
        (HEAD + ', "script": [{"add": {"prompt": [1]}}]}', "request"),
        (HEAD + ', "script": [{"inject": {"kind": "x"}}]}', "fault"),
        (HEAD + ', "faults": [{"kind": "x"}], "script": []}', "unknown kind of fault"),
    ],
)
def test_what_is_no_scenario_is_refused_with_its_place(tmp_path, text, says):
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=says) as caught:
        Session.load_scenario(path)
    assert "s.json" in str(caught.value)
