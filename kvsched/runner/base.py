"""The protocol of runners, and the gates that hold a step's execution.

Owns: `Runner` and `Gate`.
Knows nothing about: how steps are computed.
Invariants: steps execute in the order in which they were submitted; `submit` never waits for a step.

        host   submit(1) submit(2)        result(1)  submit(3)        result(2)
        device          |--- step 1 ---|--- step 2 ---|--- step 3 ---|

A token sampled in step k feeds step k + 1 on the device: the host has not seen it when it submits step k + 1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from kvsched.step import ScheduledStep, StepResult


class Gate:
    """Holds one step's execution until a named thing has happened (never by sleeping).

    name: what it waits for, for people ("load of r2 landed").
    """

    __slots__ = ("_callbacks", "_event", "_lock", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        """Whether the thing has happened."""
        return self._event.is_set()

    def open(self) -> None:
        """The thing has happened: let the step go. May be called twice."""
        with self._lock:
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def wait(self) -> None:
        """Block the calling (worker) thread until the gate is open."""
        self._event.wait()

    def on_open(self, callback: Callable[[], None]) -> None:
        """Call back when the gate opens, in the thread that opens it; at once if it is open."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()


@runtime_checkable
class Runner(Protocol):
    """Computes steps, in the order submitted.

    Two things are not asked of all. `prompt_vocab_size`: the engine refuses prompts with a token of that number or
    above. `fresh(num_blocks=…, block_size=…, max_model_len=…)`: another runner like this one, for a pool of that size.
    """

    def submit(self, step: ScheduledStep, gate: Gate | None = None) -> Future[StepResult]:
        """Queue a step; return at once. Its execution, and that of all later steps, waits for `gate`.

        A failure inside the step becomes the future's exception. With a worker connector, its `before_step` is
        called in compute order right before the step is computed; an empty step that carries transfers may be
        submitted for that alone. Invalid blocks it returns stand in the result's transfers.
        """
        ...

    def now(self) -> float:
        """Seconds on this runner's clock (virtual for the synthetic runner)."""
        ...

    def advance(self, to: float) -> None:
        """The host has waited until then. A virtual clock moves there (never back); a real one ignores it."""
        ...

    def close(self) -> None:
        """Open every gate, finish or cancel what is queued, stop threads. May be called twice."""
        ...
