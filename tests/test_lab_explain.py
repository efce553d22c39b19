"""Explanations: everybody is spoken of once, with the right reason and the right numbers."""

from __future__ import annotations

import re

import pytest

from kvsched.config import SchedulerConfig
from kvsched.connector.scripted import KvRule, ScriptedConnector
from kvsched.faults import FailCall
from kvsched.request import Request, SamplingParams
from kvsched.sched.scheduler import Scheduler
from kvsched.trace.events import EVENT_TYPES, VERSION, RunStarted
from kvsched.trace.replay import Replay
from kvsched.trace.state import Queue
from lab.explain import explain_step
from lab.look import SessionError
from lab.sentences import describe
from lab.session import Session
from tests.lab_runs import crowd
from tests.lab_scenes import c01
from tests.test_lab_fork import eventful


def why(session: Session, request: str, step: int | None = None) -> tuple[str, str]:
    """(outcome, sentence) about one request."""
    (reason,) = [r for r in session.explain(step).reasons if request in r.requests]
    return reason.outcome, reason.sentence


@pytest.mark.parametrize("seed", range(10))
def test_everybody_is_spoken_of_once_with_what_they_got(seed):
    session = eventful(seed)
    for step in range(1, session.num_steps + 1):
        before = session.seek(step - 1).state
        explanation = session.explain(step)
        told = [request for reason in explanation.reasons for request in reason.requests]
        there = [r.id for queue in (Queue.RUNNING, Queue.LOADING, Queue.WAITING) for r in before.queue(queue)]
        assert sorted(told) == sorted(there), f"step {step}"
        scheduled = next(e for e in session.events if e.kind == "step_scheduled" and e.step == step)
        given = dict(zip(scheduled.request_ids, scheduled.num_tokens, strict=True))
        assert {r.requests[0]: r.num_tokens for r in explanation.reasons if r.num_tokens} == given
        preempted = {e.request for e in session.events if e.kind == "preempted" and e.step == step and e.wanted_by}
        assert {r.requests[0] for r in explanation.reasons if r.outcome == "preempted"} == preempted
        assert len(explanation) == 1 + len(explanation.reasons)


def test_the_cascade():
    session = c01(guard="none")
    session.run("preempted")
    explanation = session.explain()
    assert explanation[0] == (
        "Step 3: 0 tokens of a budget of 64 for 0 of 4 running requests, 4 preempted. "
        "4 calls for slots; 0 blocks free before, 0 after."
    )
    outcome, text = why(session, "r3")
    assert outcome == "preempted"
    for part in (
        "r0 needs 1 block, 0 are free (call 9)",
        "it is the one admitted last",
        "8 computed tokens are lost",
        "the output of 1 token in flight will be delivered all the same",
        "its 2 blocks return when the fence has passed 2 (it stands at 1)",
    ):
        assert part in text
    assert "it is itself the one admitted last" in why(session, "r0")[1]


def test_the_guard():
    session = c01()
    session.run("guard_stopped")
    outcome, text = why(session, "r0")
    assert outcome == "stopped by the guard"
    assert "r0 needs 1 block, 0 are free" in text
    assert "The victim would be r3" in text
    assert "last scheduled at fence 2, and the fence stands at 1" in text
    assert why(session, "r2")[0] == "not reached"
    assert "ended at r0" in why(session, "r2")[1]
    session.step()
    assert "after r3 lost its blocks for it" in why(session, "r0")[1]
    assert "return to the pool at once" in why(session, "r3")[1]


def test_an_injected_failure_is_called_one():
    session = c01(enable_prefix_caching=True)
    session.inject(FailCall(5))
    session.step(2)
    assert any("a fault makes call 5 for slots, by r0, fail" in line for line in session.explain())


def test_prefill_chunks_and_the_budget():
    session = Session.synthetic(40, block_size=4, max_num_batched_tokens=10, defer_block_free=False)
    session.add_request("long", range(23), SamplingParams(max_tokens=4))
    session.add_request("next", range(50, 55), SamplingParams(max_tokens=4))
    session.step()
    assert why(session, "long") == (
        "admitted",
        "long is admitted and gets 10 tokens of its 23 known ones (13 are left: the step's budget is used up); "
        "new blocks 1 to 3 (39 were free).",
    )
    assert why(session, "next")[1] == "next is not looked at: the budget of 10 tokens is used up."
    session.step(2)
    assert "gets 3 tokens of its 23 known ones, from position 20 on" in why(session, "long")[1]
    assert "its 6 blocks have room" in why(session, "long")[1] or "new block" in why(session, "long")[1]


def test_the_threshold_is_named():
    session = Session.synthetic(40, block_size=4, long_prefill_token_threshold=6, max_num_batched_tokens=64)
    for name in ("a", "b"):
        session.add_request(name, range(20), SamplingParams(max_tokens=2))
    session.step()
    assert "(14 are left: long_prefill_token_threshold is 6)" in why(session, "a")[1]


