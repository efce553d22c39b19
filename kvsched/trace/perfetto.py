"""A recording as Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

Owns: `to_chrome`, `write_chrome`. Knows nothing about: the viewers, plots.
Invariants: slices of one track never overlap, so that viewers nest nothing by mistake; every flow that ends has begun;
times are microseconds from the first event.

    process "device"     steps one after another, as they were computed
    process "scheduler"  steps in flight (scheduled -> processed), frees: release ~~> return, counters
    process "requests"   one track each: the steps that scheduled it; preemptions and failed calls as instants
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from kvsched.trace import events as ev
from kvsched.trace.fold import apply
from kvsched.trace.plain import TraceError
from kvsched.trace.state import Flight, State

Clock = Literal["engine", "order"]

_DEVICE, _SCHEDULER, _REQUESTS = 1, 2, 3
_FREES = 1
_MARK = 1.0
"""Length of the slice that a release or return is drawn as, in microseconds."""


def write_chrome(path: str | PathLike[str], events: Iterable[ev.Event], clock: Clock = "engine") -> None:
    """Write `to_chrome` to a .json file."""
    Path(path).write_text(json.dumps(to_chrome(events, clock), separators=(",", ":")), encoding="utf-8")


def to_chrome(events: Iterable[ev.Event], clock: Clock = "engine") -> dict[str, Any]:
    """The recording as {"traceEvents": [...]}.

    clock: "engine" takes the times that the events tell; "order" puts a microsecond between one event and the next.
    Raises TraceError for a recording without a clock (all times equal) under "engine".
    """
    events = list(events)
    if clock == "engine" and len({event.time for event in events if isinstance(event, ev.StepScheduled)}) < 2:
        raise TraceError("this recording tells no times (a bare scheduler has no clock); take clock='order'")
    return {"traceEvents": list(_Export(clock).run(events)), "displayTimeUnit": "ms"}


class _Export:
    """The fold that makes the slices. One method per kind of event that shows."""

    def __init__(self, clock: Clock) -> None:
        self.state = State()
        self.by_order = clock == "order"
        self.start: float | None = None
        self.now = 0.0
        self.device_free = 0.0
        self.scheduled_at: dict[int, float] = {}
        self.tracks: dict[str, int] = {}
        self.num_flows = 0
        self.waiting: list[tuple[int, str, int, int]] = []  # fence, request, id of the flow, blocks
        self.last_mark = -_MARK

    def run(self, events: Iterable[ev.Event]) -> Iterator[dict[str, Any]]:
        """All entries, names of processes and tracks first."""
        for number, name in ((_DEVICE, "device"), (_SCHEDULER, "scheduler"), (_REQUESTS, "requests")):
            yield _meta("process_name", number, 0, name)
        yield _meta("thread_name", _SCHEDULER, _FREES, "frees")
        for event in events:
            self._tick(event)
            flights = list(self.state.flights)
            apply(self.state, event)
            yield from self._entries(event, flights)

    def _tick(self, event: ev.Event) -> None:
        if self.by_order:
            self.now += 1.0
            return
        time = getattr(event, "time", None)
        if time is not None:
            self.start = time if self.start is None else self.start
            self.now = max(self.now, (time - self.start) * 1e6)

    def _entries(self, event: ev.Event, flights: list[Flight]) -> Iterator[dict[str, Any]]:
        match event:
            case ev.RequestAdded():
                yield from self._new_track(event.request)
            case ev.StepScheduled():
                yield from self._scheduled(event)
            case ev.StepDelivered():
                for flight in flights:
                    if flight.step == event.delivered:
                        yield from self._delivered(flight)
            case ev.BlocksReleased() if event.fence:
                yield from self._released(event)
            case ev.BlocksFreed() if event.fence:
                yield from self._returned(event)
            case ev.Preempted():
                yield self._instant("preempted", event.request, {"wanted by": event.wanted_by, "reason": event.reason})
            case ev.SlotsFailed():
                yield self._instant("no slots", event.request, {"needed": event.needed, "free": event.free})
            case ev.GuardStopped():
                yield self._instant("guard stopped the retry", event.request, {"victim": event.victim})
            case ev.LoadFailed():
                yield self._instant("load failed", event.request, {"blocks": list(event.block_ids)})
            case ev.RequestFinished():
                yield self._instant(f"finished: {event.reason}", event.request, {"tokens": event.num_output_tokens})
        if isinstance(event, ev.StepScheduled | ev.FenceAdvanced | ev.BlocksFreed | ev.BlocksReleased):
            yield from self._counters()

    def _new_track(self, request: str) -> Iterator[dict[str, Any]]:
        if request not in self.tracks:
            self.tracks[request] = len(self.tracks) + 1
            yield _meta("thread_name", _REQUESTS, self.tracks[request], request)

    def _scheduled(self, e: ev.StepScheduled) -> Iterator[dict[str, Any]]:
        if e.request_ids:
            self.scheduled_at[e.step] = self.now
            args = {"seq": e.seq, "requests": len(e.request_ids), "tokens": sum(e.num_tokens)}
            yield self._async("b", f"step {e.step}", e.step, args)

    def _delivered(self, flight: Flight) -> Iterator[dict[str, Any]]:
        """A step's slice begins when it was scheduled, or when the step before it was through."""
        e = flight.scheduled
        yield self._async("e", f"step {e.step}", e.step, {})
        begin = max(self.scheduled_at.pop(e.step), self.device_free)
        length = max(self.now - begin, 0.0)
        self.device_free = begin + length
        args = {"step": e.step, "seq": flight.seq, "requests": len(e.request_ids), "tokens": sum(e.num_tokens)}
        yield _slice(_DEVICE, 1, f"step {e.step}", begin, length, args)
        for request, n, start in zip(e.request_ids, e.num_tokens, e.starts, strict=True):
            row: dict[str, Any] = {"step": e.step, "tokens": n, "from position": start}
            name = "prefill" if request in e.prefill_chunks or n > 1 else "decode"
            yield _slice(_REQUESTS, self.tracks[request], name, begin, length, row)

    def _released(self, e: ev.BlocksReleased) -> Iterator[dict[str, Any]]:
        self.num_flows += 1
        self.waiting.append((e.fence, e.request, self.num_flows, len(e.block_ids)))
        args = {"blocks": list(e.block_ids), "fence": e.fence, "reason": e.reason}
        yield from self._mark(f"{e.request} releases {len(e.block_ids)} blocks", args, "s", self.num_flows)

    def _returned(self, e: ev.BlocksFreed) -> Iterator[dict[str, Any]]:
        for i, (fence, request, flow, num_blocks) in enumerate(self.waiting):
            if (fence, request) == (e.fence, e.request):
                del self.waiting[i]
                args = {"fence": fence, "front": list(e.front), "back": list(e.back), "shared": list(e.shared)}
                yield from self._mark(f"{num_blocks} blocks of {request} return", args, "f", flow)
                return

    def _mark(self, name: str, args: dict[str, Any], phase: str, flow: int) -> Iterator[dict[str, Any]]:
        """A short slice on the track of frees, and the end of an arrow on it."""
        at = self.last_mark = max(self.now, self.last_mark + _MARK)
        yield _slice(_SCHEDULER, _FREES, name, at, _MARK, args)
        arrow = {"ph": phase, "cat": "free", "name": "deferred free", "id": flow, "ts": at}
        yield arrow | {"pid": _SCHEDULER, "tid": _FREES} | ({"bp": "e"} if phase == "f" else {})

    def _counters(self) -> Iterator[dict[str, Any]]:
        state = self.state
        lag = state.sched_step_seq - state.processed_step_seq
        deferred = sum(len(entry.block_ids) for entry in state.deferred)
        for name, value in (("free blocks", state.num_free), ("fence lag", lag), ("deferred blocks", deferred)):
            yield {"ph": "C", "name": name, "pid": _SCHEDULER, "tid": 0, "ts": self.now, "args": {name: value}}

    def _async(self, phase: str, name: str, number: int, args: dict[str, Any]) -> dict[str, Any]:
        entry = {"ph": phase, "cat": "in flight", "name": name, "id": number, "ts": self.now, "args": args}
        return entry | {"pid": _SCHEDULER, "tid": 0}

    def _instant(self, name: str, request: str, args: dict[str, Any]) -> dict[str, Any]:
        at = {"pid": _REQUESTS, "tid": self.tracks[request], "ts": self.now}
        return {"ph": "i", "s": "t", "name": name, "args": args} | at


def _slice(pid: int, tid: int, name: str, begin: float, length: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": length, "args": args}


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
