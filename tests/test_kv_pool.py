"""The pool of blocks against a plain model, and its refusal to take a block twice."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsched.kv.pool import BlockPool, BlockStateError

NUM_BLOCKS = 9
HASHES = [b"a", b"b", b"c"]


class Model:
    """The pool as the notes tell it: a list for the free queue, a list of entries per hash."""

    def __init__(self) -> None:
        self.free = list(range(1, NUM_BLOCKS))
        self.refs = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.entries: dict[bytes, list[int]] = {h: [] for h in HASHES}

    def hash_of(self, block: int) -> bytes | None:
        return next((h for h, blocks in self.entries.items() if block in blocks), None)

    def uncache(self, block: int) -> None:
        self.entries[self.hash_of(block)].remove(block)

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        blocks, self.free = self.free[:count], self.free[count:]
        evicted = [block for block in blocks if self.hash_of(block)]
        for block in blocks:
            self.refs[block] = 1
        for block in evicted:
            self.uncache(block)
        return blocks, evicted

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1

    def release(self, table: list[int]) -> tuple[list[int], list[int], list[int]]:
        front, back, shared = [], [], []
        for block in reversed(table):
            self.refs[block] -= 1
            group = shared if self.refs[block] else back if self.hash_of(block) else front
            group.append(block)
        self.free = front + self.free + back
        return front, back, shared


def compare(pool: BlockPool, model: Model) -> None:
    assert list(pool.free_ids()) == model.free
    assert pool.num_free == len(model.free)
    assert [pool.refs(block) for block in range(NUM_BLOCKS)] == list(model.refs.values())
    for h, blocks in model.entries.items():
        assert pool.find(h) == (blocks[0] if blocks else None)
        assert pool.find(h, set(blocks[:1])) == (blocks[1] if len(blocks) > 1 else None)
    assert pool.num_cached == sum(bool(blocks) for blocks in model.entries.values())
    assert [pool.hashes[block] for block in range(NUM_BLOCKS)] == [model.hash_of(b) for b in range(NUM_BLOCKS)]


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(st.data())
def test_the_pool_does_what_the_model_does(data):
    pool, model = BlockPool(NUM_BLOCKS), Model()
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["allocate", "touch", "release", "cache", "uncache", "uncache_all"]))
        held = sorted({block for table in tables for block in table})
        if action == "allocate":
            count = data.draw(st.integers(0, pool.num_free))
            got = model.allocate(count)
            assert pool.allocate(count) == got
            tables.append(got[0])
        elif action == "touch":
            some = data.draw(st.lists(st.integers(1, NUM_BLOCKS - 1), unique=True, max_size=4))
            pool.touch(some)
            model.touch(some)
            tables.append(some)
        elif action == "release" and tables:
            table = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
            assert pool.release(table) == model.release(table)
        elif action == "cache" and (bare := [block for block in held if model.hash_of(block) is None]):
            block, content_hash = data.draw(st.sampled_from(bare)), data.draw(st.sampled_from(HASHES))
            pool.cache(block, content_hash)
            model.entries[content_hash].append(block)
        elif action == "uncache" and (cached := [b for b in range(NUM_BLOCKS) if model.hash_of(b)]):
            block = data.draw(st.sampled_from(cached))
            pool.uncache(block)
            model.uncache(block)
        elif action == "uncache_all":
            pool.uncache_all()
            model.entries = {h: [] for h in HASHES}
        compare(pool, model)


def test_the_null_block_is_never_handed_out_nor_taken_back():
    pool = BlockPool(5)
    assert pool.allocate(4) == ([1, 2, 3, 4], [])
    with pytest.raises(BlockStateError, match="block 0 is freed"):
        pool.release([0])


def test_more_than_is_free_is_not_handed_out():
    pool = BlockPool(5)
    with pytest.raises(AssertionError, match="5 blocks wanted, 4 free"):
        pool.allocate(5)


@pytest.mark.parametrize("table", [[2, 3], [3], [1, 1]], ids=["in part", "whole", "twice in one table"])
def test_a_block_freed_twice_raises_at_once_and_leaves_the_pool_as_it_is(table):
    pool = BlockPool(5)
    pool.allocate(3)
    pool.release([3])
    before = list(pool.free_ids()), [pool.refs(block) for block in range(5)]
    with pytest.raises(BlockStateError, match="twice"):
        pool.release(table)
    assert (list(pool.free_ids()), [pool.refs(block) for block in range(5)]) == before


@pytest.mark.parametrize("table", ["[1]", "[2, 2]"])
def test_also_where_python_drops_assertions(table):
    code = (
        "assert False\n"
        "from kvsched.kv.pool import BlockPool, BlockStateError\n"
        "pool = BlockPool(5)\n"
        "pool.allocate(3)\n"
        "pool.release([1])\n"
        "try:\n"
        f"    pool.release({table})\n"
        "except BlockStateError as error:\n"
        "    print('raised:', error)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("raised: block")
