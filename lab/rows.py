"""Events as rows: what happened, in numbers, for marks, tips and timelines.

Owns: `row_of`, which says what a row keeps of an event, and the table of words that rows name by number.
Knows nothing about: state, frames, bytes.
Invariants: a row's fields stand in the order of ROW_FIELDS; none is negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvsched.trace import events as ev
from lab.columns import Row

_MICROSECONDS = 1e6


class FrameRow(NamedTuple):
    """One row: its kind and its fields."""

    kind: Row
    fields: tuple[int, ...]


class Words:
    """Words and their numbers, in the order of their first use."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, word: str) -> int:
        """The number of a word, new or known."""
        if word not in self._numbers:
            self._numbers[word] = len(self.words)
            self.words.append(word)
        return self._numbers[word]


class RowMaker:
    """Makes rows. ref: request id -> 1 + its index, 0 for one that is not known."""

    def __init__(self, ref: Callable[[str], int]) -> None:
        self.ref = ref
        self.words = Words()
        self._start_time: float | None = None

    def row_of(self, event: ev.Event) -> FrameRow | None:
        """The row of an event, or None for one that only moves blocks."""
        kind, fields = _ROWS.get(type(event), (None, None))
        if kind is None or fields is None:
            return None
        return FrameRow(kind, tuple(map(int, fields(self, event))))

    def microseconds(self, time: float) -> int:
        """Since the first time seen."""
        if self._start_time is None:
            self._start_time = time
        return max(0, round((time - self._start_time) * _MICROSECONDS))

    def word(self, text: str) -> int:
        """Number of a word."""
        return self.words.number(text)


def spell(data: Mapping[str, Any]) -> str:
    """Plain data as words: {"guard": "none"} -> "guard none"."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in data.items() if value is not None)


_ROWS: dict[type[Any], tuple[Row, Callable[[RowMaker, Any], tuple[Any, ...]]]] = {
    ev.StepScheduled: (Row.SCHEDULED, lambda m, e: (e.step, e.seq, e.calls, e.free, m.microseconds(e.time))),
    ev.StepDelivered: (
        Row.DELIVERED,
        lambda m, e: (e.delivered, sum(len(tokens) for tokens in e.tokens), m.microseconds(e.time)),
    ),
    ev.FenceAdvanced: (Row.FENCE, lambda m, e: (e.processed,)),
    ev.SlotsFailed: (
        Row.FAILED,
        lambda m, e: (m.ref(e.request), e.call, e.needed, e.free, e.injected, e.waiting),
    ),
    ev.GuardStopped: (Row.GUARD, lambda m, e: (m.ref(e.request), m.ref(e.victim), e.fence, e.processed)),
    ev.Preempted: (
        Row.PREEMPTED,
        lambda m, e: (
            *(m.ref(e.request), m.ref(e.wanted_by), e.computed, e.stale, e.dropped, e.count),
            m.word(e.reason),
        ),
    ),
    ev.RequestFinished: (Row.FINISHED, lambda m, e: (m.ref(e.request), m.word(e.reason), e.num_output_tokens)),
    ev.RequestAdded: (Row.ADDED, lambda m, e: (m.ref(e.request),)),
    ev.Admitted: (Row.ADMITTED, lambda m, e: (m.ref(e.request), e.resumed, e.computed, e.local, e.external)),
    ev.Skipped: (Row.SKIPPED, lambda m, e: (m.ref(e.request), m.word(e.reason))),
    ev.LoadStarted: (Row.LOAD_STARTED, lambda m, e: (m.ref(e.request), len(e.block_ids), e.asynchronous)),
    ev.LoadLanded: (Row.LOAD_LANDED, lambda m, e: (m.ref(e.request),)),
    ev.LoadFailed: (Row.LOAD_FAILED, lambda m, e: (m.ref(e.request), len(e.block_ids), e.valid)),
    ev.SaveSent: (Row.SAVE_SENT, lambda m, e: (m.ref(e.request),)),
    ev.FaultInjected: (Row.FAULT, lambda m, e: (m.word(spell(e.fault)),)),
    ev.ConfigChanged: (Row.CONFIG, lambda m, e: (m.word(spell(e.changes)),)),
    ev.CacheReset: (Row.CACHE_RESET, lambda m, e: ()),
}
