"""Forks: the same history up to a step, and from there what the change makes of it; on the model, exact tokens."""

from __future__ import annotations

import random
from collections import deque

import pytest

from kvsched.config import SchedulerConfig
from kvsched.connector.base import ConnectorPair
from kvsched.engine import Engine
from kvsched.faults import Abort, FailCall, FailRequest, HoldExecution, HoldResult
from kvsched.kv.hashing import block_hash
from kvsched.request import Request, RequestRefused, SamplingParams
from kvsched.runner.synthetic import SyntheticRunner
from kvsched.sched.scheduler import Scheduler
from kvsched.step import RequestData, ScheduledStep, StepResult
from kvsched.trace.events import VERSION, Event, RunStarted
from kvsched.trace.writer import write_trace
from lab.fork import ForkError
from lab.journal import NotEnough, commands_of
from lab.rebuild import Mirror, plan_prefills
from lab.session import Session
from tests.lab_scenes import busy, c01, outputs, preempted, tiny_model_remake


def decisions(session: Session, first: int = 0) -> list[Event]:
    """What was decided from step `first` on, without times."""
    return [
        e._replace(time=0.0) if hasattr(e, "time") else e
        for e in session.events
        if e.kind not in ("run_started", "fault_injected") and e.step >= first
    ]


# ---- the same again


def eventful(seed: int) -> Session:
    """A run in which much happens, by one seed."""
    draw = random.Random(seed)
    session = busy(
        seed=seed,
        max_in_flight=draw.choice((1, 2, 3)),
        async_scheduling=draw.random() < 0.8,
        enable_prefix_caching=draw.random() < 0.7,
        policy=draw.choice(("fcfs", "priority")),
        guard=draw.choice(("none", "stop_retry")),
        reserve_full_isl=draw.random() < 0.5,
    )
    actions = [
        lambda: session.inject(FailCall(draw.randrange(1, 60))),
        lambda: session.inject(FailRequest("r1", session.num_steps + 1, session.num_steps + 2)),
        lambda: session.inject(HoldResult(session.num_steps + 1, draw.randrange(1, 3))),
        lambda: session.inject(Abort(f"r{draw.randrange(6)}", session.num_steps + 2)),
        lambda: session.abort(f"r{draw.randrange(6)}"),
        lambda: session.set_option("guard", draw.choice(("none", "stop_retry"))),
        lambda: session.set_option("defer_block_free", draw.random() < 0.5),
        lambda: session.set_option("max_in_flight", draw.choice((1, 2, 3))),
        lambda: session.engine.scheduler.reset_prefix_cache(preempt_running=draw.random() < 0.5),
        lambda: session.add_request(f"x{session.num_steps}", [3] * draw.randrange(1, 9), SamplingParams(max_tokens=3)),
    ]
    while session.can_step and session.num_steps < 60:
        if draw.random() < 0.2:
            draw.choice(actions)()
        session.step()
    return session


@pytest.mark.parametrize("seed", range(12))
def test_a_fork_at_any_step_has_the_same_history(seed):
    session = eventful(seed)
    for step in range(1, session.num_steps + 2, 5):
        fork = session.fork(step)
        known = len(fork.events)
        assert fork.num_steps == step - 1
        assert fork.events[1:known] == session.events[1:known]
        assert fork.engine.num_in_flight == len(session.seek(max(step - 1, 0)).state.flights)


@pytest.mark.parametrize("seed", range(12))
def test_a_recording_is_as_good_as_its_engine(seed, tmp_path):
    """The journal read back from events drives a fresh engine to the same decisions, at every step."""
    session = eventful(seed)
    path = tmp_path / "run.jsonl"
    write_trace(path, session.events)
    recording = Session(path)
    for step in range(1, session.num_steps + 2, 7):
        fork = recording.fork(step)
        assert decisions(fork) == decisions(session)[: len(decisions(fork))]
        assert outputs(fork.fork(fork.num_steps + 1)) == outputs(fork)
    fork.run()
    assert fork.run().why == "end"


