"""Latencies, throughput and preemptions of a run, from its events.

Owns: the definitions; `RequestMetrics`, `RunMetrics`, `MetricsFold`, `request_metrics`, `run_metrics`.
Knows nothing about: blocks, plots, tables.
Invariants: the clock of a request starts when it is added and is never restarted; a preemption counts once, a resume
nothing, a retry stopped by the guard nothing. Times are seconds on the engine's clock, as the events tell them.

    added      first scheduled      first token                         last token
      |---- queue ----|---- prefill ----|------------- decode --------------|
      |------------- TTFT --------------|   TPOT = decode / (tokens - 1)    |
                      |-------------------- inference ----------------------|
      |------------------------------- E2EL --------------------------------|
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvsched.trace import events as ev

_NORMAL = frozenset({"stop", "length", "pool"})


@dataclass(slots=True)
class RequestMetrics:
    """One request. Latencies are None until what ends them has happened, `e2el` unless it ended normally.

    preemptions: reason ("kv_full", "priority", "cache_reset") of each. num_recomputed_tokens: tokens scheduled again
    that had been scheduled before. num_hit_tokens, num_loaded_tokens: prefix tokens found here and outside, summed over
    its admissions. token_times: when each output token was delivered.
    """

    request: str
    added: float
    num_prompt_tokens: int
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None
    finish_reason: str | None = None
    preemptions: list[str] = field(default_factory=list)
    num_scheduled_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_hit_tokens: int = 0
    num_loaded_tokens: int = 0
    high_mark: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens delivered."""
        return len(self.token_times)

    @property
    def num_preemptions(self) -> int:
        """How often it lost its blocks."""
        return len(self.preemptions)

    @property
    def queue(self) -> float | None:
        """From its arrival to the first step that scheduled it."""
        return _between(self.added, self.first_scheduled)

    @property
    def prefill(self) -> float | None:
        """From the first step that scheduled it to its first token."""
        return _between(self.first_scheduled, self._token(0))

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return _between(self.added, self._token(0))

    @property
    def decode(self) -> float | None:
        """From the first token to the last."""
        return _between(self._token(0), self._token(-1))

    @property
    def inference(self) -> float | None:
        """From the first step that scheduled it to its last token."""
        return _between(self.first_scheduled, self._token(-1))

    @property
    def e2el(self) -> float | None:
        """End-to-end latency: from its arrival to its last token."""
        return _between(self.added, self._token(-1)) if self.finish_reason in _NORMAL else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        decode = self.decode
        return decode / (self.num_output_tokens - 1) if decode is not None and self.num_output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: between one token and the next."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    def _token(self, index: int) -> float | None:
        return self.token_times[index] if self.token_times else None


def _between(start: float | None, end: float | None) -> float | None:
    return end - start if start is not None and end is not None else None


