"""Paged attention against a dense float64 reference, whatever the other slots of the pool hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvsched.request import SamplingParams
from kvsched.runner.torch_attention import DeviceAttention, decode_folded, decode_grouped
from kvsched.runner.torch_batch import RequestTable, StepInputs
from kvsched.runner.torch_cache import CacheShape, PagedCache, num_blocks_for_budget
from kvsched.runner.torch_plan import group_rows
from kvsched.step import RequestData, ScheduledStep
from tests import runner_torch  # noqa: F401 - one thread

HEAD_DIM = 16
LAYERS = 2
CPU = torch.device("cpu")


def make_cache(kv_heads: int, block_size: int, num_blocks: int) -> PagedCache:
    cache = PagedCache(CacheShape(LAYERS, block_size, kv_heads, HEAD_DIM, torch.float32), num_blocks, CPU)
    cache.poison()
    return cache


def make_step(
    requests: list[tuple[int, int, list[int]]], *, block_size: int, pad_to: int = 1, max_group_blocks: int = 4096
) -> tuple[StepInputs, RequestTable]:
    """One step over requests (start, count, table)."""
    table = RequestTable(block_size, 256, 512, pad_to=pad_to, max_group_blocks=max_group_blocks)
    names = [f"r{i}" for i in range(len(requests))]
    data = [
        RequestData(name, (1,) * (start + count), tuple(blocks), start, start + count, SamplingParams(), resumed=False)
        for name, (start, count, blocks) in zip(names, requests, strict=True)
    ]
    step = ScheduledStep(
        1, 0, tuple(names), tuple(r[1] for r in requests), tuple(r[0] for r in requests), frozenset(), {},
        tuple(data), (), (), 0,
    )  # fmt: skip
    return table.build(step), table


class History:
    """Random keys and values of a request's positions, the earlier ones already in the cache."""

    def __init__(self, cache: PagedCache, start: int, count: int, blocks: list[int], layer: int, rng: torch.Generator):
        shape = (start + count, cache.shape.num_kv_heads, HEAD_DIM)
        self.key, self.value = (torch.randn(shape, generator=rng) for _ in range(2))
        self.start = start
        for position in range(start):
            block, offset = blocks[position // cache.shape.block_size], position % cache.shape.block_size
            cache.kv[block, layer, offset, 0] = self.key[position]
            cache.kv[block, layer, offset, 1] = self.value[position]

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """Dense causal attention in float64: query [count, heads, dim] at positions from start on."""
        groups = query.shape[1] // self.key.shape[1]
        key, value = (t.double().repeat_interleave(groups, dim=1) for t in (self.key, self.value))
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * HEAD_DIM**-0.5
        ahead = torch.arange(len(key))[None] > self.start + torch.arange(len(query))[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), value)


def check(requests: list[tuple[int, int, list[int]]], *, heads: int, kv_heads: int, block_size: int, **options: int):
    """Compare all rows of a step; returns the cache, its content before the step, and the output."""
    rng = torch.Generator().manual_seed(7)
    layer = 1
    cache = make_cache(kv_heads, block_size, 40)
    histories = [History(cache, *request, layer, rng) for request in requests]
    before = cache.kv.clone()
    inputs, _ = make_step(requests, block_size=block_size, **options)
    num_tokens = sum(count for _, count, _ in requests)
    query = torch.randn((len(inputs.slots), heads, HEAD_DIM), generator=rng)
    key, value = (torch.randn((len(inputs.slots), kv_heads, HEAD_DIM), generator=rng) for _ in range(2))
    key[:num_tokens] = torch.cat([h.key[h.start :] for h in histories])
    value[:num_tokens] = torch.cat([h.value[h.start :] for h in histories])
    attention = DeviceAttention(inputs.attention, inputs.slots, cache, torch.from_numpy)
    out = attention.run(layer, query, key, value, None)
    first = 0
    for (_, count, _), history in zip(requests, histories, strict=True):
        expected = history.attend(query[first : first + count])
        torch.testing.assert_close(out[first : first + count].double(), expected, atol=1e-5, rtol=0)
        first += count
    return cache, before, out


# Block size 4: lengths around the boundaries; start 0, within a block and on a boundary; counts 1 and more.
MIXED = [
    (0, 5, [3, 1]),
    (4, 1, [7, 9]),
    (3, 1, [12]),
    (8, 8, [20, 4, 5, 6]),
    (16, 1, [30, 31, 32, 33, 34]),
    (0, 1, [2]),
    (7, 2, [14, 15, 16]),
]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize("max_group_blocks", [4096, 4])
def test_a_mixed_step_matches_dense_attention(heads, kv_heads, max_group_blocks):
    check(MIXED, heads=heads, kv_heads=kv_heads, block_size=4, max_group_blocks=max_group_blocks)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17])