def test_a_run_whose_results_came_live_can_be_forked():
    session = busy()
    live = Session(Engine.synthetic(13, block_size=4, max_in_flight=3, defer_block_free=True), landing="live")
    for i in range(4):
        live.add_request(f"r{i}", range(5), SamplingParams(max_tokens=5))
    live.run()
    for step in (1, 3, 6, live.num_steps + 1):
        fork = live.fork(step)
        assert fork.events[1:] == live.events[1 : len(fork.events)]
    assert session.engine.landing == 1


def test_a_fork_goes_on_as_the_old_run_did():
    session = busy()
    session.run()
    for step in (1, 2, 5, 9, 14):
        fork = session.fork(step)
        fork.run()
        assert [*fork.events] == [*session.events], f"fork at {step}"


def test_a_fork_of_a_fork_of_a_fork():
    session = busy()
    session.run()
    fork = session.fork(4).fork(3).fork(2)
    fork.run()
    assert [*fork.events] == [*session.events]


def test_a_held_step_is_still_held_in_the_fork():
    session = busy()
    session.inject(HoldExecution(4, "preempted", {}))
    session.run(max_steps=5)
    fork = session.fork(5)
    assert fork.engine.num_in_flight == session.seek(4).state.flights.__len__()
    session.seek(session.num_steps)
    fork.run(max_steps=3)
    assert decisions(fork) == decisions(session)[: len(decisions(fork))]


# ---- the change


def test_the_cascade_forked_at_that_very_step_with_the_guard_on():
    session = c01(guard="none")
    stop = session.run("preempted")
    fork = session.fork(stop.step, guard="stop_retry")
    fork.run()
    session.run()
    assert len(preempted(session)) == 4
    assert preempted(fork) == [(4, "r3"), (4, "r2")]
    assert session.num_steps == fork.num_steps == 17
    assert outputs(fork) == outputs(session)
    other = c01(guard="stop_retry")
    other.run()
    assert decisions(fork, first=4) == decisions(other, first=4)


def test_faults_aborts_and_settings_change_from_a_step_on():
    session = c01(guard="none")
    session.run()
    fork = session.fork(5, {"faults": [{"kind": "fail_call", "call": 20}, Abort("r3", 7)], "abort": "r2"})
    assert [e.request for e in fork.events if e.kind == "request_finished"] == ["r2"]
    fork.run()
    kinds = [e.fault["kind"] for e in fork.events if e.kind == "fault_injected"]
    assert sorted(kinds) == ["abort", "fail_call"]
    fork = session.fork(2, {"max_in_flight": 3, "defer_block_free": False})
    assert (fork.config.max_in_flight, fork.engine.landing, fork.config.defer_block_free) == (3, 2, False)


def test_faults_can_be_dropped_from_a_step_on():
    session = c01()
    session.inject(FailCall(5)).inject(FailRequest("r1", 2)).inject(Abort("r2", 6)).inject(HoldResult(4, 3))
    session.step(8)
    fork = session.fork(4, drop_faults=True)
    assert fork.faults == [FailCall(5), FailRequest("r1", 2, 3)]
    fork.run()
    later = [e for e in fork.events if e.kind == "slots_failed" and e.injected and e.step >= 4]
    assert later == []
    assert all(len(tokens) == 8 for tokens in outputs(fork).values())


def test_clients_come_as_they_came_and_the_debugger_does_not():
    session = c01()
    session.step(4)
    session.add_request("late", [1, 2, 3], SamplingParams(max_tokens=2))
    session.inject(FailCall(1000))
    session.step(2)
    session.abort("r1")
    session.set_option("guard", "none")
    session.run()
    fork = session.fork(2)
    fork.run()
    assert fork.config.guard == "stop_retry"
    assert fork.faults == []
    came = {(e.kind, e.step) for e in fork.events if getattr(e, "request", "") in ("late", "r1")}
    assert ("request_added", 4) in came
    assert ("request_finished", 6) in came


