"""First part of a step: the running requests, in order; and preemption when slots are lacking.

Owns: the pass over `running`, the retry of a failed allocation, the guard.
Knows nothing about: waiting requests' admission, outputs.
Invariants: a request is preempted only when its blocks come back at once (with the guard on).

`schedule_running` is the hot loop of the whole product, one long function on purpose: in steady decode nearly
every request takes its first lines only (one token, no new block), a few attribute reads and two appends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsched.request import Request, RequestStatus, transition
from kvsched.sched.draft import Draft
from kvsched.sched.policy import choose_victim
from kvsched.sched.slots import refuse_slots
from kvsched.trace.events import GuardStopped, Preempted, Unscheduled

if TYPE_CHECKING:
    from kvsched.sched.scheduler import Scheduler

_RUNNING = RequestStatus.RUNNING


def schedule_running(s: Scheduler, draft: Draft) -> None:
    """Give every running request its tokens, in order, while budget remains and slots can be had.

    Iterates over a copy of `running`, since victims leave it meanwhile (under PRIORITY also ones that stand
    before the present request).
    """
    take, count = draft.requests.append, draft.counts.append
    last_position = s.last_position
    chunk_cap = draft.chunk_cap
    faulty = s.slots_fault is not None
    kv, step = s.kv, draft.step
    pool, block_size = kv.pool, kv.block_size
    preempted = draft.preempted
    calls = s.allocate_calls
    budget = draft.budget
    for request in s.running.copy():
        if budget <= 0:
            break
        if preempted and request.status is not _RUNNING:
            continue
        computed = request.num_computed_tokens
        owed = request.num_output_placeholders
        if owed and computed + 2 - owed >= request.num_final_tokens:
            continue  # the step that yields its last token is already in flight
        end = wanted = request.num_tokens + owed
        if end - computed > 1:
            end = computed + min(end - computed, chunk_cap, budget)
        if end > last_position:
            end = last_position
        if end <= computed:
            continue

        calls += 1
        if end > request.num_slots or faulty:
            if pool.num_free and end - request.num_slots <= block_size and not faulty:
                draft.new_blocks[request.id] = kv.grow_by_one(request, step)
            else:
                s.allocate_calls = calls
                draft.budget = budget
                got = allocate_or_preempt(s, draft, request, end)
                calls = s.allocate_calls
                budget = draft.budget
                if got is None:
                    break
                if got:
                    draft.new_blocks[request.id] = got
        if end >= request.next_cache_at:
            kv.cache(request, min(end, request.num_tokens), step)

        take(request)
        count(end - computed)
        budget -= end - computed
        if end < wanted:
            draft.prefill_chunks.append(request)
    s.allocate_calls = calls
    draft.budget = budget


def allocate_or_preempt(s: Scheduler, draft: Draft, request: Request, end: int) -> tuple[int, ...] | None:
    """Slots for a running request's first `end` tokens, at the cost of victims if need be.

    The call for slots that `schedule_running` has just counted is the first try. Returns the blocks added, or
    None: no slots, and the pass over running requests ends.
    """
    while True:
        if not refuse_slots(s, request, s.kv.shortfall(request, end), waiting=False):
            return s.kv.grow(request, end, draft.step)
        victim = choose_victim(s.config.policy, s.running)
        if s.config.guard == "stop_retry" and not s.kv.fence.can_free_now(victim):
            if s.emit is not None:
                fence = s.kv.fence
                s.emit(GuardStopped(draft.step, request.id, victim.id, victim.last_sched_seq, fence.processed_seq))
            return None
        s.running.remove(victim)
        count = draft.take_out(victim)
        if count is not None:
            if s.exact:  # blocks that this step was to fill stand in the prefix cache already
                s.kv.taint(victim.block_ids[victim.num_computed_tokens // s.kv.block_size :])
            if s.emit is not None:
                s.emit(Unscheduled(draft.step, victim.id, count))
        preempt(s, victim, request.id, "kv_full" if s.config.policy == "fcfs" else "priority")
        draft.preempted.append(victim.id)
        if victim is request:
            return None
        s.allocate_calls += 1


def preempt(s: Scheduler, victim: Request, wanted_by: str, reason: str, drop_stale: bool = False) -> None:
    """Take a running request's blocks away; it waits again and will compute everything anew.

    The caller has taken it out of `running`. What steps in flight still yield for it is stale.
    """
    drop = s.config.drop_stale_output or drop_stale
    if s.connector is not None:
        drop |= s.connector.request_preempted(victim, victim.block_ids)
    # Stale output of an earlier preemption that is to be dropped comes first: what follows it must go too.
    drop |= victim.drop_stale_output and victim.num_stale_output_tokens > 0
    computed = victim.num_computed_tokens
    victim.num_stale_output_tokens = victim.num_in_flight_tokens
    victim.drop_stale_output = drop and victim.num_stale_output_tokens > 0
    victim.num_computed_tokens = 0
    victim.num_output_placeholders = 0
    victim.num_preemptions += 1
    if s.emit is not None:
        stale = victim.num_stale_output_tokens
        dropped = victim.drop_stale_output
        s.emit(Preempted(s.step, victim.id, wanted_by, computed, stale, dropped, victim.num_preemptions, reason))
    s.kv.release(victim, "preempted", s.step)
    s.prefilling.pop(victim.id, None)
    transition(victim, RequestStatus.PREEMPTED)
    s.waiting.put_back(victim)
