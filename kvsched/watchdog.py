"""The watchdog for zero progress: when to warn, and in which words. Pure.

Owns: the warning, its threshold, the advice in it.
Knows nothing about: how requests come to be preempted, who counts.
Invariants: it warns once per stretch without a token, and names the setting to change.

        step     41   42   43   44   45        three steps since the last delivered token have preempted
        tokens    a    -    -    -    -        somebody and scheduled nothing: the third one warns
        preempts       x         x    x
                                      warning
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsched.config import SchedulerConfig
from kvsched.kv.fence import Fence

WARN_AT = 3
"""Fruitless steps since the last delivered token at which the warning comes."""

_SHOWN = 6


class NoProgressWarning(UserWarning):
    """The scheduler preempts and schedules nothing; the message names requests, fence and the switch to change."""


def warning_text(config: SchedulerConfig, fence: Fence, preempted: Sequence[str], step: int) -> str:
    """What to say at the `WARN_AT`-th fruitless step. preempted: in this last one."""
    shown = ", ".join(preempted[:_SHOWN]) + (f" and {len(preempted) - _SHOWN} more" if len(preempted) > _SHOWN else "")
    return (
        f"no progress: {WARN_AT} steps since the last token, step {step} the latest, have preempted requests and "
        f"scheduled nothing. Preempted in step {step}: {shown}. {_fence(fence)}. {_advice(config, fence)}"
    )


def _fence(fence: Fence) -> str:
    if not fence.on:
        return "The fence is off"
    blocks = sum(len(entry.block_ids) for entry in fence.deferred)
    return (
        f"The fence stands at {fence.processed_seq}, the newest step is {fence.sched_seq}, and {blocks} blocks of "
        f"{len(fence.deferred)} requests wait behind it"
    )


def _advice(config: SchedulerConfig, fence: Fence) -> str:
    if fence.on and config.guard == "none":
        return "Set guard='stop_retry' (it is 'none'): it takes no victim whose blocks cannot come back now"
    return (
        f"Raise num_blocks (it is {config.num_blocks}) or lower max_num_seqs (it is {config.max_num_seqs}), so that "
        f"those who run find blocks to grow"
    )
