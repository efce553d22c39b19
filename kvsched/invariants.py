"""What must hold at every moment of a run: one named function per invariant.

Owns: the invariants, and `check`, `check_state`, `check_all` that run them. Knows nothing about: the live scheduler; it
sees events, and the state that they fold to.
Invariants: none of them changes a state. An invariant about an event sees the state before it; one about a state is
looked at where a step has been decided or its output processed, since between two events of one decision blocks may
be on their way. A run that merely reuses blocks in compute order violates nothing.

The order that matters: steps write in the order in which they were scheduled. A load writes whenever it likes.

    step 1 (r1 writes block 7)   |------ in flight ------|
    r1 aborted, block 7 free        x
    step 2 (r2 writes block 7)                            |---|     ordered behind step 1: harmless
    load into block 7 for r2          |---- any time ----|          not ordered: step 1 may write last
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from kvsched.config import NULL_BLOCK
from kvsched.request import RequestStatus
from kvsched.trace import events as ev
from kvsched.trace.fold import apply
from kvsched.trace.state import Flight, Queue, State


@dataclass(frozen=True, slots=True)
class Violation:
    """One breach. index: events before the one that showed it; step: `schedule()` calls begun then; steps: the steps
    that it is about."""

    invariant: str
    index: int
    step: int
    message: str
    blocks: tuple[int, ...]
    requests: tuple[str, ...]
    steps: tuple[int, ...]

    def __str__(self) -> str:
        return f"event {self.index}, step {self.step}: {self.invariant}: {self.message}"


class Finding(NamedTuple):
    """What an invariant says of one breach."""

    message: str
    blocks: tuple[int, ...] = ()
    requests: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()


Findings = Iterator[Finding]


def check(before: State, event: ev.Event, after: State) -> list[Violation]:
    """All invariants at one event."""
    found = _check_event(before, event)
    return found + check_state(after) if isinstance(event, ev.StepScheduled | ev.StepDelivered) else found


def check_state(state: State) -> list[Violation]:
    """The invariants about a state, which must be one at the end of a pass or of an update."""
    return _violations(state.index, state.step, state, (), STATE_INVARIANTS)


def check_all(events: Iterable[ev.Event], *, every: int = 1) -> list[Violation]:
    """All invariants over a whole run, in the order of the events.

    every: look at the invariants about states at every n-th step only: they cost as much as the pool is large.
    Raises TraceError for events that cannot be folded.
    """
    state, found, steps = State(), list[Violation](), 0
    for event in events:
        if state.num_blocks:
            found += _check_event(state, event)
        apply(state, event)
        if isinstance(event, ev.StepScheduled | ev.StepDelivered):
            steps += 1
            if steps % every == 0:
                found += check_state(state)
    return found


def find_stale_writes(events: Iterable[ev.Event]) -> list[Violation]:
    """The hazard that the fence closes, alone (see `stale_write_hazard`)."""
    state, found = State(), list[Violation]()
    for event in events:
        if isinstance(event, ev.LoadStarted):
            found += _violations(state.index, event.step, state, (event,), (stale_write_hazard,))
        elif isinstance(event, ev.StepScheduled):
            found += _violations(state.index, event.step, state, (event,), (no_write_under_a_load,))
        apply(state, event)
    return found


def _check_event(before: State, event: ev.Event) -> list[Violation]:
    return _violations(before.index, event.step, before, (event,), EVENT_INVARIANTS.get(type(event), ()))


def _violations(
    index: int, step: int, state: State, event: tuple[Any, ...], invariants: Iterable[Callable[..., Findings]]
) -> list[Violation]:
    return [Violation(i.__name__, index, step, *finding) for i in invariants for finding in i(state, *event)]


# ---- handing blocks out and taking them back


def null_block_is_never_used(_: State, e: ev.BlocksAllocated | ev.BlocksHit | ev.LoadStarted) -> Findings:
    """Block 0 is in no table and is never filled."""
    if NULL_BLOCK in e.block_ids:
        yield Finding(f"{e.request} was given the null block", (NULL_BLOCK,), (e.request,))


def only_free_blocks_are_handed_out(before: State, e: ev.BlocksAllocated) -> Findings:
    """A block that is handed out has no reference."""
    held = tuple(block for block in e.block_ids if before.places[block] < 0)
    if held or len(set(e.block_ids)) < len(e.block_ids):
        yield Finding(f"{e.request} was given blocks {held or e.block_ids} that are not free", held, (e.request,))


def blocks_go_in_queue_order(before: State, e: ev.BlocksAllocated) -> Findings:
    """Blocks are popped from the front of the free queue."""
    expected = tuple(before.next_free(len(e.block_ids)))
    if expected != e.block_ids:
        text = f"{e.request} got blocks {e.block_ids}, the free queue starts with {expected}"
        yield Finding(text, e.block_ids, (e.request,))


def eviction_is_told(before: State, e: ev.BlocksAllocated) -> Findings:
    """Exactly the handed-out blocks that carry a hash leave the prefix cache."""
    cached = tuple(block for block in e.block_ids if before.block_hashes[block] is not None)
    if cached != e.evicted:
        yield Finding(f"blocks {cached} were cached when handed out, evicted are {e.evicted}", cached, (e.request,))


def hits_are_cached_blocks(before: State, e: ev.BlocksHit) -> Findings:
    """A prefix hit leads an empty table, with blocks that carry a hash."""
    bare = tuple(block for block in e.block_ids if before.block_hashes[block] is None)
    if bare:
        yield Finding(f"{e.request} hit blocks {bare}, which are not in the prefix cache", bare, (e.request,))
    if before.request(e.request).num_blocks:
        yield Finding(f"{e.request} took a prefix hit while it held blocks", e.block_ids, (e.request,))


def cached_blocks_are_the_holders(before: State, e: ev.BlocksCached) -> Findings:
    """What a request enters in the prefix cache stands in its table, at that place, and carries no hash yet."""
    table = before.request(e.request).block_ids[e.first : e.first + len(e.block_ids)]
    if tuple(table) != e.block_ids:
        text = f"{e.request} entered blocks {e.block_ids}, its table has {table} there"
        yield Finding(text, e.block_ids, (e.request,))
    twice = tuple(block for block in e.block_ids if before.block_hashes[block] is not None)
    if twice:
        yield Finding(f"{e.request} entered blocks {twice}, which carry a hash already", twice, (e.request,))


def a_table_is_released_whole(before: State, e: ev.BlocksReleased) -> Findings:
    """A release names the request's whole table."""
    table = tuple(before.request(e.request).block_ids)
    if table != e.block_ids:
        yield Finding(f"{e.request} released {e.block_ids}, its table is {table}", e.block_ids, (e.request,))


