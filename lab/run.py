"""One course of events: an engine, what it did, and what made it do so.

Owns: `Run`: taking events in as they come, the journal of commands, inputs still to come, where steps begin and end.
Knows nothing about: where one looks, breakpoints, widgets, forks (lab.fork makes new runs from old ones).
Invariants: every event of the engine is taken in once, in order, whoever drove the engine; `commands` is what drove it.

A step n, as people see it, is call n of `schedule()` and all that happened until the next one began:

    events    added added | … scheduled 1 | fence … delivered … added | … scheduled 2 | …
    step            0     |                 1                         |       2
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import cached_property
from threading import RLock
from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.engine import Engine, EngineStuck
from kvsched.faults import Fault, fault_from_dict, fault_to_dict
from kvsched.trace.events import Event, RequestAdded, RunStarted
from kvsched.trace.replay import Replay
from kvsched.trace.state import State
from lab.journal import Command, commands_of, execute

Remake = Callable[[SchedulerConfig], Engine]
"""Makes a fresh engine of the same kind, with these settings, no requests and no faults."""


class Run:
    """An engine and its history, or a history alone.

    engine: None for a recording. replay: all events. remake: makes engines like this one. owned: nobody else uses
    the engine, so its own list of events need not grow. lock: held while events are added.
    """

    def __init__(
        self,
        engine: Engine | None,
        replay: Replay,
        remake: Remake | None,
        *,
        owned: bool = False,
        agenda: Sequence[Command] = (),
    ) -> None:
        self.engine = engine
        self.replay = replay
        self.remake = remake
        self.lock: AbstractContextManager[Any] = RLock()
        self.agenda = list(agenda)
        self.first_faults: list[Fault] = []
        self._planned: list[Fault] = []
        self._owned = owned
        self._taken = 0
        self._commands: list[Command] | None = None if engine is None else []
        if engine is not None:
            self._adopt(engine)

    def _adopt(self, engine: Engine) -> None:
        """An engine that may have run already. What it did before is read from its events."""
        events = engine.events
        if not events or not isinstance(events[0], RunStarted):
            raise ValueError("this engine keeps no events; make it with record=True")
        if engine.scheduler.step == 0:
            self.first_faults = list(engine.watch.faults)
            self._planned = list(engine.watch.faults)
        self.take_in()

    # ---- reading

    @property
    def settings(self) -> SchedulerConfig:
        """The settings it started with."""
        head = self.replay.events[0]
        assert isinstance(head, RunStarted)
        return SchedulerConfig.from_dict(_own_settings(head.config))

    @property
    def config(self) -> SchedulerConfig:
        """The settings in force at the end."""
        return self.engine.config if self.engine is not None else self._recorded_config

    @cached_property
    def _recorded_config(self) -> SchedulerConfig:
        return SchedulerConfig.from_dict(_own_settings(self.replay.state_at(len(self.replay)).config))

    @property
    def num_steps(self) -> int:
        """Calls of `schedule()` so far."""
        return self.replay.num_steps

    @property
    def commands(self) -> Sequence[Command]:
        """What drove it. Raises NotEnough for a recording whose events do not say."""
        if self._commands is None:
            self._commands = commands_of(self.replay.events)
        return self._commands

    @property
    def faults(self) -> list[Fault]:
        """All faults planned so far, in the order in which they were."""
        if self.engine is not None:
            return list(self.engine.watch.faults)
        return [fault_from_dict(command.args) for command in self.commands if command.do == "inject"]

    def num_before(self, step: int) -> int:
        """How many commands come before the one that makes call `step` of `schedule()`; 0 for step 0."""
        if step == 0:
            return 0
        if step > self.num_steps:
            return len(self.commands)
        return bisect_left(self.commands, step, key=lambda command: command.step) - 1

    def events_before(self, command: int) -> Sequence[Event]:
        """The events that there were before a command (by its index; the number of commands: all events)."""
        commands = self.commands
        return self.replay.events[: commands[command].at] if command < len(commands) else self.replay.events

    def end_of_step(self, step: int) -> int:
        """How many events there are up to the next call of `schedule()`. Raises IndexError for a step there is not."""
        if step == self.num_steps:
            return len(self.replay)
        index = self.replay.index_of_step(step)
        while self.replay.events[index].step <= step:
            index += 1
        return index

    def state(self, step: int) -> State:
        """The state in which step + 1 is decided. Raises IndexError for a step there is not."""
        with self.lock:
            return self.replay.state_at(self.end_of_step(step))

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be done."""
        engine = self.engine
        if engine is None:
            return True
        scheduler = engine.scheduler
        is_in_the_air = bool(engine.num_in_flight or scheduler.kept_for_save or scheduler.awaiting_load)
        return not (engine.has_unfinished_requests() or is_in_the_air or self.agenda)

    def close(self) -> None:
        """End the engine, if nobody else uses it. May be called twice."""
        if self._owned and self.engine is not None:
            self.engine.close()

    # ---- going on

    def do(self, do: str, args: Mapping[str, Any] | None = None) -> Any:
        """Carry a command out and write it down. Raises what the engine raises; what happened till then is kept."""
        engine = self.engine
        assert engine is not None
        self.take_in()
        command = Command(len(self.replay), engine.scheduler.step, do, args or {})
        try:
            result = execute(engine, command)
        except Exception as error:
            if isinstance(error, EngineStuck) or len(engine.events) > self._taken:
                self._take_in_of(command)
            raise
        self._take_in_of(command)
        return result

    def turn(self) -> Any:
        """One turn of the engine, after the inputs that are due."""
        self.give_due()
        return self.do("turn")

    def give_due(self) -> None:
        """Carry out inputs that come before the next call of `schedule()`."""
        engine = self.engine
        assert engine is not None
        while self.agenda and self.agenda[0].step <= engine.scheduler.step:
            command = self.agenda.pop(0)
            self.do(command.do, command.args)

    def plan(self, command: Command) -> None:
        """An input that is to come."""
        self.agenda.append(command)
        self.agenda.sort(key=lambda c: c.step)

    def take_in(self) -> None:
        """Take in what happened outside of `do`, if anything did."""
        engine, commands = self.engine, self._commands
        assert engine is not None
        assert commands is not None
        start, step = len(self.replay), self.num_steps
        if new := self._new_events():
            self._write(commands_of(new, start, step=step, known_faults=self._planned))
        others = [fault_to_dict(fault) for fault in engine.watch.faults if fault not in self._planned]
        self._write([Command(len(self.replay), self.num_steps, "inject", fault) for fault in others])

    def _take_in_of(self, command: Command) -> None:
        """Take in what a command did, and write the command down."""
        assert self.engine is not None
        new = self._new_events()
        if command.do == "turn" and self.engine.landing is None:
            self._write(commands_of(new, command.at, step=command.step, known_faults=self._planned))
            return
        if command.do == "add":
            added = next(event for event in new if isinstance(event, RequestAdded))
            command = command._replace(args={**command.args, "arrival_time": added.arrival_time})
        self._write([command])

    def _write(self, commands: Sequence[Command]) -> None:
        assert self._commands is not None
        self._commands += commands
        self._planned += [fault_from_dict(command.args) for command in commands if command.do == "inject"]

    def _new_events(self) -> list[Event]:
        """The engine's events since the last call; they are ours from here on."""
        assert self.engine is not None
        with self.lock:
            new = self.engine.events[self._taken :]
            for event in new:
                self.replay.append(event)
            self._taken += len(new)
            if self._owned:
                self.engine.events.clear()
                self._taken = 0
        return new


def _own_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a trace's settings that are a SchedulerConfig's (others may stand beside them)."""
    names = {f.name for f in fields(SchedulerConfig)}
    return {name: value for name, value in config.items() if name in names}
