"""A run as pandas tables. Pure.

Owns: what columns there are and what they are called.
Knows nothing about: sessions, files, notebooks. It reads states and events.
Invariants: a table is a function of the state or the events it is made from, with the same columns whatever these hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from kvsched.config import NULL_BLOCK
from kvsched.trace import events as ev
from kvsched.trace.state import Queue, State
from lab.breakpoints import names_block
from lab.sentences import describe

REQUEST_COLUMNS = (
    "request", "status", "queue", "place", "prompt", "output", "computed", "known", "blocks", "in_flight",
    "steps_in_flight", "placeholders", "stale", "priority", "preemptions", "arrival_time", "finish_time",
)  # fmt: skip
BLOCK_COLUMNS = (
    "block", "state", "refs", "owners", "fence", "cached_as", "place_in_line", "written_by", "loading_for",
    "saving_for",
)  # fmt: skip
LINEAGE_COLUMNS = ("event", "step", "what", "request", "fence", "line")
FENCE_COLUMNS = ("request", "fence", "blocks", "reason", "released_in", "returned_in", "waits")
STEP_COLUMNS = (
    "step", "seq", "time", "requests", "tokens", "prefill_chunks", "calls", "failed_calls", "guard_stops", "admitted",
    "preempted", "free_after", "delivered_in", "output_tokens",
)  # fmt: skip


def requests_table(state: State) -> pd.DataFrame:
    """One row per request that has arrived, by arrival. place: in its queue, from 0; blocks: its table."""
    places = {r.number: i for queue in Queue if queue is not Queue.NONE for i, r in enumerate(state.queue(queue))}
    steps: dict[str, list[int]] = {}
    for flight in state.flights:
        for request in flight.scheduled.request_ids:
            steps.setdefault(request, []).append(flight.step)
    rows = [
        (
            r.id,
            r.status.name.lower(),
            r.queue.name.lower(),
            places.get(r.number),
            r.num_prompt_tokens,
            r.num_output_tokens,
            r.num_computed_tokens,
            r.num_tokens,
            tuple(r.block_ids),
            r.num_in_flight_tokens,
            tuple(steps.get(r.id, ())),
            r.num_output_placeholders,
            r.num_stale_output_tokens,
            r.priority,
            r.num_preemptions,
            r.arrival_time,
            r.finish_time,
        )
        for r in state.requests
    ]
    return _table(rows, REQUEST_COLUMNS, "request").astype({"place": "Int64"})


def blocks_table(state: State) -> pd.DataFrame:
    """One row per block. state: "null", "free", "held" or "fenced" (let go, but still behind the fence).

    fence: what it waits for. place_in_line: free blocks handed out before it. written_by: steps in flight that fill
    slots of it.
    """
    owners, writing, fences = state.owners(), state.writing(), state.fences()
    line = {block: place for place, block in enumerate(state.free_queue())}
    loading = _by_block((load.request, load.block_ids) for load in state.loads.values())
    saving = _by_block((save.request, save.block_ids) for save in state.saves)
    rows = []
    for block in range(state.num_blocks):
        name = "null" if block == NULL_BLOCK else "free" if block in line else "held" if block in owners else "fenced"
        content_hash = state.hash_of(block)
        rows.append(
            (
                block,
                name,
                0 if block == NULL_BLOCK else state.refs(block),
                tuple(owners.get(block, ())),
                max(fences[block]) if block in fences else None,
                content_hash.hex() if content_hash else None,
                line.get(block),
                tuple(writing.get(block, ())),
                tuple(loading.get(block, ())),
                tuple(saving.get(block, ())),
            )
        )
    return _table(rows, BLOCK_COLUMNS, "block").astype({"fence": "Int64", "place_in_line": "Int64"})


def lineage_table(events: Iterable[ev.Event], block: int) -> pd.DataFrame:
    """What happened to one block: who held it, behind which fence it waited, who got it next."""
    rows = []
    for index, event in enumerate(events):
        if not names_block(event, block):
            continue
        e: Any = event
        what = _LINEAGE.get(type(event), event.kind)
        if isinstance(event, ev.BlocksFreed):
            what = "still shared" if block in event.shared else "back in the pool"
        if isinstance(event, ev.BlocksAllocated) and block in event.evicted:
            what = "handed out, cached content given up"
        rows.append(
            (index, event.step, what, getattr(e, "request", None), getattr(e, "fence", 0) or None, describe(event))
        )
    return _table(rows, LINEAGE_COLUMNS, "event").astype({"fence": "Int64"})


_LINEAGE: dict[type[Any], str] = {
    ev.BlocksAllocated: "handed out",
    ev.BlocksHit: "found in the prefix cache",
    ev.BlocksCached: "entered in the prefix cache",
    ev.BlocksUncached: "taken out of the prefix cache",
    ev.BlocksReleased: "let go",
    ev.BlocksKept: "kept until saved",
    ev.Parked: "held for a load",
    ev.LoadStarted: "load begins",
    ev.LoadFailed: "load failed",
    ev.SaveStarted: "save begins",
}


def fence_table(events: Iterable[ev.Event]) -> pd.DataFrame:
    """One row per deferred free, by release. returned_in: the step in which it came back; waits: it has not yet."""
    rows: list[list[Any]] = []
    waiting: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if isinstance(event, ev.BlocksReleased) and event.fence:
            waiting.setdefault((event.request, event.fence), []).append(len(rows))
            rows.append([event.request, event.fence, event.block_ids, event.reason, event.step, None, True])
        elif isinstance(event, ev.BlocksFreed) and event.fence:
            row = rows[waiting[event.request, event.fence].pop(0)]
            row[5:] = event.step, False
    return _table(rows, FENCE_COLUMNS).astype({"returned_in": "Int64"})


def steps_table(events: Iterable[ev.Event]) -> pd.DataFrame:
    """One row per call of `schedule()`. delivered_in: the step in which its output was processed (none: not yet)."""
    rows: list[list[Any]] = []
    delivered: dict[int, tuple[int, int]] = {}
    counts: dict[type[Any], int] = {}
    for event in events:
        if isinstance(event, ev.StepScheduled):
            tallies = [counts.get(kind, 0) for kind in (ev.SlotsFailed, ev.GuardStopped, ev.Admitted, ev.Preempted)]
            shape = [len(event.request_ids), sum(event.num_tokens), len(event.prefill_chunks), event.calls]
            rows.append([event.step, event.seq, event.time, *shape, *tallies, event.free, None, 0])
            counts.clear()
        elif isinstance(event, ev.StepDelivered) and event.request_ids:
            delivered[event.delivered] = event.step, sum(map(len, event.tokens))
        elif isinstance(event, ev.SlotsFailed | ev.GuardStopped | ev.Admitted | ev.Preempted):
            counts[type(event)] = counts.get(type(event), 0) + 1
    for row in rows:
        row[-2:] = delivered.get(row[0], (None, 0))
    return _table(rows, STEP_COLUMNS, "step").astype({"delivered_in": "Int64"})


def events_table(events: Iterable[ev.Event], kind: str | None = None) -> pd.DataFrame:
    """One row per event: of all kinds with a line about each, or of one kind with its fields.

    The index is the event's place in the run. Raises ValueError for an unknown kind.
    """
    if kind is None:
        rows: list[Sequence[Any]] = [(i, e.step, e.kind, describe(e)) for i, e in enumerate(events)]
        return _table(rows, ("event", "step", "kind", "line"), "event")
    event_type = ev.EVENT_TYPES.get(kind)
    if event_type is None:
        raise ValueError(f"there is no kind of event {kind!r}; known kinds: {', '.join(ev.EVENT_TYPES)}")
    rows = [(i, *event) for i, event in enumerate(events) if isinstance(event, event_type)]
    return _table(rows, ("event", *event_type._fields), "event")


def _by_block(transfers: Iterable[tuple[str, Sequence[int]]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for request, blocks in transfers:
        for block in blocks:
            found.setdefault(block, []).append(request)
    return found


def _table(rows: Iterable[Sequence[Any]], columns: Sequence[str], index: str | None = None) -> pd.DataFrame:
    frame = pd.DataFrame(list(rows), columns=list(columns))
    return frame if index is None else frame.set_index(index)
