"""An array whose copies share what neither side has changed since.

Owns: `Paged`. Knows nothing about: what it holds.
Invariants: a page is written only by the one array that has it as private; a copy makes every page shared.

    a        [p0] [p1] [p2]          b = a.copy(); b[300] = 7
    b         |    [p1'] |           p0 and p2 stay shared, p1 was copied for b
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from typing import Generic, TypeVar

T = TypeVar("T")

_BITS = 7
PAGE = 1 << _BITS
"""Items per page."""
_MASK = PAGE - 1


class Paged(Generic[T]):
    """A growing array in pages. items: what it holds at first; its pages are of their type (a list, or an array of
    machine integers)."""

    __slots__ = ("_no_items", "_pages", "_private", "_size")

    def __init__(self, items: MutableSequence[T]) -> None:
        self._no_items = items[:0]
        self._pages = [items[i : i + PAGE] for i in range(0, len(items), PAGE)]
        self._private = bytearray([1] * len(self._pages))
        self._size = len(items)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> T:
        return self._pages[index >> _BITS][index & _MASK]

    def __setitem__(self, index: int, value: T) -> None:
        number = index >> _BITS
        if not self._private[number]:
            self._pages[number] = self._pages[number][:]
            self._private[number] = 1
        self._pages[number][index & _MASK] = value

    def swap(self, index: int, value: T) -> T:
        """Set an item; returns the one before."""
        number = index >> _BITS
        if not self._private[number]:
            self._pages[number] = self._pages[number][:]
            self._private[number] = 1
        page = self._pages[number]
        old = page[index & _MASK]
        page[index & _MASK] = value
        return old

    def append(self, value: T) -> None:
        """Grow by one item."""
        number = self._size >> _BITS
        if number == len(self._pages):
            self._pages.append(self._no_items[:])
            self._private.append(1)
        elif not self._private[number]:
            self._pages[number] = self._pages[number][:]
            self._private[number] = 1
        self._pages[number].append(value)
        self._size += 1

    def __iter__(self) -> Iterator[T]:
        return self.iterate(0)

    def iterate(self, start: int) -> Iterator[T]:
        """Items from `start` on."""
        for number in range(start >> _BITS, len(self._pages)):
            page = self._pages[number]
            first = number << _BITS
            yield from page if first >= start else page[start - first :]

    def copy(self) -> Paged[T]:
        """An independent copy; costs one pointer per page."""
        self._private = bytearray(len(self._pages))
        twin: Paged[T] = Paged.__new__(Paged)
        twin._no_items = self._no_items
        twin._pages = self._pages.copy()
        twin._private = bytearray(len(self._pages))
        twin._size = self._size
        return twin
