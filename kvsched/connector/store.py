"""What a store of blocks holds, and who must go when it is full. Pure book-keeping.

Owns: `StoreIndex`: keys, sizes, the order of use, pins. And `checksum`.
Knows nothing about: where the bytes lie, requests, steps.
Invariants: `used_bytes <= capacity_bytes`; a pinned key is never evicted; the same calls give the same order, so
that what a scheduler decides on it does not depend on how fast bytes move.

    longest unused                                      used last
        c7    c6    c5    c4    |    a3    a2    a1    a0
        evicted first           |    a request's own prefix: its head is evicted after all that builds on it
"""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def checksum(data: Any) -> int:
    """CRC-32 of a contiguous buffer (bytes, or anything that lends its bytes)."""
    return zlib.crc32(data)


class StoreIndex:
    """Keys of stored blocks, bounded in bytes; the least recently used goes first."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes is {capacity_bytes}; it must be at least 1")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._pins: Counter[bytes] = Counter()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[bytes]:
        """Keys, the longest unused first."""
        return iter(self._sizes)

    def add(self, key: bytes, num_bytes: int) -> tuple[bytes, ...] | None:
        """Enter a new key as used last. Returns the keys evicted for it; None if there is no room that could be
        made, and then nothing changes."""
        assert key not in self._sizes, "the key is stored already"
        evicted = self._make_room(num_bytes)
        if evicted is not None:
            self._sizes[key] = num_bytes
            self.used_bytes += num_bytes
        return evicted

    def _make_room(self, num_bytes: int) -> tuple[bytes, ...] | None:
        missing = self.used_bytes + num_bytes - self.capacity_bytes
        evicted = []
        for key, size in self._sizes.items():
            if missing <= 0:
                break
            if not self._pins[key]:
                evicted.append(key)
                missing -= size
        if missing > 0:
            return None
        for key in evicted:
            self.drop(key)
        return tuple(evicted)

    def drop(self, key: bytes) -> bool:
        """Take a key out, pinned or not; False if it is not stored."""
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self.used_bytes -= size
        return True

    def use(self, chain: Sequence[bytes]) -> None:
        """Those of a sequence's keys that are stored were used now, its head last of all."""
        for key in reversed(chain):
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep keys from being evicted; each pin is given back by one `unpin`."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Give pins back."""
        for key in keys:
            self._pins[key] -= 1
            assert self._pins[key] >= 0, "unpinned more often than pinned"
            if not self._pins[key]:
                del self._pins[key]
