"""Looking through events for the first one at which a condition holds.

Owns: `Hit`, `Search`. Knows nothing about: where the events come from, who stops.
Invariants: a condition about the state alone counts at the event at which it becomes true, not while it stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvsched.trace.fold import apply
from kvsched.trace.replay import Replay
from kvsched.trace.state import State
from lab.breakpoints import Condition, Moment


class Hit(NamedTuple):
    """Where a condition held. at: index of the event in the run."""

    condition: Condition
    at: int


class Search:
    """Goes through a run from event `start` on, as far as it has come. conditions: the first to hold wins."""

    def __init__(self, replay: Replay, start: int, conditions: Sequence[Condition]) -> None:
        self._replay = replay
        self._conditions = conditions
        self._next = start
        self._needs_state = any(condition.needs_state for condition in conditions)
        self._state = replay.state_at(start) if self._needs_state else State()
        moment = Moment(None, self._state, start)
        self._held = [not condition.at_events and condition.test(moment) for condition in conditions]

    def go_to(self, stop: int) -> Hit | None:
        """The first hit before event `stop`; the next call goes on behind it."""
        while self._next < stop:
            event = self._replay.events[self._next]
            if self._needs_state:
                apply(self._state, event)
            self._next += 1
            moment = Moment(event, self._state, self._next)
            hit: Hit | None = None
            for i, condition in enumerate(self._conditions):
                holds = condition.test(moment)
                if holds and not self._held[i] and hit is None:
                    hit = Hit(condition, self._next - 1)
                self._held[i] = holds and not condition.at_events
            if hit is not None:
                return hit
        return None
