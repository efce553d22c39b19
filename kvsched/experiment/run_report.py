"""What came of runs of a workload: as plain data for JSON, and as tables.

Owns: `RunResult`, its JSON form, the table of results, the table of requests.
Knows nothing about: engines, how runs are made; it measures nothing itself (see trace/metrics).
Invariants: the JSON form holds no wall-clock time but what the run's own clock told, so that two runs in virtual time
give the same text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvsched.experiment.serve import Served
from kvsched.experiment.workload import WorkItem
from kvsched.faults import Fault, fault_to_dict
from kvsched.trace.metrics import RequestMetrics, RunMetrics

if TYPE_CHECKING:
    from rich.table import Table

LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run. guard: "on" or "off". settings: the scheduler's, `defers_frees` included. texts: answers by request id;
    empty without a tokenizer. fired: faults that came to pass, and the step at which each first did. warnings: what
    was warned of on the way. trace: the file the events went to."""

    guard: str
    settings: Mapping[str, Any]
    metrics: RunMetrics
    served: Served
    texts: Mapping[str, str]
    fired: Sequence[tuple[Fault, int]] = ()
    never_fired: Sequence[Fault] = ()
    warnings: Sequence[str] = ()
    trace: str | None = None

    @property
    def finished(self) -> dict[str, int]:
        """Requests that ended, by reason."""
        return dict(sorted(Counter(r.finish_reason for r in self.metrics.requests if r.finish_reason).items()))

    @property
    def num_unfinished(self) -> int:
        """Requests that had not ended, or not even come, when the run did."""
        return len(self.served.tokens) - sum(self.finished.values())

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that steps were scheduled to compute."""
        return sum(r.num_scheduled_tokens for r in self.metrics.requests)

    @property
    def cost_of_a_token(self) -> float:
        """Tokens computed per output token: NaN without output."""
        return _ratio(self.num_scheduled_tokens, self.metrics.num_output_tokens)


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def num_equal_answers(results: Sequence[RunResult]) -> int:
    """How many requests got the same tokens in all runs."""
    first = results[0].served.tokens
    return sum(all(result.served.tokens[request] == tokens for result in results) for request, tokens in first.items())


# ---- JSON


def run_to_dict(result: RunResult) -> dict[str, Any]:
    """Plain data for JSON; latencies and durations in seconds on the run's clock, null where there are none."""
    m = result.metrics
    return {
        "guard": result.guard,
        "settings": dict(result.settings),
        "stopped": result.served.stopped,
        "why": result.served.why or None,
        "finished": result.finished,
        "num_unfinished": result.num_unfinished,
        "num_prompt_tokens": sum(r.num_prompt_tokens for r in m.requests),
        "num_output_tokens": m.num_output_tokens,
        "num_steps": m.num_steps,
        "num_empty_steps": m.num_empty_steps,
        "num_preemptions": m.num_preemptions,
        "preemptions": m.preemptions,
        "num_failed_calls": m.num_failed_calls,
        "num_guard_stops": m.num_guard_stops,
        "num_scheduled_tokens": result.num_scheduled_tokens,
        "num_recomputed_tokens": m.num_recomputed_tokens,
        "recompute_tax": m.recompute_tax,
        "scheduled_tokens_per_output_token": _number(result.cost_of_a_token),
        "duration": m.duration,
        "output_throughput": m.output_throughput,
        "request_throughput": m.request_throughput,
        "latencies": {
            name: {key: _number(value) for key, value in m.percentiles(name)._asdict().items()} for name in LATENCIES
        },
        "requests": [_request_to_dict(r, result, m.requests[0].added) for r in m.requests],
        "faults": {
            "fired": [{"fault": fault_to_dict(fault), "step": step} for fault, step in result.fired],
            "never_fired": [fault_to_dict(fault) for fault in result.never_fired],
        },
        "warnings": list(result.warnings),
        "trace": result.trace,
    }


