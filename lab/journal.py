"""What drove a run: commands in order, written down as they come or read back from the run's own events.

Owns: `Command`, its execution on an engine, and the reading of commands, results and times from events.
Knows nothing about: sessions, models, how a fork goes on.
Invariants: a fresh engine that executes a run's commands, and is given its results, makes the same decisions. Results
are what `step_delivered` says was appended: what was dropped there is dropped again.

    events     added added | … scheduled 1 | … scheduled 2 | fence … delivered 1 finished | finished(abort) …
    commands    add   add  |   schedule    |   schedule    |   deliver                     | abort

A turn of the engine ("turn") is a schedule and the deliveries that follow of themselves; it repeats by itself where
results land after a stated number of steps, and is written as its halves where they land as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvsched.engine import Engine
from kvsched.faults import Fault, fault_from_dict, fault_to_dict
from kvsched.request import SamplingParams
from kvsched.trace import events as ev

CLIENT_COMMANDS = ("add", "abort")
"""What clients do; everything else is done by whoever debugs."""


class Command(NamedTuple):
    """at: events before it. step: calls of `schedule()` before it.

    do: "add", "abort", "configure", "inject", "reset_cache"; "turn", "schedule", "deliver". args: plain data, by name.
    """

    at: int
    step: int
    do: str
    args: Mapping[str, Any] = {}


class NotEnough(ValueError):
    """A recording does not hold all that is needed to run it again; the message says what is missing."""


def execute(engine: Engine, command: Command) -> Any:
    """Carry a command out. Returns what the engine's method returns."""
    args = command.args
    match command.do:
        case "add":
            sampling = SamplingParams(**args["sampling"])
            prompt, priority, arrival = args["prompt"], args.get("priority", 0), args.get("arrival_time")
            return engine.add_request(args["request"], prompt, sampling, priority=priority, arrival_time=arrival)
        case "abort":
            return engine.abort(*args["requests"])
        case "configure":
            return _configure(engine, args)
        case "inject":
            return engine.inject(fault_from_dict(args))
        case "reset_cache":
            return engine.scheduler.reset_prefix_cache(**args)
        case "turn":
            return engine.step()
        case "schedule":
            return engine.schedule()
        case "deliver":
            return engine.deliver()
    raise AssertionError(f"unknown command {command.do!r}")


def _configure(engine: Engine, settings: Mapping[str, Any]) -> None:
    """A landing that keeps the pipe full goes on to do so at another depth."""
    keeps_full = engine.landing == engine.config.max_in_flight - 1
    engine.scheduler.configure(**settings)
    if keeps_full:
        engine.landing = engine.config.max_in_flight - 1


