"""Two sessions side by side, moved by one transport, with the first step in which they differ.

Owns: the pairing. Knows nothing about: how the difference is found (compare.js, from the two histories).
Invariants: each side has a hub of its own; the longer history leads.
"""

from __future__ import annotations

from typing import Any

import traitlets

from lab.widgets.base import HistorySource, script, styles
from lab.widgets.hub import Hub
from lab.widgets.views import BlockMap, FenceTimeline, Queues, Transport, View
from lab.widgets.widget import LabWidget

SIDES = ("left", "right")


class Compare(LabWidget):
    """The views of two sessions in lock step.

    left, right: the sessions. names: what to call them.
    """

    _esm, _css = script("compare"), styles("compare")
    hubs: traitlets.List[Any] = traitlets.List().tag(sync=True)
    names: traitlets.List[Any] = traitlets.List().tag(sync=True)
    leader = traitlets.Int(0).tag(sync=True)
    parts = traitlets.Dict().tag(sync=True)

    def __init__(self, left: HistorySource, right: HistorySource, names: tuple[str, str] = SIDES) -> None:
        self.of = (Hub(left), Hub(right))
        leader = int(len(self.of[1].packer.frames) > len(self.of[0].packer.frames))
        self.views: dict[str, View] = {"transport": Transport(self.of[leader])}
        for side, hub in zip(SIDES, self.of, strict=True):
            self.views[f"{side}-blocks"] = BlockMap(hub)
            self.views[f"{side}-queues"] = Queues(hub)
            self.views[f"{side}-timeline"] = FenceTimeline(hub)
        super().__init__(
            hubs=[hub.reference for hub in self.of],
            names=list(names),
            leader=leader,
            parts={area: view.reference for area, view in self.views.items()},
        )

    def __repr__(self) -> str:
        sides = zip(self.names, self.of, strict=True)
        return f"lab.compare({', '.join(f'{name}: {hub.summary()}' for name, hub in sides)})"

    def close(self) -> None:
        """End it and all its parts."""
        for view in self.views.values():
            view.close()
        for hub in self.of:
            hub.close()
        super().close()