class Percentiles(NamedTuple):
    """Of a latency over requests, in seconds; NaN where no request has it."""

    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """A whole run. duration: from the first arrival to the last token or end; throughputs are per second of it (0 if it
    is 0). preemptions: by reason. Percentiles of ttft, tpot and e2el are over the requests that ended normally."""

    requests: tuple[RequestMetrics, ...]
    duration: float
    num_steps: int
    num_empty_steps: int
    num_failed_calls: int
    num_guard_stops: int
    preemptions: dict[str, int]

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all requests."""
        return sum(self.preemptions.values())

    @property
    def num_output_tokens(self) -> int:
        """Tokens delivered to all requests."""
        return sum(r.num_output_tokens for r in self.requests)

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens scheduled again that had been scheduled before."""
        return sum(r.num_recomputed_tokens for r in self.requests)

    @property
    def recompute_tax(self) -> float:
        """Share of the scheduled tokens that were recomputed."""
        scheduled = sum(r.num_scheduled_tokens for r in self.requests)
        return self.num_recomputed_tokens / scheduled if scheduled else 0.0

    @property
    def output_throughput(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.duration if self.duration else 0.0

    @property
    def request_throughput(self) -> float:
        """Requests ended normally per second."""
        return len(self.completed) / self.duration if self.duration else 0.0

    @property
    def completed(self) -> list[RequestMetrics]:
        """Requests that ended normally."""
        return [r for r in self.requests if r.finish_reason in _NORMAL]

    def percentiles(self, latency: str) -> Percentiles:
        """Of "ttft", "tpot", "itl", "e2el", "queue", "prefill", "decode" or "inference". "itl" is over all gaps."""
        if latency == "itl":
            return percentiles([gap for r in self.completed for gap in r.itl])
        values = (getattr(r, latency) for r in self.completed)
        return percentiles([value for value in values if value is not None])


def percentiles(values: Sequence[float]) -> Percentiles:
    """Mean and percentiles, interpolated linearly between the two nearest ranks."""
    if not values:
        return Percentiles(math.nan, math.nan, math.nan, math.nan, math.nan)
    ranked = sorted(values)
    p50, p90, p99 = (percentile(ranked, share) for share in (0.5, 0.9, 0.99))
    return Percentiles(math.fsum(ranked) / len(ranked), p50, p90, p99, ranked[-1])


def percentile(ranked: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the sorted, non-empty values lie."""
    position = share * (len(ranked) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (position - low)


class MetricsFold:
    """Gathers the measurements, event by event.

    newest: by id, the newest request that was added under it and not forgotten. flights: by step in flight, its
    requests. counts: steps, empty steps, failed calls and guard stops so far. preemptions: by reason. end: when the
    last token was delivered or request ended so far.
    """

    def __init__(self) -> None:
        self.newest: dict[str, RequestMetrics] = {}
        self.flights: dict[int, list[RequestMetrics]] = {}
        self.counts: Counter[str] = Counter()
        self.preemptions: Counter[str] = Counter()
        self.end = -math.inf

    def take(self, event: ev.Event) -> None:
        """Take one event."""
        match event:
            case ev.RequestAdded():
                self.newest[event.request] = RequestMetrics(event.request, event.time, len(event.prompt_token_ids))
            case ev.StepScheduled():
                self._scheduled(event)
            case ev.StepDelivered():
                self._delivered(event)
            case ev.Admitted():
                self.newest[event.request].num_hit_tokens += event.local
                self.newest[event.request].num_loaded_tokens += event.external
            case ev.Parked():
                self.newest[event.request].num_hit_tokens += event.local
                self.newest[event.request].num_loaded_tokens += event.external
            case ev.Preempted():
                self.newest[event.request].preemptions.append(event.reason)
                self.preemptions[event.reason] += 1
            case ev.RequestFinished():
                self.newest[event.request].finished = event.time
                self.newest[event.request].finish_reason = event.reason
                self.end = max(self.end, event.time)
            case ev.SlotsFailed() | ev.GuardStopped():
                self.counts[event.kind] += 1

    def forget(self, request: str) -> None:
        """Let go of a request that has ended: no later event speaks of it. For whoever folds without end."""
        del self.newest[request]

    def _scheduled(self, event: ev.StepScheduled) -> None:
        self.counts["steps"] += 1
        if not event.request_ids:
            self.counts["empty"] += 1
            return
        rows = self.flights[event.step] = [self.newest[request] for request in event.request_ids]
        for r, n, start in zip(rows, event.num_tokens, event.starts, strict=True):
            if r.first_scheduled is None:
                r.first_scheduled = event.time
            r.num_scheduled_tokens += n
            r.num_recomputed_tokens += max(min(start + n, r.high_mark) - start, 0)
            r.high_mark = max(r.high_mark, start + n)

    def _delivered(self, event: ev.StepDelivered) -> None:
        for r, tokens in zip(self.flights.pop(event.delivered, ()), event.tokens, strict=True):
            if tokens:
                r.token_times.extend([event.time] * len(tokens))
                self.end = max(self.end, event.time)


def run_metrics(events: Iterable[ev.Event]) -> RunMetrics:
    """Measure a run, finished or not."""
    fold = MetricsFold()
    requests: list[RequestMetrics] = []
    for event in events:
        fold.take(event)
        if isinstance(event, ev.RequestAdded):
            requests.append(fold.newest[event.request])
    start = min((r.added for r in requests), default=math.inf)
    return RunMetrics(
        tuple(requests),
        max(fold.end - start, 0.0) if requests and fold.end > -math.inf else 0.0,
        fold.counts["steps"],
        fold.counts["empty"],
        fold.counts[ev.kind_of(ev.SlotsFailed)],
        fold.counts[ev.kind_of(ev.GuardStopped)],
        dict(fold.preemptions),
    )


def request_metrics(events: Iterable[ev.Event]) -> list[RequestMetrics]:
    """Measure each request, by arrival."""
    return list(run_metrics(events).requests)
