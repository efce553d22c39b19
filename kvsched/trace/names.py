"""Request ids in order of arrival, shared by all states of one run.

Owns: `Names`. Knows nothing about: what a request is.
Invariants: it only grows. Each state knows how many of the names are its own; what lies beyond was added by later
states of the same run.
"""

from __future__ import annotations


class Names:
    """Ids by number and numbers by id. An id may arrive again once its request has finished.

    newest: the newest number of each id, which may be beyond what a state calls its own.
    """

    __slots__ = ("_earlier", "_ids", "newest")

    def __init__(self) -> None:
        self._ids: list[str] = []
        self.newest: dict[str, int] = {}
        self._earlier: dict[str, list[int]] = {}

    @property
    def unique(self) -> bool:
        """Whether no id has come twice."""
        return not self._earlier

    def find(self, name: str, size: int) -> int | None:
        """The newest number below `size` of that name."""
        number = self.newest.get(name)
        if number is None or number < size:
            return number
        return max((n for n in self._earlier.get(name, ()) if n < size), default=None)

    def added(self, name: str, size: int) -> Names:
        """The names whose first `size + 1` are ours and `name`: these, unless another state has gone another way."""
        if size < len(self._ids):
            return self if self._ids[size] == name else self._first(size).added(name, size)
        if name in self.newest:
            self._earlier.setdefault(name, []).append(self.newest[name])
        self.newest[name] = size
        self._ids.append(name)
        return self

    def _first(self, size: int) -> Names:
        names = Names()
        for number, name in enumerate(self._ids[:size]):
            names.added(name, number)
        return names
