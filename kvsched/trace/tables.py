"""A recording as pandas tables, and as Parquet files.

Owns: the tables' columns. Knows nothing about: plots. pandas (and pyarrow for Parquet) are imported when a table is
asked for: extra `lab`.
Invariants: a table has its columns also when it has no rows; times are seconds, blocks are ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsched.trace import events as ev
from kvsched.trace.fold import apply
from kvsched.trace.metrics import RequestMetrics, request_metrics
from kvsched.trace.plain import to_plain
from kvsched.trace.state import State

if TYPE_CHECKING:
    import pandas as pd

_REQUEST_COLUMNS = (
    "request",
    "finish_reason",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_preemptions",
    "num_recomputed_tokens",
    "num_hit_tokens",
    "num_loaded_tokens",
    "added",
    "first_scheduled",
    "finished",
    "queue",
    "prefill",
    "ttft",
    "decode",
    "inference",
    "tpot",
    "e2el",
)
_STEP_COLUMNS = (
    "step",
    "seq",
    "num_requests",
    "num_tokens",
    "num_prefill_tokens",
    "calls",
    "failed_calls",
    "preempted",
    "guard_stops",
    "free",
    "running",
    "waiting",
    "loading",
    "deferred_blocks",
    "sched_step_seq",
    "processed_step_seq",
    "time",
    "delivered_in",
    "delivered_time",
    "num_output_tokens",
)
_FENCE_COLUMNS = (
    "request",
    "reason",
    "fence",
    "num_blocks",
    "block_ids",
    "released_event",
    "released_step",
    "returned_event",
    "returned_step",
    "waited_steps",
)
_HISTORY_COLUMNS = ("event", "step", "what", "request", "fence", "detail", "refs", "held_by")


def _frame(rows: Iterable[dict[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows), columns=list(columns))


def requests(events: Iterable[ev.Event]) -> pd.DataFrame:
    """One row per request, by arrival: what became of it, and its latencies (see `metrics`)."""

    def row(r: RequestMetrics) -> dict[str, Any]:
        return {name: getattr(r, name) for name in _REQUEST_COLUMNS}

    return _frame(map(row, request_metrics(events)), _REQUEST_COLUMNS)


def steps(events: Iterable[ev.Event]) -> pd.DataFrame:
    """One row per call of `schedule()`, empty ones included; counts of queues and blocks as it ended. delivered_in:
    steps begun when its output was processed; missing for empty steps and steps in flight."""
    frame = _frame(_step_rows(events), _STEP_COLUMNS)
    return frame.astype({"delivered_in": "Int64", "num_output_tokens": "Int64"})


def _step_rows(events: Iterable[ev.Event]) -> list[dict[str, Any]]:
    state, rows = State(), dict[int, dict[str, Any]]()
    failed = preempted = guarded = 0
    for event in events:
        apply(state, event)
        match event:
            case ev.StepScheduled():
                rows[event.step] = _step_row(state, event) | {
                    "failed_calls": state.num_failed_calls - failed,
                    "preempted": state.num_preemptions - preempted,
                    "guard_stops": state.num_guard_stops - guarded,
                }
                failed, preempted, guarded = state.num_failed_calls, state.num_preemptions, state.num_guard_stops
            case ev.StepDelivered() if event.request_ids:
                rows[event.delivered] |= {
                    "delivered_in": event.step,
                    "delivered_time": event.time,
                    "num_output_tokens": sum(map(len, event.tokens)),
                }
    return list(rows.values())


def _step_row(state: State, e: ev.StepScheduled) -> dict[str, Any]:
    prefill = sum(n for i, n in zip(e.request_ids, e.num_tokens, strict=True) if i in e.prefill_chunks or n > 1)
    return {
        "step": e.step,
        "seq": e.seq,
        "num_requests": len(e.request_ids),
        "num_tokens": sum(e.num_tokens),
        "num_prefill_tokens": prefill,
        "calls": e.calls,
        "free": e.free,
        "running": state.num_running,
        "waiting": state.num_waiting,
        "loading": state.num_loading,
        "deferred_blocks": sum(len(entry.block_ids) for entry in state.deferred),
        "sched_step_seq": state.sched_step_seq,
        "processed_step_seq": state.processed_step_seq,
        "time": e.time,
    }


def events_of_kind(events: Iterable[ev.Event], kind: str) -> pd.DataFrame:
    """The events of one kind, one row each, `event` being their index. Raises ValueError for an unknown kind."""
    cls = ev.EVENT_TYPES.get(kind)
    if cls is None:
        raise ValueError(f"no kind of event {kind!r}; there are {', '.join(ev.EVENT_TYPES)}")
    rows = ({"event": i} | event._asdict() for i, event in enumerate(events) if event.kind == kind)
    return _frame(rows, ("event", *cls._fields))


def fence(events: Iterable[ev.Event]) -> pd.DataFrame:
    """One row per deferred free, by release. returned_*: missing while it waits; waited_steps: steps begun between."""
    rows: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for index, event in enumerate(events):
        match event:
            case ev.BlocksReleased() if event.fence:
                row: dict[str, Any] = {"request": event.request, "reason": event.reason, "fence": event.fence}
                row |= {"num_blocks": len(event.block_ids), "block_ids": event.block_ids}
                row |= {"released_event": index, "released_step": event.step}
                rows.append(row)
                waiting.append(row)
            case ev.BlocksFreed() if event.fence:
                row = next(row for row in waiting if (row["fence"], row["request"]) == (event.fence, event.request))
                waiting.remove(row)
                row |= {"returned_event": index, "returned_step": event.step}
                row["waited_steps"] = event.step - row["released_step"]
    return _frame(rows, _FENCE_COLUMNS).astype(dict.fromkeys(_FENCE_COLUMNS[-3:], "Int64"))


def block_history(events: Iterable[ev.Event], block: int) -> pd.DataFrame:
    """The life of one block, one row per event that touches it.

    what: "allocated", "hit", "cached", "uncached", "evicted", "released" (its request let it go), "freed" (in the free
    queue again), "shared" (one holder less), "kept", "load started", "load failed", "save started". fence: what a
    release waits for, or has waited for. refs, held_by: references and holders after the event; a block that waits
    behind the fence has references and nobody holds it.

    Raises IndexError for a block that is not in the pool.
    """
    return _frame(_history_rows(events, block), _HISTORY_COLUMNS)


def _history_rows(events: Iterable[ev.Event], block: int) -> Iterator[dict[str, Any]]:
    state, holders = State(), list[str]()
    for index, event in enumerate(events):
        apply(state, event)
        if isinstance(event, ev.RunStarted):
            state.block(block)
        request = getattr(event, "request", "")
        touches = dict(_touches(event, block))
        if touches.keys() & {"allocated", "hit"}:
            holders.append(request)
        elif "released" in touches:
            holders.remove(request)
        for what, detail in touches.items():
            yield {
                "event": index,
                "step": event.step,
                "what": what,
                "request": request or None,
                "fence": getattr(event, "fence", None) or None,
                "detail": detail,
                "refs": state.refs(block),
                "held_by": tuple(holders),
            }


def _touches(event: ev.Event, block: int) -> Iterator[tuple[str, str]]:
    """What an event does to a block: (word, detail)."""
    match event:
        case ev.BlocksAllocated() if block in event.block_ids:
            if block in event.evicted:
                yield "evicted", "its cache entry was dropped"
            yield "allocated", ""
        case ev.BlocksHit() if block in event.block_ids:
            yield "hit", ""
        case ev.BlocksCached() if block in event.block_ids:
            yield "cached", event.hashes[event.block_ids.index(block)].hex()
        case ev.BlocksUncached() if block in event.block_ids:
            yield "uncached", ""
        case ev.BlocksReleased() if block in event.block_ids:
            yield "released", event.reason
        case ev.BlocksFreed():
            for what, detail in (("freed", "front"), ("freed", "back"), ("shared", "shared")):
                if block in getattr(event, detail):
                    yield what, "" if what == detail else f"to the {detail}"
        case ev.BlocksKept() | ev.LoadStarted() | ev.LoadFailed() | ev.SaveStarted() if block in event.block_ids:
            yield {"blocks_kept": "kept"}.get(event.kind, event.kind.replace("_", " ")), ""


_Table = Callable[[Iterable[ev.Event]], "pd.DataFrame"]
_TABLES: dict[str, _Table] = {"requests": requests, "steps": steps, "fence": fence}


def write_parquet(folder: str | PathLike[str], events: Iterable[ev.Event]) -> list[Path]:
    """Write requests.parquet, steps.parquet, fence.parquet and one file per kind of event that came, named
    events-KIND.parquet. The folder is made. Returns the files."""
    events = list(events)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    frames = {name: table(events) for name, table in _TABLES.items()}
    for kind in sorted({event.kind for event in events}):
        frames[f"events-{kind}"] = _plain_frame(events, kind)
    for name, frame in frames.items():
        frame.to_parquet(folder / f"{name}.parquet", index=False)
    return [folder / f"{name}.parquet" for name in frames]


def _plain_frame(events: list[ev.Event], kind: str) -> pd.DataFrame:
    """Events of a kind in columns that Parquet knows: hashes in hex; settings, whose fields vary, as JSON text."""
    rows: list[dict[str, Any]] = []
    for index, event in enumerate(events):
        if event.kind == kind:
            plain = to_plain(event).items()
            rows.append({"event": index} | {k: json.dumps(v) if isinstance(v, dict) else v for k, v in plain})
    return _frame(rows, ("event", *ev.EVENT_TYPES[kind]._fields))
