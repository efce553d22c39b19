"""Running in the background: pausing at a step, aborting at once, stopping at breakpoints, leaving nothing behind."""

from __future__ import annotations

import gc
import threading
import weakref
from itertools import pairwise

import pytest

from kvsched.faults import FailCall
from kvsched.request import SamplingParams
from lab.live import Driver
from lab.look import SessionError
from lab.session import Session
from tests.lab_scenes import busy, c01, outputs, tiny_model_remake

PATIENCE = 60.0
"""Seconds until a test gives up; nothing waits that long when all is well."""


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lab-live"]


class Counter:
    """Something to drive: counts turns, and can be made to wait in one."""

    def __init__(self, turns: int = 10**9) -> None:
        self.left = turns
        self.done = 0
        self.rests = 0
        self.may_go = threading.Event()
        self.may_go.set()
        self.inside = threading.Event()
        self.driver = Driver(self, turn=Counter.turn, rested=Counter.rested)

    def turn(self) -> bool:
        self.inside.set()
        assert self.may_go.wait(PATIENCE)
        if not self.left:
            return False
        self.left -= 1
        self.done += 1
        return True

    def rested(self) -> None:
        self.rests += 1


# ---- the driver


def test_it_runs_until_nothing_is_left_and_goes_on_when_there_is_more():
    counter = Counter(5)
    counter.driver.resume()
    assert counter.driver.wait(PATIENCE)
    assert counter.done == 5
    assert counter.driver.is_running
    counter.driver.between(lambda: setattr(counter, "left", 3))
    assert counter.driver.wait(PATIENCE)
    assert (counter.done, counter.rests) == (8, 2)
    counter.driver.close()


def test_when_pause_returns_no_turn_runs():
    counter = Counter()
    counter.may_go.clear()
    counter.driver.resume()
    assert counter.inside.wait(PATIENCE)
    paused = threading.Thread(target=counter.driver.pause)
    paused.start()
    paused.join(0.05)
    assert paused.is_alive(), "the turn still runs"
    counter.may_go.set()
    paused.join(PATIENCE)
    done = counter.done
    assert not counter.driver.is_running
    assert counter.driver.between(lambda: counter.done) == done
    counter.driver.resume()
    counter.inside.clear()
    assert counter.inside.wait(PATIENCE)
    counter.driver.close()


def test_between_two_turns_nothing_else_runs():
    counter = Counter()
    counter.driver.resume()
    overlaps = []
    for _ in range(50):
        counter.inside.clear()
        before = counter.driver.between(lambda: (counter.inside.is_set(), counter.done))
        overlaps.append(before)
    assert all(later[1] >= earlier[1] for earlier, later in pairwise(overlaps))
    with pytest.raises(ZeroDivisionError):
        counter.driver.between(lambda: 1 / 0)
    counter.driver.close()


def test_an_error_stops_it_and_is_raised_where_somebody_waits():
    class Broken(Counter):
        def turn(self) -> bool:
            raise OSError("no more")

    counter = Broken()
    counter.driver = Driver(counter, turn=Broken.turn, rested=Counter.rested)
    counter.driver.resume()
    with pytest.raises(OSError, match="no more"):
        counter.driver.wait(PATIENCE)
    assert not counter.driver.is_running
    assert counter.driver.error is None
    assert counter.rests == 1
    counter.driver.close()


def test_closing_ends_the_thread_and_carries_out_what_was_asked():
    counter = Counter()
    counter.driver.resume()
    assert counter.inside.wait(PATIENCE)
    counter.driver.close()
    counter.driver.close()
    assert threads() == []
    assert counter.driver.between(lambda: 7) == 7
    with pytest.raises(RuntimeError, match="closed"):
        counter.driver.resume()


def test_a_forgotten_owner_ends_its_thread():
    counter = Counter(3)
    counter.driver.resume()
    assert counter.driver.wait(PATIENCE)
    (thread,) = threads()
    del counter
    gc.collect()
    thread.join(PATIENCE)
    assert threads() == []


def test_a_rate_is_kept_without_keeping_a_pause_waiting():
    counter = Counter()
    counter.driver.resume(turns_per_second=0.01)
    assert counter.inside.wait(PATIENCE)
    pauses = threading.Thread(target=counter.driver.pause)
    pauses.start()
    pauses.join(PATIENCE)
    assert not pauses.is_alive(), "a turn every hundred seconds does not make others wait for it"
    counter.driver.close()
    assert counter.done == 1
    with pytest.raises(ValueError, match="above 0"):
        counter.driver.resume(0)


# ---- the session


def test_a_run_in_the_background_is_the_run_in_the_foreground():
    session, other = busy(), busy()
    other.run()
    session.resume()
    assert session.wait(PATIENCE)
    assert [*session.events] == [*other.events]
    assert session.position == session.num_steps
    assert session.mode == "running", "it waits for more"
    session.add_request("more", [1, 2, 3], SamplingParams(max_tokens=3))
    assert session.wait(PATIENCE)
    assert len(outputs(session)["more"]) == 3
    session.pause()
    assert session.mode == "stepping"
    session.close()


