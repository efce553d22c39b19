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
from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

from kvsched.trace.events import Event
from kvsched.trace.fold import apply
from kvsched.trace.log import EventLog
from kvsched.trace.reader import read_events
from kvsched.trace.state import State

_WORK_PER_KEYFRAME = 15_000
_BASE_WORK = 2


class Replay:
    """A recording, finished or still growing (`append` can be a scheduler's `emit`).

    Raises TraceError for events that cannot be folded.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events = events if isinstance(events, EventLog) else EventLog()
        self._head = State()
        self._keyframes: list[State] = [State()]
        self._keyframe_at: list[int] = [0]
        self._work = 0
        self._steps = array("q")
        self._before_steps = 0
        self._kinds: dict[str, array[int]] = {}
        self._cursor = State()
        for event in events:
            if events is not self.events:
                self.events.append(event)
            self._take_in(event)

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Replay:
        """Read a trace file. Raises TraceError, warns TraceCutWarning (see `reader.read_events`)."""
        return cls(read_events(path))

    def append(self, event: Event) -> None:
        """The run goes on."""
        self._take_in(event)
        self.events.append(event)

    def _take_in(self, event: Event) -> None:
        head = self._head
        index = head.index
        apply(head, event)
        kind = event.kind
        if kind not in self._kinds:
            self._kinds[kind] = array("q")
        self._kinds[kind].append(index)
        if kind == "step_scheduled":
            self._steps.append(index)
        if not head.step:
            self._before_steps = head.index
        self._work += _BASE_WORK + (_WORK[kind](event) if kind in _WORK else 0)
        if self._work >= _WORK_PER_KEYFRAME:
            self._work = 0
            self._keyframes.append(head.copy())
            self._keyframe_at.append(head.index)

    def __len__(self) -> int:
        return self._head.index

    @property
    def num_steps(self) -> int:
        """Finished calls of `schedule()`, empty ones included."""
        return len(self._steps)

    def indexes(self, kind: str) -> array[int]:
        """Where the events of a kind stand (a copy; empty for a kind that never came)."""
        return self._kinds.get(kind, array("q"))[:]

    def index_of_step(self, step: int) -> int:
        """How many events there are up to the end of call `step` of `schedule()`; step 0: before the first call.

        Raises IndexError for a step that the recording does not have.
        """
        if step == 0:
            return self._before_steps
        if not 0 < step <= len(self._steps):
            raise IndexError(f"step {step} is not in the recording; it has steps 0 to {len(self._steps)}")
        return self._steps[step - 1] + 1

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


_WORK: dict[str, Callable[[Any], int]] = {
    "step_scheduled": lambda event: len(event.request_ids),
    "step_delivered": lambda event: len(event.request_ids),
    "blocks_allocated": lambda event: len(event.block_ids),
    "blocks_freed": lambda event: len(event.front) + len(event.back),
}
"""What folding an event costs beyond `_BASE_WORK`, in units of one request's row."""
