"""Another course from some step on: the same history up to there, then a change, then whatever comes of it.

Owns: `Changes`, `fork`, `make_like`: replaying a run's commands on a fresh engine, and letting that go on by itself.
Knows nothing about: where one looks, widgets, how a KV cache is rebuilt (lab.replay_runner).
Invariants: a fork at step n decides step n anew and nothing before it: the decisions of steps 1 to n - 1 are checked,
event by event, against the old run's.

    old     add  1  2  3  4  add  5  6 …
    fork    add  1  2  3 [change]  4' 5' …                fork(4, …): step 4 is the first to be decided anew
                                add before 5'             clients come as they came; later faults and settings do not

Two ways lead back to where the old run was. A synthetic runner, and a runner with a connector, compute everything again
(the first costs nothing; of the second not only the KV cache but what lies outside must be as it was). A model's runner
alone is told the recorded tokens, and its cache is filled by prefills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.engine import Engine, EngineStuck
from kvsched.faults import (
    Abort,
    FailCall,
    FailRequest,
    Fault,
    HoldExecution,
    HoldResult,
    fault_from_dict,
    fault_to_dict,
)
from kvsched.runner.base import Runner
from kvsched.runner.synthetic import SyntheticRunner
from kvsched.trace.events import Event, FaultInjected, RunStarted, StepDelivered
from kvsched.trace.replay import Replay
from lab.journal import CLIENT_COMMANDS, Command
from lab.replay_runner import ReplayRunner
from lab.run import Remake, Run

ANY_STEP = ("guard", "defer_block_free", "max_in_flight")
"""Settings that can change at any step; all others only from step 0."""


class ForkError(ValueError):
    """A fork that cannot be made; the message says why and what can be done."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a fork does differently.

    settings: by name; other than guard, defer_block_free and max_in_flight only at step 0. faults: more of them.
    drop_faults: those that would come to pass from here on do not. abort: requests to end right here.
    """

    settings: Mapping[str, Any]
    faults: tuple[Fault, ...] = ()
    drop_faults: bool = False
    abort: tuple[str, ...] = ()

    @staticmethod
    def of(changes: Mapping[str, Any]) -> Changes:
        """From {"guard": "none", "faults": […], …}; faults as objects or plain data. Raises ValueError."""
        given = dict(changes)
        faults = tuple(fault_from_dict(f) if isinstance(f, Mapping) else f for f in given.pop("faults", ()))
        abort = given.pop("abort", ())
        ids = (abort,) if isinstance(abort, str) else tuple(abort)
        return Changes(faults=faults, drop_faults=bool(given.pop("drop_faults", False)), abort=ids, settings=given)


def fork(run: Run, step: int, changes: Changes) -> Run:
    """A new run that goes another way from call `step` of `schedule()` on; 0: from the very start.

    Raises ForkError, NotEnough for a recording that does not tell its inputs, or the ValueError of a setting, fault or
    request that makes no sense.
    """
    if not 0 <= step <= run.num_steps + 1:
        raise ForkError(f"step {step} cannot be decided anew; this history can fork at steps 0 to {run.num_steps + 1}")
    seen = run.replay.events[: run.end_of_step(step - 1)] if step else []
    engine = _make(run, _settings(run, step, changes))
    try:
        return _replayed(run, step, changes, engine, seen)
    except BaseException:
        engine.close()
        raise


def _replayed(run: Run, step: int, changes: Changes, engine: Engine, seen: Sequence[Event]) -> Run:
    """The old run done again on a fresh engine, up to the step, and then the change. seen: what happened before it."""
    commands, cut = run.commands, run.num_before(step)
    before = run.events_before(cut)
    runner = _take_over(engine, seen) if _tokens_are_told(run, engine) else None
    kept = _Kept(run, step) if changes.drop_faults else None
    for fault in run.first_faults if kept is None else kept.of(run.first_faults):
        engine.inject(fault)
    new = Run(engine, Replay(), run.remake, owned=True)
    for command in commands[:cut] if kept is None else kept.of_commands(commands[:cut]):
        with suppress(EngineStuck):
            new.do(command.do, command.args)
    _check_same(before, new.replay.events)
    for _ in range(_num_delivered(seen[len(before) :])):
        new.do("deliver")
    if runner is not None:
        runner.go_live(engine)
    for command in [*commands[cut:], *run.agenda]:
        if command.do in CLIENT_COMMANDS:
            new.plan(command)
    _change(new, step, changes)
    return new


def _num_delivered(events: Iterable[Event]) -> int:
    """Outputs that a turn processed before it scheduled: the pipe was full, so they belong to the step before."""
    return sum(1 for event in events if isinstance(event, StepDelivered) and event.request_ids)


def make_like(engine: Engine) -> Remake | None:
    """How to make engines like this one; None if that cannot be known."""
    make_runner = _runner_maker(engine.runner)
    if make_runner is None or engine.scheduler.connector is not None:
        return None
    tokenizer, eos_token_ids, landing = engine.tokenizer, engine.eos_token_ids, engine.landing
    meta = dict(engine.events[0].meta)

    def remake(config: SchedulerConfig) -> Engine:
        return Engine(
            config,
            make_runner(config),
            landing=landing,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            max_model_len_is_explicit=False,
            meta=meta,
        )

    return remake


def _runner_maker(runner: Any) -> Callable[[SchedulerConfig], Runner] | None:
    """How to make runners like this one, if it can do that itself (`fresh`)."""
    fresh = getattr(runner, "fresh", None)
    if fresh is None:
        return None
    return lambda config: fresh(
        num_blocks=config.num_blocks, block_size=config.block_size, max_model_len=config.max_model_len
    )


def make_synthetic(config: SchedulerConfig) -> Engine:
    """What goes on where a recording ends: tokens that mean nothing."""
    return Engine(config, SyntheticRunner(), landing=config.max_in_flight - 1, max_model_len_is_explicit=False)


# ---- the old run


def _settings(run: Run, step: int, changes: Changes) -> SchedulerConfig:
    """The settings to begin with. Raises ForkError for one that cannot change at that step."""
    changed = run.settings.with_changes(**changes.settings)
    if step == 0:
        return changed
    late = sorted(set(changes.settings) - set(ANY_STEP))
    if late:
        raise ForkError(
            f"{', '.join(late)} cannot change at step {step}, only from the start, with the same inputs: "
            f"fork(0, …). At any step can change: {', '.join(ANY_STEP)}"
        )
    return run.settings


def _tokens_are_told(run: Run, engine: Engine) -> bool:
    """Whether the fork is told the tokens, rather than computing them again.

    Raises ForkError for a connector whose transfers landed as they came: they would not come alike again.
    """
    if engine.scheduler.connector is None:
        return run.engine is None or not isinstance(run.engine.runner, SyntheticRunner)
    if engine.landing is None:
        raise ForkError(
            "with a KV connector a fork computes everything again, and this engine takes results as they come; "
            "make it with landing=1 (or more) so that it does the same again"
        )
    return False


def _take_over(engine: Engine, events: Sequence[Event]) -> ReplayRunner:
    """Let the engine take recorded tokens and times for now."""
    runner = ReplayRunner(engine.runner, events)
    engine.runner = runner
    engine.scheduler.clock = runner.now
    return runner


def _make(run: Run, settings: SchedulerConfig) -> Engine:
    if run.remake is None:
        raise ForkError(
            "this engine cannot be made anew by itself; make the session with Session.model(…), or give it a function "
            "that makes such engines: Session(engine, remake=lambda config: Engine(config, …))"
        )
    engine = run.remake(settings)
    if run.engine is not None:
        follows = run.engine.landing == run.config.max_in_flight - 1
        engine.landing = settings.max_in_flight - 1 if follows else run.engine.landing
    return engine


class _Kept:
    """What is kept of faults that end before a step: those that came to pass by then."""

    def __init__(self, run: Run, step: int) -> None:
        self.step = step
        self.num_calls = run.state(step - 1).num_slot_calls if step else 0
        fired = run.engine.watch.fired if run.engine is not None else []
        self.fired = [fault for fault, at in fired if at < step]

    def of(self, faults: Iterable[Fault]) -> list[Fault]:
        """The faults, as far as they came to pass."""
        return [kept for fault in faults if (kept := self.part_of(fault)) is not None]

    def of_commands(self, commands: Iterable[Command]) -> Iterator[Command]:
        """The commands, with these faults only."""
        for command in commands:
            if command.do != "inject":
                yield command
            elif (kept := self.part_of(fault_from_dict(command.args))) is not None:
                yield command._replace(args=fault_to_dict(kept))

    def part_of(self, fault: Fault) -> Fault | None:
        match fault:
            case FailCall():
                return fault if fault.call <= self.num_calls else None
            case FailRequest():
                until = self.step - 1 if fault.until_step is None else min(fault.until_step, self.step - 1)
                return replace(fault, until_step=until) if fault.step <= until else None
            case HoldResult() | HoldExecution() | Abort():
                return fault if fault.step < self.step else None
        return fault if fault in self.fired else None


def _check_same(recorded: Sequence[Event], again: Sequence[Event]) -> None:
    """Raises ForkError at the first event that came out otherwise. Times and notes of faults may differ."""
    for old, new in zip_longest(_decisions(recorded), _decisions(again)):
        if old != new:
            step = (old or new).step
            raise ForkError(
                f"step {step} came out otherwise when it was done again, so nothing can be forked behind it. "
                f"Recorded: {old}. Now: {new}"
            )


def _decisions(events: Iterable[Event]) -> Iterator[Any]:
    for event in events:
        if isinstance(event, FaultInjected | RunStarted):
            continue
        timed: Any = event
        yield timed._replace(time=0.0) if "time" in event._fields else event


def _change(new: Run, step: int, changes: Changes) -> None:
    if step and changes.settings:
        new.do("configure", changes.settings)
    for fault in changes.faults:
        new.do("inject", fault_to_dict(fault))
    if changes.abort:
        new.do("abort", {"requests": changes.abort})
    new.give_due()
