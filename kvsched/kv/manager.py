"""Block tables: look a prefix up, allocate slots, enter full blocks in the cache, release.

Owns: every request's `block_ids`, `num_slots`, `num_cached_blocks`, `next_cache_at`.
Knows nothing about: queues, budgets, who is preempted.
Invariants: `num_slots == len(block_ids) * block_size`; the leading `num_cached_blocks` of a table have been
entered in the prefix cache; a tainted block (one that carries a hash, but its load failed, it was computed on one
whose load failed, or it was never computed) is not found by lookups until it is computed or handed out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvsched.config import SchedulerConfig
from kvsched.kv.fence import Fence
from kvsched.kv.hashing import request_block_hashes
from kvsched.kv.pool import BlockPool
from kvsched.request import NEVER, Request
from kvsched.trace.events import BlocksAllocated, BlocksCached, BlocksHit, BlocksUncached


class Shortfall(NamedTuple):
    """Why slots were refused: blocks needed from the free queue, and how many of them it may use."""

    needed: int
    free: int


class KVManager:
    """The KV cache's book-keeping for one scheduler."""

    def __init__(self, config: SchedulerConfig, defers_frees: bool, emit: Callable[[Any], None] | None) -> None:
        self.config = config
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self.emit = emit
        self.pool = BlockPool(config.num_blocks)
        self.fence = Fence(self.pool, defers_frees, emit)
        self.tainted: set[int] = set()

    # ---- looking up

    def lookup(self, request: Request) -> list[int]:
        """Cached blocks that hold the start of the request's tokens, longest run; takes no reference.

        The last known token is never covered: it must be computed to sample the next one.
        """
        if not self.caching:
            return []
        num_blocks = (request.num_tokens - 1) // self.block_size
        hits: list[int] = []
        for content_hash in request_block_hashes(request, num_blocks, self.block_size)[:num_blocks]:
            block = self.pool.find(content_hash, self.tainted)
            if block is None:
                break
            hits.append(block)
        return hits

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens, capped at max_model_len."""
        return -(-min(num_tokens, self.config.max_model_len) // self.block_size)

    # ---- allocating

    def shortfall(
        self, request: Request, num_tokens: int, hits: Sequence[int] = (), reserved: int = 0
    ) -> Shortfall | None:
        """Whether slots for the request's first `num_tokens` tokens are lacking, given prefix hits it would
        take (a free one among them counts against the free blocks) and blocks reserved for others."""
        needed = self.blocks_for(num_tokens) - len(request.block_ids) - len(hits)
        needed = max(needed, 0) + sum(1 for block in hits if self.pool.refs(block) == 0)
        free = self.pool.num_free - reserved
        return Shortfall(needed, max(free, 0)) if needed > free else None

    def take_hits(self, request: Request, hits: Sequence[int], step: int) -> None:
        """Lead the (empty) table with cached blocks."""
        assert not request.block_ids, f"{request.id} already holds blocks"
        self.pool.touch(hits)
        request.block_ids.extend(hits)
        request.num_slots = len(hits) * self.block_size
        self._cached_up_to(request, len(hits))
        if hits and self.emit is not None:
            self.emit(BlocksHit(step, request.id, tuple(hits)))

    def grow(self, request: Request, num_tokens: int, step: int) -> tuple[int, ...]:
        """Append the blocks that the first `num_tokens` tokens still need. The caller has asked `shortfall`."""
        count = self.blocks_for(num_tokens) - len(request.block_ids)
        if count <= 0:
            return ()
        blocks, evicted = self.pool.allocate(count)
        if self.tainted:
            self.tainted.difference_update(blocks)
        request.block_ids += blocks
        request.num_slots += count * self.block_size
        added = tuple(blocks)
        if self.emit is not None:
            self.emit(BlocksAllocated(step, request.id, added, tuple(evicted)))
        return added

    def grow_by_one(self, request: Request, step: int) -> tuple[int, ...]:
        """`grow` where one block is needed and one is free: the usual case of a running request, kept short."""
        block, was_cached = self.pool.take()
        if self.tainted:
            self.tainted.discard(block)
        request.block_ids.append(block)
        request.num_slots += self.block_size
        added = (block,)
        if self.emit is not None:
            self.emit(BlocksAllocated(step, request.id, added, added if was_cached else ()))
        return added

    # ---- the prefix cache

    def cache(self, request: Request, num_tokens: int, step: int) -> None:
        """Enter the full blocks among the first `num_tokens` tokens that have not been entered yet."""
        first, last = request.num_cached_blocks, num_tokens // self.block_size
        if not self.caching or last <= first:
            return
        hashes = request_block_hashes(request, last, self.block_size)
        for i in range(first, last):
            self.pool.cache(request.block_ids[i], hashes[i])
        self._cached_up_to(request, last)
        if self.emit is not None:
            blocks = tuple(request.block_ids[first:last])
            self.emit(BlocksCached(step, request.id, first, blocks, tuple(hashes[first:last])))

    def _cached_up_to(self, request: Request, num_blocks: int) -> None:
        request.num_cached_blocks = num_blocks
        request.next_cache_at = (num_blocks + 1) * self.block_size if self.caching else NEVER

    def uncache(self, blocks: Sequence[int], step: int) -> None:
        """Take those of the blocks that carry a hash out of the prefix cache."""
        cached = [block for block in dict.fromkeys(blocks) if self.pool.hashes[block] is not None]
        for block in cached:
            self.pool.uncache(block)
        self.tainted.difference_update(cached)
        if cached and self.emit is not None:
            self.emit(BlocksUncached(step, tuple(cached)))

    def uncache_all(self) -> None:
        """Empty the prefix cache."""
        self.pool.uncache_all()
        self.tainted.clear()

    # ---- letting go

    def release(self, request: Request, reason: str, step: int) -> None:
        """Empty the request's table through the fence."""
        table = request.block_ids
        request.block_ids = []
        request.num_slots = 0
        request.num_cached_blocks = 0
        request.next_cache_at = NEVER
        self.fence.release(request, table, reason, step)

    def taint(self, blocks: Sequence[int]) -> None:
        """The content of these blocks is wrong, or rests on wrong content."""
        self.tainted.update(block for block in blocks if self.pool.hashes[block] is not None)

    def recomputed(self, request: Request, start: int, end: int) -> None:
        """A step computes tokens [start, end) of the request, which was cut at a block boundary and goes on from
        there: blocks that end in [start, end) hold right content throughout."""
        self.tainted.difference_update(request.block_ids[start // self.block_size : end // self.block_size])
