"""What the plots show, as plain columns. Pure.

Owns: the series. Knows nothing about: plotly, sessions, colours.
Invariants: each is a function of the events alone; where a clock stands still (a bare scheduler has none), steps stand
for time, and `clock` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvsched.trace import events as ev
from kvsched.trace.metrics import RequestMetrics, request_metrics


class PoolSeries(NamedTuple):
    """Per call of `schedule()`: free blocks as it ended, blocks behind the fence. usable: blocks that can be held."""

    steps: list[int]
    times: list[float]
    free: list[int]
    deferred: list[int]
    usable: int


class PreemptionSeries(NamedTuple):
    """Per call of `schedule()`: requests preempted, retries that the guard stopped, failed calls for slots."""

    steps: list[int]
    preempted: list[int]
    guard_stops: list[int]
    failed_calls: list[int]


class ThroughputSeries(NamedTuple):
    """Output tokens delivered per unit of `clock` ("second" or "step"), in bins of one width that begin at `starts`."""

    starts: list[float]
    width: float
    tokens: list[float]
    clock: str


class LatencySeries(NamedTuple):
    """Seconds; one entry per request that has the latency."""

    ttft: list[float]
    tpot: list[float]


class Span(NamedTuple):
    """What a request was doing, from one moment to another. doing: "waiting", "loading", "running", "preempted"."""

    request: str
    doing: str
    first_step: int
    last_step: int
    start: float
    end: float


class FenceSeries(NamedTuple):
    """Each time one of the numbers moved: steps scheduled behind the fence's position, and deferred frees that wait."""

    events: list[int]
    steps: list[int]
    lag: list[int]
    waiting: list[int]


class RecomputeSeries(NamedTuple):
    """Per call of `schedule()`: tokens computed for the first time, and computed again after a preemption."""

    steps: list[int]
    first: list[int]
    again: list[int]

    @property
    def tax(self) -> float:
        """Share of all computed tokens that were computed again."""
        total = sum(self.first) + sum(self.again)
        return sum(self.again) / total if total else 0.0


def pool(events: Iterable[ev.Event]) -> PoolSeries:
    """Free blocks over time."""
    series = PoolSeries([], [], [], [], 0)
    deferred = 0
    for event in events:
        match event:
            case ev.RunStarted():
                series = series._replace(usable=int(event.config["num_blocks"]) - 1)
            case ev.BlocksReleased() if event.fence:
                deferred += len(event.block_ids)
            case ev.BlocksFreed() if event.fence:
                deferred -= len(event.front) + len(event.back) + len(event.shared)
            case ev.StepScheduled():
                series.steps.append(event.step)
                series.times.append(event.time)
                series.free.append(event.free)
                series.deferred.append(deferred)
    return series


def preemptions(events: Iterable[ev.Event]) -> PreemptionSeries:
    """Who lost, over time. What happens between two calls counts with the later one."""
    series = PreemptionSeries([], [], [], [])
    counts = {ev.Preempted: 0, ev.GuardStopped: 0, ev.SlotsFailed: 0}
    columns = series[1:]
    for event in events:
        if isinstance(event, ev.StepScheduled):
            series.steps.append(event.step)
            for column, kind in zip(columns, counts, strict=True):
                column.append(counts[kind])
                counts[kind] = 0
        elif type(event) in counts:
            counts[type(event)] += 1
    return series


def throughput(events: Iterable[ev.Event], num_bins: int = 60) -> ThroughputSeries:
    """Output tokens over time. num_bins: most bins; per step there is at most one bin for each step.

    Raises ValueError for fewer than one bin.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}; give at least 1")
    rows = [(e.time, e.step, sum(map(len, e.tokens))) for e in events if isinstance(e, ev.StepDelivered)]
    if not rows:
        return ThroughputSeries([], 1.0, [], "step")
    start, end = rows[0][0], rows[-1][0]
    if end > start:
        width = (end - start) / num_bins
        places = [(time - start) / width for time, _, _ in rows]
        clock = "second"
    else:
        start, end = float(rows[0][1]), float(rows[-1][1])
        width = max(1.0, (end - start + 1) / num_bins)
        places = [(step - start) / width for _, step, _ in rows]
        clock = "step"
    last = min(num_bins - 1, int(max(places)))
    tokens = [0.0] * (last + 1)
    for place, (_, _, count) in zip(places, rows, strict=True):
        tokens[min(last, int(place))] += count / width
    return ThroughputSeries([start + i * width for i in range(last + 1)], width, tokens, clock)


def latencies(events: Iterable[ev.Event]) -> LatencySeries:
    """Times to first token, and per output token, of the requests that have them (see kvsched.trace.metrics)."""
    rows: Sequence[RequestMetrics] = request_metrics(events)
    ttft = [r.ttft for r in rows if r.ttft is not None]
    tpot = [r.tpot for r in rows if r.tpot is not None]
    return LatencySeries(ttft, tpot)


def gantt(events: Iterable[ev.Event]) -> list[Span]:
    """What each request was doing, by arrival; what still goes on ends with the events."""
    open_spans: dict[str, tuple[str, int, float]] = {}
    spans: dict[str, list[Span]] = {}
    step, time = 0, 0.0

    def change(request: str, doing: str | None) -> None:
        if request in open_spans:
            was, since, start = open_spans.pop(request)
            spans.setdefault(request, []).append(Span(request, was, since, step, start, time))
        if doing is not None:
            spans.setdefault(request, [])
            open_spans[request] = doing, step, time

    for event in events:
        step, time = event.step, getattr(event, "time", time)
        match event:
            case ev.RequestAdded():
                change(event.request, "waiting")
            case ev.Parked():
                change(event.request, "loading")
            case ev.Admitted():
                change(event.request, "running")
            case ev.Preempted():
                change(event.request, "preempted")
            case ev.RequestFinished():
                change(event.request, None)
    for request in list(open_spans):
        change(request, None)
    return [span for each in spans.values() for span in each]


def fence_lag(events: Iterable[ev.Event]) -> FenceSeries:
    """How far the fence is behind the newest step, and what waits for it."""
    series = FenceSeries([], [], [], [])
    newest = processed = waiting = 0
    for index, event in enumerate(events):
        match event:
            case ev.StepScheduled():
                newest = max(newest, event.seq)
            case ev.FenceAdvanced():
                processed = event.processed
            case ev.BlocksReleased() if event.fence:
                waiting += 1
            case ev.BlocksFreed() if event.fence:
                waiting -= 1
            case _:
                continue
        for column, value in zip(series, (index, event.step, newest - processed, waiting), strict=True):
            column.append(value)
    return series


def recompute(events: Iterable[ev.Event]) -> RecomputeSeries:
    """What preemptions cost: positions of a request that are computed a second time."""
    series = RecomputeSeries([], [], [])
    reached: dict[str, int] = {}
    for event in events:
        if isinstance(event, ev.RequestAdded):
            reached[event.request] = 0
        elif isinstance(event, ev.StepScheduled):
            again = 0
            for request, n, start in zip(event.request_ids, event.num_tokens, event.starts, strict=True):
                again += max(min(start + n, reached[request]) - start, 0)
                reached[request] = max(reached[request], start + n)
            series.steps.append(event.step)
            series.first.append(sum(event.num_tokens) - again)
            series.again.append(again)
    return series
