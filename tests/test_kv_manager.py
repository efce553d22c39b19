"""Hashes of blocks, and the block tables: looking up, allocating, entering in the cache, tainted content."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvsched.config import SchedulerConfig
from kvsched.kv.hashing import ROOT, block_hash, request_block_hashes
from kvsched.kv.manager import KVManager, Shortfall
from kvsched.request import NEVER, Request, SamplingParams

TOKENS = list(range(10, 27))  # 17 tokens: four full blocks of 4 and one token


def request(tokens: list[int], name: str = "r") -> Request:
    return Request(name, tokens, SamplingParams())


def manager(usable: int = 8, **settings: object) -> tuple[KVManager, list]:
    events: list = []
    config = SchedulerConfig(num_blocks=usable + 1, block_size=4).with_changes(**settings)
    return KVManager(config, False, events.append), events


def filled(kv: KVManager, tokens: list[int], name: str = "r") -> Request:
    """A request that holds slots for all its tokens, its full blocks entered in the cache."""
    r = request(tokens, name)
    kv.grow(r, len(tokens), 1)
    kv.cache(r, len(tokens), 1)
    return r


# ---- hashes


def test_a_hash_covers_everything_from_the_start():
    first = block_hash(ROOT, [1, 2, 3, 4])
    assert len(first) == 16
    assert block_hash(first, [5, 6, 7, 8]) != block_hash(ROOT, [5, 6, 7, 8])
    assert block_hash(ROOT, [1, 2, 3, 5]) != first
    assert block_hash(ROOT, (1, 2, 3, 4)) == first


def test_hashes_are_the_same_in_every_process():
    """A constant: were it to change, blocks kept on disk could no longer be found."""
    known = "8222aab65152a8711ac413a3333a672c"
    assert block_hash(block_hash(ROOT, [1, 2, 3, 4]), [5, 6, 7, 8]).hex() == known
    code = (
        "from kvsched.kv.hashing import ROOT, block_hash\n"
        "print(block_hash(block_hash(ROOT, [1, 2, 3, 4]), [5, 6, 7, 8]).hex())"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        assert done.stdout.strip() == known


def test_a_requests_hashes_are_made_once_and_extended():
    r = request(TOKENS)
    two = list(request_block_hashes(r, 2, 4))
    assert request_block_hashes(r, 4, 4)[:2] == two
    assert request_block_hashes(r, 1, 4) is r.block_hashes
    with pytest.raises(AssertionError, match="only known tokens"):
        request_block_hashes(r, 5, 4)


# ---- tables


def test_growing_adds_the_blocks_that_are_lacking():
    kv, events = manager()
    r = request(TOKENS)
    assert kv.shortfall(r, 17) is None
    assert kv.grow(r, 5, 1) == (1, 2)
    assert kv.grow(r, 8, 1) == ()
    assert kv.grow(r, 9, 1) == (3,)
    assert (r.block_ids, r.num_slots) == ([1, 2, 3], 12)
    assert [event.block_ids for event in events] == [(1, 2), (3,)]


def test_a_shortfall_tells_what_is_needed_and_what_is_free():
    kv, _ = manager(3)
    r = request(TOKENS)
    assert kv.shortfall(r, 17) == Shortfall(5, 3)
    assert kv.shortfall(r, 12) is None
    assert kv.shortfall(r, 12, reserved=1) == Shortfall(3, 2)
    assert kv.shortfall(r, 4, reserved=9) == Shortfall(1, 0)


def test_slots_are_capped_at_max_model_len():
    kv, _ = manager(8, max_model_len=10)
    assert [kv.blocks_for(n) for n in (0, 1, 4, 5, 10, 100)] == [0, 1, 1, 2, 3, 3]


# ---- the prefix cache


def test_a_lookup_finds_the_longest_run_and_leaves_the_last_token():
    kv, _ = manager()
    filled(kv, TOKENS)
    assert kv.lookup(request(TOKENS)) == [1, 2, 3, 4]
    assert kv.lookup(request(TOKENS[:16])) == [1, 2, 3], "the last token must be computed"
    assert kv.lookup(request(TOKENS[:13])) == [1, 2, 3]
    assert kv.lookup(request([*TOKENS[:4], 0, *TOKENS[5:]])) == [1]
    assert kv.lookup(request([0, *TOKENS[1:]])) == []


def test_a_lookup_takes_no_reference_and_a_hit_does():
    kv, events = manager()
    a = filled(kv, TOKENS)
    kv.release(a, "finished", 2)
    assert kv.pool.num_free == 8
    b = request(TOKENS)
    hits = kv.lookup(b)
    assert kv.pool.num_free == 8
    assert kv.shortfall(b, 17, hits) is None
    kv.take_hits(b, hits, 3)
    assert (kv.pool.num_free, b.block_ids, b.num_slots, b.num_cached_blocks) == (4, [1, 2, 3, 4], 16, 4)
    assert events[-1].block_ids == (1, 2, 3, 4)


def test_free_hits_count_against_the_free_blocks():
    """5 blocks are wanted; 4 are hits. Held by another they cost nothing, free ones are taken out of the queue."""
    kv, _ = manager(5)
    a = filled(kv, TOKENS[:16], "a")
    b = request(TOKENS)
    hits = kv.lookup(b)
    assert hits == [1, 2, 3, 4]
    assert kv.shortfall(b, 17, hits) is None
    assert kv.shortfall(b, 17, hits, reserved=1) == Shortfall(1, 0)
    kv.release(a, "finished", 1)
    assert kv.shortfall(b, 17, hits) is None
    assert kv.shortfall(b, 17, hits, reserved=1) == Shortfall(5, 4)


def test_allocation_evicts_what_was_cached_longest():
    kv, events = manager(5)
    a = filled(kv, TOKENS)
    kv.release(a, "finished", 1)
    assert list(kv.pool.free_ids()) == [5, 4, 3, 2, 1], "without a hash to the front, with one to the back, tail first"
    b = request([0] * 9, "b")
    assert kv.grow(b, 9, 2) == (5, 4, 3)
    assert events[-1].evicted == (4, 3)
    assert kv.lookup(request(TOKENS)) == [1, 2]


def test_of_two_blocks_with_one_hash_the_first_entered_is_found():
    kv, _ = manager()
    filled(kv, TOKENS[:5], "a")
    b = filled(kv, TOKENS[:5], "b")
    assert kv.lookup(request(TOKENS)) == [1]
    assert kv.pool.num_cached == 1
    kv.uncache([1], 1)
    assert kv.lookup(request(TOKENS)) == [b.block_ids[0]]


def test_when_the_next_block_can_be_entered():
    kv, events = manager()
    r = request(TOKENS)
    kv.grow(r, 17, 1)
    kv.cache(r, 9, 1)
    assert (r.num_cached_blocks, r.next_cache_at) == (2, 12)
    kv.cache(r, 11, 1)
    assert r.num_cached_blocks == 2
    kv.cache(r, 17, 1)
    assert (r.num_cached_blocks, r.next_cache_at) == (4, 20)
    assert [(event.first, event.block_ids) for event in events if event.kind == "blocks_cached"] == [
        (0, (1, 2)),
        (2, (3, 4)),
    ]
    kv.release(r, "preempted", 1)
    assert (r.num_cached_blocks, r.next_cache_at, r.num_slots, r.block_ids) == (0, NEVER, 0, [])


def test_with_caching_off_nothing_is_entered_or_found():
    kv, _ = manager(8, enable_prefix_caching=False)
    r = filled(kv, TOKENS)
    assert kv.pool.num_cached == 0
    assert kv.lookup(request(TOKENS)) == []
    assert r.next_cache_at == NEVER
    kv.release(r, "finished", 1)
    assert list(kv.pool.free_ids()) == [5, 4, 3, 2, 1, 6, 7, 8]


# ---- tainted content


def test_tainted_blocks_are_not_found_until_they_are_computed_to_their_end():
    kv, _ = manager()
    r = filled(kv, TOKENS)
    kv.taint(r.block_ids[1:])
    assert kv.lookup(request(TOKENS)) == [1]
    kv.recomputed(r, 4, 11)
    assert kv.lookup(request(TOKENS)) == [1, 2]
    kv.recomputed(r, 11, 17)
    assert kv.lookup(request(TOKENS)) == [1, 2, 3, 4]
    assert kv.tainted == set()


def test_only_blocks_that_carry_a_hash_can_be_tainted():
    kv, _ = manager()
    r = filled(kv, TOKENS)
    kv.taint(r.block_ids)
    assert kv.tainted == {1, 2, 3, 4}


def test_a_tainted_block_hides_no_other_with_the_same_hash():
    kv, _ = manager()
    a = filled(kv, TOKENS[:5], "a")
    b = filled(kv, TOKENS[:5], "b")
    kv.taint(a.block_ids)
    assert kv.lookup(request(TOKENS)) == [b.block_ids[0]]


@pytest.mark.parametrize("way", ["handed out", "uncached", "cache emptied"])
def test_a_taint_ends_with_the_cache_entry(way):
    kv, _ = manager(5)
    r = filled(kv, TOKENS)
    kv.taint(r.block_ids)
    kv.release(r, "finished", 1)
    assert kv.tainted == {1, 2, 3, 4}
    if way == "handed out":
        kv.grow(request([0] * 20, "other"), 20, 2)
    elif way == "uncached":
        kv.uncache([1, 2, 3, 4, 5], 2)
    else:
        kv.uncache_all()
    assert kv.tainted == set()
