"""Two sessions side by side: where they part, and what each came to."""

from __future__ import annotations

import pytest

from lab.comparison import Comparison, compare
from lab.look import SessionError
from lab.session import Session
from tests.lab_scenes import busy, c01


def test_the_guard_off_and_on():
    comparison = compare(c01(guard="none"), c01(), names=("guard off", "guard on"))
    first = comparison.first
    assert first.step == 3
    assert (first.left.kind, first.right.kind) == ("preempted", "guard_stopped")
    totals = comparison.totals()
    assert totals.loc["preemptions"].tolist() == [4, 2]
    assert totals.loc["steps"].tolist() == [17, 17]
    assert totals.loc["tokens delivered"].tolist() == [32, 32]
    steps = comparison.steps()
    assert steps.same.tolist()[:3] == [True, True, False]
    assert steps["preempted guard off"].tolist()[2] == 4
    assert comparison.settings().to_dict() == {"guard off": {"guard": "none"}, "guard on": {"guard": "stop_retry"}}
    left, right = comparison.explain()
    assert "4 preempted" in left[0]
    assert "The guard ends the retry" in "\n".join(right)


def test_its_text_is_the_same_in_every_run():
    texts = [repr(compare(c01(guard="none"), c01(), names=("off", "on"))) for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("first difference in step 3:\n  off: r3 preempted for r0")


def test_equal_runs_have_no_difference():
    comparison = compare(busy(), busy())
    assert comparison.first is None
    assert comparison.explain() is None
    assert comparison.steps().same.all()
    assert repr(comparison).startswith("no difference so far")


def test_a_fork_against_what_it_came_from():
    session = busy(guard="none")
    session.run()
    fork = session.fork(4, guard="none")
    assert compare(session, fork).first is None, "a setting that changes nothing is no difference"
    fork = session.fork(6, abort="r1")
    comparison = compare(session, fork)
    assert comparison.first.step == 5
    assert comparison.first.right.kind == "request_finished"


def test_lock_step():
    comparison = Comparison(c01(guard="none"), c01())
    comparison.step(2)
    assert comparison.first is None, "nothing differs yet"
    assert [s.position for s in comparison.sessions] == [2, 2]
    comparison.step()
    assert comparison.first.step == 3
    comparison.back()
    assert [s.position for s in comparison.sessions] == [2, 2]
    comparison.run()
    assert [s.position for s in comparison.sessions] == [17, 17]
    comparison.seek(3)
    assert [s.position for s in comparison.sessions] == [3, 3]
    with pytest.raises(SessionError, match="steps 0 to 17"):
        comparison.seek(18)


def test_a_side_that_ends_sooner_stays_at_its_end():
    short, long = c01(), c01()
    for i in range(3):
        short.abort(f"r{i}")
    comparison = compare(short, long)
    assert short.num_steps < long.num_steps
    assert [s.position for s in comparison.sessions] == [short.num_steps, long.num_steps]
    comparison.back()
    assert comparison.left.position == min(short.num_steps, long.num_steps - 1)
    with pytest.raises(SessionError, match="nothing is left"):
        comparison.run().step()


def test_recordings_can_be_compared(tmp_path):
    from kvsched.trace.writer import write_trace

    paths = []
    for name, guard in (("a", "none"), ("b", "stop_retry")):
        session = c01(guard=guard)
        session.run()
        paths.append(tmp_path / f"{name}.jsonl")
        write_trace(paths[-1], session.events)
    assert compare(*map(Session, paths)).first.step == 3


def test_what_never_ends_is_stopped():
    left, right = c01(guard="none"), c01()
    comparison = compare(left, right, max_steps=5)
    assert [s.position for s in comparison.sessions] == [5, 5]
    assert comparison.first.step == 3
    assert Comparison(c01(), c01()).first is None
