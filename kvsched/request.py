"""A request: what was asked for, what is known of it, and its one transition function.

Owns: `SamplingParams`, `RequestStatus`, `Request` and `transition`.
Knows nothing about: queues, blocks' content, runners.
Invariants: `num_tokens == len(token_ids)`; a status changes only along `_ALLOWED`; a finished request never
changes again. The counters are written by the scheduler alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

WORD = range(-(2**63), 2**63)
"""The integers of traces and devices."""


class RequestRefused(ValueError):
    """A request that the engine cannot serve; the message names the numbers and the setting to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    max_tokens: most tokens to generate, at least 1.
    temperature: 0 is greedy; above 0, and finite, divides the logits.
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: keep the smallest set of likeliest tokens whose probability reaches top_p, in (0, 1].
    seed: seed of this request's draws, a signed 64-bit integer; None stands for 0, so that runs repeat.
    stop_token_ids: tokens that end the request (kept in its output).
    ignore_eos: do not stop at the model's end-of-sequence token.

    Raises RequestRefused for a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.max_tokens < 1:
            raise RequestRefused(f"max_tokens is {self.max_tokens}; ask for at least 1 token")
        if not 0.0 <= self.temperature < math.inf:
            raise RequestRefused(f"temperature is {self.temperature}; it must be 0 (greedy) or above, and finite")
        if self.top_k < 0:
            raise RequestRefused(f"top_k is {self.top_k}; it must be 0 (off) or above")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestRefused(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")
        for name in ("max_tokens", "top_k", "seed"):
            if (getattr(self, name) or 0) not in WORD:
                raise RequestRefused(f"{name} is {getattr(self, name)}; it must be an integer of 64 bits")
        for token in self.stop_token_ids:
            if token not in WORD:
                raise RequestRefused(f"stop_token_ids holds {token}; it must be an integer of 64 bits")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"stop_token_ids": list(self.stop_token_ids)}


class RequestStatus(IntEnum):
    """Where a request stands. Everything from `STOPPED` on is finished."""

    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    PREEMPTED = 3
    STOPPED = 4
    LENGTH_CAPPED = 5
    ABORTED = 6
    ERROR = 7
    POOL_CAPPED = 8

    @property
    def finish_reason(self) -> str | None:
        """"stop", "length", "abort", "error" or "pool" (outgrew the whole KV pool); None while it lives."""
        return _FINISH_REASON.get(self)


_FINISH_REASON = {
    RequestStatus.STOPPED: "stop",
    RequestStatus.LENGTH_CAPPED: "length",
    RequestStatus.ABORTED: "abort",
    RequestStatus.ERROR: "error",
    RequestStatus.POOL_CAPPED: "pool",
}
_FINISHED = frozenset(_FINISH_REASON)
_S = RequestStatus
_ALLOWED: dict[RequestStatus, frozenset[RequestStatus]] = {
    # A parked request whose load has landed waits again: as PREEMPTED if it ever was, else as WAITING.
    _S.WAITING: frozenset({_S.RUNNING, _S.WAITING_FOR_REMOTE_KVS}) | _FINISHED,
    _S.WAITING_FOR_REMOTE_KVS: frozenset({_S.WAITING, _S.PREEMPTED}) | _FINISHED,
    _S.RUNNING: frozenset({_S.PREEMPTED}) | _FINISHED,
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.WAITING_FOR_REMOTE_KVS}) | _FINISHED,
}
FINISHED_FROM = RequestStatus.STOPPED
"""`status >= FINISHED_FROM` says that a request is finished."""

NEVER = 1 << 62
"""A token count that is never reached."""


class Request:
    """One sequence: its known tokens and its counters (see the table in the design notes).

    token_ids: all known tokens, prompt first; `num_tokens` counts them.
    num_final_tokens: prompt + max_tokens. length_cap: the known tokens at which it ends at the latest.
    num_computed_tokens: tokens whose KV is computed or scheduled (counts steps in flight).
    num_output_placeholders: async only: sampled tokens owed by steps in flight.
    num_in_flight_tokens: scheduled tokens of steps whose output has not been processed.
    num_stale_output_tokens, drop_stale_output: after a preemption: tokens of steps in flight from before it,
        and whether their output is dropped.
    last_sched_seq: sequence number of the newest non-empty step that scheduled it.
    block_ids: its block table. num_slots: len(block_ids) x block size.
    num_cached_blocks: how many of its leading blocks have been entered in the prefix cache.
    next_cache_at: known, computed tokens at which its next block can be entered (NEVER with caching off).
    block_hashes: chained hashes of its full blocks, made when first needed.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_ids",
        "drop_stale_output",
        "id",
        "last_sched_seq",
        "length_cap",
        "next_cache_at",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_external_tokens",
        "num_final_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "num_stale_output_tokens",
        "num_tokens",
        "priority",
        "sampling",
        "status",
        "stop_token_ids",
        "token_ids",
        "__weakref__",
    )

    def __init__(
        self,
        id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """stop_token_ids: more tokens that end it (the model's end-of-sequence tokens, say)."""
        self.id = id
        self.token_ids = list(prompt_token_ids)
        self.sampling = sampling
        self.priority = priority
        self.arrival_time = arrival_time
        self.stop_token_ids = frozenset(sampling.stop_token_ids) | frozenset(stop_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.num_final_tokens = self.num_prompt_tokens + sampling.max_tokens
        self.length_cap = self.num_final_tokens
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_external_tokens = 0
        self.num_output_placeholders = 0
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0
        self.drop_stale_output = False
        self.last_sched_seq = 0
        self.num_preemptions = 0
        self.block_ids: list[int] = []
        self.num_slots = 0
        self.num_cached_blocks = 0
        self.next_cache_at = NEVER
        self.block_hashes: list[bytes] = []

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens (a copy)."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.status >= FINISHED_FROM

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {self.status.name}, {self.num_computed_tokens} of {self.num_tokens} tokens"
            f" computed, {len(self.block_ids)} blocks)"
        )


def transition(request: Request, status: RequestStatus) -> None:
    """Move a request to another status: the only place that writes `Request.status`."""
    allowed = _ALLOWED.get(request.status, frozenset())
    assert status in allowed, f"{request.id}: {request.status.name} cannot become {status.name}"
    request.status = status