def test_other_settings_change_from_the_start_only():
    session = c01(guard="none")
    session.run()
    with pytest.raises(ForkError, match=r"num_blocks cannot change at step 3.*fork\(0"):
        session.fork(3, num_blocks=20)
    fork = session.fork(0, num_blocks=20, policy="priority")
    assert (fork.num_steps, fork.state.num_free) == (0, 19)
    fork.run()
    assert preempted(fork) == []
    with pytest.raises(RequestRefused, match="raise num_blocks"):
        session.fork(0, num_blocks=2)


def test_what_makes_no_sense_is_refused():
    session = c01().step(2)
    with pytest.raises(ForkError, match="fork at steps 0 to 3"):
        session.fork(4)
    with pytest.raises(ValueError, match="unknown setting speed"):
        session.fork(1, speed=3)
    with pytest.raises(ValueError, match="fail_call: call is 0"):
        session.fork(1, faults=[{"kind": "fail_call", "call": 0}])
    assert session.num_steps == 2


def test_the_old_run_is_left_alone():
    session = busy().step(6)
    before, engine = [*session.events], session.engine
    fork = session.fork(3, guard="none")
    fork.run()
    assert [*session.events] == before
    assert session.engine is engine
    session.step()
    assert session.num_steps == 7


def test_a_run_that_does_not_repeat_is_found_out():
    calls = iter(range(10**6))
    session = Session.synthetic(13, block_size=4, token_fn=lambda request, position: next(calls))
    session.add_request("r0", range(5), SamplingParams(max_tokens=9))
    session.step(5)
    with pytest.raises(ForkError, match="step 2 came out otherwise"):
        session.fork(5)


def test_an_engine_that_cannot_be_made_anew_says_what_is_missing():
    class OtherRunner:
        """Not what `fork` knows how to make."""

        def __init__(self):
            inner = SyntheticRunner()
            self.submit, self.now, self.advance, self.close = inner.submit, inner.now, inner.advance, inner.close

    engine = Engine(SchedulerConfig(num_blocks=9), OtherRunner(), max_model_len_is_explicit=False)
    with pytest.raises(ForkError, match="remake="):
        Session(engine).fork(0)


# ---- recordings from elsewhere


def test_a_bare_schedulers_recording_can_be_forked(tmp_path):
    """No engine, no faults told: failed calls are read from the events that say `injected`."""
    config = SchedulerConfig(num_blocks=9, block_size=4, max_num_batched_tokens=32, max_model_len=32)
    events: list[Event] = [RunStarted(0, VERSION, config.to_dict() | {"defers_frees": False}, "bare", {})]
    scheduler = Scheduler(config, emit=events.append, slots_fault=lambda _, call, __: call == 7, cap_at_pool=True)
    for i in range(3):
        scheduler.add_request(Request(f"r{i}", [i] * 6, SamplingParams(max_tokens=6)))
    in_flight: deque = deque()
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        if step.request_ids:
            in_flight.append(step)
        if len(in_flight) == 2 or not step.request_ids:
            oldest = in_flight.popleft()
            rows = tuple(() if i in oldest.prefill_chunks else (9,) for i in oldest.request_ids)
            scheduler.update(oldest, StepResult(oldest.step, rows))
    write_trace(tmp_path / "bare.jsonl", events)
    recording = Session(tmp_path / "bare.jsonl")
    fork = recording.fork(recording.num_steps + 1)
    assert decisions(fork) == decisions(recording)
    assert fork.faults == [FailCall(7)]


def test_a_recording_with_a_connector_does_not_tell_enough():
    from kvsched.connector.scripted import KvRule, ScriptedConnector
    from kvsched.trace.replay import Replay

    events: list[Event] = []
    config = SchedulerConfig(num_blocks=9, block_size=4, max_model_len=32)
    connector = ScriptedConnector({"r0": KvRule(external_tokens=4)}, 4)
    scheduler = Scheduler(config, emit=events.append, connector=connector)
    scheduler.add_request(Request("r0", [1] * 6, SamplingParams(max_tokens=2)))
    scheduler.schedule()
    with pytest.raises(NotEnough, match="step 1 has parked"):
        commands_of(Replay([RunStarted(0, VERSION, config.to_dict(), "bare", {}), *events]).events)


