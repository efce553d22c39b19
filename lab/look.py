"""What is seen at one step of a run: the state, tables, sentences.

Owns: `Look`, the reading half of a session. Knows nothing about: engines, moving on, changing anything.
Invariants: what is seen at a step depends on the events up to its moment alone.

    events   … | scheduled 3        fence … delivered 2 …  added | scheduled 4
    step 3                  decided                             end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

from kvsched.trace.events import Event
from kvsched.trace.state import State
from lab.explain import Explanation, explain_step
from lab.run import Run
from lab.words import count

if TYPE_CHECKING:
    import pandas as pd


Moment = Literal["decided", "end"]


class SessionError(ValueError):
    """Something that cannot be done with a session now; the message says what can."""


class Events(Sequence[Event]):
    """All events of a run, in order. Called, it is a table: `events()`, `events(kind="preempted")`.

    seen: how many of them the table shows.
    """

    def __init__(self, run: Run, seen: int) -> None:
        self._run = run
        self._seen = seen

    def __len__(self) -> int:
        return len(self._run.replay)

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...

    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        with self._run.lock:
            return self._run.replay.events[index]

    def __call__(self, kind: str | None = None) -> pd.DataFrame:
        """The events up to the position, as a pandas DataFrame. Raises ValueError for an unknown kind."""
        from kvsched.trace.tables import events_of_kind
        from lab.tables import events_table

        seen = self[: self._seen]
        return events_table(seen) if kind is None else events_of_kind(seen, kind)

    def __repr__(self) -> str:
        return f"{len(self)} events; events() and events(kind=…) show those up to the position as a table"


class Look:
    """A run, and the step of it that one looks at."""

    def __init__(self, run: Run, position: int) -> None:
        self._run = run
        self._position = position
        self._moment: Moment = "end"

    @property
    def position(self) -> int:
        """The step one looks at."""
        return self._position

    @property
    def moment(self) -> Moment:
        """ "decided": right after the decision of the step one looks at; "end": right before the next one."""
        return self._moment

    @property
    def num_steps(self) -> int:
        """Calls of `schedule()` so far."""
        return self._run.num_steps

    @property
    def state(self) -> State:
        """All that is true at the position."""
        with self._run.lock:
            return self._run.replay.state_at(self._end())

    @property
    def events(self) -> Events:
        """All events so far; called with or without `kind`, a table of those up to the position."""
        return Events(self._run, self._end())

    def explain(self, step: int | None = None) -> Explanation:
        """Why each request got what it got in a step (the position if None), in sentences; `.table()` for pandas."""
        number = self._position if step is None else step
        if not 0 <= number <= self.num_steps:
            raise SessionError(f"there is no step {number} to explain; this history has steps 0 to {self.num_steps}")
        run = self._run
        if number == 0:
            waiting = count(run.state(0).num_waiting, "request")
            return Explanation(f"Step 0: nothing has been decided yet; {waiting} waiting.", [])
        with run.lock:
            start, end = run.end_of_step(number - 1), run.replay.index_of_step(number)
            return explain_step(run.replay.state_at(start), run.replay.events[start:end])

    def requests(self) -> pd.DataFrame:
        """All requests at the position, one row each."""
        from lab.tables import requests_table

        return requests_table(self.state)

    def blocks(self) -> pd.DataFrame:
        """All blocks at the position, one row each."""
        from lab.tables import blocks_table

        return blocks_table(self.state)

    def block_history(self, block: int) -> pd.DataFrame:
        """What happened to a block up to the position: who held it, behind which fence, who got it next."""
        from kvsched.trace.tables import block_history

        num_blocks = self.state.num_blocks
        if not 0 <= block < num_blocks:
            raise SessionError(f"there is no block {block}; the pool has blocks 0 to {num_blocks - 1}")
        return block_history(self.seen(), block)

    def fence(self) -> pd.DataFrame:
        """All deferred frees up to the position: those that wait, and when the others came back."""
        from kvsched.trace.tables import fence

        return fence(self.seen())

    def steps(self) -> pd.DataFrame:
        """All calls of `schedule()` up to the position, one row each."""
        from kvsched.trace.tables import steps

        return steps(self.seen())

    def seen(self) -> Sequence[Event]:
        """The events up to the position."""
        with self._run.lock:
            return self._run.replay.events[: self._end()]

    def output(self, request_id: str) -> tuple[int, ...]:
        """The tokens a request was given up to the position. Raises SessionError for an unknown request."""
        try:
            return tuple(self.state.request(request_id).output_token_ids)
        except KeyError as error:
            raise SessionError(str(error.args[0])) from None

    def _end(self) -> int:
        """How many events there are up to the position."""
        run = self._run
        with run.lock:
            if self._moment == "decided":
                return run.replay.index_of_step(self._position)
            return run.end_of_step(self._position)
