"""Frozen, validated configuration, in the field's terms.

Owns: every setting of the scheduler and the KV cache, and their checks.
Knows nothing about: models, devices, notebooks.
Invariants: a `SchedulerConfig` that exists is consistent on its own; what the engine demands beyond that
(a pool that can hold `max_model_len`) is checked at the engine's door, because the bare scheduler must be
able to replay whatever was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast

Policy = Literal["fcfs", "priority"]
Guard = Literal["stop_retry", "none"]
DeferBlockFree = bool | Literal["auto"]
LoadFailurePolicy = Literal["recompute", "fail"]
SeqSlots = Literal["running", "scheduled"]

NULL_BLOCK = 0
"""Id of the reserved block: never handed out, target of padded writes, not counted as usable."""

_CHOICES: dict[str, tuple[object, ...]] = {
    "policy": ("fcfs", "priority"),
    "guard": ("stop_retry", "none"),
    "defer_block_free": (True, False, "auto"),
    "load_failure_policy": ("recompute", "fail"),
    "seq_slots": ("running", "scheduled"),
}
_AT_LEAST: dict[str, int] = {
    "num_blocks": 2,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 1,
    "long_prefill_token_threshold": 0,
    "max_in_flight": 1,
}


class ConfigError(ValueError):
    """A setting is out of range or contradicts another one; the message names both and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of the scheduler and its KV cache.

    num_blocks: blocks in the pool, the null block 0 included (usable: `num_blocks - 1`).
    block_size: tokens per block.
    max_num_seqs: how many requests may run at once.
    max_num_batched_tokens: token budget of one step.
    max_model_len: longest sequence, prompt and output, in tokens.
    long_prefill_token_threshold: cap on one request's tokens per step when others run or wait; 0 is no cap.
    enable_chunked_prefill: whether a prompt may be split over steps when the budget is short.
    enable_prefix_caching: whether full blocks are found again by their content.
    async_scheduling: schedule on tokens not known yet, with placeholders.
    max_in_flight: how many steps may be submitted and not yet processed.
    policy: order of waiting requests and choice of the victim.
    reserve_full_isl: admit a waiting request only if its whole known sequence fits now.
    guard: "stop_retry" stops the allocation retry when the victim's blocks are behind the fence; "none" is
        the behaviour before the fix.
    defer_block_free: keep freed blocks behind the fence while a step in flight may write them; "auto" turns it
        on when more than one step may be in flight and a connector that can load is configured.
    load_failure_policy: what becomes of a request whose KV load failed.
    drop_stale_output: drop, rather than deliver, the output of steps in flight of a preempted request.
    seq_slots: what `max_num_seqs` counts: requests in `running` (as vLLM does), or those that can still be
        scheduled ("scheduled": a request whose last token is already in flight gives its place up).

    Raises ConfigError for a value out of range.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    max_in_flight: int = 2
    policy: Policy = "fcfs"
    reserve_full_isl: bool = True
    guard: Guard = "stop_retry"
    defer_block_free: DeferBlockFree = "auto"
    load_failure_policy: LoadFailurePolicy = "recompute"
    drop_stale_output: bool = False
    seq_slots: SeqSlots = "running"

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} must be an int, not {value!r}")
            if value < least:
                note = " (block 0 is reserved)" if name == "num_blocks" else ""
                raise ConfigError(f"{name} is {value}; it must be at least {least}{note}")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is a or (isinstance(a, str) and value == a) for a in allowed):
                raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(map(repr, allowed))}")

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: the pool without the null block."""
        return self.num_blocks - 1

    @property
    def num_usable_slots(self) -> int:
        """Token slots that requests can hold."""
        return self.num_usable_blocks * self.block_size

    def defers_frees(self, connector_loads: bool) -> bool:
        """Whether the fence is on, given whether a connector that can load is configured."""
        if self.defer_block_free == "auto":
            return self.max_in_flight > 1 and connector_loads
        return bool(self.defer_block_free)

    def with_changes(self, **changes: Any) -> SchedulerConfig:
        """A copy with some settings changed, validated afresh. Raises ConfigError for an unknown name."""
        unknown = sorted(set(changes) - {f.name for f in fields(self)})
        if unknown:
            known = ", ".join(f.name for f in fields(self))
            raise ConfigError(f"unknown setting {', '.join(unknown)}; known settings: {known}")
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SchedulerConfig:
        """The inverse of `to_dict`. Raises ConfigError for unknown or missing settings."""
        if "num_blocks" not in data:
            raise ConfigError("num_blocks is missing; give the pool's size in blocks, the null block included")
        base = SchedulerConfig(num_blocks=cast(int, data["num_blocks"]))
        return base.with_changes(**dict(data))