def test_commands_are_read_from_events_as_they_were_given():
    session = c01()
    session.step(3)
    session.abort("r3")
    session.set_option("guard", "none")
    session.schedule()
    session.deliver()
    read = [(c.do, c.step) for c in commands_of(session.events[:])]
    halves = {"turn": ("schedule", "deliver"), "schedule": ("schedule",), "deliver": ("deliver",)}
    assert read[:4] == [("add", 0)] * 4
    assert ("abort", 3) in read
    assert ("configure", 3) in read
    told = [do for do, _ in read if do in ("schedule", "deliver")]
    given = [half for c in session._run.commands for half in halves.get(c.do, ())]
    assert told.count("schedule") == given.count("schedule") == 4
    assert told[-2:] == ["schedule", "deliver"]


# ---- the cache, rebuilt


@pytest.fixture(scope="module")
def remake():
    return tiny_model_remake()


def on_model(remake, seed: int, **settings) -> Session:
    draw = random.Random(seed)
    defaults = {
        "num_blocks": draw.choice((13, 17, 30)),
        "block_size": 4,
        "max_num_batched_tokens": draw.choice((16, 64)),
        "max_num_seqs": 4,
        "max_model_len": 48,
        "defer_block_free": draw.random() < 0.5,
        "max_in_flight": draw.choice((1, 2, 3)),
        "async_scheduling": draw.random() < 0.8,
        "drop_stale_output": draw.random() < 0.3,
        "guard": draw.choice(("none", "stop_retry")),
    }
    session = Session(remake(SchedulerConfig(**(defaults | settings))), remake=remake)
    common = [draw.randrange(200) for _ in range(9)]
    for i in range(6):
        prompt = common[: draw.choice((0, 4, 8, 9))] + [draw.randrange(200) for _ in range(1 + i)]
        session.add_request(f"r{i}", prompt, SamplingParams(max_tokens=8))
    session.add_request("late", [*common, 3, 4], SamplingParams(max_tokens=6), at_step=15)
    return session


@pytest.mark.parametrize("seed", range(5))
def test_on_the_model_a_fork_gives_the_same_tokens(remake, seed):
    """The fork's cache begins full of NaN: a block that is read and was not rebuilt would show in the tokens."""
    session = on_model(remake, seed)
    session.run(max_steps=80)
    expected = outputs(session)
    for step in range(1 + seed, session.num_steps + 2, 5):
        fork = session.fork(step)
        fork.run(max_steps=80)
        assert outputs(fork) == expected, f"fork at {step}"
        fork.close()
    assert any(e.kind == "blocks_hit" for e in session.events) or not session.config.enable_prefix_caching
    session.engine.close()


def test_a_session_on_a_models_engine_forks_by_itself():
    engine = Engine.from_model(
        "random:llama-tiny", device="cpu", num_blocks=14, block_size=4, max_model_len=48, defer_block_free=True
    )
    session = Session(engine)
    for i in range(4):
        session.add_request(f"r{i}", [7 * i + k for k in range(9)], SamplingParams(max_tokens=12))
    session.run(max_steps=80)
    assert preempted(session)
    for step, changes in ((0, {"num_blocks": 30}), (7, {"guard": "none"})):
        fork = session.fork(step, **changes)
        fork.run(max_steps=80)
        assert outputs(fork) == outputs(session)
        fork.engine.close()
    session.engine.close()