def no_block_is_freed_twice(before: State, e: ev.BlocksFreed) -> Findings:
    """A freed block was held."""
    blocks = (*e.front, *e.back, *e.shared)
    free = tuple(block for block in blocks if before.places[block] >= 0 or block == NULL_BLOCK)
    if free:
        yield Finding(f"blocks {free} of {e.request} were freed, but nobody holds them", free, (e.request,))
    if len(set(blocks)) < len(blocks):
        yield Finding(f"one free of {e.request} names a block twice: {blocks}", blocks, (e.request,))


def shared_blocks_stay_held(before: State, e: ev.BlocksFreed) -> Findings:
    """A block returns to the free queue when, and only when, its last reference goes."""
    lost = tuple(block for block in e.shared if before.refs(block) == 1)
    early = tuple(block for block in (*e.front, *e.back) if before.refs(block) > 1)
    if lost:
        text = f"blocks {lost} of {e.request} are told as shared, but nobody else holds them"
        yield Finding(text, lost, (e.request,))
    if early:
        yield Finding(f"blocks {early} of {e.request} became free while others hold them", early, (e.request,))


def hashed_blocks_return_to_the_back(before: State, e: ev.BlocksFreed) -> Findings:
    """Without a hash to the front of the free queue, with one to its back."""
    wrong = [block for block in e.front if before.block_hashes[block] is not None]
    wrong += [block for block in e.back if before.block_hashes[block] is None]
    if wrong:
        yield Finding(f"blocks {tuple(wrong)} of {e.request} returned to the wrong end", tuple(wrong), (e.request,))


