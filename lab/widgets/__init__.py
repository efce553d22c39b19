"""Widgets: one thin Python class, one `.js` and one `.css` file each; no build step.

`hub` holds one history in the browser; the views draw it: `Transport`, `Queues`, `BlockMap`, `FenceTimeline`,
`InjectPanel`, `WhyPanel`, `Live`; `Show` lays them out, `Compare` does so for two histories.
"""

from lab.widgets.base import HistorySource
from lab.widgets.compare import Compare
from lab.widgets.hub import Hub
from lab.widgets.show import Show, show
from lab.widgets.views import BlockMap, FenceTimeline, InjectPanel, Live, Queues, Transport, View, WhyPanel

__all__ = [
    "BlockMap",
    "Compare",
    "FenceTimeline",
    "HistorySource",
    "Hub",
    "InjectPanel",
    "Live",
    "Queues",
    "Show",
    "Transport",
    "View",
    "WhyPanel",
    "show",
]
