"""How the attention of one step is cut into pieces, on the host.

Owns: `AttentionPlan` and the choice of which decode tokens are computed together.
Knows nothing about: tensors on devices, models. All arrays are numpy, int64.
Invariants: every real token of the step is in exactly one piece; padding tokens are in none. A request that
computes one token is a decode row; a request that computes more is a chunk of its own.

Decode rows of similar length are padded to one width and computed in one call; `stale` lists the gathered slots
that lie beyond a row's own length, which must not reach the result:

        row 0   |k k k k|k k k k|k k . .|        k: the request's tokens
        row 1   |k k k k|k k . .|. . . .|        .: stale (unwritten, or another block altogether)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_CALL_IN_BLOCKS = 16
"""A further call costs about as much as gathering and reading this many blocks (measured for SmolLM2 on a CPU)."""


class DecodeGroup(NamedTuple):
    """Requests that compute one token each.

    tokens: [n] index of each in the step's tokens. block_ids: [n x width], padded with the null block.
    lengths: [n] tokens to attend to. stale: gathered slots, numbered row by row, beyond a row's length.
    """

    tokens: Ints
    block_ids: Ints
    lengths: Ints
    stale: Ints


class Chunk(NamedTuple):
    """A request that computes tokens [first, last) of the step: the last of its `length` known positions."""

    first: int
    last: int
    block_ids: Ints
    length: int


class AttentionPlan(NamedTuple):
    """The pieces of one step."""

    decode: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def plan_attention(starts: Ints, counts: Ints, tables: Ints, block_size: int, max_group_blocks: int) -> AttentionPlan:
    """Cut a step into pieces.

    starts, counts: [n] each request computes positions [start, start + count). tables: [n, w] block tables,
    padded with 0. max_group_blocks: most blocks, padding included, gathered in one call.
    """
    lengths = starts + counts
    widths = -(-lengths // block_size)
    first = np.cumsum(counts) - counts
    single = counts == 1
    decode = []
    for members in group_rows(np.flatnonzero(single), widths, max_group_blocks):
        width = int(widths[members].max())
        inside = np.arange(width * block_size) < lengths[members, None]
        stale = np.flatnonzero(~inside)
        blocks = np.where(np.arange(width) < widths[members, None], tables[members, :width], 0)
        decode.append(DecodeGroup(first[members], blocks.reshape(-1), lengths[members], stale))
    chunks = tuple(
        Chunk(int(first[i]), int(first[i] + counts[i]), tables[i, : widths[i]].copy(), int(lengths[i]))
        for i in np.flatnonzero(~single)
    )
    return AttentionPlan(tuple(decode), chunks)


def group_rows(rows: Ints, widths: Ints, max_group_blocks: int) -> list[Ints]:
    """Split rows into groups of similar width, each in ascending order.

    A group is closed when it would gather more than `max_group_blocks`, or when its padding has cost as much as
    another call would.
    """
    if len(rows) == 0:
        return []
    order = rows[np.argsort(-widths[rows], kind="stable")]
    groups: list[Ints] = []
    begin, padding = 0, 0
    for i in range(1, len(order)):
        widest = int(widths[order[begin]])
        padding += widest - int(widths[order[i]])
        if (i + 1 - begin) * widest > max_group_blocks or padding > _CALL_IN_BLOCKS:
            groups.append(np.sort(order[begin:i]))
            begin, padding = i, 0
    groups.append(np.sort(order[begin:]))
    return groups
