"""Serving a workload on an engine: requests join when their time has come, until all have ended.

Owns: `serve`, what ends a run early, Ctrl-C between two turns, `Recorder`.
Knows nothing about: models, tables.
Invariants: on a virtual clock arrivals are virtual, on a real one real. A run that ends early, for whatever reason,
leaves all its events behind. With nothing to serve the clock goes on to the next arrival:

    clock      0 ── turns ── all served          next arrival ── turns ──
                                      └ waited, or jumped ┘
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from kvsched.engine import Engine, EngineStuck
from kvsched.experiment.workload import WorkItem, WorkloadError
from kvsched.request import RequestRefused, SamplingParams
from kvsched.trace.events import Event, RequestAdded
from kvsched.trace.log import EventLog
from kvsched.trace.writer import TraceWriter

_LONGEST_NAP = 0.05
"""Seconds between two looks at Ctrl-C while waiting for an arrival."""


class Interrupt:
    """Ctrl-C as a question: the first one only sets `asked`, so that a turn is never cut in two; the second raises
    KeyboardInterrupt at once. A context manager; outside the main thread it changes nothing."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        self._is_ours = threading.current_thread() is threading.main_thread()
        if self._is_ours:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class Recorder:
    """Keeps a run's events, in `log`, and writes them to a file from `open` on: what has happened by then as well, so
    that a file is only replaced once a run is sure to begin. For Engine(on_event=…)."""

    def __init__(self) -> None:
        self.log = EventLog()
        self._writer: TraceWriter | None = None

    def __call__(self, event: Event) -> None:
        self.log.append(event)
        if self._writer is not None:
            self._writer.append(event)

    def open(self, path: Path) -> None:
        """Write to `path` from now on. Raises OSError if it cannot be written, TraceError for a wrong suffix."""
        writer = TraceWriter(path)
        writer.extend(self.log)
        self._writer = writer

    def close(self) -> None:
        """Finish the file, if there is one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@dataclass(slots=True)
class Served:
    """How far a run came. tokens: delivered so far, by request id. num_ended: requests that ended.

    stopped: why it ended early: "interrupted", "stalled" (no token for too long) or "stuck"; None if all was served.
    why: the same in a sentence.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_ended: int = 0
    stopped: str | None = None
    why: str = ""


def check_items(engine: Engine, items: Iterable[WorkItem]) -> None:
    """Raises WorkloadError, naming where the request was asked for, if one of them could never be served."""
    for item in items:
        try:
            engine.check_request(item.id, item.prompt, priority=item.priority)
        except RequestRefused as error:
            raise WorkloadError(f"{item.source}: {error}") from error


def serve(
    engine: Engine,
    items: Sequence[WorkItem],
    sampling: Callable[[WorkItem], SamplingParams],
    *,
    patience: int,
    interrupt: Interrupt,
    on_turn: Callable[[Served], None],
) -> Served:
    """Serve a workload to its end, or as far as it goes.

    sampling: how each request draws its tokens. patience: give up after so many turns in a row in which no request
    got a token. on_turn: called after each turn. Raises RequestRefused as `Engine.add_request`; see `check_items`.
    """
    served = Served({item.id: [] for item in items})
    try:
        _serve(engine, items, sampling, served, patience, interrupt, on_turn)
    except EngineStuck as error:
        served.stopped, served.why = "stuck", str(error)
    except KeyboardInterrupt:
        served.stopped = "interrupted"
    if served.stopped == "interrupted":
        served.why = "interrupted: the tables show what was reached"
    return served


def _serve(
    engine: Engine,
    items: Sequence[WorkItem],
    sampling: Callable[[WorkItem], SamplingParams],
    served: Served,
    patience: int,
    interrupt: Interrupt,
    on_turn: Callable[[Served], None],
) -> None:
    start = engine.runner.now()
    coming = deque(sorted(items, key=lambda item: item.arrival))
    num_barren = 0
    while coming or engine.has_unfinished_requests():
        if interrupt.asked:
            served.stopped = "interrupted"
            return
        while coming and start + coming[0].arrival <= engine.runner.now():
            item = coming.popleft()
            arrival = start + item.arrival
            engine.add_request(item.id, item.prompt, sampling(item), priority=item.priority, arrival_time=arrival)
        if engine.has_unfinished_requests():
            outputs = engine.step()
        else:
            outputs = engine.drain()
            _wait(engine, start + coming[0].arrival, interrupt)
        for output in outputs:
            served.tokens[output.request_id] += output.token_ids
        served.num_ended = len(items) - len(coming) - len(engine.scheduler.requests)
        num_barren = 0 if outputs or not engine.has_unfinished_requests() else num_barren + 1
        on_turn(served)
        if num_barren >= patience:
            served.stopped = "stalled"
            served.why = f"given up: {num_barren} turns in a row brought no request a token (--patience sets how many)"
            return
    engine.drain()


def _wait(engine: Engine, until: float, interrupt: Interrupt) -> None:
    """Let the runner's clock come to `until`: a virtual one jumps there, a real one is waited for."""
    engine.runner.advance(until)
    while not interrupt.asked and (left := until - engine.runner.now()) > 0:
        time.sleep(min(left, _LONGEST_NAP))


def from_arrival(events: Iterable[Event]) -> Iterator[Any]:
    """The events with each request's clock set to its arrival. The engine takes a request in between two turns, so
    that it may have waited already; latencies count that."""
    for event in events:
        if isinstance(event, RequestAdded) and event.arrival_time < event.time:
            yield event._replace(time=event.arrival_time)
        else:
            yield event