def test_without_the_rebuilding_the_tokens_would_be_wrong(remake, monkeypatch):
    """What the test above would see."""
    import lab.replay_runner

    session = on_model(remake, 0)
    session.run(max_steps=80)
    monkeypatch.setattr(lab.replay_runner, "plan_prefills", lambda *_: ([], ()))
    with pytest.raises(ValueError, match="no step has handed over"):
        session.fork(9).run(max_steps=80)
    real = plan_prefills

    def without_last_tokens(*args):
        steps, forget = real(*args)
        counts = [tuple(max(1, n - 1) for n in step.num_scheduled_tokens) for step in steps]
        return [s._replace(num_scheduled_tokens=c) for s, c in zip(steps, counts, strict=True)], forget

    monkeypatch.setattr(lab.replay_runner, "plan_prefills", without_last_tokens)
    fork = session.fork(9)
    fork.run(max_steps=80)
    assert outputs(fork) != outputs(session)
    session.engine.close()


def test_on_the_model_a_change_leaves_tokens_as_they_are(remake):
    session = on_model(remake, 1, guard="none", defer_block_free=True, num_blocks=13, max_in_flight=2)
    session.run(max_steps=80)
    fork = session.fork(3, guard="stop_retry", faults=[FailCall(12)])
    fork.run(max_steps=80)
    assert outputs(fork) == outputs(session)
    assert decisions(fork) != decisions(session)
    deeper = fork.fork(7, max_in_flight=3)
    deeper.run(max_steps=80)
    assert outputs(deeper) == outputs(session)
    for each in (fork, deeper):
        each.close()
    session.engine.close()


def test_the_clock_goes_on_from_where_it_stood(remake):
    session = on_model(remake, 2)
    session.step(8)
    fork = session.fork(6)
    before = fork.events[-1].time if hasattr(fork.events[-1], "time") else fork.state.time
    times = [e.time for e in session.events if hasattr(e, "time")]
    assert fork.state.time == pytest.approx(times[len([e for e in fork.events if hasattr(e, "time")]) - 1])
    fork.step(2)
    assert before <= fork.state.time < before + 60
    fork.close()
    session.engine.close()


def test_a_failure_while_rebuilding_is_raised(remake):
    def broken(config):
        engine = remake(config)
        engine.runner.close()
        return engine

    session = on_model(remake, 3)
    session.step(5)
    session._run.remake = broken
    with pytest.raises(RuntimeError, match="closed"):
        session.fork(5)
    session.engine.close()


def test_with_a_host_tier_everything_is_computed_again(remake):
    from kvsched.connector.host import HostTier
    from kvsched.runner.torch_tiers import open_tier

    def with_tier(config):
        engine = remake(config)
        runner = engine.runner
        pair = open_tier(HostTier(capacity_bytes=1 << 22), runner)
        return Engine(config, runner, connector=pair, landing=config.max_in_flight - 1, max_model_len_is_explicit=False)

    settings = {"max_model_len": 28, "max_num_batched_tokens": 16, "max_num_seqs": 3, "enable_prefix_caching": False}
    config = SchedulerConfig(num_blocks=9, block_size=4, reserve_full_isl=False, **settings)
    session = Session(with_tier(config), remake=with_tier)
    for i in range(5):
        session.add_request(f"r{i}", range(50 + i, 59 + i), SamplingParams(max_tokens=12))
    session.run(max_steps=120)
    assert {"load_started", "preempted", "save_sent"} <= {e.kind for e in session.events}
    assert session.state.num_free == 8
    for step in (4, 11, 19):
        fork = session.fork(step)
        fork.run(max_steps=120)
        assert outputs(fork) == outputs(session)
        assert decisions(fork) == decisions(session)
        fork.close()
    session.engine.close()


def test_a_connector_whose_transfers_came_live_cannot_be_forked():
    from kvsched.connector.scripted import KvRule, ScriptedConnector

    def make(config):
        pair = ConnectorPair(ScriptedConnector({"r9": KvRule(4)}, 4), None)
        return Engine(config, SyntheticRunner(), connector=pair, max_model_len_is_explicit=False)

    session = Session(make(SchedulerConfig(num_blocks=9, block_size=4)), remake=make)
    session.add_request("r0", range(5))
    session.step(2)
    with pytest.raises(ForkError, match="landing=1"):
        session.fork(2)


