"""Two recordings in lock step: where they part, and by how much in all.

Owns: `diff` and its result. Knows nothing about: where the events come from.
Invariants: events compare field by field; times of the clock do not count unless asked for, and neither do the settings
at the head, which are told apart: they are what one compares runs for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from kvsched.trace.events import Event, RunStarted
from kvsched.trace.fold import apply
from kvsched.trace.state import State

CLOCK_FIELDS = frozenset({"time", "arrival_time"})


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two recordings part.

    index: events before it. a, b: the two events, None where a recording has ended. fields: names of those that differ,
    () for different kinds. before: the state that both have in common.
    """

    index: int
    a: Event | None
    b: Event | None
    fields: tuple[str, ...]
    before: State

    def __str__(self) -> str:
        head = f"event {self.index}, after step {self.before.step}"
        if self.fields:
            what = ", ".join(f"{n} {getattr(self.a, n)!r:.200} | {getattr(self.b, n)!r:.200}" for n in self.fields)
            return f"{head}: {self.a.kind if self.a else ''} differs in {what}\nbefore: {self.before}"
        return f"{head}:\n  a: {self.a!r:.300}\n  b: {self.b!r:.300}\nbefore: {self.before}"


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """first: None if there is no difference. settings: value here and there, of settings that differ. counts: number
    of events here and there, of kinds of which there are not equally many."""

    first: Difference | None
    settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether the same things happened (the settings may differ)."""
        return self.first is None

    def __str__(self) -> str:
        lines = [f"setting {name}: {a!r} | {b!r}" for name, (a, b) in self.settings.items()]
        if self.first is None:
            return "\n".join([*lines, "no difference"])
        lines.append(str(self.first))
        return "\n".join(lines + [f"number of {kind}: {a} | {b}" for kind, (a, b) in self.counts.items()])


def diff(a: Iterable[Event], b: Iterable[Event], *, ignore: Collection[str] = CLOCK_FIELDS) -> TraceDiff:
    """Compare two recordings. ignore: names of fields that do not count.

    Raises TraceError if their common beginning cannot be folded.
    """
    state, first = State(), None
    settings: dict[str, tuple[Any, Any]] = {}
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for index, (left, right) in enumerate(zip_longest(a, b)):
        for count, event in zip(counts, (left, right), strict=True):
            if event is not None:
                count[event.kind] += 1
        if first is not None:
            continue
        if isinstance(left, RunStarted) and isinstance(right, RunStarted):
            settings = _differing(left.config, right.config)
        else:
            fields = differing_fields(left, right, ignore)
            if fields is not None:
                first = Difference(index, left, right, fields, state)
                continue
        assert left is not None
        apply(state, left)
    kinds = sorted(counts[0] | counts[1])
    uneven = {kind: (counts[0][kind], counts[1][kind]) for kind in kinds if counts[0][kind] != counts[1][kind]}
    return TraceDiff(first, settings, uneven)


def differing_fields(
    a: Event | None, b: Event | None, ignore: Collection[str] = CLOCK_FIELDS
) -> tuple[str, ...] | None:
    """Names of the fields in which two events differ; () if they are of different kinds, None if they are equal."""
    if a is None or b is None or type(a) is not type(b):
        return ()
    if a == b:
        return None
    names = tuple(n for n, x, y in zip(a._fields, a, b, strict=True) if x != y and n not in ignore)
    return names or None


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*a, *(name for name in b if name not in a)]
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}