# ---- the fence


def the_fence_advances_by_one(before: State, e: ev.FenceAdvanced) -> Findings:
    """processed_step_seq counts up by one and never overtakes sched_step_seq."""
    if e.processed != before.processed_step_seq + 1 or e.processed > before.sched_step_seq:
        old, newest = before.processed_step_seq, before.sched_step_seq
        yield Finding(f"the fence moved from {old} to {e.processed}, the newest step is {newest}")


def a_release_waits_for_its_steps(before: State, e: ev.BlocksReleased) -> Findings:
    """With the fence on, blocks that a step in flight may still write wait for the newest step."""
    last = before.request(e.request).last_sched_seq
    must_wait = before.fence_on and last > before.processed_step_seq
    expected = before.sched_step_seq if must_wait else 0
    if e.fence != expected:
        yield Finding(
            f"{e.request}, last scheduled in {last} (processed {before.processed_step_seq}), was released with fence"
            f" {e.fence} instead of {expected}",
            e.block_ids,
            (e.request,),
        )


def deferred_frees_return_in_order(before: State, e: ev.BlocksFreed) -> Findings:
    """A deferred free is the first of the FIFO, whole, and its fence has been processed (or was turned off)."""
    if not e.fence:
        return
    first = before.deferred[0] if before.deferred else None
    blocks = sorted((*e.front, *e.back, *e.shared))
    if first is None or (first.fence, first.request, sorted(first.block_ids)) != (e.fence, e.request, blocks):
        yield Finding(f"{blocks} of {e.request} behind fence {e.fence} returned, the first to wait is {first}")
    if before.fence_on and e.fence > before.processed_step_seq:
        yield Finding(
            f"{e.request}: blocks returned behind fence {e.fence}, processed is {before.processed_step_seq}",
            tuple(blocks),
            (e.request,),
        )


def the_guard_has_a_reason(before: State, e: ev.GuardStopped) -> Findings:
    """The guard stops a retry only if the victim's blocks are behind the fence."""
    last, processed = before.request(e.victim).last_sched_seq, before.processed_step_seq
    if not before.fence_on or last <= processed or (last, processed) != (e.fence, e.processed):
        text = f"the guard stopped for {e.victim}, last scheduled in {last}, processed {processed}; it says {e}"
        yield Finding(text, requests=(e.request, e.victim))


def stale_write_hazard(before: State, e: ev.LoadStarted) -> Findings:
    """No block is filled by a load while a step in flight could still write it.

    The load is not ordered with the compute stream: the step may overwrite what the load has just brought.
    """
    wanted = set(e.block_ids)
    for flight in before.pending():
        for holder, blocks in flight.writes(before.block_size):
            hit = tuple(block for block in blocks if block in wanted)
            if hit:
                yield Finding(
                    f"{_name(hit)} handed to {e.request} and filled by its load in step {e.step}, while step"
                    f" {flight.step}, in flight, can still write there for {holder}",
                    hit,
                    (holder, e.request),
                    (flight.step,),
                )


def no_write_under_a_load(before: State, e: ev.StepScheduled) -> Findings:
    """No step writes a block that a load in the air is filling (its own synchronous load excepted: it is awaited)."""
    if not before.loads:
        return
    rows = [before.request(request) for request in e.request_ids]
    flight = Flight(e, e.seq, (), tuple(r.table_log[: r.num_blocks] for r in rows))
    for load in before.loads.values():
        for holder, blocks in flight.writes(before.block_size):
            hit = tuple(block for block in blocks if block in load.block_ids)
            if hit and (load.asynchronous or holder != load.request):
                yield Finding(
                    f"step {e.step} writes {_name(hit)} for {holder}, while the load of {load.request} still fills it",
                    hit,
                    (holder, load.request),
                    (e.step,),
                )


