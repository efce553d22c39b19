"""Moving through a run and on: step by step, to a condition, back, or by itself in the background.

Owns: `Walk`: the position, breakpoints, who is told of changes; `Stop`, why a run came back.
Knows nothing about: changing a run, forks, files (lab.session); what is seen at a step (lab.look).
Invariants: moving through the history asks nothing of the engine; at its end every step is one turn of the engine.
Whoever listens is told after each change, in the thread that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from kvsched.engine import Engine
from lab.breakpoints import Condition
from lab.breakpoints import Moment as Asked
from lab.live import Driver
from lab.look import Look, Moment, SessionError
from lab.run import Run
from lab.search import Search
from lab.sentences import describe
from lab.words import count

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


class Walk(Look):
    """A run, the step of it that one looks at, and the ways to get to another one."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.num_steps)
        self._breakpoints: list[Condition] = []
        self._callbacks: list[Callable[[], None]] = []
        self._search: Search | None = None
        self._last_stop: Stop | None = None
        self._driver = Driver(self, turn=Walk._background_turn, rested=Walk._changed)

    @property
    def engine(self) -> Engine | None:
        """The engine at the end of the history; None for a recording."""
        return self._run.engine

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
        if self._position and hit.at < replay.index_of_step(self._position):
            self._place(self._position, "decided")
        return Stop("condition", self._position, hit.at, str(hit.condition), describe(replay.events[hit.at]))

    def _do(self, do: str, args: Mapping[str, Any] | None = None) -> None:
        try:
            self._run.do(do, args)
        finally:
            self._place(self._run.num_steps)
            self._changed()

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
