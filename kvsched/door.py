"""The engine's door: what is refused, and why. Pure.

Owns: the checks of configurations and requests that the bare scheduler does not make.
Knows nothing about: runners, queues.
Invariants: whatever passes can be served to its end, or ends with a reason of its own; nothing that passes can
block the engine for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsched.config import ConfigError, SchedulerConfig
from kvsched.request import WORD, RequestRefused


def check_config(config: SchedulerConfig, max_model_len_is_explicit: bool) -> None:
    """Raises ConfigError if some sequence that the settings promise to serve could never be served."""
    blocks = -(-config.max_model_len // config.block_size)
    if max_model_len_is_explicit and blocks > config.num_usable_blocks:
        raise ConfigError(
            f"max_model_len {config.max_model_len} needs {blocks} blocks of {config.block_size}, but only "
            f"{config.num_usable_blocks} of the {config.num_blocks} blocks are usable (block 0 is reserved); raise "
            f"num_blocks to {blocks + 1} or lower max_model_len to {config.num_usable_slots}"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
        raise ConfigError(
            f"without chunked prefill a prompt must fit into one step, but max_num_batched_tokens is "
            f"{config.max_num_batched_tokens} and max_model_len {config.max_model_len}; raise the token budget, "
            f"lower max_model_len, or set enable_chunked_prefill=True"
        )


def check_request(
    config: SchedulerConfig,
    request_id: str,
    prompt_token_ids: Sequence[int],
    vocab_size: int | None = None,
    priority: int = 0,
) -> None:
    """Raises RequestRefused for a prompt that could never be served, or a priority that no trace can hold. vocab_size:
    the model's tokens lie below it; None if the runner has no vocabulary (tokens then are 64-bit integers of 0 or
    more)."""
    num_tokens = len(prompt_token_ids)
    if not num_tokens:
        raise RequestRefused(f"request {request_id!r}: the prompt is empty; give at least one token")
    if num_tokens >= config.max_model_len:
        raise RequestRefused(
            f"request {request_id!r}: the prompt has {num_tokens} tokens, max_model_len is {config.max_model_len} and "
            f"one token must be left to generate; shorten the prompt or raise max_model_len"
        )
    if num_tokens > config.num_usable_slots:
        needed = -(-num_tokens // config.block_size)
        raise RequestRefused(
            f"request {request_id!r}: the prompt's {num_tokens} tokens need {needed} blocks of {config.block_size}, "
            f"the pool has {config.num_usable_blocks} usable; raise num_blocks to at least {needed + 1}"
        )
    end = WORD.stop if vocab_size is None else vocab_size
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= end:
        place, token = next((i, token) for i, token in enumerate(prompt_token_ids) if not 0 <= token < end)
        raise RequestRefused(
            f"request {request_id!r}: token {place} of the prompt is {token}; give token ids of 0 to {end - 1}"
        )
    if priority not in WORD:
        raise RequestRefused(f"request {request_id!r}: priority is {priority}; it must be an integer of 64 bits")
