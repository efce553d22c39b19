"""The paged KV cache on the device: one tensor, cut into blocks.

Owns: `CacheShape`, `PagedCache` and the sizing of the pool from a memory budget.
Knows nothing about: which block belongs to whom, requests, attention.
Invariants: a block is one contiguous piece of memory that holds the keys and values of `block_size` tokens in all
layers, so that copying a block in or out is one copy:

    kv[block, layer, offset in block, 0 = key | 1 = value, kv head, head dim]

Memory comes uninitialised. Block 0 is the null block: padding writes there, nobody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class CacheShape(NamedTuple):
    """What a block of a model's KV cache looks like."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, keys and values."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size

    @property
    def layout(self) -> str:
        """Names the meaning of a block's bytes; equal exactly when blocks can be exchanged."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"L{self.num_layers}-T{self.block_size}-KV2-H{self.num_kv_heads}-D{self.head_dim}-{dtype}"


def cache_shape(config: Any, block_size: int, dtype: torch.dtype) -> CacheShape:
    """Shape of the cache for a transformers configuration. Raises ValueError for a block size below 1."""
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return CacheShape(config.num_hidden_layers, block_size, num_kv_heads, head_dim, dtype)


def num_blocks_for_budget(shape: CacheShape, num_bytes: int) -> int:
    """Blocks (the null block included) that fit into `num_bytes`. Raises ValueError if not even two do."""
    num_blocks = num_bytes // shape.block_bytes
    if num_blocks < 2:
        raise ValueError(
            f"kv_cache_memory is {num_bytes} bytes, but two blocks (one is reserved) of this model take"
            f" {2 * shape.block_bytes}; raise kv_cache_memory or lower block_size (now {shape.block_size})"
        )
    return num_blocks


class PagedCache:
    """The pool's memory. Ids are block ids; slots are `block id x block_size + offset`."""

    def __init__(self, shape: CacheShape, num_blocks: int, device: torch.device) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 2 (block 0 is reserved)")
        self.shape = shape
        self.num_blocks = num_blocks
        self.device = device
        s = shape
        self.kv = torch.empty(
            (num_blocks, s.num_layers, s.block_size, 2, s.num_kv_heads, s.head_dim), dtype=s.dtype, device=device
        )
        self._slots = self.kv.view(-1, 2, s.num_kv_heads, s.head_dim)
        self._blocks = self.kv.view(num_blocks * s.num_layers, -1)
        self._scratch = torch.empty((0, self._blocks.shape[1]), dtype=s.dtype, device=device)
        self._layers = torch.arange(s.num_layers, device=device)

    def slots_of_layers(self, slots: Tensor) -> Tensor:
        """[n] slots -> [num_layers, n] rows for `write`."""
        size = self.shape.block_size
        blocks = torch.div(slots, size, rounding_mode="floor")
        first = blocks * (size * self.shape.num_layers) + (slots - blocks * size)
        return first + (self._layers * size).unsqueeze(1)

    def blocks_of_layers(self, block_ids: Tensor) -> Tensor:
        """[n] block ids -> [num_layers, n] rows for `gather`."""
        return block_ids * self.shape.num_layers + self._layers.unsqueeze(1)

    def write(self, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values, each [n, kv heads, head dim], in the rows of one layer ([n])."""
        self._slots.index_copy_(0, rows, torch.stack((key, value), dim=1))

    def gather(self, rows: Tensor) -> Tensor:
        """Copy blocks of one layer into scratch memory: [n] rows -> [n x block_size, 2, kv heads, head dim].

        The next call overwrites what this one returned.
        """
        count = rows.shape[0]
        if count > self._scratch.shape[0]:
            self._scratch = torch.empty((count, self._blocks.shape[1]), dtype=self.kv.dtype, device=self.device)
        found = torch.index_select(self._blocks, 0, rows, out=self._scratch[:count])
        return found.view(-1, *self._slots.shape[1:])

    def read_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """A copy of whole blocks: [n, num_layers, block_size, 2, kv heads, head dim], in stream order."""
        return self.kv.index_select(0, torch.tensor(block_ids, dtype=torch.int64, device=self.device))

    def write_blocks(self, block_ids: Sequence[int], data: Tensor) -> None:
        """The inverse of `read_blocks`. Raises ValueError for a wrong shape or dtype, or for block 0."""
        expected = (len(block_ids), *self.kv.shape[1:])
        if tuple(data.shape) != expected or data.dtype != self.kv.dtype:
            raise ValueError(f"got blocks {data.dtype} {tuple(data.shape)}; the cache takes {self.kv.dtype} {expected}")
        if 0 in block_ids:
            raise ValueError("block 0 is reserved; nothing is loaded into it")
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        self.kv.index_copy_(0, ids, data.to(self.device, non_blocking=True))

    @torch.inference_mode()
    def poison(self) -> None:
        """Fill everything with NaN: whoever reads a slot that was never written will be seen (for tests).

        Waits until it is done, on whatever stream steps are computed.
        """
        self.kv.fill_(float("nan"))
        self._scratch.fill_(float("nan"))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
