"""One moment of a run as pandas tables, and all events with a line each. Pure.

Owns: what columns there are and what they are called. (Tables of a whole run: `kvsched.trace.tables`.)
Knows nothing about: sessions, files, notebooks.
Invariants: a table is a function of what it is made from, with the same columns whatever that holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from kvsched.config import NULL_BLOCK
from kvsched.trace.events import Event
from kvsched.trace.state import Queue, State
from lab.sentences import describe

REQUEST_COLUMNS = (
    "request", "status", "queue", "place", "prompt", "output", "computed", "known", "blocks", "in_flight",
    "steps_in_flight", "placeholders", "stale", "priority", "preemptions", "arrival_time", "finish_time",
)  # fmt: skip
BLOCK_COLUMNS = (
    "block", "state", "refs", "owners", "fence", "cached_as", "place_in_line", "written_by", "loading_for",
    "saving_for",
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


def events_table(events: Iterable[Event]) -> pd.DataFrame:
    """One row per event, with a line about it. The index is the event's place in the run."""
    rows = [(i, e.step, e.kind, describe(e)) for i, e in enumerate(events)]
    return _table(rows, ("event", "step", "kind", "line"), "event")


def _by_block(transfers: Iterable[tuple[str, Sequence[int]]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for request, blocks in transfers:
        for block in blocks:
            found.setdefault(block, []).append(request)
    return found


def _table(rows: Iterable[Sequence[Any]], columns: Sequence[str], index: str) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(columns)).set_index(index)
