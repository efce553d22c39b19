"""A store in the host's memory: what a user says of it.

Owns: `HostTier`. Knows nothing about: tensors (the store itself is kvsched/runner/torch_offload).
Invariants: a `HostTier` that exists is in range; it belongs to no engine and can be used for several.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """Full blocks are copied to host memory (pinned on CUDA) and loaded back when a request needs them again.

    capacity_bytes: bound of the store; the least recently used blocks go first.
    asynchronous: a request waits for its load while others run; False: the step that needs it waits.
    min_tokens_to_load: a shorter run of stored blocks is computed rather than loaded.

    Raises ValueError for a value out of range.
    """

    capacity_bytes: int = GIB
    asynchronous: bool = True
    min_tokens_to_load: int = 0

    def __post_init__(self) -> None:
        check_options(self.capacity_bytes, self.min_tokens_to_load)


def check_options(capacity_bytes: int, min_tokens_to_load: int) -> None:
    """Raises ValueError for an option of a tier that is out of range."""
    if capacity_bytes < 1:
        raise ValueError(f"capacity_bytes is {capacity_bytes}; give the bytes that blocks may take, at least one block")
    if min_tokens_to_load < 0:
        raise ValueError(f"min_tokens_to_load is {min_tokens_to_load}; give 0 (load whatever is found) or more")