def one_transfer_at_a_time(before: State, e: ev.LoadStarted) -> Findings:
    """A block is not filled by two loads, nor filled while it is being saved (a load may wait for a save)."""
    wanted = set(e.block_ids)
    saves = (save for save in before.saves if save.step > e.after_step)
    for other in (*before.loads.values(), *saves):
        hit = tuple(block for block in other.block_ids if block in wanted)
        if hit:
            text = f"{_name(hit)} filled for {e.request} during the transfer of {other.request} (step {other.step})"
            yield Finding(text, hit, (other.request, e.request))


def no_save_under_a_load(before: State, e: ev.SaveStarted) -> Findings:
    """A block is not saved while it is being filled (the load may wait for this save)."""
    wanted = set(e.block_ids)
    for load in before.loads.values():
        hit = tuple(block for block in load.block_ids if block in wanted)
        if hit and load.after_step < e.step:
            text = f"{_name(hit)} saved for {e.request} during the load of {load.request} (step {load.step})"
            yield Finding(text, hit, (load.request, e.request))


def loads_fill_own_blocks(before: State, e: ev.LoadStarted) -> Findings:
    """A load fills blocks of its request's table."""
    others = tuple(sorted(set(e.block_ids) - set(before.request(e.request).block_ids)))
    if others:
        yield Finding(f"{_name(others)} filled for {e.request}, which does not hold them", others, (e.request,))


def no_release_under_a_load(before: State, e: ev.BlocksReleased) -> Findings:
    """Blocks are not released while an asynchronous load into them is in the air."""
    load = before.loads.get(e.request)
    if load is not None and load.asynchronous:
        yield Finding(f"{e.request} released its blocks while its load is in the air", load.block_ids, (e.request,))


# ---- decisions


def the_budget_is_kept(before: State, e: ev.StepScheduled) -> Findings:
    """A step has at most max_num_batched_tokens tokens, at least one per request, each request once."""
    total, budget = sum(e.num_tokens), before.config.get("max_num_batched_tokens", 0)
    if budget and total > budget:
        yield Finding(f"{total} tokens scheduled, max_num_batched_tokens is {budget}", requests=e.request_ids)
    if min(e.num_tokens, default=1) < 1 or len(set(e.request_ids)) < len(e.request_ids):
        yield Finding(f"a row is empty or told twice: {e.request_ids} {e.num_tokens}", requests=e.request_ids)


def tokens_are_computed_once_and_in_order(before: State, e: ev.StepScheduled) -> Findings:
    """A row starts where the one before ended, ends within the request's slots and within the tokens known or owed,
    and is a prefill chunk exactly if it leaves some of them."""
    limit = before.config.get("max_model_len") or 1 << 62
    for request, n, start in zip(e.request_ids, e.num_tokens, e.starts, strict=True):
        r, end = before.request(request), start + n
        owed = r.num_tokens + r.num_output_placeholders
        if start != r.num_computed_tokens:
            yield Finding(f"{request} starts at {start}, computed are {r.num_computed_tokens}", requests=(request,))
        if end > r.num_blocks * before.block_size:
            yield Finding(f"{request} is computed up to {end}, it holds {r.num_blocks} blocks", requests=(request,))
        if end > min(owed, limit) or (request in e.prefill_chunks) != (end < owed):
            chunk = "a" if request in e.prefill_chunks else "not a"
            yield Finding(f"{request} is computed up to {end} of {owed}, {chunk} prefill chunk", requests=(request,))


def only_running_requests_are_scheduled(before: State, e: ev.StepScheduled) -> Findings:
    """Every row belongs to a request in `running`."""
    other = tuple(i for i in e.request_ids if before.request(i).queue != Queue.RUNNING)
    if other:
        yield Finding(f"{other} were scheduled, but do not run", requests=other)


