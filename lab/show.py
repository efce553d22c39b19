"""`lab.show`: a session on one screen.

Owns: nothing but the entry point. Knows nothing about: how views draw, what sessions do.
Invariants: running the cell again closes what it showed before.
"""

from __future__ import annotations

from lab.widgets.base import HistorySource
from lab.widgets.show import Show


def show(session: HistorySource, *, live: bool = False) -> Show:
    """All views of a session, to be shown as the result of a cell.

    live: with tokens, rates and buttons for a session that runs by itself (`session.resume()`).
    """
    return Show(session, live=live)
