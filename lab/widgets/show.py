"""The whole lab in one widget: the views of one session, laid out.

Owns: `show`, which views there are and in which arrangement. Knows nothing about: what they draw.
Invariants: all parts have one hub; closing the whole closes every part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, overload, runtime_checkable

import traitlets

from lab.widgets.base import HistorySource, script, styles
from lab.widgets.compare import Compare
from lab.widgets.hub import Hub
from lab.widgets.views import (
    BlockMap,
    FenceTimeline,
    InjectPanel,
    Live,
    Queues,
    Transport,
    View,
    WhyPanel,
)
from lab.widgets.widget import LabWidget

PARTS: dict[str, type[View]] = {
    "transport": Transport,
    "blocks": BlockMap,
    "queues": Queues,
    "timeline": FenceTimeline,
    "why": WhyPanel,
    "side": InjectPanel,
}
"""The views of a session, by the area of the grid they stand in."""


class Show(LabWidget):
    """All views of a session in one screen.

    source: the session. live: with the view of a run that goes on by itself.
    """

    _esm, _css = script("show"), styles("show")
    hub = traitlets.Unicode().tag(sync=True)
    parts = traitlets.Dict().tag(sync=True)
    layout_name = traitlets.Unicode("debugger").tag(sync=True)

    def __init__(self, source: HistorySource, *, live: bool = False) -> None:
        self.of = Hub(source)
        kinds = PARTS | ({"live": Live} if live else {})
        self.views: Mapping[str, View] = {area: kind(self.of) for area, kind in kinds.items()}
        references: dict[str, Any] = {area: view.reference for area, view in self.views.items()}
        name = "live" if live else "debugger"
        super().__init__(hub=self.of.reference, parts=references, layout_name=name)

    def __repr__(self) -> str:
        return f"lab.show({self.of.summary()})"

    def close(self) -> None:
        """End it and all its parts."""
        for view in self.views.values():
            view.close()
        self.of.close()
        super().close()


@runtime_checkable
class Pair(Protocol):
    """Two sessions to be seen side by side, and what to call them (`lab.compare` makes one)."""

    @property
    def sessions(self) -> tuple[HistorySource, HistorySource]:
        """Left and right."""
        ...

    @property
    def names(self) -> tuple[str, str]:
        """Of left and right."""
        ...


@overload
def show(session: HistorySource, *, live: bool = False) -> Show: ...


@overload
def show(session: Pair) -> Compare: ...


def show(session: HistorySource | Pair, *, live: bool = False) -> Show | Compare:
    """All views of a session on one screen, or two sessions side by side, to be shown as the result of a cell.

    live: with tokens, rates and buttons for a session that runs by itself (`session.resume()`). Running the cell again
    closes what it showed before.
    """
    if isinstance(session, Pair):
        return Compare(*session.sessions, names=session.names)
    return Show(session, live=live)
