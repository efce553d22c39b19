"""What crosses between scheduler and runner: ids and ints, frozen.

Owns: `ScheduledStep` (down) and `StepResult` (up), and the records they hold.
Knows nothing about: requests as the scheduler sees them, tensors.
Invariants: nothing here is changed after it was handed over. Positions are half-open: request i of a step
computes the KV of positions [num_computed_tokens[i], num_computed_tokens[i] + num_scheduled_tokens[i]).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvsched.request import SamplingParams


class RequestData(NamedTuple):
    """All that a runner must know of a request that joins a step anew or again.

    token_ids: every known token, prompt first. block_ids: its whole block table.
    num_computed_tokens: positions below this already have their KV in those blocks.
    """

    id: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    num_prompt_tokens: int
    sampling: SamplingParams
    resumed: bool


class Load(NamedTuple):
    """Blocks to fill from outside. keys[i] is the content hash wanted in block_ids[i]; the last block may be
    filled in part: num_tokens counts the tokens, from token `start` of the request on.

    after_step: the newest step in flight whose saves write one of these keys or read one of these blocks: nothing is
    filled before they have been copied out. 0 if there is none.
    """

    request_id: str
    block_ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    start: int
    num_tokens: int
    asynchronous: bool
    after_step: int = 0


class Save(NamedTuple):
    """Full blocks to copy out, as they stand in compute order before this step runs.

    final: this is the last save of a finished request whose blocks are kept until it is reported as sent.
    evicted: keys that leave the store first, to make room.
    """

    request_id: str
    block_ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    final: bool
    evicted: tuple[bytes, ...] = ()


class ScheduledStep(NamedTuple):
    """The decision of one `schedule()` call. Columns have one entry per scheduled request, in order.

    step: number of the `schedule()` call, from 1, empty ones included.
    seq: `sched_step_seq` after this step; 0 while deferred frees are off.
    num_scheduled_tokens, num_computed_tokens: tokens of this step, and the position of the first of them.
    prefill_chunks: ids of the requests that leave known tokens uncomputed, hence sample nothing.
    new_block_ids: blocks added to a table in this step; only requests that got any. For a request in
        `new_requests` its whole table stands in its RequestData.
    new_requests: requests that are not in the runner's hands: new, or resumed after a preemption, in step order.
    preempted: ids in the order in which they were preempted in this call.
    finished_request_ids: requests that ended since the call before; the runner may forget them.
    allocate_calls: calls for slots made by this `schedule()`.
    loads, saves: transfers to start with this step (also an empty one).
    """

    step: int
    seq: int
    request_ids: tuple[str, ...]
    num_scheduled_tokens: tuple[int, ...]
    num_computed_tokens: tuple[int, ...]
    prefill_chunks: frozenset[str]
    new_block_ids: Mapping[str, tuple[int, ...]]
    new_requests: tuple[RequestData, ...]
    preempted: tuple[str, ...]
    finished_request_ids: tuple[str, ...]
    allocate_calls: int
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()

    @property
    def is_empty(self) -> bool:
        """No tokens are scheduled (there may still be transfers)."""
        return not self.request_ids

    @property
    def total_tokens(self) -> int:
        """Scheduled tokens of all requests."""
        return sum(self.num_scheduled_tokens)


class Transfers(NamedTuple):
    """What a connector's worker side reports: ids in the order in which the transfers ended."""

    finished_recving: tuple[str, ...] = ()
    finished_sending: tuple[str, ...] = ()
    invalid_block_ids: frozenset[int] = frozenset()


NO_TRANSFERS = Transfers()


class StepResult(NamedTuple):
    """What a runner makes of a step.

    sampled_token_ids: per scheduled request, in step order; () for a prefill chunk.
    started_at, finished_at: seconds on the runner's clock.
    """

    step: int
    sampled_token_ids: tuple[tuple[int, ...], ...]
    transfers: Transfers = NO_TRANSFERS
    started_at: float = 0.0
    finished_at: float = 0.0
