"""A store in a folder on disk: what a user says of it, and how a folder is read and written. No tensors.

Owns: `DiskTier`, the names of files, the key that keeps models apart, atomic writes, the order of last use.
Knows nothing about: what stands in a file (kvsched/runner/torch_disk), requests.
Invariants: a file with a block's name is complete (it is written under another name and renamed); files that are
not ours are neither counted nor touched.

    FOLDER/
      3f0c…e1.safetensors     one block; its name is the key, its time of change the time of its last use
      .partial-…              being written; left over after a crash, and then removed by the next engine
      .lock                   held by the engine that uses the folder
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from kvsched.connector.host import GIB, check_options

SUFFIX = ".safetensors"
LOCK = ".lock"
_PARTIAL = ".partial-"
_NAME = re.compile(r"[0-9a-f]{32}" + re.escape(SUFFIX))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTier:
    """Full blocks are written to a folder, and found there again by later engines, also after a restart.

    folder: made if it is not there. One engine at a time; models may share it, each finds its own blocks only.
    capacity_bytes: bound of all blocks in the folder, of all models; the least recently used go first.
    asynchronous, min_tokens_to_load: see HostTier.

    Raises ValueError for a value out of range.
    """

    folder: str | Path
    capacity_bytes: int = 4 * GIB
    asynchronous: bool = True
    min_tokens_to_load: int = 0

    def __post_init__(self) -> None:
        check_options(self.capacity_bytes, self.min_tokens_to_load)


def disk_key(weights_id: str, layout: str, content_hash: bytes) -> bytes:
    """16-byte key of a block: equal only for the same weights, layout (shape, block size, dtype) and tokens."""
    digest = blake2b(digest_size=16)
    for part in (weights_id.encode(), layout.encode(), content_hash):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def path_of(folder: Path, key: bytes) -> Path:
    """The file of a key."""
    return folder / f"{key.hex()}{SUFFIX}"


def write_atomically(folder: Path, key: bytes, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file, then give it its name, replacing an earlier one. Raises OSError if that fails; no
    trace of it stays."""
    partial = folder / f"{_PARTIAL}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        write(partial)
        partial.replace(path_of(folder, key))
    finally:
        partial.unlink(missing_ok=True)


class Scan(NamedTuple):
    """What a folder holds. stored: (key, bytes), the longest unused first. skipped: (file name, reason)."""

    stored: tuple[tuple[bytes, int], ...]
    skipped: tuple[tuple[str, str], ...]


def scan(folder: Path, fault_of: Callable[[Path], str | None]) -> Scan:
    """Read a folder that this process holds the lock of; removes what a crash has left half written.

    fault_of: why a file is no sound block, None if it is one.
    """
    found: list[tuple[int, str, int]] = []
    skipped: list[tuple[str, str]] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(_PARTIAL):
            path.unlink()
        elif path.name != LOCK:
            reason = "not the name of a block" if not _NAME.fullmatch(path.name) else fault_of(path)
            if reason is None:
                stat = path.stat()
                found.append((stat.st_mtime_ns, path.name, stat.st_size))
            else:
                skipped.append((path.name, reason))
    stored = tuple((bytes.fromhex(name.removesuffix(SUFFIX)), size) for _, name, size in sorted(found))
    return Scan(stored, tuple(skipped))
