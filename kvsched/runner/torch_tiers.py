"""Tiers on a real cache: a store in the host's memory, and the joining of both halves of a tier.

Owns: `HostMedium`, `open_tier`. Knows nothing about: scheduling, files.
Invariants: the host store is one piece of memory, cut into slots; a key's slot is its own until it is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvsched.connector.base import ConnectorPair
from kvsched.connector.disk import DiskTier, disk_key
from kvsched.connector.host import HostTier
from kvsched.connector.store import checksum
from kvsched.connector.tier import TierConnector
from kvsched.runner.torch_cache import CacheShape
from kvsched.runner.torch_disk import DiskMedium
from kvsched.runner.torch_offload import OffloadWorker
from kvsched.runner.torch_runner import TorchRunner

Tier = HostTier | DiskTier


class HostMedium:
    """Host memory for `num_slots` blocks, pinned where blocks come from a GPU."""

    def __init__(self, shape: CacheShape, num_slots: int, device: torch.device) -> None:
        s = shape
        size = (num_slots, s.num_layers, s.block_size, 2, s.num_kv_heads, s.head_dim)
        self.memory = torch.empty(size, dtype=s.dtype, pin_memory=device.type == "cuda")
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[bytes, int] = {}
        self._checksums: dict[bytes, int] = {}

    def put(self, keys: Sequence[bytes], data: Tensor) -> None:
        """See `Medium`. Whoever decides what is saved has evicted enough."""
        slots = [self._slots[key] if key in self._slots else self._free.pop() for key in keys]
        for slot, block in zip(slots, data, strict=True):
            self.memory[slot].copy_(block, non_blocking=True)
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()
        for key, slot in zip(keys, slots, strict=True):
            self._slots[key] = slot
            self._checksums[key] = self._checksum(slot)

    def get(self, key: bytes) -> Tensor | None:
        """See `Medium`. The block itself, not a copy: it stays as it is until its key is evicted."""
        slot = self._slots.get(key)
        if slot is None or self._checksum(slot) != self._checksums[key]:
            return None
        return self.memory[slot]

    def evict(self, keys: Sequence[bytes]) -> None:
        """See `Medium`."""
        for key in keys:
            slot = self._slots.pop(key, None)
            if slot is not None:
                del self._checksums[key]
                self._free.append(slot)

    def take_warnings(self) -> list[str]:
        """Nothing goes wrong here but bits."""
        return []

    def close(self) -> None:
        """Memory goes with the object."""

    def slot_of(self, key: bytes) -> int:
        """Where in `memory` a block lies. Raises KeyError for an unknown key."""
        return self._slots[key]

    def _checksum(self, slot: int) -> int:
        return checksum(self.memory[slot].view(-1).view(torch.uint8).numpy())


def open_tier(tier: Tier, runner: TorchRunner, *, transfer_landing: int | None = None) -> ConnectorPair:
    """Both halves of a tier on a runner's cache, for Engine(connector=…).

    transfer_landing: see ConnectorPair. Raises ValueError if the tier does not hold one block, or its folder is in use.
    """
    shape = runner.cache.shape
    if isinstance(tier, HostTier):
        return _open_host(tier, runner, shape, transfer_landing)
    return _open_disk(tier, runner, shape, transfer_landing)


def _open_host(tier: HostTier, runner: TorchRunner, shape: CacheShape, landing: int | None) -> ConnectorPair:
    scheduler = TierConnector(
        shape.block_size,
        shape.block_bytes,
        tier.capacity_bytes,
        asynchronous=tier.asynchronous,
        min_tokens_to_load=tier.min_tokens_to_load,
    )
    medium = HostMedium(shape, tier.capacity_bytes // shape.block_bytes, runner.cache.device)
    worker = OffloadWorker(runner.cache, medium)
    runner.attach_connector(worker)
    return ConnectorPair(scheduler, worker, landing)


def _open_disk(tier: DiskTier, runner: TorchRunner, shape: CacheShape, landing: int | None) -> ConnectorPair:
    medium = DiskMedium(Path(tier.folder), shape)
    try:
        scheduler = TierConnector(
            shape.block_size,
            medium.block_bytes,
            tier.capacity_bytes,
            asynchronous=tier.asynchronous,
            min_tokens_to_load=tier.min_tokens_to_load,
            key_of=partial(disk_key, runner.weights_id(), shape.layout),
            stored=medium.scanned.stored,
        )
    except ValueError:
        medium.close()
        raise
    medium.evict(scheduler.take_evicted())
    worker = OffloadWorker(runner.cache, medium)
    runner.attach_connector(worker)
    return ConnectorPair(scheduler, worker, landing)