def test_decode_and_chunks_at_block_boundaries(block_size, length):
    blocks = -(-length // block_size)
    tables = [list(range(1 + 17 * i, 1 + 17 * i + blocks)) for i in range(2)]
    check([(length - 1, 1, tables[0]), (0, length, tables[1])], heads=4, kv_heads=2, block_size=block_size)


def test_decode_rows_of_equal_length_need_no_mask():
    check([(7, 1, [5, 6]), (7, 1, [9, 8]), (7, 1, [1, 2])], heads=4, kv_heads=2, block_size=4)


def test_requests_may_share_blocks():
    rng = torch.Generator().manual_seed(3)
    cache = make_cache(2, 4, 16)
    history = History(cache, 8, 1, [5, 6, 7], 0, rng)
    inputs, _ = make_step([(8, 1, [5, 6, 7]), (8, 1, [5, 6, 9])], block_size=4)
    query = torch.randn((1, 4, HEAD_DIM), generator=rng).expand(2, -1, -1)
    key, value = history.key[8:].expand(2, -1, -1), history.value[8:].expand(2, -1, -1)
    out = DeviceAttention(inputs.attention, inputs.slots, cache, torch.from_numpy).run(0, query, key, value, None)
    torch.testing.assert_close(out.double(), history.attend(query[:1]).expand(2, -1, -1), atol=1e-5, rtol=0)


def test_padding_touches_the_null_block_only():
    """C52: three tokens padded to four; slot 23 (block 5, offset 3) is the one a slot of -1 would hit."""
    requests = [(4, 1, [1, 2]), (5, 1, [3, 4]), (6, 1, [6, 5])]
    options = {"heads": 4, "kv_heads": 2, "block_size": 4}
    cache, before, padded = check(requests, **options, pad_to=4)
    _, _, plain = check(requests, **options)
    assert torch.equal(padded[:3], plain)
    changed = (cache.kv != before) & ~(cache.kv.isnan() & before.isnan())
    slots = {(b, o) for b, _, o, *_ in changed.nonzero().tolist()}
    assert slots == {(2, 0), (4, 1), (5, 2), (0, 0)}
    assert padded[3].eq(0).all()
    assert cache.kv[5, :, 3].isnan().all()


def test_the_null_block_is_in_no_block_table():
    with pytest.raises(ValueError, match="block table of r0 holds block 0"):
        make_step([(0, 4, [0])], block_size=4)


def test_a_pool_full_of_nan_changes_nothing():
    """C53: 5 tokens (3 empty slots in block 2), 8 tokens, and a padded row; 16 blocks."""
    requests = [(4, 1, [1, 2]), (7, 1, [3, 4])]
    for pad_to in (1, 3):
        _, _, out = check(requests, heads=4, kv_heads=2, block_size=4, pad_to=pad_to)
        assert out.isfinite().all()


def test_both_ways_of_sharing_key_heads_agree():
    rng = torch.Generator().manual_seed(5)
    query = torch.randn((3, 6, HEAD_DIM), generator=rng)
    key, value = (torch.randn((3, 2, 8, HEAD_DIM), generator=rng) for _ in range(2))
    mask = torch.zeros(3, 1, 1, 8)
    mask[0, ..., 5:] = -torch.inf
    for one_mask in (mask, None):
        grouped, folded = (f(query, key, value, one_mask, None) for f in (decode_grouped, decode_folded))
        torch.testing.assert_close(grouped, folded)


def test_every_row_is_in_one_group_and_no_group_is_too_large():
    rng = np.random.default_rng(11)
    for limit in (1, 8, 100, 4096):
        widths = rng.integers(1, 60, size=50)
        rows = np.flatnonzero(rng.random(50) < 0.7)
        groups = group_rows(rows, widths, limit)
        assert sorted(np.concatenate(groups).tolist()) == rows.tolist()
        assert all(len(g) == 1 or len(g) * widths[g].max() <= limit for g in groups)
        assert all((widths[g].max() - widths[g]).sum() <= 16 for g in groups)
    assert group_rows(rows[:0], widths, 8) == []


def test_blocks_are_read_and_written_whole():
    cache = make_cache(2, 4, 8)
    cache.write_blocks([3, 5], torch.ones(2, *cache.kv.shape[1:]))
    assert cache.kv[[3, 5]].eq(1).all()
    assert cache.kv[[0, 1, 2, 4, 6, 7]].isnan().all()
    assert torch.equal(cache.read_blocks([5]), cache.kv[5:6])
    assert cache.read_blocks([5]).nbytes == cache.shape.block_bytes
    with pytest.raises(ValueError, match="block 0 is reserved"):
        cache.write_blocks([0], torch.ones(1, *cache.kv.shape[1:]))
    with pytest.raises(ValueError, match=r"the cache takes torch.float32 \(2, 2, 4"):
        cache.write_blocks([1, 2], torch.ones(1, *cache.kv.shape[1:]))


def test_the_pool_is_sized_from_a_budget():
    shape = CacheShape(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype=torch.float32)
    assert shape.block_bytes == 737_280
    assert num_blocks_for_budget(shape, 10 * 737_280 + 1) == 10
    with pytest.raises(ValueError, match=r"two blocks .* take 1474560; raise kv_cache_memory"):
        num_blocks_for_budget(shape, 737_280)
