"""Static plotly figures of a run.

Owns: titles, axes, colours. Knows nothing about: how the numbers come about (lab.plot_data), widgets.
Invariants: a figure depends on the events alone, and is the same each time; colour is never the only difference.

Each function takes a session (what is seen up to its position), or events, or several of them by name to be laid over
one another: free_blocks({"guard off": a, "guard on": b}).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvsched.trace.events import Event
from lab import plot_data as data
from lab.columns import PALETTE
from lab.look import Look

Source = Look | Iterable[Event]
Sources = Source | Mapping[str, Source]

_DASHES = ("solid", "dash", "dot", "dashdot")
_PATTERNS = ("", "/", ".", "x")
_SPANS = {
    "waiting": ("#bbbbbb", ""),
    "loading": (PALETTE[4], "."),
    "running": (PALETTE[0], ""),
    "preempted": (PALETTE[5], "/"),
}


def free_blocks(sources: Sources) -> go.Figure:
    """Free blocks, and blocks behind the fence, after each call of `schedule()`."""
    figure = _figure("Free blocks", "step", "blocks")
    largest = 1
    for i, (name, events) in enumerate(_named(sources)):
        series = data.pool(events)
        figure.add_trace(_line(series.steps, series.free, _label(name, "free"), i, shape="hv"))
        if any(series.deferred):
            figure.add_trace(_line(series.steps, series.deferred, _label(name, "behind the fence"), i, 1, shape="hv"))
        largest = max(largest, series.usable)
    figure.update_yaxes(range=[0, largest * 1.05])
    return figure


def preemptions(sources: Sources) -> go.Figure:
    """Requests preempted, and retries that the guard stopped, summed up over the steps."""
    figure = _figure("Preemptions", "step", "so far")
    for i, (name, events) in enumerate(_named(sources)):
        series = data.preemptions(events)
        figure.add_trace(_line(series.steps, _summed(series.preempted), _label(name, "preempted"), i, shape="hv"))
        if any(series.guard_stops):
            stops = _summed(series.guard_stops)
            figure.add_trace(_line(series.steps, stops, _label(name, "stopped by the guard"), i, 1, shape="hv"))
    return figure


def throughput(sources: Sources, num_bins: int = 60) -> go.Figure:
    """Output tokens per second of the engine's clock (per step where the clock stands still)."""
    named = [(name, data.throughput(events, num_bins)) for name, events in _named(sources)]
    clocks = {series.clock for _, series in named}
    unit = clocks.pop() if len(clocks) == 1 else "second or step"
    figure = _figure("Throughput", "seconds" if unit == "second" else "step", f"output tokens per {unit}")
    for i, (name, series) in enumerate(named):
        ends, tokens = [start + series.width for start in series.starts[-1:]], series.tokens[-1:]
        label = _label(name, "tokens")
        figure.add_trace(_line(series.starts + ends, series.tokens + tokens, label, i, shape="hv"))
    return figure


def latencies(sources: Sources) -> go.Figure:
    """How times to first token (TTFT) and per output token (TPOT) are distributed over the requests."""
    figure = _figure("Latencies", "", "", make_subplots(cols=2, horizontal_spacing=0.12))
    for i, (name, events) in enumerate(_named(sources)):
        series = data.latencies(events)
        for column, (values, what) in enumerate(((series.ttft, "TTFT"), (series.tpot, "TPOT")), 1):
            colour = PALETTE[i % len(PALETTE)]
            box = go.Box(y=values, name=_label(name, what), boxpoints="all", jitter=0, marker_color=colour)
            figure.add_trace(box, row=1, col=column)
    figure.update_yaxes(title="seconds", col=1)
    figure.update_layout(showlegend=False)
    return figure


