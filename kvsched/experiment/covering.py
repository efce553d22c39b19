"""Plans that try every pair of settings at least once. Pure.

Owns: the greedy construction. Knows nothing about: what the settings mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

_CANDIDATES = 40

Pair = tuple[tuple[str, int], tuple[str, int]]


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    *,
    seed: int = 0,
    allowed: Callable[[Mapping[str, Any]], bool] = lambda row: True,
) -> list[dict[str, Any]]:
    """Rows (one level per factor) such that every pair of levels of two factors that some allowed row can hold
    stands in at least one row. Greedy, the same for the same seed.

    Raises ValueError if a factor has no level.
    """
    empty = [name for name, levels in factors.items() if not levels]
    if empty:
        raise ValueError(f"{', '.join(empty)}: a factor needs at least one level")
    rng = random.Random(seed)
    names = list(factors)
    open_pairs: set[Pair] = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows: list[dict[str, Any]] = []
    while open_pairs:
        target = min(open_pairs)
        best: dict[str, int] | None = None
        best_gain = 0
        for _ in range(_CANDIDATES):
            row = _complete(dict(target), names, factors, open_pairs, rng)
            if allowed(_levels(row, factors)):
                gain = len(_pairs(row, names) & open_pairs)
                if gain > best_gain:
                    best, best_gain = row, gain
        if best is None:
            open_pairs.discard(target)  # no allowed row was found that holds this pair
            continue
        open_pairs -= _pairs(best, names)
        rows.append(_levels(best, factors))
    return rows


def _complete(
    row: dict[str, int],
    names: list[str],
    factors: Mapping[str, Sequence[Any]],
    open_pairs: set[Pair],
    rng: random.Random,
) -> dict[str, int]:
    """Fill a row up, factor by factor in random order, each with the level that closes most open pairs."""
    rest = [name for name in names if name not in row]
    rng.shuffle(rest)
    for name in rest:
        levels = list(range(len(factors[name])))
        rng.shuffle(levels)
        row[name] = max(levels, key=lambda level: len(_pairs({**row, name: level}, names) & open_pairs))
    return row


def _pairs(row: Mapping[str, int], names: list[str]) -> set[Pair]:
    return set(combinations([(name, row[name]) for name in names if name in row], 2))


def _levels(row: Mapping[str, int], factors: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    return {name: factors[name][row[name]] for name in factors}
