"""The lab: a debugger for schedulers, in a notebook. Rests on `kvsched`; `kvsched` never imports it.

Owns: the list of the lab's public names and where each one lives.
Knows nothing about: what they do.
Invariants: importing `lab` loads none of its modules; a public name loads its module when it is first used. No module
of the lab has the name of a public function: Python would put the one in the place of the other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab import plots as plots
    from lab.breakpoints import ConditionError as ConditionError
    from lab.comparison import Comparison as Comparison
    from lab.comparison import compare as compare
    from lab.fork import ForkError as ForkError
    from lab.look import SessionError as SessionError
    from lab.page import export_html as export_html
    from lab.picture import snapshot as snapshot
    from lab.scenario import ScenarioError as ScenarioError
    from lab.session import Session as Session
    from lab.walk import Stop as Stop
    from lab.widgets.show import show as show
    from lab.widgets.views import BlockMap as BlockMap
    from lab.widgets.views import FenceTimeline as FenceTimeline
    from lab.widgets.views import InjectPanel as InjectPanel
    from lab.widgets.views import Live as Live
    from lab.widgets.views import Queues as Queues
    from lab.widgets.views import Transport as Transport
    from lab.widgets.views import WhyPanel as WhyPanel

_HOME = {
    "BlockMap": "lab.widgets.views",
    "Comparison": "lab.comparison",
    "ConditionError": "lab.breakpoints",
    "FenceTimeline": "lab.widgets.views",
    "ForkError": "lab.fork",
    "InjectPanel": "lab.widgets.views",
    "Live": "lab.widgets.views",
    "Queues": "lab.widgets.views",
    "ScenarioError": "lab.scenario",
    "Session": "lab.session",
    "SessionError": "lab.look",
    "Stop": "lab.walk",
    "Transport": "lab.widgets.views",
    "WhyPanel": "lab.widgets.views",
    "compare": "lab.comparison",
    "export_html": "lab.page",
    "show": "lab.widgets.show",
    "snapshot": "lab.picture",
}
"""Public name -> the module that defines it. A name added here is added to the imports above too (tested)."""

_MODULES = ("plots",)
"""Modules that are public as such."""

__all__ = [*sorted([*_HOME, *_MODULES])]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"lab.{name}")
    if name not in _HOME:
        known = ", ".join(__all__)
        raise AttributeError(f"module 'lab' has no attribute {name!r}; public names: {known}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
