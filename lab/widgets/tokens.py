"""The last tokens of each request that is being served, as text.

Owns: `TokenTails`. Knows nothing about: sessions, widgets.
Invariants: a tail holds the last `TAIL` tokens delivered; only the requests that got tokens most recently have one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvsched.trace.events import Event, StepDelivered

TAIL = 64
"""Tokens kept of each request."""

_MOST_REQUESTS = 12


class TokenTails:
    """Notes tokens as they are delivered; hands out the texts that have changed."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, list[int]] = OrderedDict()
        self._texts: dict[str, str] = {}
        self._changed: set[str] = set()

    def note(self, events: Iterable[Event]) -> None:
        """Take the tokens out of more events."""
        for event in events:
            if isinstance(event, StepDelivered):
                for request, tokens in zip(event.request_ids, event.tokens, strict=True):
                    if tokens:
                        self._note_request(request, tokens)
        while len(self._tokens) > _MOST_REQUESTS:
            request, _ = self._tokens.popitem(last=False)
            self._texts.pop(request, None)
            self._changed.discard(request)

    def _note_request(self, request: str, tokens: Sequence[int]) -> None:
        tail = self._tokens.setdefault(request, [])
        tail += tokens
        del tail[:-TAIL]
        self._tokens.move_to_end(request)
        self._changed.add(request)

    def take(self, decode: Callable[[Sequence[int]], str]) -> dict[str, str]:
        """Texts of the requests that got tokens since the last call."""
        new = {request: decode(self._tokens[request]) for request in sorted(self._changed)}
        self._changed.clear()
        self._texts.update(new)
        return new

    def all(self) -> dict[str, str]:
        """The texts handed out so far."""
        return dict(self._texts)
