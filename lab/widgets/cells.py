"""Which widgets a notebook cell made, so that running it again leaves none of the old ones behind.

Owns: the register of widgets by cell. Knows nothing about: what widgets are, but that they can be closed.
Invariants: the register keeps nothing alive. All that one run of a cell made lives on until the cell runs again.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol


class Closable(Protocol):
    """A widget."""

    def close(self) -> None:
        """End it, in the kernel and in the browser."""
        ...


@dataclass(slots=True)
class _Run:
    """One run of a cell: the message that asked for it, and what it made."""

    message: str
    made: list[weakref.ref[Any]] = field(default_factory=list)


_runs: dict[str, _Run] = {}


def adopt(widget: Closable) -> None:
    """Note that the cell that runs now made this widget; close what an earlier run of the same cell made.

    Outside of a notebook nothing is noted.
    """
    cell = running_cell()
    if cell is None:
        return
    key, message = cell
    run = _runs.get(key)
    if run is None or run.message != message:
        for old in run.made if run else ():
            if (closable := old()) is not None:
                closable.close()
        run = _runs[key] = _Run(message)
    run.made.append(weakref.ref(widget))


def running_cell() -> tuple[str, str] | None:
    """(key of the cell, id of the message that runs it), or None where no cell runs.

    The key is the cell's id where the notebook tells it (JupyterLab, VS Code), else its code.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    parent: dict[str, Any] = getattr(shell, "get_parent", dict)()
    message = parent.get("header", {}).get("msg_id")
    if not message or parent["header"].get("msg_type") != "execute_request":
        return None
    cell_id = parent.get("metadata", {}).get("cellId")
    return cell_id or parent.get("content", {}).get("code", ""), message
