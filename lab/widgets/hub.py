"""The hub: one session's history in the browser, kept up to date, and the commands that come back.

Owns: packing a source's events and sending them piece by piece, at most 20 messages a second; position and selection
as the kernel knows them.
Knows nothing about: how anything is drawn, what commands do.
Invariants: the history that the browser holds is the beginning of ours, of the same generation, or it asks for all of
it. The source does not keep the hub alive. After `close` the hub holds neither source nor timer.

    source --on_change--> throttle --append piece--> browser          (history)
    source <--look, step, inject, …-- browser                         (commands: small dicts)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import traitlets

from lab.pack import Packer
from lab.widgets.base import HistorySource, script, styles
from lab.widgets.commands import Commands
from lab.widgets.throttle import Throttle
from lab.widgets.tokens import TokenTails
from lab.widgets.widget import LabWidget

MESSAGES_PER_SECOND = 20


class Hub(LabWidget):
    """Shows nothing itself; every view of a history refers to one.

    source: the session. frame, request, block: what the browser looks at; followed: the step at which the source was
    when we looked last. Raises TraceError for events that cannot be folded.
    """

    _esm = script("history", "hub")
    _css = styles("hub")
    packed = traitlets.Bytes().tag(sync=True, to_json=lambda _, hub: bytes(hub.packer.data))
    opening = traitlets.Dict().tag(sync=True, to_json=lambda _, hub: hub.describe())

    def __init__(self, source: HistorySource) -> None:
        self.source: HistorySource | None = source
        self.frame = 0
        self.request = ""
        self.block = -1
        self.followed = 0
        self._commands = Commands(self)
        self._busy_command = ""
        self._last_status: dict[str, Any] = {}
        self._begin(source)
        self._throttle = Throttle(1 / MESSAGES_PER_SECOND, _weakly(self, Hub.push))
        self._unsubscribe = source.on_change(_weakly(self, Hub._changed))
        super().__init__()
        self.on_msg(_weakly(self, Hub._receive))

    def __repr__(self) -> str:
        return f"Hub({self.summary()})"

    def summary(self) -> str:
        """ "step 7 of 40": where one looks; the same in every run."""
        if not self.packer.frames:
            return "empty"
        return f"step {self.packer.frames[self.frame].step} of {self.packer.frames[-1].step}"

    @property
    def step(self) -> int:
        """The step one looks at."""
        return self.packer.frames[self.frame].step

    def close(self) -> None:
        """End it: in the browser, and for the source. May be called twice."""
        if self.source is None:
            return
        self.source = None
        self._unsubscribe()
        self._unsubscribe = _nothing  # the other one holds the source
        self._throttle.close()
        super().close()

    # ---- what the browser is told

    @staticmethod
    def _status(source: HistorySource) -> dict[str, Any]:
        """What can be done now, as plain data. (Of a source in hand: another thread may close the hub meanwhile.)"""
        mode = source.mode
        return {"mode": mode, "can_step": mode == "stepping", "settings": source.config.to_dict()}

    def describe(self) -> dict[str, Any]:
        """All but the history that a page needs that opens now."""
        return {
            "generation": self.generation,
            "position": self.frame,
            "request": self.request,
            "block": self.block,
            "status": self._last_status,
            "tails": self.tails.all(),
        }

    def _changed(self) -> None:
        self._throttle.poke()

    def push(self) -> None:
        """Send what is new. Called as often as anybody likes; sends nothing when there is nothing."""
        source = self.source
        if source is None:
            return
        with source.lock:
            if source.generation != self.generation:
                self._begin(source)
                self.resend()
                return
            before = self._last_status
            self._last_status = self._status(source)
            message: dict[str, Any] = {"kind": "append", "generation": self.generation, "offset": len(self.packer.data)}
            piece = self._grow(source)
            if self._last_status != before:
                message["status"] = self._last_status
            if self._follow(source):
                message["position"] = self.frame
            if tails := self.tails.take(source.decode):
                message["tails"] = tails
            if piece or len(message) > 3:
                self.send(message, [piece])

    def _grow(self, source: HistorySource) -> bytes:
        """Take what is new. Who looks at the end goes with it: the browser does so by itself, as we do here."""
        num_before = len(self.packer.frames)
        was_at_end = self.frame == num_before - 1
        piece = self._take_events(source)
        if was_at_end and len(self.packer.frames) > num_before:
            self.frame = num_before if self._busy_command == "step" else len(self.packer.frames) - 1
        return piece

    def _take_events(self, source: HistorySource) -> bytes:
        new = source.events[self.packer.num_events :]
        self.tails.note(new)
        return self.packer.feed(new)

    def _begin(self, source: HistorySource) -> None:
        """Take the whole history of the source's present generation."""
        with source.lock:
            self.packer = Packer()
            self.tails = TokenTails()
            self.generation = source.generation
            self._take_events(source)
            self.followed = source.position
            self.frame = self.packer.frame_of_step(source.position)
            self._last_status = self._status(source)
            self.tails.take(source.decode)

    def resend(self) -> None:
        """Send the whole history and where one looks in it."""
        self.send_state(["opening", "packed"])

    def _follow(self, source: HistorySource) -> bool:
        """Go where the source has gone since we looked last. Returns whether the browser has to be told."""
        if source.position == self.followed:
            return False
        self.followed = source.position
        if self.step == source.position:
            return False
        self.frame = self.packer.frame_of_step(source.position)
        return True

    # ---- what the browser asks

    def _receive(self, _: object, content: Mapping[str, Any], __: object) -> None:
        if self.source is None:
            return
        name = content.get("do")
        self._busy_command = str(name)
        try:
            self._commands.carry_out(content)
            self.push()
            if name not in ("look", "explain", "resend"):
                self.send({"kind": "done", "do": name})
        except (ValueError, RuntimeError) as error:
            self.push()
            self.send({"kind": "refused", "do": name, "text": str(error)})
        finally:
            self._busy_command = ""


def _nothing() -> None:
    """What is left to end after the end."""


def _weakly(hub: Hub, method: Callable[..., None]) -> Callable[..., None]:
    """The method, without keeping the hub alive."""
    reference = weakref.ref(hub)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            method(alive, *args)

    return call
