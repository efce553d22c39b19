"""kvsched: the scheduler of an LLM server, whole and small enough to hold.

Owns: the list of public names and where each one lives.
Knows nothing about: notebooks, widgets, or anything under `lab`.
Invariants: importing this package loads none of its modules. A public name loads its module when it is first used,
so that the scheduler, traces and the simulator never pay for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsched.config import ConfigError as ConfigError
    from kvsched.config import SchedulerConfig as SchedulerConfig
    from kvsched.connector.base import ConnectorPair as ConnectorPair
    from kvsched.connector.disk import DiskTier as DiskTier
    from kvsched.connector.host import HostTier as HostTier
    from kvsched.engine import Engine as Engine
    from kvsched.engine import EngineStuck as EngineStuck
    from kvsched.faults import FaultPlan as FaultPlan
    from kvsched.outputs import RequestOutput as RequestOutput
    from kvsched.outputs import TokenOutput as TokenOutput
    from kvsched.request import Request as Request
    from kvsched.request import RequestRefused as RequestRefused
    from kvsched.request import RequestStatus as RequestStatus
    from kvsched.request import SamplingParams as SamplingParams
    from kvsched.runner.synthetic import CostModel as CostModel
    from kvsched.runner.synthetic import SyntheticRunner as SyntheticRunner
    from kvsched.sched.scheduler import Scheduler as Scheduler
    from kvsched.trace.reader import read_trace as read_trace
    from kvsched.trace.replay import Replay as Replay
    from kvsched.trace.writer import TraceWriter as TraceWriter
    from kvsched.trace.writer import write_trace as write_trace
    from kvsched.watchdog import NoProgressWarning as NoProgressWarning

__version__ = "0.1.0"

_HOME = {
    "ConfigError": "kvsched.config",
    "ConnectorPair": "kvsched.connector.base",
    "CostModel": "kvsched.runner.synthetic",
    "DiskTier": "kvsched.connector.disk",
    "Engine": "kvsched.engine",
    "EngineStuck": "kvsched.engine",
    "FaultPlan": "kvsched.faults",
    "HostTier": "kvsched.connector.host",
    "NoProgressWarning": "kvsched.watchdog",
    "Replay": "kvsched.trace.replay",
    "Request": "kvsched.request",
    "RequestOutput": "kvsched.outputs",
    "RequestRefused": "kvsched.request",
    "RequestStatus": "kvsched.request",
    "SamplingParams": "kvsched.request",
    "Scheduler": "kvsched.sched.scheduler",
    "SchedulerConfig": "kvsched.config",
    "SyntheticRunner": "kvsched.runner.synthetic",
    "TokenOutput": "kvsched.outputs",
    "TraceWriter": "kvsched.trace.writer",
    "read_trace": "kvsched.trace.reader",
    "write_trace": "kvsched.trace.writer",
}
"""Public name -> the module that defines it. A name added here is added to the imports above too (tested)."""

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvsched' has no attribute {name!r}; public names: {', '.join(sorted(_HOME))}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