def running_is_bounded(before: State, e: ev.StepScheduled) -> Findings:  # noqa: ARG001
    """At most max_num_seqs requests run (unless those whose last token is in flight are not counted)."""
    most = before.config.get("max_num_seqs", 0)
    if most and before.config.get("seq_slots", "running") == "running" and before.num_running > most:
        yield Finding(f"{before.num_running} requests run, max_num_seqs is {most}")


def steps_in_flight_are_bounded(before: State, e: ev.StepScheduled) -> Findings:
    """At most max_in_flight steps are in flight."""
    most = before.config.get("max_in_flight", 0)
    if most and e.request_ids and len(before.flights) >= most:
        text = f"step {e.step} makes {len(before.flights) + 1} in flight, max_in_flight is {most}"
        yield Finding(text, steps=(e.step,))


def free_blocks_are_told_right(before: State, e: ev.StepScheduled) -> Findings:
    """The free blocks that the scheduler counts are those that the events leave."""
    if e.free != before.num_free:
        yield Finding(f"the scheduler counts {e.free} free blocks, the events leave {before.num_free}")


def steps_are_numbered(before: State, e: ev.StepScheduled) -> Findings:
    """Steps are numbered without a gap, and with the fence on the non-empty ones are counted."""
    expected = before.sched_step_seq + (1 if before.fence_on and e.request_ids else 0)
    if before.fence_on and e.seq != expected:
        yield Finding(f"step {e.step} has sequence number {e.seq}, {expected} comes next", steps=(e.step,))
    last = max((flight.step for flight in before.flights), default=0)
    if e.step <= last:
        yield Finding(f"step {e.step} was scheduled after step {last}", steps=(e.step,))


def victims_were_running(before: State, e: ev.Preempted) -> Findings:
    """A victim runs; what is told of it agrees with its counters."""
    r = before.request(e.request)
    if r.queue != Queue.RUNNING:
        yield Finding(f"{e.request} was preempted, but does not run ({r.status.name})", requests=(e.request,))
    told = (e.computed, e.stale, e.count)
    known = (r.num_computed_tokens, r.num_in_flight_tokens, r.num_preemptions + 1)
    if told != known:
        names = "(computed tokens, stale tokens, preemptions)"
        yield Finding(f"{e.request} was preempted with {told}, known are {known} {names}", requests=(e.request,))


def admitted_requests_were_waiting(before: State, e: ev.Admitted | ev.Parked) -> Findings:
    """A request is admitted or parked out of a queue of waiting ones, and not with stale output still owed to it."""
    r = before.request(e.request)
    if r.queue not in (Queue.WAITING, Queue.LOADING):
        yield Finding(f"{e.request} was taken from no queue ({r.status.name})", requests=(e.request,))
    if r.num_stale_output_tokens and not r.drop_stale_output:
        text = f"{e.request} was taken with {r.num_stale_output_tokens} stale tokens owed"
        yield Finding(text, requests=(e.request,))


# ---- tokens


def steps_are_processed_in_order(before: State, e: ev.StepDelivered) -> Findings:
    """Of the steps in flight, the oldest is processed first."""
    steps = tuple(flight.step for flight in before.flights)
    if e.delivered in steps and e.delivered != steps[0]:
        yield Finding(f"step {e.delivered} was processed before step {steps[0]}", steps=steps)
    if e.request_ids and e.delivered not in steps:
        yield Finding(f"step {e.delivered} was processed, but is not in flight", steps=(e.delivered,))


def tokens_go_to_whom_they_belong(before: State, e: ev.StepDelivered) -> Findings:
    """No token goes to a finished request, to a prefill chunk, or beyond max_tokens; dropped output stays dropped."""
    flight = next((flight for flight in before.flights if flight.step == e.delivered), None)
    if flight is None:
        return
    for number, request, tokens in zip(flight.numbers, e.request_ids, e.tokens, strict=True):
        if not tokens:
            continue
        r = before.requests[number]
        if r.is_finished or (r.num_stale_output_tokens and r.drop_stale_output):
            why = "has finished" if r.is_finished else "has its stale output dropped"
            yield Finding(f"{request} {why}, but got {len(tokens)} tokens", requests=(request,), steps=(e.delivered,))
        if request in flight.scheduled.prefill_chunks:
            yield Finding(f"{request} got a token from a prefill chunk", requests=(request,), steps=(e.delivered,))
        if r.max_tokens and r.num_output_tokens + len(tokens) > r.max_tokens:
            text = f"{request} got more than its {r.max_tokens} tokens"
            yield Finding(text, requests=(request,), steps=(e.delivered,))


