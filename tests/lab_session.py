"""A small session for the tests of the widgets: the bare scheduler behind the protocol they ask for.

Owns: `SmallSession`. Knows nothing about: forks, files, models: those are the real session's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.trace.events import Event
from tests.lab_runs import SMALL_ASKS, SMALL_CONFIG, Ask, Recorder


class SmallSession:
    """Steps a scheduler; a recording if it is given events. Notes the commands it gets."""

    def __init__(
        self,
        config: SchedulerConfig = SMALL_CONFIG,
        asks: Sequence[Ask] = SMALL_ASKS,
        *,
        fails: Collection[int] = (),
        events: Sequence[Event] | None = None,
        steps: int = 0,
    ) -> None:
        self._make = lambda: Recorder(config, asks, fails)
        self.recorder = None if events is not None else self._make()
        self._recorded = events
        self.generation = 0
        self.position = 0
        self.lock = threading.RLock()
        self.running: threading.Thread | None = None
        self.commands: list[tuple[Any, ...]] = []
        self._callbacks: list[Callable[[], None]] = []
        for _ in range(steps):
            self.step()
        if events is not None:
            self.position = events[-1].step

    @property
    def events(self) -> Sequence[Event]:
        return self._recorded if self.recorder is None else self.recorder.events

    @property
    def config(self) -> SchedulerConfig:
        if self.recorder is None:
            settings = {k: v for k, v in self._recorded[0].config.items() if k != "defers_frees"}
            return SchedulerConfig.from_dict(settings)
        return self.recorder.scheduler.config

    @property
    def mode(self) -> str:
        return "recording" if self.recorder is None else "running" if self.running else "stepping"

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    @property
    def num_callbacks(self) -> int:
        return len(self._callbacks)

    def changed(self) -> None:
        for callback in list(self._callbacks):
            callback()

    def step(self) -> None:
        if self.recorder is None:
            raise ValueError("a recording cannot be stepped; fork it first")
        with self.lock:
            self.recorder.step()
            self.position = self.recorder.scheduler.step
        self.changed()

    def back(self) -> None:
        self.seek(max(0, self.position - 1))

    def seek(self, step: int) -> None:
        self.position = step
        self.changed()

    def run(self) -> None:
        while not self.recorder.finished:
            self.step()

    def inject(self, fault: Mapping[str, Any]) -> None:
        self.commands.append(("inject", dict(fault)))
        if fault.get("kind") != "fail_call":
            raise ValueError(f"this small session cannot inject {fault.get('kind')!r}; use fail_call")
        self.recorder.fails.add(fault["call"])
        self.changed()

    def set_option(self, name: str, value: Any) -> None:
        self.commands.append(("set_option", name, value))
        with self.lock:
            self.recorder.scheduler.configure(**{name: value})
        self.changed()

    def restart(self) -> None:
        """All over again: another generation."""
        with self.lock:
            self.recorder = self._make()
            self.generation += 1
            self.position = 0
        self.changed()

    def explain(self, step: int) -> list[str]:
        kinds = [event.kind for event in self.events if event.step == step]
        return [f"Step {step} made {len(kinds)} events."] + [kind.replace("_", " ") for kind in kinds]

    def pause(self) -> None:
        thread, self.running = self.running, None
        if thread is not None:
            thread.join()
        self.changed()

    def resume(self, pause: float = 0.002) -> None:
        """Step by itself, `pause` seconds between steps."""
        stop = threading.Event()

        def go_on() -> None:
            while self.running is threading.current_thread() and not self.recorder.finished:
                self.step()
                stop.wait(pause)

        self.running = threading.Thread(target=go_on, daemon=True)
        self.running.start()
        self.changed()

    def abort(self, request_id: str) -> None:
        self.commands.append(("abort", request_id))
        with self.lock:
            self.recorder.scheduler.finish_requests([request_id])
        self.changed()

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))
