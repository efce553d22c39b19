"""Two sessions in lock step: the first step at which they part, and what each has come to.

Owns: `compare`, `Comparison`, `FirstDifference`. Knows nothing about: how either came about, widgets.
Invariants: times of the clock, settings and planned faults do not count as differences: they are what one compares for.
Both sides are at the same step, or one has ended before it.

    left    1  2  3  4  5  6 …
    right   1  2  3  4' 5' 6' …      first difference: step 4
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvsched.trace.diff import differing_fields
from kvsched.trace.events import ConfigChanged, Event, FaultInjected, RunStarted
from kvsched.trace.metrics import RunMetrics, run_metrics
from lab.explain import Explanation
from lab.sentences import describe
from lab.session import Session

if TYPE_CHECKING:
    import pandas as pd

    from lab.widgets.compare import Compare

_NOT_COMPARED = (RunStarted, ConfigChanged, FaultInjected)


class FirstDifference(NamedTuple):
    """Where two sessions part. step: in which it happened; left, right: the two events, None where a side has ended."""

    step: int
    left: Event | None
    right: Event | None

    @property
    def lines(self) -> tuple[str, str]:
        """What happened on either side."""
        return tuple(describe(e) if e is not None else "has ended" for e in (self.left, self.right))  # type: ignore[return-value]


class Comparison:
    """What two sessions did alike, and where they part. names: what to call them."""

    def __init__(self, left: Session, right: Session, names: tuple[str, str] = ("left", "right")) -> None:
        self.left = left
        self.right = right
        self.names = names
        self._agreed = (0, 0)
        self._first: FirstDifference | None = None

    @property
    def sessions(self) -> tuple[Session, Session]:
        """Left and right."""
        return self.left, self.right

    # ---- in lock step

    def step(self, n: int = 1) -> Comparison:
        """Both on by n steps; one that has nothing left to do stays. Raises what a session raises if neither can."""
        for _ in range(n):
            step = max(session.position for session in self.sessions) + 1
            movable = [s for s in self.sessions if s.position < s.num_steps or s.can_step]
            for session in movable or self.sessions:
                if session.position < step:
                    session.step()
        return self

    def back(self, n: int = 1) -> Comparison:
        """Both back to the same step, n before the later one."""
        return self.seek(max(0, max(session.position for session in self.sessions) - n))

    def seek(self, step: int) -> Comparison:
        """Both to a step, or to the end of the side that ended before it."""
        if not 0 <= step <= max(session.num_steps for session in self.sessions):
            self.left.seek(step)
        for session in self.sessions:
            session.seek(min(step, session.num_steps))
        return self

    def run(self, *, max_steps: int = 10_000) -> Comparison:
        """Both to their ends, by at most so many steps."""
        for _ in range(max_steps):
            if not any(s.position < s.num_steps or s.can_step for s in self.sessions):
                break
            self.step()
        return self

    # ---- the difference

    @property
    def first(self) -> FirstDifference | None:
        """The first difference in what both have done so far; None if there is none yet."""
        if self._first is None:
            self._first = self._look_further()
        return self._first

    def _look_further(self) -> FirstDifference | None:
        """Compare what has not been compared. A side that may still go on has not ended."""
        left, right = self.left.events, self.right.events
        i, j = self._agreed
        while True:
            a, i = _next(left, i)
            b, j = _next(right, j)
            if (a is None and self.left.can_step) or (b is None and self.right.can_step) or (a is None and b is None):
                return None
            if differing_fields(a, b) is not None:
                return FirstDifference(min(e.step for e in (a, b) if e is not None), a, b)
            self._agreed = i, j = i + 1, j + 1

    def settings(self) -> pd.DataFrame:
        """The settings in which they differ, at the end of each."""
        import pandas as pd

        left, right = (session.config.to_dict() for session in self.sessions)
        rows = {name: (left[name], right[name]) for name in left if left[name] != right[name]}
        return pd.DataFrame.from_dict(rows, orient="index", columns=list(self.names), dtype=object)

    def explain(self) -> tuple[Explanation, Explanation] | None:
        """Why each side did what it did in the step of the first difference; None without one."""
        first = self.first
        if first is None:
            return None
        left, right = (session.explain(min(first.step, session.num_steps)) for session in self.sessions)
        return left, right

    def show(self) -> Compare:
        """Both side by side, as a widget with one transport."""
        from lab.widgets.compare import Compare

        return Compare(self.left, self.right, self.names)

    # ---- totals and tables

    def totals(self) -> pd.DataFrame:
        """What each has come to so far."""
        import pandas as pd

        columns = [_totals(run_metrics(session.events[:])) for session in self.sessions]
        return pd.DataFrame(dict(zip(self.names, columns, strict=True)), index=list(columns[0]))

    def steps(self) -> pd.DataFrame:
        """Both sides step by step: tokens, preempted, free blocks; and whether these are the same."""
        from kvsched.trace.tables import steps

        shown = ["num_tokens", "preempted", "guard_stops", "free"]
        tables = [steps(session.events[:]).set_index("step")[shown] for session in self.sessions]
        left, right = (t.add_suffix(f" {name}") for t, name in zip(tables, self.names, strict=True))
        joined = left.join(right, how="outer").astype("Int64")
        same = [(joined[f"{c} {self.names[0]}"] == joined[f"{c} {self.names[1]}"]).fillna(False) for c in shown]
        joined["same"] = same[0] & same[1] & same[2] & same[3]
        return joined

    def __repr__(self) -> str:
        first = self.first
        totals = [_totals(run_metrics(session.events[:])) for session in self.sessions]
        width = max(map(len, self.names))
        lines = []
        if first is None:
            lines.append("no difference so far")
        else:
            lines.append(f"first difference in step {first.step}:")
            lines += [f"  {name:>{width}}: {line}" for name, line in zip(self.names, first.lines, strict=True)]
        for name, each in zip(self.names, totals, strict=True):
            lines.append(f"  {name:>{width}} in all: " + ", ".join(f"{value} {what}" for what, value in each.items()))
        return "\n".join(lines)


def compare(
    left: Session,
    right: Session,
    *,
    names: tuple[str, str] = ("left", "right"),
    run: bool = True,
    max_steps: int = 10_000,
) -> Comparison:
    """Step two sessions side by side until both have ended, and find where they part.

    run: False leaves them where they are. max_steps: most steps to make (a run may never end).
    """
    comparison = Comparison(left, right, names)
    return comparison.run(max_steps=max_steps) if run else comparison


def _next(events: Sequence[Event], index: int) -> tuple[Event | None, int]:
    """The next event that counts, from `index` on, and where it stands."""
    while index < len(events):
        event = events[index]
        if not isinstance(event, _NOT_COMPARED):
            return event, index
        index += 1
    return None, index


def _totals(metrics: RunMetrics) -> dict[str, int]:
    return {
        "steps": metrics.num_steps,
        "preemptions": metrics.num_preemptions,
        "guard stops": metrics.num_guard_stops,
        "failed calls for slots": metrics.num_failed_calls,
        "tokens recomputed": metrics.num_recomputed_tokens,
        "tokens delivered": metrics.num_output_tokens,
        "requests ended": sum(1 for r in metrics.requests if r.finish_reason is not None),
    }
