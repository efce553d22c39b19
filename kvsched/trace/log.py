"""A long list of events, held compactly.

Owns: `EventLog`. Knows nothing about: what events mean, files.
Invariants: indexing gives back an event equal to the one appended. Full chunks are packed bytes; only the newest
events and the last few chunks read are objects. Packing never leaves this process.

    appended   e0 ... e255 | e256 ... e511 | e512 ... e600
    held          bytes    |     bytes     |    objects
"""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from kvsched.trace.events import EVENT_TYPES, Event

CHUNK = 256
"""Events packed together."""

_NUM_UNPACKED = 8
_TYPES: list[type[Any]] = list(EVENT_TYPES.values())
_NUMBERS: dict[type[Any], int] = {cls: number for number, cls in enumerate(_TYPES)}


class EventLog(Sequence[Event]):
    """Events in order; grows by `append`. num_packed_bytes: size of the full chunks."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.num_packed_bytes = 0
        self._packed: list[bytes] = []
        self._newest: list[Event] = []
        self._unpacked: OrderedDict[int, list[Event]] = OrderedDict()
        self.extend(events)

    def append(self, event: Event) -> None:
        """Add an event. Raises ValueError, once its chunk is full, if it holds anything but plain data."""
        self._newest.append(event)
        if len(self._newest) == CHUNK:
            packed = _pack(self._newest)
            self._packed.append(packed)
            self.num_packed_bytes += len(packed)
            self._newest = []

    def extend(self, events: Iterable[Event]) -> None:
        """Add several events."""
        for event in events:
            self.append(event)

    def __len__(self) -> int:
        return len(self._packed) * CHUNK + len(self._newest)

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...

    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        if isinstance(index, slice):
            start, stop, stride = index.indices(len(self))
            if stride == 1:
                return list(self.iterate(start, stop))
            return [self[i] for i in range(start, stop, stride)]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"event {index} of {len(self)}")
        return self._chunk(index // CHUNK)[index % CHUNK]

    def __iter__(self) -> Iterator[Event]:
        return self.iterate(0, len(self))

    def iterate(self, start: int, stop: int) -> Iterator[Event]:
        """Events [start, stop), chunk by chunk."""
        for number in range(start // CHUNK, -(-stop // CHUNK)):
            first = number * CHUNK
            yield from self._chunk(number)[max(start - first, 0) : stop - first]

    def __repr__(self) -> str:
        return f"EventLog({len(self)} events, {self.num_packed_bytes:,} bytes packed)"

    def _chunk(self, number: int) -> list[Event]:
        if number == len(self._packed):
            return self._newest
        chunk = self._unpacked.get(number)
        if chunk is None:
            chunk = self._unpacked[number] = _unpack(self._packed[number])
            if len(self._unpacked) > _NUM_UNPACKED:
                self._unpacked.popitem(last=False)
        else:
            self._unpacked.move_to_end(number)
        return chunk


def _pack(events: list[Event]) -> bytes:
    numbers = bytes(_NUMBERS[type(event)] for event in events)
    try:
        return marshal.dumps((numbers, [tuple(event) for event in events]))
    except ValueError:
        # Settings may come as any mapping; the rest of an event is plain.
        plain = [tuple(dict(v) if isinstance(v, Mapping) else v for v in event) for event in events]
        return marshal.dumps((numbers, plain))


def _unpack(packed: bytes) -> list[Event]:
    numbers, rows = marshal.loads(packed)
    return [tuple.__new__(_TYPES[number], row) for number, row in zip(numbers, rows, strict=True)]
