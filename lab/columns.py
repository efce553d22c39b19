"""The names, numbers and colours that Python and the browser share.

Owns: the columns of a state, the frames' and rows' kinds and their fields, block flags, the palette.
Knows nothing about: how any of it is computed, packed or drawn.
Invariants: everything here is plain data; `browser_constants` hands it to the JavaScript word for word, so that neither
side can disagree. A number that is taken is never given another meaning without raising `pack.VERSION`.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any

BLOCK_COLUMNS = ("owner", "refs", "flags", "fence")
"""One entry per block. owner: 1 + index of the request that holds it (of its last holder while it waits behind the
fence); 0: nobody. refs: references, those behind the fence included. flags: BlockFlag. fence: the sequence number that
must be processed before the last one who let it go gives it back, 0 if nobody has to."""

REQUEST_COLUMNS = (
    "status",
    "queue",
    "ticket",
    "computed",
    "known",
    "blocks",
    "in_flight",
    "steps",
    "given",
    "stale",
    "preemptions",
)
"""One entry per request. status: RequestStatus + 1 (0: has not arrived). queue: kvsched.trace.state.Queue. ticket:
orders it within its queue, smaller first (waiting requests under PRIORITY: all 0, their priority orders them).
computed: tokens whose KV is computed or scheduled. known: prompt and output tokens. blocks: length of its table.
in_flight: scheduled tokens not processed yet; steps: the number of steps they are in. given: tokens it got in the
newest step. stale: tokens in flight from before its preemption. preemptions: how many so far."""


class BlockFlag(IntFlag):
    """What else is true of a block.

    FENCED: nobody holds it any more, it waits behind the fence. CACHED: its content can be found. LOADING, SAVING: a
    transfer is under way. KEPT: its request has finished, a save is still to be sent. STALE: it was handed out while a
    step in flight still writes it for whoever had it before.
    """

    FENCED = 1
    CACHED = 2
    LOADING = 4
    SAVING = 8
    KEPT = 16
    STALE = 32


class FrameKind(IntEnum):
    """What ended a frame: a schedule() call, the processing of a step's output, or something outside of both."""

    OUTSIDE = 0
    SCHEDULED = 1
    DELIVERED = 2


class Row(IntEnum):
    """Kinds of rows: what happened within a frame."""

    SCHEDULED = 0
    DELIVERED = 1
    FENCE = 2
    RELEASED = 3
    RETURNED = 4
    FAILED = 5
    GUARD = 6
    PREEMPTED = 7
    FINISHED = 8
    ADDED = 9
    ADMITTED = 10
    LOAD_STARTED = 11
    LOAD_LANDED = 12
    LOAD_FAILED = 13
    SAVE_SENT = 14
    FAULT = 15
    CONFIG = 16
    CACHE_RESET = 17
    SKIPPED = 18
    COUNTED = 19


ROW_FIELDS: dict[Row, tuple[str, ...]] = {
    Row.SCHEDULED: ("number", "seq", "calls", "free", "time"),
    Row.DELIVERED: ("number", "tokens", "time"),
    Row.FENCE: ("processed",),
    Row.RELEASED: ("request", "blocks", "fence", "reason"),
    Row.RETURNED: ("request", "blocks", "fence"),
    Row.FAILED: ("request", "call", "needed", "free", "injected", "waiting"),
    Row.GUARD: ("request", "victim", "fence", "processed"),
    Row.PREEMPTED: ("request", "wanted_by", "computed", "stale", "dropped", "count", "reason"),
    Row.FINISHED: ("request", "reason", "tokens"),
    Row.ADDED: ("request",),
    Row.ADMITTED: ("request", "resumed", "computed", "local", "external"),
    Row.LOAD_STARTED: ("request", "blocks", "asynchronous"),
    Row.LOAD_LANDED: ("request",),
    Row.LOAD_FAILED: ("request", "blocks", "valid"),
    Row.SAVE_SENT: ("request",),
    Row.FAULT: ("text",),
    Row.CONFIG: ("text",),
    Row.CACHE_RESET: (),
    Row.SKIPPED: ("request", "reason"),
    Row.COUNTED: ("number", "seq"),
}
"""Fields of each row, all of them unsigned whole numbers. request, victim, wanted_by: 1 + index of a request (0: none).
time: microseconds since the first event. reason and text: index into the history's table of words. A SCHEDULED row is
followed by its requests and the blocks they write (see `lab.pack`). COUNTED: the fence was turned on, and gives this
step, already in flight, a number."""

MARKS: dict[Row, tuple[str, str, str]] = {
    Row.FAILED: ("✕", "failed call for slots", "failed calls for slots"),
    Row.GUARD: ("■", "guard stop", "guard stops"),
    Row.PREEMPTED: ("▼", "preemption", "preemptions"),
    Row.LOAD_FAILED: ("!", "failed load", "failed loads"),
    Row.FAULT: ("✳", "fault injected", "faults injected"),
    Row.CONFIG: ("◆", "setting changed", "settings changed"),
    Row.FINISHED: ("●", "finish", "finishes"),
}
"""The rows that are marked on the strip and stopped at with [ and ]: sign, name of one, name of many."""

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#882255")
"""Colours of requests, which colour-blind eyes can tell apart (tested): Okabe and Ito's, wine instead of yellow."""

PATTERNS = ("solid", "rising", "dots", "level", "cross")
"""Patterns of requests. Request i has colour i mod 7 and pattern i mod 5: 35 looks before one comes back."""

STATUS_NAMES = (
    "not arrived",
    "waiting",
    "loading",
    "running",
    "preempted",
    "stop",
    "length",
    "aborted",
    "error",
    "pool",
)
"""Words for the `status` column. From "stop" on: why it finished (pool: it outgrew the whole pool)."""

FIRST_FINISHED = STATUS_NAMES.index("stop")


def browser_constants() -> dict[str, Any]:
    """All of this as plain data, for the JavaScript side."""
    return {
        "blockColumns": BLOCK_COLUMNS,
        "requestColumns": REQUEST_COLUMNS,
        "flags": {flag.name: flag.value for flag in BlockFlag},
        "frames": {kind.name: kind.value for kind in FrameKind},
        "rows": {row.name: row.value for row in Row},
        "rowFields": [ROW_FIELDS[row] for row in Row],
        "marks": [[row.value, *texts] for row, texts in MARKS.items()],
        "palette": PALETTE,
        "patterns": PATTERNS,
        "statusNames": STATUS_NAMES,
        "firstFinished": FIRST_FINISHED,
    }