# ---- the plan of the rebuilding


def step_of(number: int, rows: dict[str, tuple[int, int]], new=(), blocks=(), gone=()) -> ScheduledStep:
    """rows: id -> (first position, tokens). new: RequestData. blocks: added by id."""
    ids, starts, counts = tuple(rows), [a for a, _ in rows.values()], [n for _, n in rows.values()]
    return ScheduledStep(
        number, 0, ids, tuple(counts), tuple(starts), frozenset(), dict(blocks), tuple(new), (), tuple(gone), 0
    )


def data_of(name: str, tokens, blocks, computed: int = 0) -> RequestData:
    return RequestData(name, tuple(tokens), tuple(blocks), computed, len(tokens), SamplingParams(), False)


def test_the_plan_writes_what_the_blocks_hold():
    """a computes 6 tokens in blocks 1 and 2 and decodes; b hits block 1; a ends: block 1 stays cached, and b's."""
    mirror = Mirror(4)
    mirror.execute(step_of(1, {"a": (0, 6)}, new=[data_of("a", range(6), (1, 2))]), [(50,)])
    mirror.execute(step_of(2, {"a": (6, 1)}), [(51,)])
    b = data_of("b", [0, 1, 2, 3, 7, 8], (1, 3), 4)
    mirror.execute(step_of(3, {"a": (7, 1), "b": (4, 2)}, new=[b]), [(52,), (60,)])
    hashes = [None, *[block_hash(b"", range(4))], None, None]
    hashes[2] = block_hash(hashes[1], [4, 5, 50, 51])
    steps, forget = plan_prefills(mirror, {"b"}, hashes, 64)
    assert [(s.request_ids, s.num_computed_tokens, s.num_scheduled_tokens) for s in steps] == [
        (("b",), (0,), (6,)),
        (("cached block 2",), (4,), (4,)),
    ]
    (b,), (chain,) = steps[0].new_requests, steps[1].new_requests
    assert (b.token_ids, b.block_ids) == ((0, 1, 2, 3, 7, 8, 60), (1, 3))
    assert (chain.token_ids, chain.block_ids) == ((0, 1, 2, 3, 4, 5, 50, 51), (1, 2))
    assert forget == ("cached block 2",)
    assert all(s.prefill_chunks == frozenset(s.request_ids) for s in steps), "nothing is sampled"


def test_what_was_handed_on_is_not_rebuilt():
    """a was preempted in an empty step, so the device still has it; its block 1 is c's now."""
    mirror = Mirror(4)
    mirror.execute(step_of(1, {"a": (0, 4)}, new=[data_of("a", range(4), (1,))]), [(50,)])
    mirror.execute(step_of(2, {"c": (0, 4)}, new=[data_of("c", range(10, 14), (1,))]), [(60,)])
    steps, _ = plan_prefills(mirror, {"a", "c"}, [None] * 4, 64)
    assert [s.request_ids for s in steps] == [("c",)]


def test_a_batch_ends_where_the_budget_or_a_prefix_asks_for_it():
    mirror = Mirror(4)
    new = [data_of(name, [*range(4), ord(name)], (1, ord(name) - 95)) for name in "abc"]
    mirror.execute(step_of(1, {"a": (0, 5)}, new=new[:1]), [(9,)])
    others = [data._replace(num_computed_tokens=4) for data in new[1:]]
    mirror.execute(step_of(2, {"b": (4, 1), "c": (4, 1)}, new=others), [(9,), (9,)])
    steps, _ = plan_prefills(mirror, set("abc"), [None] * 9, 64)
    assert [(s.request_ids, s.num_computed_tokens) for s in steps] == [(("a",), (0,)), (("b", "c"), (4, 4))]
    steps, _ = plan_prefills(mirror, set("abc"), [None] * 9, 1)
    assert [s.request_ids for s in steps] == [("a",), ("b",), ("c",)]
