"""The events: every decision and every block that moves, told once.

Owns: the frozen event types, their version, and their plain-data form.
Knows nothing about: who listens. Widgets, plots, exports, invariants and diffs are all folds over these.
Invariants: an event is never changed. `step` is the number of `schedule()` calls begun when it happened
(0 before the first). Events stand in the order in which things happened, so that a fold that applies them one
by one always holds a state the scheduler was in. Per-request columns stand in step order.

Folding the pool. Start: blocks 1..num_blocks-1 free in id order, no hashes, no references.
  BlocksHit        each block +1 reference; one at 0 before leaves the free queue (wherever it stands)
  BlocksAllocated  popped from the front of the free queue, in order; 1 reference; `evicted` ones lose their hash
  BlocksCached     the block now carries this hash (found by later lookups)
  BlocksUncached   it no longer does
  BlocksReleased   the request's table is emptied; fence > 0: the blocks wait, owned by nobody, still in use
  BlocksFreed      -1 reference each; `front` are prepended to the free queue as a group in this order, `back`
                   appended likewise, `shared` are still held by others
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

VERSION = 1
"""Version of the event format; raised when a field changes its meaning or goes away."""


class RunStarted(NamedTuple):
    """Head of every trace. config: SchedulerConfig.to_dict(), with the deferral actually in force under
    `defers_frees`; source: "kvsched" or what else recorded it; meta: model, runner, faults, free to extend."""

    step: int
    version: int
    config: Mapping[str, Any]
    source: str
    meta: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return "run_started"


class RequestAdded(NamedTuple):
    """A request arrives, status WAITING. sampling: SamplingParams.to_dict(). time: seconds, engine's clock."""

    step: int
    request: str
    prompt_token_ids: tuple[int, ...]
    sampling: Mapping[str, Any]
    priority: int
    arrival_time: float
    time: float

    @property
    def kind(self) -> str:
        return "request_added"


class SlotsFailed(NamedTuple):
    """A call for slots failed. call: its number over the whole run, from 1; needed: blocks wanted from the
    free queue (0 for an injected failure that would have needed none); free: blocks free then;
    injected: it failed because a fault said so; waiting: on behalf of a waiting request."""

    step: int
    request: str
    call: int
    needed: int
    free: int
    injected: bool
    waiting: bool

    @property
    def kind(self) -> str:
        return "slots_failed"


class GuardStopped(NamedTuple):
    """The guard ended the retry: the victim's blocks are behind the fence. fence: the victim's last_sched_seq;
    processed: processed_step_seq, which must reach it."""

    step: int
    request: str
    victim: str
    fence: int
    processed: int

    @property
    def kind(self) -> str:
        return "guard_stopped"


class Preempted(NamedTuple):
    """`request` lost its blocks so that `wanted_by` may get slots. computed: tokens whose KV is thrown away;
    stale: tokens of steps in flight from before; dropped: whether their output will be dropped; count: its
    preemptions so far, this one included; reason: "kv_full" (FCFS), "priority" or "cache_reset"."""

    step: int
    request: str
    wanted_by: str
    computed: int
    stale: int
    dropped: bool
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on an event
    reason: str

    @property
    def kind(self) -> str:
        return "preempted"


class Unscheduled(NamedTuple):
    """A victim that had already been scheduled in this very step leaves it; its tokens go back to the budget."""

    step: int
    request: str
    num_tokens: int

    @property
    def kind(self) -> str:
        return "unscheduled"


class NoProgress(NamedTuple):
    """A call of `schedule()` preempted requests and scheduled nothing. since_token: such calls since a token was last
    delivered, this one included."""

    step: int
    preempted: tuple[str, ...]
    since_token: int

    @property
    def kind(self) -> str:
        return "no_progress"


class BlocksHit(NamedTuple):
    """Local prefix hit taken by a request: these cached blocks lead its table."""

    step: int
    request: str
    block_ids: tuple[int, ...]

    @property
    def kind(self) -> str:
        return "blocks_hit"


class BlocksAllocated(NamedTuple):
    """Blocks popped for a request, appended to its table. evicted: those of them that lost a cache entry."""

    step: int
    request: str
    block_ids: tuple[int, ...]
    evicted: tuple[int, ...]

    @property
    def kind(self) -> str:
        return "blocks_allocated"


class BlocksCached(NamedTuple):
    """Full blocks of a request entered in the prefix cache. first: index in its table of the first of them."""

    step: int
    request: str
    first: int
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]

    @property
    def kind(self) -> str:
        return "blocks_cached"


class BlocksUncached(NamedTuple):
    """Blocks taken out of the prefix cache without being handed out (a failed load, a cache reset)."""

    step: int
    block_ids: tuple[int, ...]

    @property
    def kind(self) -> str:
        return "blocks_uncached"


class BlocksReleased(NamedTuple):
    """A request let its whole table go (order of the table). fence: 0 if the blocks return at once, else the
    sequence number that must be processed first. reason: "preempted", "finished", "aborted", "sent", "load"."""

    step: int
    request: str
    block_ids: tuple[int, ...]
    fence: int
    reason: str

    @property
    def kind(self) -> str:
        return "blocks_released"


class BlocksFreed(NamedTuple):
    """Released blocks came back to the pool (see the module's text). fence: as in BlocksReleased."""

    step: int
    request: str
    front: tuple[int, ...]
    back: tuple[int, ...]
    shared: tuple[int, ...]
    fence: int

    @property
    def kind(self) -> str:
        return "blocks_freed"


