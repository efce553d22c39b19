"""Content hashes of full blocks, chained from the start of the sequence. Pure.

Owns: the hash function. Knows nothing about: pools, queues.
Invariants: equal hashes mean equal tokens from position 0 to the end of the block (as far as a 128-bit hash
can say it); the same tokens hash alike in every process, so the hash can be a key on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from struct import Struct

from kvsched.request import Request

ROOT = b""
"""The parent of a sequence's first block."""


@cache
def _packer(num_tokens: int) -> Callable[..., bytes]:
    """Makes bytes of so many tokens: 64 bits each, little-endian."""
    return Struct(f"<{num_tokens}q").pack


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """16-byte hash of one full block, given the hash of the block before it (ROOT for the first)."""
    return blake2b(parent + _packer(len(token_ids))(*token_ids), digest_size=16).digest()


def request_block_hashes(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """The request's own list of hashes, extended to at least its first `num_blocks` full blocks."""
    hashes = request.block_hashes
    tokens = request.token_ids
    assert num_blocks * block_size <= request.num_tokens, "only known tokens can be hashed"
    for i in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else ROOT
        hashes.append(block_hash(parent, tokens[i * block_size : (i + 1) * block_size]))
    return hashes
