"""Second part of a step: admission of waiting requests.

Owns: the pass over both waiting queues, promotion of landed loads, look-ups, parking for a load.
Knows nothing about: preemption (nobody is preempted on behalf of a waiting request), outputs.
Invariants: a request that is passed over keeps its place; one that does not get slots ends the pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvsched.kv.manager import Shortfall
from kvsched.request import Request, RequestStatus, transition
from kvsched.sched.draft import Draft
from kvsched.sched.policy import last_token_in_flight, reserved_blocks
from kvsched.sched.queue import WaitingQueue
from kvsched.sched.slots import refuse_slots
from kvsched.trace.events import Admitted, Parked, Skipped

if TYPE_CHECKING:
    from kvsched.sched.scheduler import Scheduler


class _Prefix(NamedTuple):
    """What a waiting request need not compute: cached blocks here, tokens outside."""

    hits: list[int]
    num_local: int
    num_external: int
    loads_async: bool


def schedule_waiting(s: Scheduler, draft: Draft) -> None:
    """Admit waiting requests in order, those that hold blocks first."""
    passed_over: list[tuple[WaitingQueue, Request]] = []
    while draft.budget > 0 and (s.kv_holding_waiting or s.waiting) and _has_seq_slot(s):
        queue = s.kv_holding_waiting if s.kv_holding_waiting else s.waiting
        request = queue.head()
        reason = _reason_to_skip(s, request)
        prefix = None if reason else _find_prefix(s, request)
        if prefix is None:
            # Whoever holds no blocks (any more) stands with those that never did.
            back = queue if request.block_ids else s.waiting
            _pass_over(s, queue, request, reason or "lookup", passed_over, back)
            continue
        count = _tokens_to_schedule(s, draft, request, prefix)
        if count is None:
            if s.emit is not None:
                s.emit(Skipped(s.step, request.id, "budget"))
            break
        if not _allocate(s, draft, request, prefix, count):
            if _stands_in_the_way(s, request, prefix, count):
                _pass_over(s, queue, request, "slots", passed_over, queue)
                continue
            break
        queue.remove(request)
        if prefix.loads_async:
            _park(s, draft, request, prefix)
            passed_over.append((s.kv_holding_waiting, request))
        else:
            _admit(s, draft, request, prefix, count)
    for queue, request in reversed(passed_over):
        queue.put_back(request)


def _pass_over(
    s: Scheduler,
    queue: WaitingQueue,
    request: Request,
    reason: str,
    passed_over: list[tuple[WaitingQueue, Request]],
    back: WaitingQueue,
) -> None:
    """Set a request aside until the end of the pass; then it goes `back`."""
    queue.remove(request)
    passed_over.append((back, request))
    if s.emit is not None:
        s.emit(Skipped(s.step, request.id, reason))


def _has_seq_slot(s: Scheduler) -> bool:
    taken = len(s.running)
    if s.config.seq_slots == "scheduled":
        taken -= sum(1 for request in s.running if last_token_in_flight(request))
    return taken < s.config.max_num_seqs


def _reason_to_skip(s: Scheduler, request: Request) -> str | None:
    """Why a request cannot be admitted in this pass; promotes one whose load has landed."""
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
        if request.id not in s.landed:
            return "load"
        _promote(s, request)
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return "stale"
    return None


def _promote(s: Scheduler, request: Request) -> None:
    """A load has landed, perhaps in part: what is valid enters the prefix cache; with nothing valid the blocks
    go, and the request will be looked up afresh."""
    s.landed.discard(request.id)
    transition(request, RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING)
    if request.num_computed_tokens == 0:
        s.kv.release(request, "load", s.step)
        return
    s.kv.cache(request, request.num_computed_tokens, s.step)
    if request.num_computed_tokens == request.num_tokens:
        request.num_computed_tokens -= 1


def _find_prefix(s: Scheduler, request: Request) -> _Prefix | None:
    """Local hit, then what the connector has beyond it; None: the connector does not know yet."""
    if request.num_computed_tokens:
        return _Prefix([], 0, 0, False)
    hits = s.kv.lookup(request)
    num_local = len(hits) * s.kv.block_size
    if s.connector is None:
        return _Prefix(hits, num_local, 0, False)
    found = s.connector.lookup(request, num_local)
    if found.num_tokens is None:
        return None
    most = request.num_tokens - num_local - (0 if found.asynchronous else 1)
    assert 0 <= found.num_tokens <= most, f"{request.id}: connector offers {found.num_tokens} of {most} tokens"
    return _Prefix(hits, num_local, found.num_tokens, found.asynchronous and found.num_tokens > 0)


def _tokens_to_schedule(s: Scheduler, draft: Draft, request: Request, prefix: _Prefix) -> int | None:
    """Tokens of this request in this step; 0 for an asynchronous load, None if the pass ends here."""
    if prefix.loads_async:
        return 0
    known = request.num_computed_tokens + prefix.num_local + prefix.num_external
    count = min(request.num_tokens - known, draft.chunk_cap)
    if count > draft.budget and not s.config.enable_chunked_prefill:
        return None
    count = min(count, draft.budget)
    assert count > 0, f"{request.id}: nothing to schedule"
    return count


def _allocate(s: Scheduler, draft: Draft, request: Request, prefix: _Prefix, count: int) -> bool:
    """Slots for a waiting request: all or nothing. Blocks of an asynchronous load are not entered in the cache."""
    s.allocate_calls += 1
    known = request.num_computed_tokens + prefix.num_local + prefix.num_external
    if refuse_slots(s, request, _lacking(s, request, prefix, known + count), waiting=True):
        return False
    if not request.block_ids:
        s.kv.take_hits(request, prefix.hits, draft.step)
    s.kv.grow(request, known + count, draft.step)
    if not prefix.loads_async:
        s.kv.cache(request, min(known + count, request.num_tokens), draft.step)
    if s.connector is not None:
        s.connector.load_admitted(request, request.block_ids, prefix.num_local, prefix.num_external)
    return True


def _lacking(s: Scheduler, request: Request, prefix: _Prefix, num_tokens: int) -> Shortfall | None:
    """What keeps a waiting request from its slots: the whole sequence must fit (reserve_full_isl), and an
    asynchronous load must leave to unfinished prefills and loads what they still need."""
    config = s.config
    if config.reserve_full_isl:
        short = s.kv.shortfall(request, request.num_tokens, prefix.hits)
        if short is not None:
            return short
    if not prefix.loads_async:
        return s.kv.shortfall(request, num_tokens, prefix.hits)
    counted = list(s.prefilling.values())
    if not request.block_ids and request.id in s.prefilling and _is_at_a_standstill(s):
        counted = [other for other in counted if other.block_ids]
        num_tokens = request.num_tokens
    reserved = reserved_blocks(counted, config.max_model_len, config.block_size)
    return s.kv.shortfall(request, num_tokens, prefix.hits, reserved)


def _is_at_a_standstill(s: Scheduler) -> bool:
    """Whether nothing goes on that could free a block. What then lacks slots lacks them for ever, and all that stands
    behind it with a load that has landed waits for ever, too: the reference hangs, and so does the bare scheduler,
    which replays it; the engine's goes on. A load retried after a failure no longer counts its own need against
    itself, nor that of others that hold nothing."""
    return s.exact and not (s.running or s.in_flight or s.awaiting_load or s.kept_for_save)


def _stands_in_the_way(s: Scheduler, request: Request, prefix: _Prefix, count: int) -> bool:
    """Whether a request that has got no slots must be passed over, so that others with landed loads can go first.
    A call for slots that was made to fail is no reason."""
    if request not in s.kv_holding_waiting or not _is_at_a_standstill(s):
        return False
    known = request.num_computed_tokens + prefix.num_local + prefix.num_external
    return _lacking(s, request, prefix, known + count) is not None


def _park(s: Scheduler, draft: Draft, request: Request, prefix: _Prefix) -> None:
    """Hold blocks and wait for the load; computed tokens are counted as if it had landed."""
    transition(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
    request.num_computed_tokens = prefix.num_local + prefix.num_external
    request.num_external_tokens = prefix.num_external
    s.prefilling[request.id] = request
    if s.emit is not None:
        blocks = tuple(request.block_ids)
        s.emit(Parked(draft.step, request.id, blocks, prefix.num_local, prefix.num_external))


def _admit(s: Scheduler, draft: Draft, request: Request, prefix: _Prefix, count: int) -> None:
    """The request joins `running` and the step."""
    resumed = request.num_preemptions > 0
    transition(request, RequestStatus.RUNNING)
    s.running.append(request)
    if not request.num_computed_tokens:
        request.num_computed_tokens = prefix.num_local + prefix.num_external
        request.num_external_tokens = prefix.num_external
    draft.requests.append(request)
    draft.counts.append(count)
    draft.joined.append(request)
    draft.budget -= count
    if request.num_computed_tokens + count < request.num_tokens:
        draft.prefill_chunks.append(request)
        s.prefilling[request.id] = request
    if s.emit is not None:
        computed = request.num_computed_tokens
        s.emit(Admitted(draft.step, request.id, resumed, computed, prefix.num_local, prefix.num_external))
