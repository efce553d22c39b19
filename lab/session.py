"""The debugger: a run that one can step, stop, look into, go back in, break, and let go another way.

Owns: `Session`: the position, breakpoints, who is told of changes, and the tables of what is seen at the position.
Knows nothing about: how widgets draw, how a fork is made (lab.fork), what drives it in the background (lab.live).
Invariants: the history behind the position never changes; a change made in the past makes another branch, and the old
one is kept in `branches`. Position n shows call n of `schedule()` and all that happened before the next; 0 is before
the first.

    position   0   1   2   3   4      step() at 4 asks the engine for call 5
                       ^              step() here goes to 3; inject() here forks: call 3 is decided anew, with the fault
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self

from kvsched.config import SchedulerConfig
from kvsched.engine import Engine
from kvsched.faults import Fault, check_fault, fault_from_dict, fault_to_dict
from kvsched.request import SamplingParams
from kvsched.runner.synthetic import CostModel
from kvsched.trace.replay import Replay
from lab import fork as forks
from lab.breakpoints import Condition
from lab.breakpoints import Moment as Asked
from lab.journal import Command
from lab.live import Driver
from lab.look import Look, Moment, SessionError
from lab.run import Remake, Run
from lab.search import Search
from lab.sentences import describe
from lab.words import count

if TYPE_CHECKING:
    from lab.widgets.base import HistorySource

    def _satisfies_the_widgets(session: Session) -> HistorySource:
        return session


Mode = Literal["recording", "stepping", "running"]


@dataclass(frozen=True, slots=True)
class Stop:
    """Why `run` came back. why: "condition", "end" (nothing is left to do), or "limit" (max_steps).

    step: the position now. index: of the event at which the condition held, else None. line: what happened there.
    """

    why: str
    step: int
    index: int | None = None
    condition: str = ""
    line: str = ""

    def __repr__(self) -> str:
        if self.why == "condition":
            return f"stopped at step {self.step}, event {self.index}: {self.condition} ({self.line})"
        return f"step {self.step}: " + ("nothing is left to do" if self.why == "end" else "stopped by max_steps")


class Session(Look):
    """A debugger for one engine, or for a recording.

    source: an Engine (which from now on is driven through the session), or the path of a trace, which can be looked
        at, and forked if it tells all inputs.
    remake: makes an engine of the same kind for given settings; needed to fork engines with a KV connector.
    landing: after how many further steps results land. "full": as the engine says, else as many as keep the pipe
        full (max_in_flight - 1); "live": as they come, so that no two runs are alike.
    """

    def __init__(
        self,
        source: Engine | str | PathLike[str],
        *,
        remake: Remake | None = None,
        landing: int | Literal["full", "live"] = "full",
    ) -> None:
        if isinstance(source, Engine):
            _set_landing(source, landing)
            run = Run(source, Replay(), remake)
            run.remake = remake or forks.make_like(source)
        else:
            run = Run(None, Replay.open(source), remake or forks.make_synthetic)
        self._begin(run)

    @classmethod
    def _of(cls, run: Run) -> Self:
        session = cls.__new__(cls)
        session._begin(run)
        return session

    def _begin(self, run: Run) -> None:
        super().__init__(run, run.num_steps)
        self._generation = 0
        self._breakpoints: list[Condition] = []
        self._callbacks: list[Callable[[], None]] = []
        self._branches: list[Session] = []
        self._search: Search | None = None
        self._last_stop: Stop | None = None
        self._driver = Driver(self, turn=Session._background_turn, rested=Session._changed)

    @classmethod
    def synthetic(
        cls,
        num_blocks: int,
        *,
        cost: CostModel | None = None,
        vocab_size: int = 32_000,
        token_fn: Callable[[str, int], int] | None = None,
        landing: int | None = None,
        **settings: Any,
    ) -> Self:
        """A session without a model (see Engine.synthetic). settings: those of SchedulerConfig."""
        engine = Engine.synthetic(
            num_blocks, cost=cost, vocab_size=vocab_size, token_fn=token_fn, landing=landing, **settings
        )
        return cls(engine)

    @classmethod
    def model(
        cls,
        model: Any = "smollm2",
        *,
        dtype: str = "float32",
        seed: int = 0,
        landing: int | None = None,
        **options: Any,
    ) -> Self:
        """A session on a real model (see Engine.from_model for the arguments). Forks share the model's weights."""
        from kvsched.runner.torch_load import load_model

        loaded = load_model(model, dtype=dtype, seed=seed) if isinstance(model, str) else model
        kept = {name: options[name] for name in ("device", "connector") if name in options}

        def remake(config: SchedulerConfig) -> Engine:
            settings = config.to_dict()
            if config.max_model_len == loaded.max_positions:
                del settings["max_model_len"]  # it is the model's, which need not fit the pool
            return Engine.from_model(loaded, **kept, landing=config.max_in_flight - 1, **settings)

        if landing is None:
            landing = options.get("max_in_flight", SchedulerConfig(num_blocks=2).max_in_flight) - 1
        return cls(Engine.from_model(loaded, landing=landing, **options), remake=remake)

    # ---- what there is

    @property
    def engine(self) -> Engine | None:
        """The engine at the end of the history; None for a recording."""
        return self._run.engine

    @property
    def config(self) -> SchedulerConfig:
        """The settings in force at the end."""
        return self._run.config

    @property
    def generation(self) -> int:
        """Goes up when the history becomes another one (a change in the past, a reset)."""
        return self._generation

    @property
    def mode(self) -> Mode:
        """ "recording": there will be no more events; "stepping"; "running": they come by themselves."""
        if self._run.engine is None:
            return "recording"
        return "running" if self._driver.is_running else "stepping"

    @property
    def can_step(self) -> bool:
        """Whether the engine has anything left to do."""
        return not self._run.is_over

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while events are added."""
        return self._run.lock

    @property
    def branches(self) -> tuple[Session, ...]:
        """Earlier histories that a change in the past, or a reset, has left, as recordings."""
        return tuple(self._branches)

    @property
    def faults(self) -> list[Fault]:
        """Faults planned so far."""
        return self._run.faults

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called after anything has changed, in whichever thread changed it. Returns what ends that."""
        self._callbacks.append(callback)

        def end() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return end

    def _changed(self) -> None:
        for callback in list(self._callbacks):
            callback()

    def __repr__(self) -> str:
        state = self.state
        parts = [
            f"{state.num_running} running, {state.num_waiting} waiting",
            *([f"{state.num_loading} loading"] if state.num_loading else []),
            f"{state.num_finished} finished",
            f"{state.num_free} of {state.num_blocks - 1} blocks free",
            f"{count(len(state.flights), 'step')} in flight",
        ]
        if state.fence_on:
            waiting = sum(len(entry.block_ids) for entry in state.deferred)
            parts.append(
                f"fence {state.processed_step_seq} of {state.sched_step_seq}, {count(waiting, 'block')} behind it"
            )
        where = f"step {self._position} of {self.num_steps}" + (", just decided" if self._moment == "decided" else "")
        return f"{self.mode}, {where}: {'; '.join(parts)}"

    # ---- moving

    def step(self, n: int = 1) -> Self:
        """On by n steps: through the history, and at its end by turns of the engine.

        Raises SessionError if not even one more step can be made.
        """
        if n < 1:
            raise SessionError(f"step({n}) goes nowhere; give 1 or more, or use back()")
        self._must_rest()
        try:
            for i in range(n):
                if not self._one_step():
                    if i == 0:
                        raise SessionError(self._why_no_step())
                    break
        finally:
            self._changed()
        return self

    def _one_step(self) -> bool:
        """One step on. False: there is nothing left to do."""
        run = self._run
        if self._position < run.num_steps:
            self._place(self._position + 1)
            return True
        if run.is_over:
            return False
        try:
            run.turn()
        finally:
            self._place(run.num_steps)
        return True

    def _place(self, step: int, moment: Moment = "end") -> None:
        self._position, self._moment = step, moment

    def _why_no_step(self) -> str:
        if self._run.engine is None:
            return f"the recording ends with step {self.num_steps}; fork it to go on"
        return "nothing is left to do: every request has ended; add one, or go back"

    def deliver(self) -> Self:
        """Process the output of the oldest step in flight, without scheduling. Only at the end of the history."""
        engine = self._must_stand_at_end("deliver")
        if not engine.num_in_flight:
            raise SessionError("nothing is in flight; step() schedules something")
        self._do("deliver")
        return self

    def schedule(self) -> Self:
        """Schedule and submit one step, without processing any output. Only at the end of the history."""
        self._must_stand_at_end("schedule")
        self._run.give_due()
        self._do("schedule")
        return self

    def back(self, n: int = 1) -> Self:
        """Back by n steps, to step 0 at most."""
        return self.seek(max(0, self._position - n))

    def seek(self, step: int, moment: Moment = "end") -> Self:
        """Look at another step; moment "decided": as it was before any output was processed behind its decision.

        Raises SessionError if there is no such step.
        """
        if not 0 <= step <= self.num_steps:
            raise SessionError(f"there is no step {step}; this history has steps 0 to {self.num_steps}")
        if moment not in ("decided", "end") or (moment == "decided" and step == 0):
            raise SessionError(f"step {step} has no moment {moment!r}; choose 'end', or 'decided' from step 1 on")
        self._must_rest()
        self._place(step, moment)
        self._changed()
        return self

    def run(self, until: str | Callable[[Asked], Any] | Condition | None = None, *, max_steps: int = 10_000) -> Stop:
        """On until a condition holds (or one of the breakpoints), nothing is left to do, or `max_steps` were made.

        until: see lab.breakpoints; None: to the next breakpoint or the end. The position is then the step in which
        the condition held; its moment is "decided" if it held by then. Raises ConditionError for text that cannot
        be read.
        """
        self._must_rest()
        conditions = [*([] if until is None else [Condition.of(until)]), *self._breakpoints]
        search = Search(self._run.replay, self._end(), conditions)
        try:
            self._last_stop = self._run_until(search, max_steps)
        finally:
            self._changed()
        return self._last_stop

    def _run_until(self, search: Search, max_steps: int) -> Stop:
        if self._moment == "decided":
            self._place(self._position)
            if stop := self._stop_at(search):
                return stop
        for _ in range(max_steps):
            if not self._one_step():
                return Stop("end", self._position)
            if stop := self._stop_at(search):
                return stop
        return Stop("limit", self._position)

    def _stop_at(self, search: Search) -> Stop | None:
        hit = search.go_to(self._end())
        if hit is None:
            return None
        replay = self._run.replay
        if self._position and hit.index < replay.index_of_step(self._position):
            self._place(self._position, "decided")
        return Stop("condition", self._position, hit.index, str(hit.condition), describe(replay.events[hit.index]))

    # ---- breakpoints

    def break_on(self, condition: str | Callable[[Asked], Any] | Condition) -> Condition:
        """Stop `run`, and a run in the background, whenever this holds. Raises ConditionError."""
        self._breakpoints.append(Condition.of(condition))
        return self._breakpoints[-1]

    def clear_breakpoints(self) -> None:
        """Forget all breakpoints."""
        self._breakpoints = []

    @property
    def breakpoints(self) -> tuple[Condition, ...]:
        """The breakpoints."""
        return tuple(self._breakpoints)

    # ---- changing

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        at_step: int | None = None,
    ) -> Self:
        """Queue a request (see Engine.add_request). at_step: it arrives right before that call of `schedule()`.

        In the past this forks. Raises RequestRefused for a request that could never be served.
        """
        args = {
            "request": request_id,
            "prompt": prompt if isinstance(prompt, str) else tuple(prompt),
            "sampling": (sampling or SamplingParams()).to_dict(),
            "priority": priority,
            "arrival_time": arrival_time,
        }
        if at_step is None:
            return self._change("add", args)
        if at_step <= self.num_steps:
            raise SessionError(
                f"step {at_step} has been decided; requests can arrive at step {self.num_steps + 1} or later"
            )
        self._must_have_engine()
        self._driver.between(lambda: self._run.plan(Command(0, at_step - 1, "add", args)))
        self._changed()
        return self

    def inject(self, fault: Fault | Mapping[str, Any]) -> Self:
        """Plan a fault (see kvsched.faults), from the position on. In the past this forks. Raises FaultError."""
        if isinstance(fault, Mapping):
            fault = fault_from_dict(fault)
        check_fault(fault)
        return self._change("inject", fault_to_dict(fault))

    def abort(self, *request_ids: str) -> Self:
        """End requests now. In the past this forks; a session that runs ends them before its next step."""
        return self._change("abort", {"requests": request_ids})

    def set_option(self, name: str, value: Any) -> Self:
        """Change a setting: guard, defer_block_free and max_in_flight from the position on (in the past this forks),
        any other by starting again from step 0 with the same inputs. Raises ConfigError."""
        self.config.with_changes(**{name: value})
        if name in forks.ANY_STEP:
            return self._change("configure", {name: value})
        self._must_rest()
        self._become(forks.fork(self._run, 0, forks.Changes.of({name: value})))
        return self

    def reset(self) -> Self:
        """Start again from step 0 with the same requests, at the same steps. A recording goes back to its start."""
        self._must_rest()
        if self._run.engine is None:
            return self.seek(0)
        self._become(forks.fork(self._run, 0, forks.Changes.of({})))
        return self

    def fork(self, step: int | None = None, changes: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """Another session that goes another way from call `step` of `schedule()` on: the first to be decided anew.

        step: the next one if None; 0: from the very start. changes (and keyword arguments): guard,
        defer_block_free, max_in_flight; faults (more of them), drop_faults=True (none from here on), abort (ids);
        at step 0 any setting. Requests and aborts that came later come again at the same steps.
        Raises ForkError, NotEnough (a recording that does not tell its inputs), or what is wrong with a change.
        """
        self._must_rest()
        number = self._position + 1 if step is None else step
        run = forks.fork(self._run, number, forks.Changes.of({**(changes or {}), **more}))
        session = self._of(run)
        session._breakpoints = list(self._breakpoints)
        return session

    def _change(self, do: str, args: Mapping[str, Any]) -> Self:
        """Carry out a change at the position: in the past, on another branch."""
        self._must_have_engine()
        if self.mode == "running":
            self._driver.between(lambda: self._run.do(do, args))
        elif self._position < self.num_steps:
            branch = forks.fork(self._run, self._position + 1, forks.Changes.of({}))
            branch.do(do, args)
            self._become(branch)
        else:
            self._run.do(do, args)
        self._changed()
        return self

    def _become(self, run: Run) -> None:
        """Go on with another history; keep the old one as a recording."""
        old = self._run
        self._branches.append(self._of(Run(None, old.replay, old.remake)))
        with old.lock:
            self._run = run
            self._place(run.num_steps)
            self._generation += 1
            self._search = None
        old.close()
        self._changed()

    def _do(self, do: str, args: Mapping[str, Any] | None = None) -> None:
        try:
            self._run.do(do, args)
        finally:
            self._place(self._run.num_steps)
            self._changed()

    # ---- running in the background

    def resume(self, steps_per_second: float | None = None) -> Self:
        """Run on in the background, stopping at breakpoints. steps_per_second: at most so many."""
        self._must_have_engine()
        self._place(self.num_steps)
        self._search = Search(self._run.replay, self._end(), self._breakpoints) if self._breakpoints else None
        self._driver.resume(steps_per_second)
        self._changed()
        return self

    def pause(self) -> Self:
        """Stop running in the background, at this very step."""
        self._driver.pause()
        self._changed()
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run in the background has nothing to do, or has stopped. timeout: seconds.

        Returns whether it has. Raises what went wrong in it.
        """
        return self._driver.wait(timeout)

    @property
    def last_stop(self) -> Stop | None:
        """Why `run`, or the run in the background, stopped last."""
        return self._last_stop

    @property
    def error(self) -> BaseException | None:
        """What went wrong in the background, until somebody waits or resumes."""
        return self._driver.error

    def _background_turn(self) -> bool:
        """One turn, in the driver's thread. False: nothing is left to do."""
        run = self._run
        if run.is_over:
            return False
        try:
            run.turn()
        finally:
            self._place(run.num_steps)
        if self._search is not None and (stop := self._stop_at(self._search)):
            self._last_stop = stop
            self._driver.pause()
        self._changed()
        return True

    def close(self) -> None:
        """End the run in the background, and the engine if the session made it. May be called twice."""
        self._driver.close()
        self._run.close()
        self._callbacks.clear()

    # ---- what can be done

    def _must_rest(self) -> None:
        if self.mode == "running":
            raise SessionError("the session is running; pause() it first")

    def _must_have_engine(self) -> Engine:
        if self._run.engine is None:
            raise SessionError("this is a recording and cannot be changed; fork() it and change the fork")
        return self._run.engine

    def _must_stand_at_end(self, what: str) -> Engine:
        self._must_rest()
        engine = self._must_have_engine()
        if self._position < self.num_steps:
            raise SessionError(
                f"{what}() works at the end of the history, step {self.num_steps}; this is step {self._position}: "
                f"seek({self.num_steps}), or fork()"
            )
        return engine

    def decode(self, token_ids: Sequence[int]) -> str:
        """Tokens as text; without a tokenizer, their numbers."""
        tokenizer = self._run.engine.tokenizer if self._run.engine is not None else None
        if tokenizer is None:
            return " ".join(map(str, token_ids))
        return tokenizer.decode(list(token_ids), skip_special_tokens=False)

    # ---- files

    def save_scenario(self, path: str | PathLike[str]) -> None:
        """Write the smallest JSON from which the run up to the position can be done again (see lab.scenario)."""
        from lab.scenario import scenario_of, write_scenario

        write_scenario(path, scenario_of(self._run, self._position))

    @classmethod
    def load_scenario(cls, path: str | PathLike[str]) -> Self:
        """The session that `save_scenario` wrote down, done again up to the same step. Raises ScenarioError."""
        from lab.scenario import open_scenario

        return cls._of(open_scenario(path))

    def to_pytest(self, path: str | PathLike[str]) -> None:
        """Write the run up to the position as a test that needs kvsched alone, to attach to a bug report."""
        from lab.scenario import write_pytest

        write_pytest(path, self._run, self._position)


def _set_landing(engine: Engine, landing: int | Literal["full", "live"]) -> None:
    if landing == "live":
        engine.landing = None
    elif landing != "full":
        if landing < 0:
            raise SessionError(f"landing is {landing}; give 0 or more further steps, 'full' or 'live'")
        engine.landing = landing
    elif engine.landing is None and engine.scheduler.connector is None:
        engine.landing = engine.config.max_in_flight - 1
