"""The pool of blocks: ids, reference counts, the free queue, and the prefix cache's index.

Owns: which block is free and in what order it goes, who counts on it, which content it carries.
Knows nothing about: requests, steps, fences (kv/fence is the only caller of `release`).
Invariants: block 0 is the null block and is never handed out; a block is in the free queue if and only if its
reference count is 0; `num_free` is the length of that queue; a block with a hash is in the index under it.

The free queue is a circular doubly linked list in two flat lists; the null block is its sentinel:

    front = next[0]                                   back = prev[0]
    0 <-> 7 <-> 3 <-> ... <-> 12 <-> 0      allocation pops at the front

Every operation costs the same whatever the size of the pool.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from kvsched.config import NULL_BLOCK


class BlockStateError(AssertionError):
    """A block was freed twice, or freed without having been handed out. Raised at once, also under -O."""


class BlockPool:
    """`num_blocks` blocks, the null block included. Initially all others are free, in the order of their ids."""

    __slots__ = ("_index", "_next", "_prev", "_refs", "hashes", "num_blocks", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._refs = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        # Hash -> the blocks that carry it, oldest entry first. One block is the rule, so it is stored bare.
        self._index: dict[bytes, int | list[int]] = {}

    # ---- reading

    def refs(self, block: int) -> int:
        """How many tables hold the block."""
        return self._refs[block]

    def free_ids(self) -> Iterator[int]:
        """Free blocks, the next to be handed out first."""
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self._next[block]

    def find(self, content_hash: bytes, avoid: Container[int] = ()) -> int | None:
        """The block entered first among those that carry this hash, blocks in `avoid` left aside."""
        found = self._index.get(content_hash)
        if isinstance(found, list):
            return next((block for block in found if block not in avoid), None)
        return None if found in avoid else found

    @property
    def num_cached(self) -> int:
        """Distinct hashes in the prefix cache."""
        return len(self._index)

    # ---- the free queue

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        """Pop `count` blocks, each with one reference. Returns (blocks, those that lost a cache entry)."""
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        after, refs, hashes = self._next, self._refs, self.hashes
        block = after[NULL_BLOCK]
        blocks, evicted = [], []
        for _ in range(count):
            blocks.append(block)
            refs[block] = 1
            if hashes[block] is not None:
                self.uncache(block)
                evicted.append(block)
            block = after[block]
        after[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self.num_free -= count
        return blocks, evicted

    def take(self) -> tuple[int, bool]:
        """Pop one block: (block, whether it lost a cache entry). Short, since decoding requests do it all the time."""
        after = self._next
        block = after[NULL_BLOCK]
        assert block != NULL_BLOCK, "1 block wanted, 0 free"
        self._refs[block] = 1
        following = after[NULL_BLOCK] = after[block]
        self._prev[following] = NULL_BLOCK
        self.num_free -= 1
        if self.hashes[block] is None:
            return block, False
        self.uncache(block)
        return block, True

    def touch(self, blocks: Sequence[int]) -> None:
        """Take one more reference on each; those that were free leave the queue, wherever they stand."""
        after, before, refs = self._next, self._prev, self._refs
        for block in blocks:
            if refs[block] == 0:
                after[before[block]], before[after[block]] = after[block], before[block]
                self.num_free -= 1
            refs[block] += 1

    def release(self, table: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Give one reference on each block of a table back, tail first.

        A block that nobody holds any more goes to the front of the free queue if it carries no hash, else to
        the back, each group in the order of release. Returns (front, back, still shared).
        """
        refs = self._refs
        front: list[int] = []
        back: list[int] = []
        shared: list[int] = []
        for block in table:
            if block == NULL_BLOCK or refs[block] < 1:
                raise BlockStateError(f"block {block} is freed, but nobody holds it (freed twice?)")
        if len(set(table)) != len(table):
            raise BlockStateError(f"blocks {list(table)} are freed, one of them twice")
        for block in reversed(table):
            refs[block] -= 1
            if refs[block]:
                shared.append(block)
            else:
                (front if self.hashes[block] is None else back).append(block)
        self._link(front, NULL_BLOCK, self._next[NULL_BLOCK])
        self._link(back, self._prev[NULL_BLOCK], NULL_BLOCK)
        self.num_free += len(front) + len(back)
        return front, back, shared

    def _link(self, blocks: Sequence[int], left: int, right: int) -> None:
        """Put a run of blocks between two neighbours of the free queue."""
        after, before = self._next, self._prev
        for block in blocks:
            after[left] = block
            before[block] = left
            left = block
        after[left] = right
        before[right] = left

    # ---- the prefix cache

    def cache(self, block: int, content_hash: bytes) -> None:
        """Enter a full block under its hash, behind any block that already carries it."""
        assert self.hashes[block] is None, f"block {block} already carries a hash"
        self.hashes[block] = content_hash
        found = self._index.get(content_hash)
        if found is None:
            self._index[content_hash] = block
        elif isinstance(found, list):
            found.append(block)
        else:
            self._index[content_hash] = [found, block]

    def uncache(self, block: int) -> None:
        """Take a block out of the prefix cache; its place in the free queue stays as it is."""
        content_hash = self.hashes[block]
        assert content_hash is not None, f"block {block} carries no hash"
        self.hashes[block] = None
        found = self._index[content_hash]
        if isinstance(found, list) and len(found) > 1:
            found.remove(block)
        else:
            del self._index[content_hash]

    def uncache_all(self) -> None:
        """Empty the prefix cache."""
        self._index.clear()
        self.hashes = [None] * self.num_blocks
