"""Media for tests: one that can be stopped, one that fails at random."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from kvsched.connector.base import ConnectorPair
from kvsched.connector.tier import TierConnector
from kvsched.runner.torch_cache import CacheShape, PagedCache
from kvsched.runner.torch_offload import Medium, OffloadWorker
from kvsched.runner.torch_runner import TorchRunner
from kvsched.runner.torch_tiers import HostMedium

SHAPE = CacheShape(num_layers=2, block_size=4, num_kv_heads=1, head_dim=8, dtype=torch.float32)


def numbered_cache(num_blocks: int = 8, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PagedCache:
    """A cache whose block b is full of b's."""
    cache = PagedCache(SHAPE._replace(dtype=dtype), num_blocks, torch.device(device))
    for block in range(num_blocks):
        cache.kv[block] = block
    return cache


class StoppableMedium(HostMedium):
    """A host store whose copy thread stands still while `go` is cleared."""

    def __init__(self, shape: CacheShape, num_slots: int, device: torch.device) -> None:
        super().__init__(shape, num_slots, device)
        self.go = threading.Event()
        self.go.set()

    def put(self, keys: Sequence[bytes], data: Tensor) -> None:
        self.go.wait()
        super().put(keys, data)


class FlakyMedium(HostMedium):
    """A host store in which a block is damaged at random: bits are really flipped. The same seed damages the same.

    share: of the reads that find a damaged block.
    """

    def __init__(self, shape: CacheShape, num_slots: int, device: torch.device, share: float, seed: int) -> None:
        super().__init__(shape, num_slots, device)
        self._share = share
        self._seed = seed
        self._reads: Counter[bytes] = Counter()
        self.num_damaged = 0

    def get(self, key: bytes) -> Tensor | None:
        self._reads[key] += 1
        text = f"{key.hex()}/{self._reads[key]}/{self._seed}"
        draw = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") / 2**32
        if draw < self._share and key in self._slots:
            self.num_damaged += 1
            self.memory[self.slot_of(key)].view(-1).view(torch.int32)[draw_index(draw)] ^= 1 << 22
        return super().get(key)


def draw_index(draw: float) -> int:
    return int(draw * 1e6) % 64


def pair_on(
    runner: TorchRunner,
    medium: Medium,
    num_blocks: int,
    *,
    asynchronous: bool = True,
    min_tokens_to_load: int = 0,
    transfer_landing: int | None = None,
) -> ConnectorPair:
    """Both halves of a tier of `num_blocks` blocks on a medium of one's own."""
    shape = runner.cache.shape
    scheduler = TierConnector(
        shape.block_size,
        shape.block_bytes,
        num_blocks * shape.block_bytes,
        asynchronous=asynchronous,
        min_tokens_to_load=min_tokens_to_load,
    )
    worker = OffloadWorker(runner.cache, medium)
    runner.attach_connector(worker)
    return ConnectorPair(scheduler, worker, transfer_landing)