def requests_finish_once(before: State, e: ev.RequestFinished) -> Findings:
    """A request finishes once, with as many tokens as were delivered to it."""
    r = before.request(e.request)
    if r.is_finished:
        yield Finding(f"{e.request} finished twice ({r.status.name}, then {e.reason})", requests=(e.request,))
    if r.num_output_tokens != e.num_output_tokens:
        yield Finding(
            f"{e.request} finished with {e.num_output_tokens} tokens, {r.num_output_tokens} were delivered",
            requests=(e.request,),
        )


# ---- about a state


def references_add_up(state: State) -> Findings:
    """A block's references are the tables and the deferred frees it stands in; a free block stands in none."""
    counts = [0] * state.num_blocks
    for r in state.unsettled():
        for block in r.block_ids:
            counts[block] += 1
    for entry in state.deferred:
        for block in entry.block_ids:
            counts[block] += 1
    counts[NULL_BLOCK] = 1
    wrong = [b for b, (n, place) in enumerate(zip(counts, state.places, strict=True)) if n != max(-place, 0)]
    for block in wrong:
        holders = state.block(block)
        refs = max(-state.places[block], 0)
        text = f"block {block} has {refs} references; tables: {holders.owners}, deferred behind: {holders.fences}"
        yield Finding(text, (block,), holders.owners)


def free_held_and_fenced_make_the_pool(state: State) -> Findings:
    """Every usable block is in exactly one place: in the free queue, or held (by tables or deferred frees)."""
    free = sum(1 for place in state.places if place >= 0)
    fenced = set().union(*(entry.block_ids for entry in state.deferred))
    held = set().union(*(r.block_ids for r in state.unsettled())) | fenced
    if free != state.num_free or free + len(held) != state.num_blocks - 1:
        usable = state.num_blocks - 1
        yield Finding(f"{free} free (counted {state.num_free}), {len(held)} held or fenced, of {usable} blocks")


def nobody_holds_a_block_twice(state: State) -> Findings:
    """A table names each of its blocks once, and never the null block."""
    for r in state.unsettled():
        table = r.block_ids
        if len(set(table)) < len(table) or NULL_BLOCK in table:
            yield Finding(f"the table of {r.id} is {table}", tuple(table), (r.id,))


_QUEUES = {
    RequestStatus.WAITING: (Queue.WAITING, Queue.LOADING),
    RequestStatus.PREEMPTED: (Queue.WAITING, Queue.LOADING),
    RequestStatus.WAITING_FOR_REMOTE_KVS: (Queue.LOADING,),
    RequestStatus.RUNNING: (Queue.RUNNING,),
}


def requests_stand_where_their_status_says(state: State) -> Findings:
    """A request stands in one queue, the one of its status; a finished one in none."""
    counts = dict.fromkeys(Queue, 0)
    for r in state.unsettled():
        counts[r.queue] += 1
        if r.queue not in _QUEUES.get(r.status, (Queue.NONE,)):
            yield Finding(f"{r.id} is {r.status.name} and stands in {r.queue.name}", requests=(r.id,))
    told = (state.num_waiting, state.num_loading, state.num_running)
    if told != tuple(counts[queue] for queue in (Queue.WAITING, Queue.LOADING, Queue.RUNNING)):
        yield Finding(f"waiting, loading and running are counted as {told}, the queues hold {counts}")


