"""A medium in a folder: one safetensors file per block.

Owns: `DiskMedium`, the format of a file, the lock on the folder.
Knows nothing about: what is evicted, when blocks are saved.
Invariants: a block is used only if its file names our format, its own key and layout, and its bytes match the
checksum; anything else is skipped and told.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from kvsched.connector.disk import LOCK, Scan, path_of, scan, write_atomically
from kvsched.connector.store import checksum
from kvsched.runner.torch_cache import CacheShape

FORMAT = "kvsched-block/1"
_TENSOR = "kv"
_SHOWN = 3


class FolderInUseError(ValueError):
    """Another engine uses the folder."""


class DiskMedium:
    """Blocks of one shape in a folder. Raises FolderInUseError if another engine has it.

    scanned: what stood in the folder at the start.
    """

    def __init__(self, folder: Path, shape: CacheShape) -> None:
        self.folder = folder
        self.shape = shape
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / LOCK, timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise FolderInUseError(
                f"folder {folder} is in use by another engine; close that one first, or choose another folder"
            ) from None
        self._warnings: deque[str] = deque()
        self.scanned: Scan = scan(folder, _fault_of)
        if self.scanned.skipped:
            shown = "; ".join(f"{name} ({reason})" for name, reason in self.scanned.skipped[:_SHOWN])
            self._warnings.append(f"{folder}: {len(self.scanned.skipped)} files are no sound blocks, skipped: {shown}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one file."""
        s = self.shape
        empty = torch.zeros((s.num_layers, s.block_size, 2, s.num_kv_heads, s.head_dim), dtype=s.dtype)
        return len(save({_TENSOR: empty}, self._metadata(bytes(16), empty)))

    def put(self, keys: Sequence[bytes], data: Tensor) -> None:
        """See `Medium`. A file that cannot be written is told; its block is not there."""
        for key, block in zip(keys, data.cpu(), strict=True):
            write = partial(save_file, {_TENSOR: block}, metadata=self._metadata(key, block))
            try:
                write_atomically(self.folder, key, write)
            except (OSError, SafetensorError) as error:
                self._warnings.append(f"{path_of(self.folder, key)} could not be written: {error}")

    def get(self, key: bytes) -> Tensor | None:
        """See `Medium`. Marks the file as used now."""
        path = path_of(self.folder, key)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                block: Tensor = file.get_tensor(_TENSOR)
            os.utime(path)
        except (OSError, SafetensorError) as error:
            self._warnings.append(f"{path} could not be read: {error}")
            return None
        if metadata != self._metadata(key, block):
            self._warnings.append(f"{path} is damaged: its content does not match what it says of itself")
            return None
        return block

    def evict(self, keys: Sequence[bytes]) -> None:
        """See `Medium`."""
        for key in keys:
            path_of(self.folder, key).unlink(missing_ok=True)

    def take_warnings(self) -> list[str]:
        """See `Medium`."""
        return [self._warnings.popleft() for _ in range(len(self._warnings))]

    def close(self) -> None:
        """Let the folder go."""
        self._lock.release()

    def _metadata(self, key: bytes, block: Tensor) -> dict[str, str]:
        crc = checksum(block.reshape(-1).view(torch.uint8).numpy())
        return {"format": FORMAT, "key": key.hex(), "layout": self.shape.layout, "crc32": f"{crc:08x}"}


def _fault_of(path: Path) -> str | None:
    """Why a file is no sound block, without reading its tensor."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        return f"damaged: {error}"
    if metadata.get("format") != FORMAT:
        return "not written by kvsched"
    return None if metadata.get("key") == path.stem else "it is renamed: its content belongs to another key"
