"""Numbers, names and word forms for sentences.

Owns: nothing but words. Knows nothing about: what is said. The same input gives the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MOST_NAMES = 4


def count(number: int, word: str) -> str:
    """1 block, 2 blocks."""
    return f"{number} {inflected(word, number)}"


_PLURALS = {"is": "are", "its": "their", "was": "were", "has": "have", "returns": "return", "runs": "run"}


def inflected(word: str, of: int | Sequence[Any]) -> str:
    """A word for one or for several; 0 counts as several."""
    number = of if isinstance(of, int) else len(of)
    return word if number == 1 else _PLURALS.get(word, f"{word}s")


def names(ids: Sequence[str]) -> str:
    """r1, r2 and r3; many are cut short."""
    if len(ids) > _MOST_NAMES:
        return f"{', '.join(ids[: _MOST_NAMES - 1])} and {len(ids) - _MOST_NAMES + 1} more"
    return " and ".join(filter(None, [", ".join(ids[:-1]), *ids[-1:]]))


def numbers(values: Sequence[int]) -> str:
    """12, 13, 14 -> "12 to 14"."""
    runs: list[list[int]] = []
    for number in values:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def capital(text: str) -> str:
    """With a capital in front."""
    return text[0].upper() + text[1:]
