"""The views: thin classes, each with a `.js` and a `.css` file of its own.

Owns: `View` and its kinds. Knows nothing about: how they draw (their JavaScript), what sessions do.
Invariants: a view is a function of its hub's history and position; it keeps no state in the kernel. Its text form has
nothing in it that differs from run to run.
"""

from __future__ import annotations

from typing import Any

import traitlets

from lab.widgets.base import HistorySource, script, styles
from lab.widgets.hub import Hub
from lab.widgets.widget import LabWidget


class View(LabWidget):
    """One view of a history.

    of: a session, or the hub of one that another view shows too: views with the same hub move together.
    """

    hub = traitlets.Unicode().tag(sync=True)

    def __init__(self, of: HistorySource | Hub, **traits: Any) -> None:
        self._owns_hub = not isinstance(of, Hub)
        self.of = of if isinstance(of, Hub) else Hub(of)
        super().__init__(hub=self.of.reference, **traits)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.of.summary()})"

    def close(self) -> None:
        """End it, and its hub if nobody else gave it one."""
        if self._owns_hub:
            self.of.close()
        super().close()


class Transport(View):
    """Step, back, play and seek along a strip that marks what happened."""

    _esm, _css = script("transport"), styles("transport")


class Queues(View):
    """Waiting, loading, running and finished requests with their numbers."""

    _esm, _css = script("queues"), styles("queues")


class BlockMap(View):
    """Every block of the pool: who holds it, what waits, what is written; its lineage."""

    _esm, _css = script("blockmap"), styles("blockmap")


class FenceTimeline(View):
    """Steps in flight, the fence, and deferred frees as spans, over time."""

    _esm, _css = script("timeline"), styles("timeline")


class InjectPanel(View):
    """Faults and settings, from the moment one looks at."""

    _esm, _css = script("inject"), styles("inject")


class WhyPanel(View):
    """The decision of a step in sentences."""

    _esm, _css = script("why"), styles("why")


class Live(View):
    """A run that goes on by itself: tokens as they stream, rates, pause and abort."""

    _esm, _css = script("live"), styles("live")
