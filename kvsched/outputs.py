"""What the engine hands to its user.

Owns: `TokenOutput` (as they come) and `RequestOutput` (at the end). Knows nothing about: how they were made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class TokenOutput(NamedTuple):
    """New tokens of one request. finish_reason: None while it goes on, else "stop", "length", "pool" (it outgrew
    the whole KV pool), "abort" or "error"."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. text is None without a tokenizer; token_ids are the generated tokens only."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    num_preemptions: int
