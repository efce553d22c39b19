"""One call for slots: whether it is refused, by the pool or by a fault.

Owns: the verdict and its event. Knows nothing about: what the caller does about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsched.kv.manager import Shortfall
from kvsched.request import Request
from kvsched.trace.events import SlotsFailed

if TYPE_CHECKING:
    from kvsched.sched.scheduler import Scheduler


def refuse_slots(s: Scheduler, request: Request, short: Shortfall | None, waiting: bool) -> bool:
    """Whether the call for slots just counted fails: blocks are lacking, or a fault makes it fail."""
    injected = s.slots_fault is not None and s.slots_fault(request.id, s.allocate_calls, s.step)
    if short is None and not injected:
        return False
    if s.emit is not None:
        needed, free = short or Shortfall(0, s.kv.pool.num_free)
        s.emit(SlotsFailed(s.step, request.id, s.allocate_calls, needed, free, injected, waiting))
    return True