def _request_to_dict(r: RequestMetrics, result: RunResult, start: float) -> dict[str, Any]:
    """arrival: seconds after the first one's, which is at `start`."""
    return {
        "id": r.request,
        "arrival": r.added - start,
        "num_prompt_tokens": r.num_prompt_tokens,
        "num_output_tokens": r.num_output_tokens,
        "finish_reason": r.finish_reason,
        "num_preemptions": r.num_preemptions,
        "num_hit_tokens": r.num_hit_tokens,
        "num_loaded_tokens": r.num_loaded_tokens,
        "ttft": r.ttft,
        "tpot": r.tpot,
        "e2el": r.e2el,
        "token_ids": result.served.tokens[r.request],
        "text": result.texts.get(r.request),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


# ---- tables


def results_table(results: Sequence[RunResult], clock: str) -> Table:
    """A column per run. clock: what its seconds are, for the heading of the times."""
    table = _table("results")
    table.add_column()
    for result in results:
        table.add_column(f"guard {result.guard}", justify="right")
    for section, rows in (("", _count_rows(results)), (clock, _TIME_ROWS)):
        if section:
            table.add_section()
            table.add_row(section, style="dim")
        for name, value in rows.items():
            table.add_row(name, *(value(result) for result in results))
    return table


Row = Callable[[RunResult], str]


def _count_rows(results: Sequence[RunResult]) -> dict[str, Row]:
    def ended(reason: str) -> Row:
        return lambda result: f"{result.finished.get(reason, 0):,}"

    reasons = sorted({reason for result in results for reason in result.finished})
    rows: dict[str, Row] = {f"requests ended: {_REASONS.get(reason, reason)}": ended(reason) for reason in reasons}
    if any(result.num_unfinished for result in results):
        rows["requests not ended"] = lambda result: f"{result.num_unfinished:,}"
    return rows | _COUNT_ROWS


_REASONS = {
    "stop": "end of text",
    "length": "all tokens asked for",
    "abort": "aborted",
    "error": "error",
    "pool": "outgrew the pool",
}
_COUNT_ROWS: dict[str, Row] = {
    "prompt tokens": lambda result: f"{sum(r.num_prompt_tokens for r in result.metrics.requests):,}",
    "output tokens": lambda result: f"{result.metrics.num_output_tokens:,}",
    "steps (of them empty)": lambda result: f"{result.metrics.num_steps:,} ({result.metrics.num_empty_steps:,})",
    "preemptions": lambda result: f"{result.metrics.num_preemptions:,}",
    "failed calls for slots": lambda result: f"{result.metrics.num_failed_calls:,}",
    "retries stopped by the guard": lambda result: f"{result.metrics.num_guard_stops:,}",
    "tokens computed": lambda result: f"{result.num_scheduled_tokens:,}",
    "  of them again (recompute tax)": lambda result: (
        f"{result.metrics.num_recomputed_tokens:,} ({result.metrics.recompute_tax:.1%})"
    ),
    "  per output token": lambda result: _digits(result.cost_of_a_token),
}


def _latency(name: str, scale: float) -> Row:
    def row(result: RunResult) -> str:
        p = result.metrics.percentiles(name)
        return " / ".join(_digits(value * scale) for value in (p.mean, p.p50, p.p99))

    return row


_TIME_ROWS: dict[str, Row] = {
    "duration, s": lambda result: _digits(result.metrics.duration),
    "output tokens/s": lambda result: _digits(result.metrics.output_throughput),
    "TTFT mean / p50 / p99, ms": _latency("ttft", 1000),
    "TPOT mean / p50 / p99, ms": _latency("tpot", 1000),
    "ITL mean / p50 / p99, ms": _latency("itl", 1000),
    "E2EL mean / p50 / p99, s": _latency("e2el", 1),
}


def _digits(value: float) -> str:
    """About three digits; "-" for what was not measured."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def requests_table(results: Sequence[RunResult], items: Sequence[WorkItem]) -> Table:
    """A row per request, in the order of the workload; the answers are those of the last run."""
    table = _table("requests")
    last = results[-1]
    table.add_column("id", no_wrap=True)
    table.add_column("prompt", no_wrap=True, ratio=2, min_width=10)
    table.add_column("tokens", justify="right")
    table.add_column("ended", no_wrap=True)
    for result in results:
        table.add_column(f"preempted,\nguard {result.guard}", justify="right")
    if len(results) == 1:
        table.add_column("TTFT, ms", justify="right")
        table.add_column("E2EL, s", justify="right")
    if last.texts:
        table.add_column("answer", no_wrap=True, ratio=3, min_width=10)
    table.expand = bool(last.texts)
    by_run = [{r.request: r for r in result.metrics.requests} for result in results]
    for item in items:
        table.add_row(*_request_row(item, [run.get(item.id) for run in by_run], last))
    return table


def _request_row(item: WorkItem, runs: Sequence[RequestMetrics | None], last: RunResult) -> list[str]:
    r = runs[-1]
    row = [item.id, _one_line(item.prompt)]
    if r is None:
        row += ["-", "not come yet", *("-" for _ in runs)]
    else:
        row += [f"{r.num_prompt_tokens} + {r.num_output_tokens}", r.finish_reason or "not yet"]
        row += ["-" if run is None else str(run.num_preemptions) for run in runs]
    if len(runs) == 1:
        ttft, e2el = (None, None) if r is None else (r.ttft, r.e2el)
        row += [_digits(_or_nan(ttft) * 1000), _digits(_or_nan(e2el))]
    return [*row, _one_line(last.texts.get(item.id, ""))] if last.texts else row


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _one_line(prompt: str | Sequence[int]) -> str:
    if not isinstance(prompt, str):
        shown = " ".join(map(str, prompt[:6]))
        return shown if len(prompt) <= 6 else f"{shown} …"
    return " ".join(prompt.split())


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
