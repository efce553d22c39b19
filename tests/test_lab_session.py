"""The debugger's handling: moving, stopping, changing, tables, files."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref

import pytest

import lab
from kvsched.config import ConfigError, SchedulerConfig
from kvsched.engine import Engine, EngineStuck
from kvsched.faults import Abort, FailCall, FailRequest, FaultError, FaultPlan, HoldResult
from kvsched.request import RequestRefused, SamplingParams
from kvsched.runner.synthetic import SyntheticRunner
from kvsched.trace.replay import Replay
from lab.look import SessionError
from lab.session import Session
from tests.house import ROOT
from tests.lab_runs import crowd
from tests.lab_scenes import busy, c01, outputs, preempted

# ---- the package


def test_importing_the_lab_loads_nothing_heavy_and_all_names_are_there():
    code = (
        "import sys, lab; heavy = {'torch', 'pandas', 'plotly', 'anywidget', 'numpy', 'kvsched.engine'};"
        "assert not heavy & set(sys.modules); lab.Session; assert not heavy & set(sys.modules) - {'kvsched.engine'}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    for name in lab.__all__:
        assert getattr(lab, name) is not None
    with pytest.raises(AttributeError, match=r"public names: .*Session"):
        _ = lab.Sesion


def test_the_list_of_names_is_the_list_of_imports():
    source = (ROOT / "lab" / "__init__.py").read_text()
    imported = set(re.findall(r"^    from \S+ import \S+ as (\S+)$", source, re.MULTILINE))
    assert imported == set(lab.__all__)
    modules = {path.stem for path in (ROOT / "lab").glob("*.py")}
    assert modules & set(lab._HOME) == set(), "a module would take its function's place"


# ---- moving


def test_step_back_seek_and_what_is_seen_there():
    session = c01(guard="none")
    seen = [repr(session)]
    for _ in range(6):
        seen.append(repr(session.step()).replace(f"of {session.num_steps}:", "of 6:"))
    assert session.position == session.num_steps == 6
    for step in (5, 4, 3, 2, 1, 0):
        session.back()
        assert session.position == step
        assert repr(session).partition(": ")[2] == seen[step].partition(": ")[2]
    assert session.back().position == 0
    assert session.step(3).position == 3
    assert session.num_steps == 6, "moving through the history makes no steps"
    assert session.seek(6).step().num_steps == 7


def test_a_step_shows_all_that_happened_before_the_next_decision():
    session = c01(guard="none").step(3)
    assert session.state.waiting == ["r0", "r1", "r2", "r3"]
    assert session.state.num_free == 8
    session.seek(3, "decided")
    assert session.moment == "decided"
    assert session.state.num_free == 0
    assert session.fence().returned_step.isna().tolist() == [True] * 4
    assert "just decided" in repr(session)


def test_state_at_a_step_is_the_schedulers_own():
    session = busy()
    for _ in range(12):
        session.step()
        scheduler = session.engine.scheduler
        assert session.state.running == [r.id for r in scheduler.running]
        assert session.state.waiting == [r.id for r in scheduler.waiting]
        assert session.state.num_free == scheduler.kv.pool.num_free


def test_halves_of_a_step():
    session = c01()
    session.schedule()
    assert session.engine.num_in_flight == 1
    session.schedule()
    with pytest.raises(ValueError, match="2 steps are in flight"):
        session.schedule()
    session.deliver()
    assert session.engine.num_in_flight == 1
    session.deliver()
    with pytest.raises(SessionError, match="nothing is in flight"):
        session.deliver()
    session.back()
    with pytest.raises(SessionError, match=r"seek\(2\), or fork\(\)"):
        session.deliver()


def test_what_cannot_be_done_says_what_can():
    session = c01()
    with pytest.raises(SessionError, match="steps 0 to 0"):
        session.seek(1)
    with pytest.raises(SessionError, match="give 1 or more"):
        session.step(0)
    with pytest.raises(SessionError, match="'decided' from step 1 on"):
        session.seek(0, "decided")
    with pytest.raises(SessionError, match="blocks 0 to 8"):
        session.block_history(9)
    with pytest.raises(SessionError, match="no request 'x'"):
        session.output("x")
    session.run()
    with pytest.raises(SessionError, match="add one, or go back"):
        session.step()


def test_results_land_after_a_stated_number_of_steps():
    engine = Engine(SchedulerConfig(num_blocks=9, max_in_flight=3), SyntheticRunner(), max_model_len_is_explicit=False)
    assert engine.landing is None
    assert Session(engine).engine.landing == 2
    assert Session(engine, landing="live").engine.landing is None
    assert Session(engine, landing=0).engine.landing == 0
    with pytest.raises(SessionError, match="landing is -1"):
        Session(engine, landing=-1)


# ---- stopping


def test_run_stops_at_the_step_in_which_a_condition_held():
    session = c01(guard="none")
    stop = session.run("allocation_failed")
    assert (stop.why, stop.step, session.position, session.moment) == ("condition", 3, 3, "decided")
    assert session.events[stop.index].kind == "slots_failed"
    assert repr(stop) == f"stopped at step 3, event {stop.index}: allocation_failed (r0 needs 1 block, 0 free (call 9))"
    assert session.run("fence_advanced").step == 3, "it comes behind the decision, in the same step"
    assert session.moment == "end"
    assert session.run().why == "end"
    assert session.run("preempted").why == "end"


def test_run_searches_the_history_first_and_then_goes_on():
    session = c01(guard="none")
    session.run("preempted")
    session.seek(0)
    assert session.run("preempted").step == 3
    assert session.num_steps == 3
    session.seek(1)
    stop = session.run("finished and request == 'r3'")
    assert stop.step == session.num_steps > 3


def test_breakpoints_stay_and_a_fork_has_them_too():
    session = c01(guard="none")
    session.break_on("preempted")
    session.break_on(lambda moment: moment.state.num_finished == 4)
    assert session.run().condition == "preempted"
    fork = session.fork(1)
    assert fork.run().condition == "preempted"
    session.clear_breakpoints()
    assert session.breakpoints == ()
    assert session.run().why == "end"
    fork.run()
    assert fork.last_stop.condition.startswith("function")


def test_run_never_goes_on_for_ever():
    session = c01(guard="none")
    assert session.run(max_steps=2).why == "limit"
    assert session.position == 2
    stuck = c01()
    stuck.inject(FailRequest("r0", 1))
    for other in ("r1", "r2", "r3"):
        stuck.abort(other)
    with pytest.raises(EngineStuck, match="FailRequest"):
        stuck.run()
    assert stuck.position == stuck.num_steps > 100


# ---- changing


def test_a_change_in_the_past_makes_another_branch():
    session = c01(guard="none")
    session.run()
    before = [*session.events]
    session.seek(2).inject(FailCall(9))
    assert (session.generation, session.position) == (1, 2)
    session.run()
    assert any(event.kind == "fault_injected" for event in session.events)
    (old,) = session.branches
    assert [*old.events] == before
    assert old.mode == "recording"
    alike = [event for event in before if event.step <= 2]
    assert [*session.events][: len(alike)] == alike


def test_changes_at_the_end_do_not_branch():
    session = c01().step(2)
    session.inject({"kind": "abort", "request": "r1", "step": 4})
    session.set_option("guard", "none")
    session.abort("r2")
    assert session.generation == 0
    assert session.config.guard == "none"
    session.step(2)
    ended = [e.request for e in session.events if e.kind == "request_finished" and e.reason == "abort"]
    assert ended == ["r2", "r1"]


def test_the_depth_changes_with_its_landing():
    session = c01().step(2)
    session.set_option("max_in_flight", 3)
    assert session.engine.landing == 2
    session.step(3)
    assert max(len(session.seek(step).state.flights) for step in range(session.num_steps + 1)) == 2


def test_the_pools_size_changes_from_the_start_with_the_same_inputs():
    session = c01(guard="none")
    session.add_request("late", [1, 2, 3], SamplingParams(max_tokens=2), at_step=5)
    session.run()
    assert len(preempted(session)) == 4
    session.set_option("num_blocks", 40)
    assert (session.position, session.generation, session.config.num_blocks) == (0, 1, 40)
    assert session.state.waiting == ["r0", "r1", "r2", "r3"]
    session.run()
    assert preempted(session) == []
    assert next(e.step for e in session.events if e.kind == "request_added" and e.request == "late") == 4


def test_reset_does_the_same_again():
    session = busy()
    session.run(max_steps=9)
    session.add_request("late", [1, 2, 3], SamplingParams(max_tokens=4))
    session.run()
    before = [*session.events]
    assert session.reset().position == 0
    session.run()
    assert [*session.events] == before


def test_bad_changes_are_refused_and_change_nothing():
    session = c01().step(3)
    number = len(session.events)
    session.back()
    with pytest.raises(FaultError, match="call is 0"):
        session.inject({"kind": "fail_call", "call": 0})
    with pytest.raises(ConfigError, match="unknown setting"):
        session.set_option("num_block", 3)
    with pytest.raises(ConfigError, match="guard is 'on'"):
        session.set_option("guard", "on")
    with pytest.raises(RequestRefused, match="in use"):
        session.add_request("r0", [1])
    with pytest.raises(SessionError, match="at step 4 or later"):
        session.add_request("r9", [1], at_step=3)
    assert (session.position, session.num_steps, session.branches) == (2, 3, ())
    assert len(session.events) == number


def test_requests_can_be_planned_to_arrive():
    session = c01()
    session.add_request("b", [1, 2], SamplingParams(max_tokens=2), at_step=9)
    session.add_request("a", [1, 2], SamplingParams(max_tokens=2), at_step=4)
    session.run()
    arrived = {e.request: e.step for e in session.events if e.kind == "request_added"}
    assert (arrived["a"], arrived["b"]) == (3, 8)
    assert len(session.output("b")) == 2


def test_an_engine_that_is_driven_from_outside_is_followed():
    session = c01()
    engine = session.engine
    session.step(2)
    engine.step()
    engine.abort("r3")
    engine.inject(FailCall(20))
    engine.step()
    session.run()
    assert session.num_steps == engine.scheduler.step
    fork = session.fork(session.num_steps + 1)
    assert [e._replace(time=0) if hasattr(e, "time") else e for e in fork.events] == [
        e._replace(time=0) if hasattr(e, "time") else e for e in session.events
    ]


def test_an_engine_that_has_run_before_can_be_taken_over():
    engine = Engine.synthetic(9, block_size=4, defer_block_free=True, options={"faults": FaultPlan((FailCall(6),))})
    for i in range(3):
        engine.add_request(f"r{i}", range(7), SamplingParams(max_tokens=6))
    for _ in range(4):
        engine.step()
    session = Session(engine)
    assert session.position == 4
    session.step(2)
    fork = session.fork(3)
    fork.run()
    session.run()
    assert outputs(fork) == outputs(session)
    with pytest.raises(ValueError, match="record=True"):
        Session(Engine.synthetic(9, options={"record": False}))


# ---- tables


def test_tables_say_what_the_state_says():
    session = c01(guard="none")
    session.run("preempted")
    state = session.state
    requests = session.requests()
    assert requests.index.tolist() == ["r0", "r1", "r2", "r3"]
    assert requests.status.tolist() == ["preempted"] * 4
    assert requests.place.tolist() == [0, 1, 2, 3]
    assert requests.stale.tolist() == [1] * 4
    blocks = session.blocks()
    assert blocks.state.tolist() == ["null"] + ["fenced"] * 8
    assert blocks.fence.tolist()[1:] == [2] * 8
    assert [int(n) for n in blocks.refs] == [0] + [state.refs(b) for b in range(1, 9)]
    session.seek(3)
    assert session.blocks().place_in_line.tolist()[1:] == [session.state.free_queue().index(b) for b in range(1, 9)]
    assert session.events(kind="preempted").request.tolist() == ["r3", "r2", "r1", "r0"]
    assert session.events().line.tolist()[-1].startswith("blocks 1 to 2") or len(session.events()) > 20
    assert session.steps().preempted.tolist() == [0, 0, 4]
    assert session.seek(2).steps().preempted.tolist() == [0, 0]
    with pytest.raises(ValueError, match="preempted"):
        session.events(kind="preemption")


def test_a_blocks_lineage_tells_who_had_it_behind_which_fence_and_who_got_it_next():
    session = c01(guard="none")
    session.run()
    history = session.block_history(1)
    rows = [(row.what, row.request, row.fence if row.fence > 0 else None) for row in history.itertuples()]
    assert rows[0] == ("allocated", "r0", None)
    assert ("released", "r0", 2) in rows
    assert ("freed", "r0", 2) in rows
    takers = [request for what, request, _ in rows if what == "allocated"]
    assert len(takers) > 1


def test_tables_and_texts_are_the_same_in_every_run():
    texts = []
    for _ in range(2):
        session = busy(seed=3)
        stop = session.run("preempted or guard_stopped")
        texts.append(
            [repr(session), repr(stop), repr(session.events), repr(session.explain())]
            + [table.to_csv() for table in (session.requests(), session.blocks(), session.steps(), session.events())]
        )
    assert texts[0] == texts[1]
    assert not any(re.search(r"0x[0-9a-f]{6}", text) for text in texts[0])


# ---- recordings


def test_a_recording_can_be_looked_at_and_not_changed(tmp_path):
    events = crowd().events[:]
    path = tmp_path / "run.jsonl.gz"
    crowd().save_trace(path)
    session = Session(path)
    assert session.mode == "recording"
    assert session.position == session.num_steps == events[-1].step
    assert [*session.events] == events
    replay = Replay(events)
    for step in (0, 1, 7, session.num_steps):
        assert session.seek(step).state.running == session.state.running
    assert session.seek(0).run("guard_stopped").why == "condition"
    assert replay.events[session.last_stop.index].kind == "guard_stopped"
    for change in (
        lambda: session.inject(FailCall(1)),
        lambda: session.abort("r1"),
        lambda: session.add_request("x", [1]),
        lambda: session.set_option("guard", "none"),
        session.deliver,
        session.resume,
    ):
        with pytest.raises(SessionError, match="recording"):
            change()
    session.seek(session.num_steps)
    with pytest.raises(SessionError, match="fork it to go on"):
        session.step()
    assert session.reset().position == 0


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(OSError, match=r"nothing\.jsonl"):
        Session(tmp_path / "nothing.jsonl")


# ---- listeners, and what is left behind


def test_listeners_hear_of_changes_until_they_end():
    session = c01()
    heard: list[tuple[int, int]] = []
    end = session.on_change(lambda: heard.append((session.generation, session.position)))
    session.step(2)
    session.back()
    session.inject(HoldResult(5, 1))
    session.seek(0)
    assert heard[0] == (0, 2)
    assert (0, 1) in heard
    assert (1, 1) in heard
    assert heard[-1] == (1, 0)
    number = len(heard)
    end()
    end()
    session.step()
    assert len(heard) == number


def test_a_forgotten_session_is_collected():
    session = c01().step(3)
    session.inject(Abort("r1", 5))
    session.seek(1).inject(FailCall(9))
    references = [weakref.ref(session), weakref.ref(session.engine), weakref.ref(session.branches[0])]
    del session
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