class BlocksKept(NamedTuple):
    """A finished request's blocks stay allocated until its save has been sent."""

    step: int
    request: str
    block_ids: tuple[int, ...]

    @property
    def kind(self) -> str:
        return "blocks_kept"


class Admitted(NamedTuple):
    """A waiting request joined `running`. local, external: prefix tokens found here and outside;
    computed: num_computed_tokens at admission; resumed: it had been preempted before."""

    step: int
    request: str
    resumed: bool
    computed: int
    local: int
    external: int

    @property
    def kind(self) -> str:
        return "admitted"


class Skipped(NamedTuple):
    """A waiting request was passed over in this pass. reason: "load" (not landed), "stale" (output still in
    flight), "lookup" (connector does not know yet), "slots" (none for it, nothing else goes on, and others behind it
    may have their loads), "budget" (without chunked prefill: what is left of it is too little, and the pass ends)."""

    step: int
    request: str
    reason: str

    @property
    def kind(self) -> str:
        return "skipped"


class Parked(NamedTuple):
    """A waiting request holds blocks and waits for its asynchronous load."""

    step: int
    request: str
    block_ids: tuple[int, ...]
    local: int
    external: int

    @property
    def kind(self) -> str:
        return "parked"


class LoadStarted(NamedTuple):
    """Blocks begin to be filled from outside. after_step: not before the saves of that step, which read these blocks
    or bring what is to be loaded, have been copied out; 0: at once."""

    step: int
    request: str
    block_ids: tuple[int, ...]
    num_tokens: int
    asynchronous: bool
    after_step: int = 0

    @property
    def kind(self) -> str:
        return "load_started"


class LoadLanded(NamedTuple):
    """A request's load was reported as finished; it can be promoted in the next pass."""

    step: int
    request: str

    @property
    def kind(self) -> str:
        return "load_landed"


class LoadFailed(NamedTuple):
    """Blocks of a request could not be filled. valid: tokens up to the first bad block; policy: "recompute" or
    "fail"; dropped: tokens in flight whose output is dropped (synchronous loads)."""

    step: int
    request: str
    block_ids: tuple[int, ...]
    valid: int
    policy: str
    dropped: int

    @property
    def kind(self) -> str:
        return "load_failed"


class SaveStarted(NamedTuple):
    """Blocks begin to be copied out."""

    step: int
    request: str
    block_ids: tuple[int, ...]

    @property
    def kind(self) -> str:
        return "save_started"


class SaveSent(NamedTuple):
    """The save of a finished request was reported as sent; its kept blocks are released next."""

    step: int
    request: str

    @property
    def kind(self) -> str:
        return "save_sent"


class StepScheduled(NamedTuple):
    """End of a `schedule()` call, empty ones included. scheduled: seq of the step (sched_step_seq; 0 with the
    fence off); starts: position of the first token; calls: calls for slots in this step; free: free blocks;
    time: seconds on the engine's clock."""

    step: int
    seq: int
    request_ids: tuple[str, ...]
    num_tokens: tuple[int, ...]
    starts: tuple[int, ...]
    prefill_chunks: frozenset[str]
    calls: int
    free: int
    time: float

    @property
    def kind(self) -> str:
        return "step_scheduled"


class FenceAdvanced(NamedTuple):
    """The output of a non-empty step began to be processed; processed: processed_step_seq now."""

    step: int
    processed: int

    @property
    def kind(self) -> str:
        return "fence_advanced"


class StepDelivered(NamedTuple):
    """The output of step number `delivered` has been processed. request_ids, tokens: what each of its requests
    got appended (() if nothing or dropped). time: seconds on the engine's clock."""

    step: int
    delivered: int
    request_ids: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    time: float

    @property
    def kind(self) -> str:
        return "step_delivered"


class RequestFinished(NamedTuple):
    """A request ended. reason: "stop", "length", "abort", "error" or "pool"."""

    step: int
    request: str
    reason: str
    num_output_tokens: int
    time: float

    @property
    def kind(self) -> str:
        return "request_finished"


class FaultInjected(NamedTuple):
    """A planned fault came to pass. fault: its plain-data form."""

    step: int
    fault: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return "fault_injected"


class ConfigChanged(NamedTuple):
    """Settings changed while running (guard, fence, depth). defers_frees: whether the fence is on from here; None in
    traces that do not tell."""

    step: int
    changes: Mapping[str, Any]
    defers_frees: bool | None = None

    @property
    def kind(self) -> str:
        return "config_changed"


class CacheReset(NamedTuple):
    """The whole prefix cache was emptied."""

    step: int

    @property
    def kind(self) -> str:
        return "cache_reset"


Event = (
    RunStarted | RequestAdded | SlotsFailed | GuardStopped | Preempted | Unscheduled | NoProgress | BlocksHit
    | BlocksAllocated | BlocksCached | BlocksUncached | BlocksReleased | BlocksFreed | BlocksKept | Admitted | Skipped
    | Parked | LoadStarted | LoadLanded | LoadFailed | SaveStarted | SaveSent | StepScheduled | FenceAdvanced
    | StepDelivered | RequestFinished | FaultInjected | ConfigChanged | CacheReset
)  # fmt: skip



def kind_of(event_type: type[Any]) -> str:
    """The kind of an event class: `StepScheduled` is "step_scheduled", as its events say."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", event_type.__name__).lower()


EVENT_TYPES: dict[str, type[Any]] = {kind_of(t): t for t in Event.__args__}
"""Event class by kind."""
