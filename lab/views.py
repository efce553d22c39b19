"""What a history looks like at a moment: small, plain answers, for pictures without a browser.

Owns: the headline of a moment, the rows of the queues, the steps in flight, the look of every block.
Knows nothing about: SVG, widgets, sessions. The browser's twins are in `shared.js` and the views' own files.
Invariants: pure functions of (history, frame).
"""

from __future__ import annotations

from typing import NamedTuple

from kvsched.trace.state import Queue
from lab.columns import FIRST_FINISHED, STATUS_NAMES, BlockFlag
from lab.history import History, State


class RequestRow(NamedTuple):
    """A request's numbers at a moment. section: "running", "loading", "waiting" or "finished"; number: its place in
    order of arrival; status: one of STATUS_NAMES; tokens, blocks and steps are counts; given: tokens of the newest
    step."""

    section: str
    number: int
    request: str
    status: str
    computed: int
    known: int
    given: int
    steps: int
    blocks: int
    preemptions: int
    priority: int


class BlockLook(NamedTuple):
    """One block at a moment. owner: index of the request that holds it, or has let it go and not yet given it back; -1:
    nobody. fence: what it waits for, 0 if it does not. writing: steps in flight that write it. stale: one of them does
    so for whoever had it before."""

    block: int
    owner: int
    refs: int
    fence: int
    cached: bool
    loading: bool
    saving: bool
    writing: tuple[int, ...]
    stale: bool


def headline(history: History, frame: int) -> str:
    """ "step 7 of 40 · 3 running · 1 waiting · 2 of 8 blocks free · fence at 5, newest 7" """
    read, queue = history.frames[frame], history.at(frame).request("queue")
    loading = int((queue == Queue.LOADING).sum())
    usable = history.num_blocks - 1
    parts = [
        f"step {read.step:,} of {history.frames[-1].step:,}",
        f"{int((queue == Queue.RUNNING).sum()):,} running",
        *([f"{loading:,} loading"] if loading else []),
        f"{int((queue == Queue.WAITING).sum()):,} waiting",
        f"{read.free:,} of {usable:,} {'block' if usable == 1 else 'blocks'} free",
        fence_words(history, frame),
    ]
    return " · ".join(parts)


def fence_words(history: History, frame: int) -> str:
    """ "fence at 5, newest 7", or what is in flight while the fence is off."""
    read = history.frames[frame]
    if read.fenced:
        return f"fence at {read.processed:,}, newest {read.newest:,}"
    steps = in_flight(history, frame)
    if not steps:
        return "fence off"
    return f"fence off, {'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))} in flight"


# ---- requests


def queue_rows(history: History, frame: int) -> list[RequestRow]:
    """Every request that has arrived: running in order of admission, then those that load, wait (in the order in which
    they will be looked at) and have finished (the newest first)."""
    state = history.at(frame)
    queue, ticket, status = (state.request(name) for name in ("queue", "ticket", "status"))
    by_priority = history.head["config"].get("policy") == "priority"

    def turn(index: int) -> tuple[int, float, str]:
        head = history.requests[index]
        return head.priority, head.arrival_time, head.id

    rows: list[RequestRow] = []
    for section, wanted in (("running", Queue.RUNNING), ("loading", Queue.LOADING), ("waiting", Queue.WAITING)):
        members = [int(i) for i in (queue == wanted).nonzero()[0]]
        if by_priority and wanted is not Queue.RUNNING:
            members.sort(key=turn)
        else:
            members.sort(key=lambda index: int(ticket[index]))
        rows += (_request_row(history, state, section, index) for index in members)
    finished = [int(i) for i in (status >= FIRST_FINISHED).nonzero()[0]]
    rows += (_request_row(history, state, "finished", index) for index in reversed(finished))
    return rows


def _request_row(history: History, state: State, section: str, number: int) -> RequestRow:
    def cell(name: str) -> int:
        return int(state.request(name)[number])

    head = history.requests[number]
    return RequestRow(
        section,
        number,
        head.id,
        STATUS_NAMES[cell("status")],
        cell("computed"),
        cell("known"),
        cell("given"),
        cell("steps"),
        cell("blocks"),
        cell("preemptions"),
        head.priority,
    )


# ---- blocks and the fence


def in_flight(history: History, frame: int) -> list[int]:
    """Numbers of the steps whose output has not been processed at the end of a frame, oldest first."""
    return [
        step.number
        for step in history.steps.values()
        if step.written and step.frame <= frame and (step.delivered is None or step.delivered > frame)
    ]


def block_looks(history: History, frame: int) -> list[BlockLook]:
    """Every usable block (from 1 on)."""
    state = history.at(frame)
    writers: dict[int, list[int]] = {}
    for number in in_flight(history, frame):
        for written in history.steps[number].written:
            for block in written.blocks:
                writers.setdefault(block, []).append(number)
    owners, refs, flags, fences = (state.block(name).tolist() for name in ("owner", "refs", "flags", "fence"))
    looks = []
    for block in range(1, history.num_blocks):
        owner, flag, writes = owners[block] - 1, BlockFlag(flags[block]), writers.get(block, [])
        fence = fences[block] if BlockFlag.FENCED in flag else 0
        saving = bool(flag & (BlockFlag.SAVING | BlockFlag.KEPT))
        about = BlockFlag.CACHED in flag, BlockFlag.LOADING in flag, saving
        looks.append(BlockLook(block, owner, refs[block], fence, *about, tuple(writes), BlockFlag.STALE in flag))
    return looks
