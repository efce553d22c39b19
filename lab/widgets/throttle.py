"""At most so many calls a second, and never the last one lost.

Owns: `Throttle`. Knows nothing about: what is called.
Invariants: two calls of the action are at least `interval` apart; after the last `poke` the action is called once more,
unless it was called since, or the throttle was closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Throttle:
    """poke() calls `action` at once if the last call is long enough ago, else a little later, from a thread of its own.

    interval: seconds.
    """

    def __init__(
        self, interval: float, action: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._action = action
        self._clock = clock
        self._lock = threading.Lock()
        self._last = -float("inf")
        self._timer: threading.Timer | None = None
        self._closed = False

    def poke(self) -> None:
        """There is something new."""
        with self._lock:
            if self._closed or self._timer is not None:
                return
            wait = self._last + self._interval - self._clock()
            if wait > 0:
                self._timer = threading.Timer(wait, self._fire)
                self._timer.daemon = True
                self._timer.start()
                return
            self._last = self._clock()
        self._action()

    def _fire(self) -> None:
        with self._lock:
            self._timer = None
            if self._closed:
                return
            self._last = self._clock()
        self._action()

    def close(self) -> None:
        """No call begins after this."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
