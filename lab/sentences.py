"""One line about one event, for people.

Owns: `describe`. Knows nothing about: the state around an event, sessions.
Invariants: every kind of event has a line; the same event has the same line in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvsched.trace import events as ev
from lab.words import count, inflected, numbers


def describe(event: ev.Event) -> str:
    """What happened, in a line."""
    line: str = _LINES[type(event)](event)
    return line


def _slots_failed(e: ev.SlotsFailed) -> str:
    if e.injected:
        return f"a fault makes call {e.call} for slots, by {e.request}, fail"
    return f"{e.request} needs {count(e.needed, 'block')}, {e.free} free (call {e.call})"


def _guard_stopped(e: ev.GuardStopped) -> str:
    return (
        f"victim {e.victim} is fenced (scheduled in {e.fence}, processed {e.processed}): retry for {e.request} stopped"
    )


def _preempted(e: ev.Preempted) -> str:
    why = f" for {e.wanted_by}" if e.wanted_by else ""
    return f"{e.request} preempted{why}: {count(e.computed, 'computed token')} lost, {count(e.count, 'time')} now"


def _released(e: ev.BlocksReleased) -> str:
    when = f"behind fence {e.fence}" if e.fence else "at once"
    return f"{e.request} lets {_blocks(e.block_ids)} go {when} ({e.reason})"


def _freed(e: ev.BlocksFreed) -> str:
    back = _blocks(sorted(e.front + e.back)) if e.front or e.back else "no block"
    shared = f"; {numbers(e.shared)} still shared" if e.shared else ""
    fence = f", fence {e.fence} passed" if e.fence else ""
    return f"{back} of {e.request} back in the pool{fence}{shared}"


def _scheduled(e: ev.StepScheduled) -> str:
    if not e.request_ids:
        return f"step {e.step} is empty, {e.free} free"
    parts = [f"{request}:{n}" for request, n in zip(e.request_ids, e.num_tokens, strict=True)]
    shown = ", ".join(parts[:8]) + (f" and {len(parts) - 8} more" if len(parts) > 8 else "")
    return f"step {e.step} computes {count(sum(e.num_tokens), 'token')} ({shown}), {e.free} free"


def _delivered(e: ev.StepDelivered) -> str:
    return f"output of step {e.delivered}: {count(sum(map(len, e.tokens)), 'token')}"


def _admitted(e: ev.Admitted) -> str:
    found = f", {e.computed} tokens need not be computed" if e.computed else ""
    return f"{e.request} {'resumed' if e.resumed else 'admitted'}{found}"


def _load_started(e: ev.LoadStarted) -> str:
    return f"load for {e.request} into {_blocks(e.block_ids)} begins"


def _load_failed(e: ev.LoadFailed) -> str:
    return f"load for {e.request} failed in {_blocks(e.block_ids)}; {count(e.valid, 'token')} valid, policy {e.policy}"


def _fault(e: ev.FaultInjected) -> str:
    fields = ", ".join(f"{k} {v}" for k, v in e.fault.items() if k != "kind" and v is not None)
    return f"fault {e.fault.get('kind')} comes to pass: {fields}"


def _config(e: ev.ConfigChanged) -> str:
    return "settings change: " + ", ".join(f"{name} = {value!r}" for name, value in e.changes.items())


def _blocks(blocks: Any) -> str:
    return f"{inflected('block', blocks)} {numbers(blocks)}"


_LINES: dict[type[Any], Callable[[Any], str]] = {
    ev.RunStarted: lambda e: f"a run with {e.config.get('num_blocks')} blocks begins, recorded by {e.source}",
    ev.RequestAdded: lambda e: f"{e.request} arrives with {count(len(e.prompt_token_ids), 'token')}",
    ev.SlotsFailed: _slots_failed,
    ev.GuardStopped: _guard_stopped,
    ev.Preempted: _preempted,
    ev.Unscheduled: lambda e: f"{e.request} leaves the step; {count(e.num_tokens, 'token')} back in the budget",
    ev.NoProgress: lambda e: (
        f"no progress: {count(len(e.preempted), 'request')} preempted, nothing scheduled"
        f"; {count(e.since_token, 'step')} like this since the last token"
    ),
    ev.BlocksHit: lambda e: f"{e.request} finds {_blocks(e.block_ids)} in the prefix cache",
    ev.BlocksAllocated: lambda e: f"{e.request} gets {_blocks(e.block_ids)}",
    ev.BlocksCached: lambda e: f"{_blocks(e.block_ids)} of {e.request} entered in the prefix cache",
    ev.BlocksUncached: lambda e: f"{_blocks(e.block_ids)} taken out of the prefix cache",
    ev.BlocksReleased: _released,
    ev.BlocksFreed: _freed,
    ev.BlocksKept: lambda e: f"{_blocks(e.block_ids)} of {e.request} kept until saved",
    ev.Admitted: _admitted,
    ev.Skipped: lambda e: f"{e.request} passed over ({e.reason})",
    ev.Parked: lambda e: f"{e.request} waits for a load of {count(e.external, 'token')}",
    ev.LoadStarted: _load_started,
    ev.LoadLanded: lambda e: f"load for {e.request} landed",
    ev.LoadFailed: _load_failed,
    ev.SaveStarted: lambda e: f"save of {_blocks(e.block_ids)} of {e.request} begins",
    ev.SaveSent: lambda e: f"save of {e.request} sent",
    ev.StepScheduled: _scheduled,
    ev.FenceAdvanced: lambda e: f"fence: {e.processed} processed",
    ev.StepDelivered: _delivered,
    ev.RequestFinished: lambda e: f"{e.request} ends ({e.reason}) with {count(e.num_output_tokens, 'token')}",
    ev.FaultInjected: _fault,
    ev.ConfigChanged: _config,
    ev.CacheReset: lambda e: "prefix cache emptied",
}
assert set(_LINES) == set(ev.EVENT_TYPES.values()), "an event has no line"