def gantt(source: Source, *, clock: str = "step") -> go.Figure:
    """What each request was doing: waiting, loading, running, or waiting again after a preemption.

    clock: "step" or "time" (seconds). Raises ValueError for anything else.
    """
    if clock not in ("step", "time"):
        raise ValueError(f"clock is {clock!r}; choose 'step' or 'time'")
    ((_, events),) = _named(source)
    spans = data.gantt(events)
    figure = _figure("Requests", "step" if clock == "step" else "seconds", "")
    for doing, (colour, pattern) in _SPANS.items():
        rows = [span for span in spans if span.doing == doing]
        if not rows:
            continue
        starts = [span.first_step if clock == "step" else span.start for span in rows]
        ends = [span.last_step if clock == "step" else span.end for span in rows]
        figure.add_trace(
            go.Bar(
                base=starts,
                x=[end - start for start, end in zip(starts, ends, strict=True)],
                y=[span.request for span in rows],
                name=doing,
                orientation="h",
                marker={"color": colour, "pattern": {"shape": pattern}},
                hovertemplate="%{y} " + doing + " from %{base} for %{x}<extra></extra>",
            )
        )
    names = list(dict.fromkeys(span.request for span in spans))
    figure.update_layout(barmode="overlay", height=max(240, 90 + 22 * len(names)))
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=names, autorange="reversed")
    return figure


def fence_lag(sources: Sources) -> go.Figure:
    """Steps scheduled that the fence has not passed, and deferred frees that wait for it."""
    figure = _figure("Fence lag", "event", "steps, deferred frees")
    for i, (name, events) in enumerate(_named(sources)):
        series = data.fence_lag(events)
        figure.add_trace(_line(series.events, series.lag, _label(name, "steps behind"), i, shape="hv"))
        figure.add_trace(_line(series.events, series.waiting, _label(name, "frees that wait"), i, 1, shape="hv"))
    return figure


def recompute_tax(sources: Sources) -> go.Figure:
    """Tokens computed for the first time and again, in all; the share of the latter is the recompute tax."""
    figure = _figure("Recompute tax", "", "tokens computed")
    names, first, again, shares = [], [], [], []
    for name, events in _named(sources):
        series = data.recompute(events)
        names.append(name or "run")
        first.append(sum(series.first))
        again.append(sum(series.again))
        shares.append(f"{series.tax:.1%} again")
    figure.add_trace(go.Bar(x=names, y=first, name="first time", marker_color=PALETTE[0]))
    marker = {"color": PALETTE[5], "pattern": {"shape": _PATTERNS[1]}}
    figure.add_trace(go.Bar(x=names, y=again, name="again", marker=marker, text=shares, textposition="outside"))
    figure.update_layout(barmode="stack")
    return figure


def _figure(title: str, x: str, y: str, figure: go.Figure | None = None) -> go.Figure:
    figure = go.Figure() if figure is None else figure
    figure.update_layout(
        title=title,
        template="plotly_white",
        height=320,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "y": 1.12, "x": 1, "xanchor": "right"},
    )
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, rangemode="tozero")
    return figure


def _line(x: Sequence[float], y: Sequence[float], name: str, source: int, dash: int = 0, *, shape: str) -> go.Scatter:
    colour = PALETTE[(source + 3 * dash) % len(PALETTE)]
    line = {"color": colour, "dash": _DASHES[(source + 2 * dash) % len(_DASHES)], "shape": shape}
    return go.Scatter(x=x, y=y, name=name, mode="lines", line=line)


def _label(name: str, what: str) -> str:
    return f"{name}: {what}" if name else what


def _summed(values: Iterable[int]) -> list[int]:
    total, sums = 0, []
    for value in values:
        total += value
        sums.append(total)
    return sums


def _named(sources: Sources) -> list[tuple[str, Sequence[Event]]]:
    """(name, events) of each source; a single one has no name. Raises ValueError for none."""
    each = sources if isinstance(sources, Mapping) else {"": sources}
    if not each:
        raise ValueError("nothing to plot; give a session, events, or several of them by name")
    return [(str(name), one.seen() if isinstance(one, Look) else list(one)) for name, one in each.items()]
