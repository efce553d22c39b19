"""Pure choices: who is the victim, and how much of a request goes into a step.

Owns: the choices. Knows nothing about: queues, blocks, events; changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsched.config import Policy
from kvsched.request import Request


def choose_victim(policy: Policy, running: Sequence[Request]) -> Request:
    """Who gives blocks up: the newest admitted (FCFS), or the one with the largest (priority, arrival_time)."""
    if policy == "fcfs":
        return running[-1]
    return max(running, key=lambda request: (request.priority, request.arrival_time))


def last_token_in_flight(request: Request) -> bool:
    """Async: the step that yields its last token is already in flight, so it needs no further step.

    Conservative from three steps in flight on: it may say no once too often.
    """
    owed = request.num_output_placeholders
    return owed > 0 and request.num_computed_tokens + 2 - owed >= request.num_final_tokens


def reserved_blocks(prefilling: Sequence[Request], max_model_len: int, block_size: int) -> int:
    """Blocks that unfinished prefills and loads still need to hold their known tokens."""
    return sum(
        max(0, -(-min(request.num_tokens, max_model_len) // block_size) - len(request.block_ids))
        for request in prefilling
    )
