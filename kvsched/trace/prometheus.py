"""Metrics of a run for Prometheus, from its events, under the names that vLLM gives them.

Owns: `EngineMetrics`: names, labels and buckets, and what each metric counts.
Knows nothing about: the live scheduler, the engine, HTTP.
Invariants: nothing is computed until somebody scrapes; each event is folded once; what is held is bounded by the
pool and by the requests that live, not by those that have ended. A scrape sees one moment, also from another thread.

Names, types, labels and buckets are those of vLLM 0.32 with the prefix `kvsched:` in place of `vllm:`, so that a
dashboard needs no more than this change. Definitions are vLLM's too; the times come from `kvsched.trace.metrics`.
In particular:

- a preemption restarts no clock, and the second look-up of a preempted request counts neither as query nor as hit
- prompt tokens are counted, found in a cache or not, when the first token comes
- iteration_tokens_total has one sample per delivered step that yields a token: its tokens, and the prompt tokens
  computed by requests for which it was the first
- inter_token_latency_seconds has one sample per delivery after the first
- request_time_per_output_token_seconds is 0 for a request of one token
- histograms of whole requests are over those that ended with "stop", "length" or "pool"; request_success counts
  every end, by reason ("pool" is kvsched's own: the request outgrew the whole pool)

kvsched's own are `num_failed_slot_calls`, `num_guard_stops`, `num_blocks_behind_fence` and `num_steps_in_flight`.
Seconds are those of the engine's clock, virtual ones on an engine without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics import MetricWrapperBase

from kvsched.request import RequestStatus
from kvsched.trace import events as ev
from kvsched.trace.metrics import MetricsFold, RequestMetrics

PREFIX = "kvsched:"
"""What every name begins with."""

_GAUGES = {
    "num_requests_running": "Requests admitted and not preempted since",
    "num_requests_waiting": "Requests that wait to be admitted, those that wait for a load included",
    "kv_cache_usage_perc": "Share of the blocks that are not free, from 0 to 1; blocks behind the fence are not free",
    "num_blocks_behind_fence": "Blocks let go that a step in flight may still write, once per request that let them go",
    "num_steps_in_flight": "Steps scheduled whose output has not been processed",
}
_COUNTERS = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache, at first admission",
    "prefix_cache_hits": "Tokens found in the prefix cache, at first admission",
    "external_prefix_cache_queries": "Tokens that a KV connector was asked for, at first admission",
    "external_prefix_cache_hits": "Tokens that a KV connector offered, at first admission",
    "num_preemptions": "Preemptions; a retry that the guard stops is none",
    "prompt_tokens": "Prompt tokens of requests that have got their first token",
    "generation_tokens": "Tokens delivered",
    "num_failed_slot_calls": "Calls for slots that failed",
    "num_guard_stops": "Retries that the guard stopped",
}
_REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITERATION_TOKENS = (1, *(2**i for i in range(3, 15)))
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "iteration_tokens_total": ("Prompt tokens computed and tokens delivered, per delivered step", _ITERATION_TOKENS),
    "time_to_first_token_seconds": ("From arrival to the first token", _FIRST_TOKEN_SECONDS),
    "inter_token_latency_seconds": ("From one delivery to the next, per request", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean time per token after the first", _TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token", _REQUEST_SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step that scheduled it", _REQUEST_SECONDS),
    "request_prefill_time_seconds": ("From the first step that scheduled it to its first token", _REQUEST_SECONDS),
    "request_decode_time_seconds": ("From its first token to its last", _REQUEST_SECONDS),
    "request_inference_time_seconds": ("From the first step that scheduled it to its last token", _REQUEST_SECONDS),
    "request_num_preemptions": ("How often it was preempted", _PREEMPTIONS),
}
_REQUEST_TOKENS = {
    "request_prompt_tokens": "Tokens of its prompt",
    "request_generation_tokens": "Tokens it was given",
}


class EngineMetrics:
    """The metrics of one run, in a registry of their own.

    events: the run's, head first; it may grow, each scrape folds what has come since the last one.
    model_name: value of the label `model_name` (the other label, `engine`, is "0": one registry is one engine).
    has_connector: whether the run has a KV connector; without one it asks for no external tokens.
    registry: what to scrape: for `prometheus_client.generate_latest` or `start_http_server`.
    Raises ValueError if the events do not open with `run_started`; so does a scrape if events have been taken away.
    """

    def __init__(self, events: Sequence[ev.Event], model_name: str, *, has_connector: bool = False) -> None:
        head = events[0] if events else None
        if not isinstance(head, ev.RunStarted):
            raise ValueError(
                "the events do not open with run_started; if somebody has taken them over (a session of the lab does), "
                "give EngineMetrics the whole run as it is kept there"
            )
        self._events = events
        self._head = head
        self._num_folded = 0
        self._lock = Lock()
        self._has_prefix_cache = bool(head.config["enable_prefix_caching"])
        self._has_connector = has_connector
        self._fold = MetricsFold()
        self._moment = _Moment(head.config["num_blocks"] - 1)
        self._cached: dict[str, int] = {}  # prompt tokens a request need not compute, until its first token
        self._metrics: list[MetricWrapperBase] = []
        self._labels = (model_name, "0")
        self._make_metrics(head.config["max_model_len"])
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def _make_metrics(self, max_model_len: int) -> None:
        names, labels, made = ("model_name", "engine"), self._labels, self._metrics
        self._gauges: dict[str, Gauge] = {}
        for name, about in _GAUGES.items():
            made.append(gauge := Gauge(PREFIX + name, about, names, registry=None))
            self._gauges[name] = gauge.labels(*labels)
        self._counters: dict[str, Counter] = {}
        for name, about in _COUNTERS.items():
            made.append(counter := Counter(PREFIX + name, about, names, registry=None))
            self._counters[name] = counter.labels(*labels)
        sizes = _sizes(max_model_len)
        self._histograms: dict[str, Histogram] = {}
        of_tokens = {name: (about, sizes) for name, about in _REQUEST_TOKENS.items()}
        for name, (about, buckets) in (_HISTOGRAMS | of_tokens).items():
            made.append(histogram := Histogram(PREFIX + name, about, names, registry=None, buckets=buckets))
            self._histograms[name] = histogram.labels(*labels)
        about = "Requests that ended, by reason"
        self._ends = Counter(f"{PREFIX}request_success", about, (*names, "finished_reason"), registry=None)
        for status in RequestStatus:
            if status.finish_reason:
                self._ends.labels(*labels, status.finish_reason)
        made.append(self._ends)

    # ---- what a registry asks of a collector

    def describe(self) -> list[Metric]:
        """The metrics without their values."""
        return [family for metric in self._metrics for family in metric.describe()]

    def collect(self) -> list[Metric]:
        """Fold the events that have come since the last call; the metrics as they are then."""
        with self._lock:
            if len(self._events) < self._num_folded or self._events[0] != self._head:
                raise ValueError("events that were there have been taken away; scrape where the whole run is kept")
            for event in self._events[self._num_folded :]:
                self._num_folded += 1
                self._take(event)
            self._set_gauges()
            return [family for metric in self._metrics for family in metric.collect()]

    # ---- the fold

    def _take(self, event: ev.Event) -> None:
        rows = self._fold.flights.get(event.delivered, []) if isinstance(event, ev.StepDelivered) else []
        self._fold.take(event)
        self._moment.take(event)
        match event:
            case ev.StepDelivered():
                self._delivered(rows, event.tokens)
            case ev.Admitted() | ev.Parked():
                self._looked_up(event)
            case ev.RequestFinished():
                self._finished(event)
            case ev.Preempted():
                self._counters["num_preemptions"].inc()
            case ev.SlotsFailed():
                self._counters["num_failed_slot_calls"].inc()
            case ev.GuardStopped():
                self._counters["num_guard_stops"].inc()

    def _looked_up(self, event: ev.Admitted | ev.Parked) -> None:
        """A request was admitted or parked. One whose load has landed had tokens before, and was not looked up."""
        r = self._fold.newest[event.request]
        was_looked_up = isinstance(event, ev.Parked) or event.computed == event.local + event.external
        if r.num_preemptions or not was_looked_up:
            return
        self._cached[r.request] = event.local + event.external
        if self._has_prefix_cache:
            self._counters["prefix_cache_queries"].inc(r.num_prompt_tokens)
            self._counters["prefix_cache_hits"].inc(event.local)
        if self._has_connector:
            self._counters["external_prefix_cache_queries"].inc(r.num_prompt_tokens - event.local)
            self._counters["external_prefix_cache_hits"].inc(event.external)

    def _delivered(self, rows: list[RequestMetrics], tokens: tuple[tuple[int, ...], ...]) -> None:
        """A step's output: tokens per row, () where a request got nothing."""
        num_prompt_tokens = num_computed = num_generated = 0
        for r, new in zip(rows, tokens, strict=True):
            if not new:
                continue
            num_generated += len(new)
            if r.num_output_tokens == len(new):
                self._observe("time_to_first_token_seconds", r.ttft)
                num_prompt_tokens += r.num_prompt_tokens
                num_computed += r.num_prompt_tokens - self._cached.pop(r.request, 0)
            else:
                self._observe("inter_token_latency_seconds", r.token_times[-1] - r.token_times[-1 - len(new)])
        if num_generated:
            self._counters["prompt_tokens"].inc(num_prompt_tokens)
            self._counters["generation_tokens"].inc(num_generated)
            self._observe("iteration_tokens_total", num_computed + num_generated)

    def _finished(self, event: ev.RequestFinished) -> None:
        self._ends.labels(*self._labels, event.reason).inc()
        r = self._fold.newest[event.request]
        self._fold.forget(event.request)
        self._cached.pop(event.request, None)
        if r.e2el is None:
            return
        self._observe("e2e_request_latency_seconds", r.e2el)
        self._observe("request_queue_time_seconds", r.queue)
        self._observe("request_prefill_time_seconds", r.prefill)
        self._observe("request_decode_time_seconds", r.decode)
        self._observe("request_inference_time_seconds", r.inference)
        self._observe("request_time_per_output_token_seconds", 0.0 if r.tpot is None else r.tpot)
        self._observe("request_num_preemptions", r.num_preemptions)
        self._observe("request_prompt_tokens", r.num_prompt_tokens)
        self._observe("request_generation_tokens", r.num_output_tokens)

    def _observe(self, name: str, value: float | None) -> None:
        assert value is not None, f"{name}: what ends it has happened, so that it has a value"
        self._histograms[name].observe(value)

    def _set_gauges(self) -> None:
        moment, gauges = self._moment, self._gauges
        gauges["num_requests_running"].set(len(moment.running))
        gauges["num_requests_waiting"].set(len(self._fold.newest) - len(moment.running))
        gauges["kv_cache_usage_perc"].set(len(moment.held) / moment.num_usable)
        gauges["num_blocks_behind_fence"].set(moment.num_fenced)
        gauges["num_steps_in_flight"].set(len(self._fold.flights))


class _Moment:
    """What there is at one moment. running: ids. num_usable: blocks of the pool without the reserved one. held: those
    that are not free. num_fenced: blocks of the deferred frees."""

    def __init__(self, num_usable: int) -> None:
        self.num_usable = num_usable
        self.running: set[str] = set()
        self.held: set[int] = set()
        self.num_fenced = 0

    def take(self, event: ev.Event) -> None:
        """Take one event."""
        match event:
            case ev.Admitted():
                self.running.add(event.request)
            case ev.Preempted() | ev.RequestFinished():
                self.running.discard(event.request)
            case ev.BlocksHit() | ev.BlocksAllocated():
                self.held.update(event.block_ids)
            case ev.BlocksReleased() if event.fence:
                self.num_fenced += len(event.block_ids)
            case ev.BlocksFreed():
                self.held.difference_update(event.front, event.back)
                if event.fence:
                    self.num_fenced -= len(event.front) + len(event.back) + len(event.shared)


def _sizes(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `most`."""
    series = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(takewhile(lambda size: size <= most, series))
