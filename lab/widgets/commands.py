"""Commands from the browser: checked, then carried out on the session.

Owns: the table of commands and the form of each. Knows nothing about: how the session does what it is asked.
Invariants: nothing that does not have the stated form reaches the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.widgets.base import HistorySource
    from lab.widgets.hub import Hub


class CommandRefused(ValueError):
    """A message from the browser that is no command; the text says what is wrong with it."""


class Commands:
    """Carries out messages {"do": name, …} for a hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._table: dict[str, Callable[[HistorySource, Mapping[str, Any]], object]] = {
            "look": self._look,
            "resend": lambda source, message: self._hub.resend(),
            "explain": self._explain,
            "step": lambda source, message: source.step(),
            "back": lambda source, message: source.back(),
            "run": lambda source, message: source.run(),
            "seek": lambda source, message: source.seek(_number(message, "step")),
            "inject": lambda source, message: source.inject(_mapping(message, "fault")),
            "set_option": lambda source, message: source.set_option(_text(message, "name"), message.get("value")),
            "pause": lambda source, message: source.pause(),
            "resume": lambda source, message: source.resume(),
            "abort": lambda source, message: source.abort(_text(message, "request")),
        }

    def carry_out(self, message: Mapping[str, Any]) -> None:
        """Do what the browser asks. Raises CommandRefused, and what the session raises."""
        name = message.get("do")
        command = self._table.get(name) if isinstance(name, str) else None
        if command is None:
            raise CommandRefused(f"unknown command {name!r}; known: {', '.join(self._table)}")
        assert self._hub.source is not None
        command(self._hub.source, message)

    def _look(self, source: HistorySource, message: Mapping[str, Any]) -> None:
        hub = self._hub
        frame = _number(message, "position")
        if not 0 <= frame < len(hub.packer.frames):
            raise CommandRefused(f"there is no moment {frame}; the history has {len(hub.packer.frames)}")
        hub.frame, hub.request, hub.block = frame, _text(message, "request"), _number(message, "block")
        if source.mode != "running" and source.position != hub.step:
            hub.followed = hub.step
            source.seek(hub.step)

    def _explain(self, source: HistorySource, message: Mapping[str, Any]) -> None:
        step, up_to = _number(message, "step"), _number(message, "upTo")
        self._hub.send({"kind": "why", "step": step, "upTo": up_to, "lines": source.explain(step)})


def _number(message: Mapping[str, Any], name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CommandRefused(f"{message['do']}: {name} is {value!r}; it must be a whole number")
    return value


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise CommandRefused(f"{message['do']}: {name} is {value!r}; it must be a text")
    return value


def _mapping(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = message.get(name)
    if not isinstance(value, Mapping):
        raise CommandRefused(f"{message['do']}: {name} is {value!r}; it must be an object")
    return value
