"""What widgets ask of a session, and the JavaScript and CSS they are made of.

Owns: the protocol `HistorySource`, and the joining of `shared.js` and the shared constants with a widget's own file.
Knows nothing about: any one widget, sessions, kernels.
Invariants: the browser gets the constants of `lab.columns`, `shared.js` and the widget's file, in this order (the hub's
has `history.js` before it).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

from kvsched.config import SchedulerConfig
from kvsched.trace.events import Event
from lab.columns import browser_constants

_FOLDER = Path(__file__).parent

Mode = Literal["recording", "stepping", "running"]
"""recording: there will be no more events. stepping: `step` makes more. running: they come by themselves."""


class HistorySource(Protocol):
    """What a widget shows and steers: a session.

    Commands raise ValueError (or a subclass) for what cannot be done; the message is shown to the user as it stands.
    """

    @property
    def events(self) -> Sequence[Event]:
        """All events so far, `run_started` first."""
        ...

    @property
    def generation(self) -> int:
        """Goes up whenever events that were there before are no longer the start of `events` (a fork, a reset)."""
        ...

    @property
    def config(self) -> SchedulerConfig:
        """The settings in force now."""
        ...

    @property
    def position(self) -> int:
        """The step one looks at: the number of a schedule() call; 0 is before the first."""
        ...

    @property
    def mode(self) -> Mode:
        """Whether more events can come, and how."""
        ...

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while events are added; reentrant."""
        ...

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after events, settings, mode or position have changed, in whichever thread changed them.

        Returns what ends it.
        """
        ...

    def step(self) -> object:
        """One more schedule() call at the end of the history."""
        ...

    def back(self) -> object:
        """One step back."""
        ...

    def seek(self, step: int) -> object:
        """Look at another step."""
        ...

    def run(self) -> object:
        """On to the next breakpoint, or the end."""
        ...

    def inject(self, fault: Mapping[str, Any]) -> object:
        """Plan a fault in its plain-data form (`kvsched.faults`). In the past this forks."""
        ...

    def set_option(self, name: str, value: Any) -> object:
        """Change a setting from the position on (`num_blocks`: from the start). In the past this forks."""
        ...

    def explain(self, step: int) -> list[str]:
        """Why each request got what it got in a step, in sentences."""
        ...

    def pause(self) -> object:
        """Stop running by itself, at this very step."""
        ...

    def resume(self) -> object:
        """Run by itself, in the background."""
        ...

    def abort(self, request_id: str) -> object:
        """End a request now."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, for people."""
        ...


def source_text(file: str) -> str:
    """A file of this folder."""
    return (_FOLDER / file).read_text(encoding="utf-8")


def script(*names: str) -> str:
    """The JavaScript module of a widget: constants, `shared.js`, then its own files."""
    constants = json.dumps(browser_constants(), ensure_ascii=False)
    files = "\n".join(source_text(f"{name}.js") for name in ("shared", *names))
    return f"const LAB = {constants};\n{files}"


def styles(name: str) -> str:
    """The style sheet of a widget."""
    return source_text(f"{name}.css")