def test_seats_blocks_and_unsplit_prompts():
    session = Session.synthetic(9, block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    for name in ("a", "b", "c"):
        session.add_request(name, [ord(name)] * 6, SamplingParams(max_tokens=3))
    session.step()
    assert why(session, "c")[1] == "c is not looked at: 2 requests run, max_num_seqs is 2."
    session = Session.synthetic(5, block_size=4, max_num_batched_tokens=64)
    for name in ("a", "b", "c"):
        session.add_request(name, [ord(name)] * 9, SamplingParams(max_tokens=3))
    session.step()
    outcome, text = why(session, "b")
    assert outcome == "not admitted"
    assert "its whole sequence needs 3 blocks more, 1 may be used (call 2)" in text
    assert why(session, "c")[1] == "c is not looked at: the pass ended at b."
    whole = Session.synthetic(
        40, block_size=4, max_num_batched_tokens=16, max_model_len=16, enable_chunked_prefill=False
    )
    for name in ("a", "b"):
        whole.add_request(name, [ord(name)] * 10, SamplingParams(max_tokens=3))
    whole.step()
    assert "6 tokens are left of the budget of 16, fewer than it must compute at once" in why(whole, "b")[1]


def sentences(session: Session, outcome: str) -> list[str]:
    """Those of all steps that tell such an outcome."""
    reasons = [reason for step in range(1, session.num_steps + 1) for reason in session.explain(step).reasons]
    return [reason.sentence for reason in reasons if reason.outcome == outcome]


def test_the_last_token_in_flight_and_stale_output():
    session = c01(guard="none")
    session.run()
    idle = sentences(session, "nothing to do")
    assert any("the one that yields its last token is in flight" in text for text in idle)
    skipped = sentences(crowd(guard="none"), "skipped")
    told = r"output of \d tokens? from before its preemption is still in flight"
    assert any(re.search(told, text) for text in skipped)


def test_synchronous_requests_wait_for_their_token():
    session = c01(async_scheduling=False)
    session.step(2)
    assert why(session, "r0")[1] == "r0 has nothing to compute: all its 7 known tokens are computed or in flight."


def test_priorities():
    session = Session.synthetic(9, block_size=4, policy="priority", defer_block_free=False, enable_prefix_caching=False)
    for i in range(4):
        session.add_request(f"r{i}", range(7), SamplingParams(max_tokens=8), priority=3 - i, arrival_time=float(i))
    session.run("preempted")
    (reason,) = [r for r in session.explain().reasons if r.outcome == "preempted"][:1]
    assert "the one with the largest (priority, arrival): 3, 0" in reason.sentence
    assert reason.requests == ("r0",)


def test_a_victim_that_was_already_scheduled_gives_its_tokens_back():
    session = Session.synthetic(9, block_size=4, policy="priority", defer_block_free=False, enable_prefix_caching=False)
    session.add_request("low", range(5), SamplingParams(max_tokens=9), priority=9)
    session.step()
    session.add_request("high", range(23), SamplingParams(max_tokens=9), priority=0)
    assert session.run("unscheduled").why == "condition"
    assert "1 token given to it in this step went back to the budget" in why(session, "low")[1]


def test_prefix_hits_are_named():
    session = Session.synthetic(20, block_size=4)
    session.add_request("a", range(9), SamplingParams(max_tokens=2))
    session.step()
    session.add_request("b", range(9), SamplingParams(max_tokens=2))
    session.step()
    assert "(8 found in the prefix cache (block 1 to 2))" in why(session, "b")[1]


def test_loads_from_outside():
    events = [RunStarted(0, VERSION, SchedulerConfig(num_blocks=20, block_size=4).to_dict(), "bare", {})]
    rules = {"r0": KvRule(external_tokens=8), "r1": KvRule(unknown_lookups=1)}
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=20, block_size=4), emit=events.append, connector=ScriptedConnector(rules, 4)
    )
    for name in rules:
        scheduler.add_request(Request(name, range(11), SamplingParams(max_tokens=2)))
    step = scheduler.schedule()
    scheduler.schedule()
    replay = Replay(events)
    start, end = replay.index_of_step(0), replay.index_of_step(1)
    lines = explain_step(replay.state_at(start), events[start:end])
    assert step.is_empty
    assert any("r0 is given blocks 1 to 2 and waits for a load of 8 tokens" in line for line in lines)
    assert any("r1 is passed over" in line and "does not know yet" in line for line in lines)
    start, end = replay.index_of_step(1), replay.index_of_step(2)
    lines = explain_step(replay.state_at(start), events[start:end])
    assert any("r0 is passed over and keeps its place: its load has not landed" in line for line in lines)


def test_step_0_and_steps_that_are_not_there():
    session = c01()
    assert [*session.explain()] == ["Step 0: nothing has been decided yet; 4 requests waiting."]
    with pytest.raises(SessionError, match="steps 0 to 0"):
        session.explain(1)


def test_as_a_table():
    session = c01(guard="none")
    session.run("preempted")
    table = session.explain().table()
    assert table.request.tolist() == ["r3", "r2", "r1", "r0"], "in the order in which it happened"
    assert table.outcome.unique().tolist() == ["preempted"]
    assert isinstance(session.explain(), list)
    assert "object at" not in repr(session.explain())


def test_every_kind_of_event_has_a_line():
    seen = {}
    for session in (eventful(3), crowd()):
        for event in session.events:
            seen.setdefault(event.kind, describe(event))
    assert all(line and "(" not in line[:1] for line in seen.values())
    assert seen["preempted"].endswith("now")
    assert set(seen) <= set(EVENT_TYPES)
    assert len(seen) > 15