def endless(**settings) -> Session:
    """Requests enough for as long as a test looks."""
    session = Session.synthetic(4000, block_size=4, max_num_seqs=4, max_model_len=9000, **settings)
    for i in range(4):
        session.add_request(f"r{i}", range(5), SamplingParams(max_tokens=8000))
    return session


def after(session: Session, steps: int) -> None:
    """Wait, without looking at a clock, until so many more steps were made."""
    reached = threading.Event()
    goal = session.num_steps + steps
    end = session.on_change(lambda: reached.set() if session.num_steps >= goal else None)
    assert reached.wait(PATIENCE)
    end()


def test_pause_becomes_the_debugger_at_that_very_step():
    session = endless()
    session.resume()
    after(session, 20)
    session.pause()
    step = session.position
    assert step == session.num_steps >= 20
    assert session.engine.scheduler.step == step
    session.step()
    assert session.position == step + 1
    assert session.back(3).explain()[0].startswith(f"Step {step - 2}:")
    fork = session.fork(step - 1, abort="r1")
    assert fork.num_steps == step - 2
    session.resume()
    after(session, 5)
    session.close()
    assert threads() == []


def test_an_abort_takes_effect_before_the_next_step():
    session = endless()
    session.resume()
    after(session, 10)
    session.abort("r2")
    at_once = session.num_steps
    session.pause()
    finished = next(e for e in session.events if e.kind == "request_finished")
    assert (finished.request, finished.reason) == ("r2", "abort")
    assert finished.step <= at_once
    later = [e for e in session.events if e.kind == "step_scheduled" and e.step > finished.step]
    assert not any("r2" in e.request_ids for e in later)
    session.close()


def test_changes_while_it_runs_come_between_two_steps():
    session = endless(defer_block_free=True)
    session.resume()
    after(session, 5)
    session.set_option("guard", "none")
    session.set_option("max_in_flight", 3)
    session.inject(FailCall(10**6))
    session.add_request("new", [7] * 9, SamplingParams(max_tokens=2))
    after(session, 5)
    session.pause()
    assert (session.config.guard, session.config.max_in_flight, session.engine.landing) == ("none", 3, 2)
    fork = session.fork(session.num_steps + 1)
    assert fork.events[1:] == session.events[1:], "what was done while it ran is in the journal, in its place"
    session.close()


def test_what_needs_rest_says_so():
    session = endless()
    session.resume()
    for call in (session.step, session.back, session.run, session.fork, session.reset, lambda: session.seek(0)):
        with pytest.raises(SessionError, match=r"pause\(\) it first"):
            call()
    with pytest.raises(SessionError, match=r"pause\(\)"):
        session.set_option("num_blocks", 50)
    session.close()


def test_it_stops_at_breakpoints():
    session = c01(guard="none")
    session.break_on("preempted")
    session.resume()
    assert session.wait(PATIENCE)
    assert session.mode == "stepping"
    assert (session.position, session.moment, session.last_stop.condition) == (3, "decided", "preempted")
    session.resume()
    assert session.wait(PATIENCE)
    assert session.position == 17
    session.close()


def test_an_error_in_the_background_is_seen():
    session = busy()
    session.break_on(lambda moment: 1 / 0)
    heard = []
    session.on_change(lambda: heard.append(session.mode))
    session.resume()
    with pytest.raises(ZeroDivisionError):
        session.wait(PATIENCE)
    assert heard[-1] == "stepping"
    assert session.error is None
    session.close()


def test_reading_while_it_runs_always_sees_a_whole_state():
    session = endless(defer_block_free=True)
    session.resume()
    after(session, 1)
    for _ in range(40):
        state = session.state
        assert len(state.running) == state.num_running
        assert len(session.events) >= state.index
        assert session.events[-1] is not None
    session.close()


def test_a_forgotten_session_stops_and_is_collected():
    session = endless()
    session.resume()
    after(session, 3)
    (thread,) = threads()
    reference = weakref.ref(session)
    del session
    gc.collect()
    thread.join(PATIENCE)
    gc.collect()
    assert reference() is None
    assert threads() == []


def test_the_model_runs_in_the_background_and_gives_the_same_tokens():
    from kvsched.config import SchedulerConfig

    remake = tiny_model_remake()
    config = SchedulerConfig(num_blocks=13, block_size=4, max_model_len=40, max_num_batched_tokens=16)
    made = []
    for _ in range(2):
        session = Session(remake(config), remake=remake)
        for i in range(4):
            session.add_request(f"r{i}", range(3 + i, 9 + i), SamplingParams(max_tokens=7))
        made.append(session)
    live, plain = made
    plain.run()
    live.resume()
    after(live, 3)
    live.pause()
    fork = live.fork()
    live.resume()
    assert live.wait(PATIENCE)
    fork.run()
    assert outputs(live) == outputs(plain) == outputs(fork)
    fork.close()
    for session in made:
        session.close()
        session.engine.close()
