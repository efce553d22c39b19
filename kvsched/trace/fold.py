"""The fold: how each event changes the state.

Owns: `apply`. Knows nothing about: files, keyframes, the live scheduler.
Invariants: applying a run's events one by one gives, at every boundary between calls of the scheduler, its own queues
(exact order), tables, references, cached blocks, deferred frees and counters. A trace that breaks the rules (a double
free, say) is still folded: to find that out is the business of `invariants`.

Within a pass over the waiting requests the scheduler takes those that it skips out of their queue and puts them back
at its end, in front and in order. The net effect is that they keep their places; here they never leave them. The
exception are those that stand with the holders of blocks and hold none any more: they go to the front of the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

from kvsched.config import NULL_BLOCK
from kvsched.request import RequestStatus
from kvsched.trace import events as ev
from kvsched.trace.paged import Paged
from kvsched.trace.plain import TraceError
from kvsched.trace.state import Deferred, Flight, Queue, RequestState, State, Transfer, grown

_FINISHED = {status.finish_reason: status for status in RequestStatus if status.finish_reason}
_COUNTERS = {Queue.WAITING: "num_waiting", Queue.LOADING: "num_loading", Queue.RUNNING: "num_running"}


def apply(state: State, event: ev.Event) -> None:
    """Change the state by one event.

    Raises TraceError if the event speaks of a request, or a block, that there is not, or does not fit its run in
    another way; the state is then of no more use.
    """
    if not state.num_blocks and not isinstance(event, ev.RunStarted):
        raise TraceError(f"event {state.index} is {event.kind}; a trace opens with run_started")
    try:
        _HANDLERS[type(event)](state, event)
    except TraceError:
        raise
    except IndexError as error:
        size = state.num_blocks
        raise TraceError(f"event {state.index} names a block outside the pool of {size}: {event!r:.200}") from error
    except (OverflowError, ValueError) as error:
        raise TraceError(f"event {state.index} does not make sense ({error}): {event!r:.200}") from error
    if event.step > state.step:
        state.step = event.step
    state.index += 1


def fold(events: Iterable[ev.Event], state: State | None = None) -> State:
    """The state after these events, starting from `state` (changed in place) or from nothing."""
    state = State() if state is None else state
    for event in events:
        apply(state, event)
    return state


def _own(state: State, request: str) -> RequestState:
    r = state.mine.get(state.names.newest.get(request, -1))
    if r is not None:
        return r
    number = state.find(request)
    if number is None:
        raise TraceError(f"event {state.index} speaks of request {request!r}, which has not been added")
    return state.own(number)


# ---- the run, arrivals and ends


def _run_started(state: State, e: ev.RunStarted) -> None:
    config = dict(e.config)
    if state.num_blocks:
        raise TraceError(f"event {state.index}: a second run_started; fold each run by itself")
    for name in ("num_blocks", "block_size"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise TraceError(f"run_started: config has no {name} of 1 or more (it says {config.get(name)!r})")
    state.config = config
    state.num_blocks, state.block_size = config["num_blocks"], config["block_size"]
    state.async_scheduling = bool(config.get("async_scheduling", False))
    state.by_priority = config.get("policy") == "priority"
    state.fence_on = bool(config.get("defers_frees", False))
    state.num_free = state.num_blocks - 1
    first = state.first_free_ticket
    state.last_free_ticket = first + state.num_blocks
    state.places = Paged(array("q", range(first, state.last_free_ticket)))
    state.places[NULL_BLOCK] = -1
    state.block_hashes = Paged([None] * state.num_blocks)


def _config_changed(state: State, e: ev.ConfigChanged) -> None:
    """A fence that is turned on counts the steps in flight; what leaves it when it is turned off is told."""
    state.config = {**state.config, **e.changes}
    on = e.defers_frees
    if on is None:
        on = e.changes.get("defer_block_free", state.fence_on)
    if on == "auto":
        raise TraceError(f"event {state.index}: defer_block_free='auto', but not whether that is on (defers_frees)")
    if on and not state.fence_on:
        state.flights = [_counted(state, flight) for flight in state.flights]
    state.fence_on = on


def _counted(state: State, flight: Flight) -> Flight:
    if flight.seq:
        return flight
    state.sched_step_seq += 1
    for number in flight.numbers:
        state.own(number).last_sched_seq = state.sched_step_seq
    return flight._replace(seq=state.sched_step_seq)


def _request_added(state: State, e: ev.RequestAdded) -> None:
    number = len(state.requests)
    state.names = state.names.added(e.request, number)
    max_tokens = e.sampling.get("max_tokens", 0)
    r = RequestState(number, e.request, e.prompt_token_ids, max_tokens, e.priority, e.arrival_time)
    state.requests.append(r)
    state.mine[number] = r
    state.time = e.time
    _stand(state, r, Queue.WAITING)


def _request_finished(state: State, e: ev.RequestFinished) -> None:
    r = _own(state, e.request)
    status = _FINISHED.get(e.reason)
    if status is None:
        raise TraceError(f"event {state.index}: {e.request} finished for {e.reason!r}; known: {', '.join(_FINISHED)}")
    _stand(state, r, Queue.NONE)
    r.status = status
    r.load_landed = False
    r.finish_time = state.time = e.time
    state.num_finished += 1
    _settle(state)


def _settle(state: State) -> None:
    """Move the mark up to which every request is through."""
    first, size = state.first_unsettled, len(state.requests)
    while first < size and state.requests[first].is_settled:
        first += 1
    state.first_unsettled = first


# ---- queues


def _stand(state: State, r: RequestState, queue: Queue, front: bool = False) -> None:
    """Move a request to the end of a queue (or its front), or to where its priority puts it."""
    for name, change in ((_COUNTERS.get(r.queue), -1), (_COUNTERS.get(queue), 1)):
        if name is not None:
            setattr(state, name, getattr(state, name) + change)
    r.queue = queue
    if state.by_priority and queue in (Queue.WAITING, Queue.LOADING):
        r.ticket = (r.priority, r.arrival_time, r.id)
    elif front:
        state.first_ticket -= 1
        r.ticket = state.first_ticket
    else:
        state.last_ticket += 1
        r.ticket = state.last_ticket


def _admitted(state: State, e: ev.Admitted) -> None:
    r = _own(state, e.request)
    r.status = RequestStatus.RUNNING
    r.load_landed = False
    r.num_computed_tokens = e.computed
    _stand(state, r, Queue.RUNNING)


def _parked(state: State, e: ev.Parked) -> None:
    """A request whose load has failed and that is parked again keeps its place."""
    r = _own(state, e.request)
    r.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    r.load_landed = False
    r.num_computed_tokens = e.local + e.external
    if r.queue != Queue.LOADING:
        _stand(state, r, Queue.LOADING)


def _promoted(r: RequestState) -> None:
    """A request whose load has landed is looked at again as a waiting one."""
    if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS and r.load_landed:
        r.load_landed = False
        r.status = RequestStatus.PREEMPTED if r.num_preemptions else RequestStatus.WAITING
        if r.num_computed_tokens == r.num_tokens:
            r.num_computed_tokens -= 1


def _skipped(state: State, e: ev.Skipped) -> None:
    r = _own(state, e.request)
    if e.reason != "load":
        _promoted(r)
    if e.reason in ("stale", "lookup") and r.queue == Queue.LOADING and not r.num_blocks:
        state.set_back += (r.number,)


def _preempted(state: State, e: ev.Preempted) -> None:
    r = _own(state, e.request)
    r.num_stale_output_tokens = e.stale
    r.drop_stale_output = e.dropped
    r.num_computed_tokens = 0
    r.num_output_placeholders = 0
    r.num_preemptions = e.count
    r.status = RequestStatus.PREEMPTED
    state.num_preemptions += 1
    _stand(state, r, Queue.WAITING, front=True)


def _slots_failed(state: State, e: ev.SlotsFailed) -> None:
    state.num_failed_calls += 1
    if e.waiting:
        _promoted(_own(state, e.request))


def _guard_stopped(state: State, e: ev.GuardStopped) -> None:  # noqa: ARG001 (every handler takes both)
    state.num_guard_stops += 1


def _nothing(state: State, e: ev.Event) -> None:
    """Told for the reader; what follows from it comes as events of its own."""


# ---- the pool


def _blocks_hit(state: State, e: ev.BlocksHit) -> None:
    places = state.places
    for block in e.block_ids:
        place = places[block]
        if place >= 0:
            state.num_free -= 1
        places[block] = -1 if place >= 0 else place - 1
    _extend_table(_own(state, e.request), e.block_ids)


def _blocks_allocated(state: State, e: ev.BlocksAllocated) -> None:
    places = state.places
    for block in e.block_ids:
        if places.swap(block, -1) >= 0:
            state.num_free -= 1
    for block in e.evicted:
        state.block_hashes[block] = None
    _extend_table(_own(state, e.request), e.block_ids)


def _extend_table(r: RequestState, block_ids: tuple[int, ...]) -> None:
    if min(block_ids, default=0) < 0:
        raise IndexError("a block id is negative")
    r.table_log = grown(r.table_log, r.num_blocks, block_ids)
    r.num_blocks += len(block_ids)


def _blocks_cached(state: State, e: ev.BlocksCached) -> None:
    for block, content_hash in zip(e.block_ids, e.hashes, strict=True):
        state.block_hashes[block] = content_hash
    _promoted(_own(state, e.request))


def _blocks_uncached(state: State, e: ev.BlocksUncached) -> None:
    for block in e.block_ids:
        state.block_hashes[block] = None


def _cache_reset(state: State, e: ev.CacheReset) -> None:  # noqa: ARG001
    state.block_hashes = Paged([None] * state.num_blocks)


def _blocks_released(state: State, e: ev.BlocksReleased) -> None:
    r = _own(state, e.request)
    if e.reason == "load":
        _promoted(r)
        r.num_computed_tokens = 0
    r.table_log = array("q")
    r.num_blocks = 0
    state.loads.pop(e.request, None)
    if e.fence:
        state.deferred.append(Deferred(e.fence, e.request, e.block_ids, e.step))
    if r.is_finished:
        _settle(state)


def _blocks_freed(state: State, e: ev.BlocksFreed) -> None:
    places = state.places
    if e.fence:
        _leave_fifo(state.deferred, e)
    for block in e.shared:
        places[block] = min(places[block] + 1, -1)
    state.num_free += sum(1 for block in e.front + e.back if places[block] < 0)
    state.first_free_ticket -= len(e.front)
    front = list(enumerate(e.front, state.first_free_ticket))
    back = list(enumerate(e.back, state.last_free_ticket))
    state.last_free_ticket += len(e.back)
    for ticket, block in front + back:
        places[block] = ticket
    if state.free_order is not None:
        state.free_order.extendleft(reversed(front))
        state.free_order.extend(back)


def _leave_fifo(deferred: list[Deferred], e: ev.BlocksFreed) -> None:
    for i, entry in enumerate(deferred):
        if entry.fence == e.fence and entry.request == e.request:
            del deferred[i]
            return


def _blocks_kept(state: State, e: ev.BlocksKept) -> None:
    r = _own(state, e.request)
    r.kept = True
    state.first_unsettled = min(state.first_unsettled, r.number)


# ---- transfers


def _load_started(state: State, e: ev.LoadStarted) -> None:
    _own(state, e.request)
    state.loads[e.request] = Transfer(e.request, e.block_ids, e.step, e.asynchronous, e.after_step)


def _load_landed(state: State, e: ev.LoadLanded) -> None:
    state.loads.pop(e.request, None)
    r = _own(state, e.request)
    r.load_landed = r.status == RequestStatus.WAITING_FOR_REMOTE_KVS


def _load_failed(state: State, e: ev.LoadFailed) -> None:
    if e.policy != "recompute":
        return  # it finishes next
    r = _own(state, e.request)
    r.num_computed_tokens = e.valid
    if r.queue == Queue.RUNNING:
        r.num_output_placeholders = 0
        r.num_stale_output_tokens = e.dropped
    if e.dropped:
        r.drop_stale_output = True


def _save_started(state: State, e: ev.SaveStarted) -> None:
    _own(state, e.request)
    state.saves.append(Transfer(e.request, e.block_ids, e.step, True))


def _save_sent(state: State, e: ev.SaveSent) -> None:
    state.saves = [save for save in state.saves if save.request != e.request]
    _own(state, e.request).kept = False
    _settle(state)


def _end_transfers(state: State, step: int) -> None:
    """Steps up to this one are through: their synchronous loads have landed, and what they were to save has been copied
    (a finished request's last save is told by `save_sent`)."""
    if any(load.step <= step and not load.asynchronous for load in state.loads.values()):
        state.loads = {k: load for k, load in state.loads.items() if load.asynchronous or load.step > step}
    if state.saves:
        state.saves = [save for save in state.saves if save.step > step or state.request(save.request).kept]


# ---- steps


def _step_scheduled(state: State, e: ev.StepScheduled) -> None:
    state.time = e.time
    state.num_slot_calls += e.calls
    if state.set_back:
        for number in reversed(state.set_back):
            _stand(state, state.own(number), Queue.WAITING, front=True)
        state.set_back = ()
    if not e.request_ids:
        state.num_empty_steps += 1
        return
    seq, owed = e.seq, 1 if state.async_scheduling else 0
    numbers = _numbers(state, e.request_ids)
    rows = state.own_all(numbers)
    for r, n, start in zip(rows, e.num_tokens, e.starts, strict=True):
        r.num_computed_tokens = start + n
        r.num_in_flight_tokens += n
        r.last_sched_seq = seq
        r.is_prefill_chunk = False
        r.num_output_placeholders += owed
    if e.prefill_chunks:
        for r in rows:
            if r.id in e.prefill_chunks:
                r.is_prefill_chunk = True
                r.num_output_placeholders -= owed
    state.sched_step_seq = max(state.sched_step_seq, seq)
    state.flights.append(Flight(e, seq, numbers, tuple([r.table_log for r in rows])))


def _numbers(state: State, request_ids: tuple[str, ...]) -> tuple[int, ...]:
    """Numbers of the requests of a step; most often they are those of the step before."""
    if state.flights and state.names.unique and state.flights[-1].scheduled.request_ids == request_ids:
        return state.flights[-1].numbers
    return tuple(_own(state, request).number for request in request_ids)


def _fence_advanced(state: State, e: ev.FenceAdvanced) -> None:
    state.processed_step_seq = e.processed


def _step_delivered(state: State, e: ev.StepDelivered) -> None:
    state.time = e.time
    flight = next((flight for flight in state.flights if flight.step == e.delivered), None)
    if flight is not None:
        state.flights.remove(flight)
    oldest = state.flights[0].step if state.flights else e.delivered + 1
    _end_transfers(state, min(e.delivered, oldest - 1))
    if flight is None:
        return  # an empty step: it takes nothing off the steps in flight
    if e.request_ids != flight.scheduled.request_ids:
        raise TraceError(f"event {state.index}: step {e.delivered} delivers other requests than it scheduled")
    owed = 1 if state.async_scheduling else 0
    for r, n, tokens in zip(state.own_all(flight.numbers), flight.scheduled.num_tokens, e.tokens, strict=True):
        r.num_in_flight_tokens -= n
        if r.num_stale_output_tokens or len(tokens) != 1:
            _take_unusual(r, n, tokens)
            continue
        size, log = r.num_output_tokens, r.output_log
        if len(log) == size:
            log.append(tokens[0])
        elif log[size] != tokens[0]:
            r.output_log = grown(log, size, tokens)
        r.num_output_tokens = size + 1
        r.num_output_placeholders -= owed
    state.num_output_tokens += sum(map(len, e.tokens))
    _settle(state)


def _take_unusual(r: RequestState, n: int, tokens: tuple[int, ...]) -> None:
    """A row that is stale, or has not exactly one token."""
    if r.num_stale_output_tokens:
        r.num_stale_output_tokens -= n
        r.drop_stale_output = r.drop_stale_output and r.num_stale_output_tokens > 0
    else:
        r.num_output_placeholders = max(r.num_output_placeholders - len(tokens), 0)
    r.output_log = grown(r.output_log, r.num_output_tokens, tokens)
    r.num_output_tokens += len(tokens)


_HANDLERS: dict[type[Any], Callable[[State, Any], None]] = {
    ev.RunStarted: _run_started,
    ev.RequestAdded: _request_added,
    ev.SlotsFailed: _slots_failed,
    ev.GuardStopped: _guard_stopped,
    ev.Preempted: _preempted,
    ev.Unscheduled: _nothing,
    ev.NoProgress: _nothing,
    ev.BlocksHit: _blocks_hit,
    ev.BlocksAllocated: _blocks_allocated,
    ev.BlocksCached: _blocks_cached,
    ev.BlocksUncached: _blocks_uncached,
    ev.BlocksReleased: _blocks_released,
    ev.BlocksFreed: _blocks_freed,
    ev.BlocksKept: _blocks_kept,
    ev.Admitted: _admitted,
    ev.Skipped: _skipped,
    ev.Parked: _parked,
    ev.LoadStarted: _load_started,
    ev.LoadLanded: _load_landed,
    ev.LoadFailed: _load_failed,
    ev.SaveStarted: _save_started,
    ev.SaveSent: _save_sent,
    ev.StepScheduled: _step_scheduled,
    ev.FenceAdvanced: _fence_advanced,
    ev.StepDelivered: _step_delivered,
    ev.RequestFinished: _request_finished,
    ev.FaultInjected: _nothing,
    ev.ConfigChanged: _config_changed,
    ev.CacheReset: _cache_reset,
}
