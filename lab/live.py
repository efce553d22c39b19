"""Running by itself: a thread that takes turn after turn, and can be stopped between any two.

Owns: `Driver`: the thread, pausing, resuming, doing something between two turns, what went wrong.
Knows nothing about: engines, events, what a turn is: it is given a function.
Invariants: a turn and anything handed to `between` never overlap; when `pause` has returned no turn runs. The thread
holds its owner only during a turn: once nobody else does, it ends. It waits on a condition, never by sleeping.

    thread      turn | turn | (abort) | turn |          | turn …
    others              between(abort)   pause()   step() by hand   resume()
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Shared:
    """What the thread and its driver both hold."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.wants_to_run = False
        self.is_idle = False
        self.in_turn = False
        self.is_closed = False
        self.jobs: deque[Callable[[], None]] = deque()
        self.error: BaseException | None = None
        self.seconds_per_turn = 0.0

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    @property
    def has_work(self) -> bool:
        return self.is_closed or bool(self.jobs) or (self.wants_to_run and not self.is_idle)


class Driver:
    """Drives an owner, which it holds weakly. The thread begins with the first `resume`.

    turn: called with the owner, in the thread; False: nothing to do until somebody calls `between` or `resume`.
    rested: called with the owner after the driver has come to rest by itself: nothing to do, an error, or a pause
    that the turn asked for. Neither may hold the owner.
    """

    def __init__(self, owner: T, *, turn: Callable[[T], bool], rested: Callable[[T], None]) -> None:
        self._shared = _Shared()
        self._args = self._shared, weakref.ref(owner), turn, rested
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(owner, self._shared.close)

    @property
    def is_running(self) -> bool:
        """Whether turns are taken, or will be as soon as there is something to do."""
        return self._shared.wants_to_run

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the driver's thread."""
        return threading.current_thread() is self._thread

    def resume(self, turns_per_second: float | None = None) -> None:
        """Go on. turns_per_second: at most so many. Raises ValueError for a rate that is not above 0."""
        if turns_per_second is not None and not turns_per_second > 0:
            raise ValueError(f"turns_per_second is {turns_per_second}; give a rate above 0, or None for no limit")
        shared = self._shared
        with shared.changed:
            if shared.is_closed:
                raise RuntimeError("this session is closed; make a new one")
            shared.seconds_per_turn = 0.0 if turns_per_second is None else 1.0 / turns_per_second
            shared.wants_to_run, shared.is_idle, shared.error = True, False, None
            shared.changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=_drive, args=self._args, name="lab-live", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Stop after the turn that runs now, and wait for its end (not in the driver's own thread)."""
        shared = self._shared
        with shared.changed:
            shared.wants_to_run = False
            shared.changed.notify_all()
            if not self.is_own_thread:
                shared.changed.wait_for(lambda: not shared.in_turn)

    def between(self, action: Callable[[], T]) -> T:
        """Do something between two turns, at once if none are taken; returns, or raises, what it does."""
        shared = self._shared
        if self._thread is None or self.is_own_thread:
            return action()
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(action())
            except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
                future.set_exception(error)

        with shared.changed:
            if not shared.wants_to_run or shared.is_closed:
                shared.changed.wait_for(lambda: not shared.in_turn)
                return action()
            shared.jobs.append(job)
            shared.is_idle = False
            shared.changed.notify_all()
        return future.result()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is nothing to do, or it is paused. timeout: seconds. Returns whether that came.

        Raises what a turn raised.
        """
        shared = self._shared
        with shared.changed:
            at_rest = shared.changed.wait_for(self._is_at_rest, timeout)
            error, shared.error = shared.error, None
        if error is not None:
            raise error
        return at_rest

    def _is_at_rest(self) -> bool:
        shared = self._shared
        return not shared.in_turn and not shared.jobs and (shared.is_idle or not shared.wants_to_run)

    @property
    def error(self) -> BaseException | None:
        """What a turn raised, until `resume` or `wait`."""
        return self._shared.error

    def close(self) -> None:
        """End the thread, after the turn that runs now. May be called twice."""
        self._finalizer()
        if self._thread is not None and not self.is_own_thread:
            self._thread.join()


def _drive(
    shared: _Shared, reference: weakref.ref[Any], turn: Callable[[Any], bool], rested: Callable[[Any], None]
) -> None:
    """The thread. It must not hold its owner while it waits."""
    while True:
        with shared.changed:
            shared.changed.wait_for(lambda: shared.has_work)
            if shared.is_closed:
                break
            jobs, shared.jobs = shared.jobs, deque()
            shared.in_turn = True
        begun = time.monotonic()
        for job in jobs:
            job()
        del jobs
        _take_turn(shared, reference, turn, rested)
        with shared.changed:
            shared.in_turn = False
            shared.changed.notify_all()
            pause = begun + shared.seconds_per_turn - time.monotonic()
            if pause > 0 and shared.wants_to_run and not shared.is_idle:
                shared.changed.wait_for(lambda: bool(shared.jobs) or shared.is_closed or not shared.wants_to_run, pause)
    for job in shared.jobs:
        job()


def _take_turn(
    shared: _Shared, reference: weakref.ref[Any], turn: Callable[[Any], bool], rested: Callable[[Any], None]
) -> None:
    """One turn, if it is still wanted. Comes to rest when there is nothing to do, or on an error."""
    owner = reference()
    if owner is None or not shared.wants_to_run:
        return
    try:
        is_busy = turn(owner)
    except Exception as error:  # noqa: BLE001 - kept for whoever waits, and shown
        with shared.changed:
            shared.error, shared.wants_to_run = error, False
        rested(owner)
        return
    with shared.changed:
        shared.is_idle = not is_busy and not shared.jobs
        stopped = not shared.wants_to_run
    if stopped or not is_busy:
        rested(owner)
