"""A recording that can be looked at anywhere: the state before any event, after any step.

Owns: `Replay`: the events, keyframes, and where the steps and kinds of events stand.
Knows nothing about: files (`Replay.open` asks the reader), the live scheduler.
Invariants: `state_at(i)` equals folding the first i events; what it returns is the caller's own. Keyframes stand so
close that the work between two is bounded, whatever the events are.

    events     e0 ............ e900 ............. e2000 ......
    keyframes  K0              K1                 K2              state_at(1500) = copy of K1, then 600 events
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from os import PathLike
from typing import Any

from kvsched.trace.events import EVENT_TYPES, Event, StepScheduled
from kvsched.trace.fold import apply
from kvsched.trace.log import EventLog
from kvsched.trace.reader import read_events
from kvsched.trace.state import State

_BYTES_PER_KEYFRAME = 200_000
"""Packed events between two keyframes. What it costs to fold events goes with their size: about 20 to 60 ns a byte."""


class Replay:
    """A recording, finished or still growing (`append` can be a scheduler's `emit`). One thread at a time.

    Raises TraceError for events that cannot be folded.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events = EventLog()
        self._head = State()
        self._cursor = State()
        self._keyframes: list[State] = [State()]
        self._keyframe_at: list[int] = [0]
        self._keyframe_bytes = 0
        self._places: dict[type[Any], array[int]] = {cls: array("q") for cls in EVENT_TYPES.values()}
        self._steps = self._places[StepScheduled]
        self._before_steps: int | None = None
        for event in events:
            self.append(event)

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Replay:
        """Read a trace file. Raises TraceError, warns TraceCutWarning (see `reader.read_events`)."""
        return cls(read_events(path))

    def append(self, event: Event) -> None:
        """The run goes on."""
        head, events = self._head, self.events
        index = head.index
        apply(head, event)
        events.append(event)
        self._places[type(event)].append(index)
        if events.num_packed_bytes - self._keyframe_bytes >= _BYTES_PER_KEYFRAME:
            self._keyframe_bytes = events.num_packed_bytes
            self._keyframes.append(head.copy())
            self._keyframe_at.append(head.index)

    def __len__(self) -> int:
        return self._head.index

    @property
    def num_steps(self) -> int:
        """Finished calls of `schedule()`, empty ones included."""
        return len(self._steps)

    def indexes(self, kind: str) -> array[int]:
        """Where the events of a kind stand (a copy). Raises ValueError for an unknown kind."""
        cls = EVENT_TYPES.get(kind)
        if cls is None:
            raise ValueError(f"no kind of event {kind!r}; there are {', '.join(EVENT_TYPES)}")
        return self._places[cls][:]

    def index_of_step(self, step: int) -> int:
        """How many events there are up to the end of call `step` of `schedule()`; step 0: before the first call.

        Raises IndexError for a step that the recording does not have.
        """
        if not 0 <= step <= self.num_steps:
            raise IndexError(f"step {step} is not in the recording; it has steps 0 to {self.num_steps}")
        return self._steps[step - 1] + 1 if step else self._index_before_steps()

    def _index_before_steps(self) -> int:
        """Events before the first call of `schedule()` had begun."""
        if self._before_steps is None:
            first = next((i for i, event in enumerate(self.events) if event.step), None)
            if first is None:
                return len(self)
            self._before_steps = first
        return self._before_steps

    def step_at(self, index: int) -> int:
        """The last step that was decided within the first `index` events."""
        return bisect_right(self._steps, index - 1)

    def state_at(self, index: int) -> State:
        """The state after the first `index` events, that is, before event `index`; `len(self)` is the end.

        Raises IndexError if there are fewer events.
        """
        if not 0 <= index <= len(self):
            raise IndexError(f"index {index} is not in the recording of {len(self)} events")
        number = bisect_right(self._keyframe_at, index) - 1
        if not self._keyframe_at[number] <= self._cursor.index <= index:
            self._cursor = self._keyframes[number].copy()
        for event in self.events.iterate(self._cursor.index, index):
            apply(self._cursor, event)
        return self._cursor.copy()

    def state_at_step(self, step: int) -> State:
        """The state after call `step` of `schedule()`. Raises IndexError for a step that is not there."""
        return self.state_at(self.index_of_step(step))
