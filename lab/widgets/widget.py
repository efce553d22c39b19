"""What every widget of the lab is.

Owns: `LabWidget`: being noted by the cell that made it, and closing without leaving anything behind.
Knows nothing about: any one widget.
Invariants: a closed widget has closed its layout too (ipywidgets would leave that comm open).
"""

from __future__ import annotations

from typing import Any

import anywidget

from lab.widgets.cells import adopt


class LabWidget(anywidget.AnyWidget):
    """A widget that is closed when its cell runs again."""

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        adopt(self)

    @property
    def reference(self) -> str:
        """How this widget is named in another one's state."""
        return f"anywidget:{self.model_id}"

    def close(self) -> None:
        """End it, in the kernel and in the browser. May be called twice."""
        if self.comm is not None:
            self.layout.close()
        super().close()