def counters_are_sound(state: State) -> Findings:
    """No counter is negative; tokens in flight are those of the steps in flight; computed tokens have slots."""
    in_flight: dict[int, int] = {}
    for flight in state.flights:
        for number, n in zip(flight.numbers, flight.scheduled.num_tokens, strict=True):
            in_flight[number] = in_flight.get(number, 0) + n
    for r in state.unsettled():
        counters = (r.num_computed_tokens, r.num_output_placeholders, r.num_stale_output_tokens)
        if min(counters) < 0:
            text = f"{r.id} has a negative counter: computed, placeholders, stale = {counters}"
            yield Finding(text, requests=(r.id,))
        counted, owed, stale = r.num_in_flight_tokens, in_flight.get(r.number, 0), r.num_stale_output_tokens
        if counted != owed or stale > counted:
            text = f"{r.id} counts {counted} tokens in flight ({stale} stale), the steps in flight have {owed}"
            yield Finding(text, requests=(r.id,))
        if not r.is_finished and r.num_computed_tokens > r.num_blocks * state.block_size:
            text = f"{r.id} has {r.num_computed_tokens} tokens computed in {r.num_blocks} blocks"
            yield Finding(text, requests=(r.id,))


def the_fifo_is_in_order(state: State) -> Findings:
    """Fences of deferred frees never decrease; none is beyond the newest step; processed never exceeds scheduled."""
    fences = [entry.fence for entry in state.deferred]
    if any(a > b for a, b in pairwise(fences)) or max(fences, default=0) > state.sched_step_seq:
        yield Finding(f"deferred frees wait for {fences}, the newest step is {state.sched_step_seq}")
    if state.processed_step_seq > state.sched_step_seq:
        yield Finding(f"{state.processed_step_seq} steps processed, {state.sched_step_seq} scheduled")


def _name(blocks: tuple[int, ...]) -> str:
    return f"block {blocks[0]} was" if len(blocks) == 1 else f"blocks {', '.join(map(str, blocks))} were"


EVENT_INVARIANTS: dict[type[Any], tuple[Callable[..., Findings], ...]] = {
    ev.BlocksAllocated: (
        null_block_is_never_used,
        only_free_blocks_are_handed_out,
        blocks_go_in_queue_order,
        eviction_is_told,
    ),
    ev.BlocksHit: (null_block_is_never_used, hits_are_cached_blocks),
    ev.BlocksCached: (cached_blocks_are_the_holders,),
    ev.BlocksReleased: (a_table_is_released_whole, a_release_waits_for_its_steps, no_release_under_a_load),
    ev.BlocksFreed: (
        no_block_is_freed_twice,
        shared_blocks_stay_held,
        hashed_blocks_return_to_the_back,
        deferred_frees_return_in_order,
    ),
    ev.FenceAdvanced: (the_fence_advances_by_one,),
    ev.GuardStopped: (the_guard_has_a_reason,),
    ev.LoadStarted: (
        null_block_is_never_used,
        stale_write_hazard,
        one_transfer_at_a_time,
        loads_fill_own_blocks,
    ),
    ev.SaveStarted: (no_save_under_a_load,),
    ev.StepScheduled: (
        the_budget_is_kept,
        tokens_are_computed_once_and_in_order,
        only_running_requests_are_scheduled,
        running_is_bounded,
        steps_in_flight_are_bounded,
        free_blocks_are_told_right,
        steps_are_numbered,
        no_write_under_a_load,
    ),
    ev.Preempted: (victims_were_running,),
    ev.Admitted: (admitted_requests_were_waiting,),
    ev.Parked: (admitted_requests_were_waiting,),
    ev.StepDelivered: (steps_are_processed_in_order, tokens_go_to_whom_they_belong),
    ev.RequestFinished: (requests_finish_once,),
}
"""Invariants about events, by kind: each is given the state before the event, and the event."""

STATE_INVARIANTS: tuple[Callable[[State], Findings], ...] = (
    references_add_up,
    free_held_and_fenced_make_the_pool,
    nobody_holds_a_block_twice,
    requests_stand_where_their_status_says,
    counters_are_sound,
    the_fifo_is_in_order,
)
"""Invariants about states."""