def results_of(events: Sequence[ev.Event]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """By step: the tokens that each of its requests was given."""
    return {e.delivered: e.tokens for e in events if isinstance(e, ev.StepDelivered) and e.request_ids}


def times_of(events: Sequence[ev.Event]) -> Iterator[float]:
    """What the clock said, each time it was asked."""
    return (e.time for e in events if isinstance(e, _TIMED))


_TIMED = (ev.RequestAdded, ev.StepScheduled, ev.StepDelivered, ev.RequestFinished)


# ---- from events


def commands_of(
    events: Sequence[ev.Event], start: int = 0, *, step: int = 0, known_faults: Iterable[Fault] = ()
) -> list[Command]:
    """The commands that caused events (the first of which has index `start`, after `step` calls of `schedule()`).

    known_faults: those that need not be written down when they come to pass.
    Raises NotEnough if something came from outside the scheduler that events do not tell.
    """
    return _Reading(events, start, step, [fault_to_dict(fault) for fault in known_faults]).read()


class _Reading:
    """One pass over events. at: index into `events`."""

    def __init__(self, events: Sequence[ev.Event], start: int, step: int, known: list[dict[str, Any]]) -> None:
        self.events = events
        self.start = start
        self.step = step
        self.at = 0
        self.commands: list[Command] = []
        self.told_faults: list[Mapping[str, Any]] = [*known]

    def read(self) -> list[Command]:
        while self.at < len(self.events):
            self.next_command(self.events[self.at])
        return self.commands

    def next_command(self, event: ev.Event) -> None:
        if event.step > self.step or self.is_planned_abort(event):
            self.schedule()
        elif isinstance(event, ev.RunStarted):
            self.skip(lambda e: False)
        elif isinstance(event, ev.RequestAdded):
            self.write("add", _added(event))
            self.skip(lambda e: False)
        elif isinstance(event, ev.ConfigChanged):
            self.write("configure", dict(event.changes))
            self.skip(lambda e: isinstance(e, ev.BlocksFreed))
        elif isinstance(event, ev.RequestFinished) and event.reason == "abort":
            self.write("abort", {"requests": [event.request]})
            self.skip(lambda e: isinstance(e, _OF_AN_END))
        elif isinstance(event, ev.CacheReset | ev.Preempted):
            self.write("reset_cache", {"preempt_running": isinstance(event, ev.Preempted)})
            self.skip(lambda e: isinstance(e, ev.Preempted | ev.BlocksReleased | ev.BlocksFreed | ev.CacheReset))
        elif isinstance(event, ev.FaultInjected):
            self.fault(event.fault, len(self.commands))
            self.skip(lambda e: False)
        else:
            self.deliver()

    def write(self, do: str, args: Mapping[str, Any] | None = None) -> None:
        self.commands.append(Command(self.start + self.at, self.step, do, args or {}))

    def skip(self, goes_on: Callable[[ev.Event], bool]) -> None:
        """Past this event, and those behind it that belong to it."""
        self.at += 1
        while self.at < len(self.events) and self.events[self.at].step == self.step and goes_on(self.events[self.at]):
            self.at += 1

    def schedule(self) -> None:
        place = len(self.commands)
        self.write("schedule")
        while self.at < len(self.events):
            event = self.events[self.at]
            self.at += 1
            if isinstance(event, ev.FaultInjected):
                self.fault(event.fault, place)
            elif isinstance(event, ev.SlotsFailed) and event.injected:
                self.failed_call(event, place)
            elif isinstance(event, ev.StepScheduled):
                self.step = event.step
                self.held_execution(place)
                return
            elif isinstance(event, _FROM_OUTSIDE) or (isinstance(event, ev.Admitted) and event.external):
                raise NotEnough(
                    f"step {event.step} has {event.kind}: what a KV connector answered is not in the events"
                )

    def held_execution(self, place: int) -> None:
        """A fault that holds the execution of a step is told right after the step."""
        while self.at < len(self.events) and isinstance(event := self.events[self.at], ev.FaultInjected):
            if event.fault.get("kind") != "hold_execution":
                return
            self.fault(event.fault, place)
            self.at += 1

    def deliver(self) -> None:
        self.write("deliver")
        while self.at < len(self.events):
            event = self.events[self.at]
            if isinstance(event, _FROM_OUTSIDE):
                raise NotEnough(f"step {event.step} has {event.kind}: what a KV connector did is not in the events")
            if isinstance(event, ev.StepDelivered):
                if not event.request_ids:
                    raise NotEnough(f"step {event.step} delivers an empty step: a KV connector reported transfers")
                self.skip(_trails)
                return
            self.at += 1

    def is_planned_abort(self, event: ev.Event) -> bool:
        """Whether an abort is the work of a fault: told right behind it, and followed by the pass it stands before."""
        if not isinstance(event, ev.RequestFinished) or event.reason != "abort":
            return False
        for later in self.events[self.at + 1 : self.at + 4]:
            if isinstance(later, ev.FaultInjected):
                return later.fault.get("kind") == "abort" and later.fault.get("request") == event.request
            if not isinstance(later, _OF_AN_END):
                return False
        return False

    def fault(self, fault: Mapping[str, Any], place: int) -> None:
        """Write a fault down before the command at `place`."""
        if fault in self.told_faults:
            return
        self.told_faults.append(fault)
        at, step = self.start + self.at, self.step
        if place < len(self.commands):
            at, step = self.commands[place].at, self.commands[place].step
        self.commands.insert(place, Command(at, step, "inject", dict(fault)))

    def failed_call(self, event: ev.SlotsFailed, place: int) -> None:
        """A call for slots was made to fail. Recordings from elsewhere may not say by what."""
        by_request = any(
            fault["kind"] == "fail_request"
            and fault["request"] == event.request
            and fault["step"] <= event.step <= (fault.get("until_step") or event.step)
            for fault in self.told_faults
        )
        if not by_request:
            self.fault({"kind": "fail_call", "call": event.call}, place)


_OF_AN_END = (ev.BlocksReleased, ev.BlocksFreed, ev.BlocksKept, ev.BlocksUncached)
_FROM_OUTSIDE = (ev.Parked, ev.LoadStarted, ev.LoadLanded, ev.LoadFailed, ev.SaveStarted, ev.SaveSent, ev.BlocksKept)


def _trails(event: ev.Event) -> bool:
    """Whether an event behind `step_delivered` belongs to it."""
    if isinstance(event, ev.RequestFinished):
        return event.reason != "abort"
    if isinstance(event, ev.BlocksFreed):
        return not event.fence
    return isinstance(event, ev.BlocksReleased | ev.BlocksUncached)


def _added(event: ev.RequestAdded) -> dict[str, Any]:
    sampling = {key: tuple(value) if isinstance(value, list) else value for key, value in event.sampling.items()}
    return {
        "request": event.request,
        "prompt": event.prompt_token_ids,
        "sampling": sampling,
        "priority": event.priority,
        "arrival_time": event.arrival_time,
    }
