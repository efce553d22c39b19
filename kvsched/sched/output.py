"""What becomes of a step's output: tokens, stops, stale output, failed loads, finished transfers.

Owns: `update` of the scheduler. Knows nothing about: how steps are decided.
Invariants: the fence moves before anything else; rows are processed in step order; a request that has finished
or lost its blocks meanwhile gets nothing it should not get.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvsched.request import FINISHED_FROM, Request, RequestStatus, transition
from kvsched.sched.draft import InFlight
from kvsched.step import Transfers
from kvsched.trace.events import LoadFailed, LoadLanded, RequestFinished, SaveSent

if TYPE_CHECKING:
    from kvsched.sched.scheduler import Scheduler

_RUNNING = RequestStatus.RUNNING
_NORMAL_FINISH = (RequestStatus.STOPPED, RequestStatus.LENGTH_CAPPED, RequestStatus.POOL_CAPPED)
_NOTHING: tuple[int, ...] = ()


class StepOutput(NamedTuple):
    """What came of a delivered step. request_ids and new_token_ids are parallel, in step order; () where a
    request got nothing. finished: reason by id, in the order in which they ended."""

    step: int
    request_ids: tuple[str, ...]
    new_token_ids: tuple[tuple[int, ...], ...]
    finished: dict[str, str]

    @property
    def emitted(self) -> list[tuple[str, tuple[int, ...]]]:
        """(id, tokens) of the requests that got any."""
        return [(i, tokens) for i, tokens in zip(self.request_ids, self.new_token_ids, strict=True) if tokens]


def process_rows(
    s: Scheduler, record: InFlight, sampled: Sequence[tuple[int, ...]], failed: Sequence[Request]
) -> tuple[tuple[tuple[int, ...], ...], list[Request]]:
    """Append each request's tokens. Returns (tokens per row, requests that must now finish, in order).

    The hot half of `update`: a running request with one sampled token and no stale output takes the straight way.
    """
    is_async = s.config.async_scheduling
    cache = s.kv.cache
    step = s.step
    running = None if failed else _RUNNING  # then no row takes the straight way
    changed: dict[str, tuple[int, ...]] = {}
    ended: list[Request] = []
    for request, count, tokens in zip(record.requests, record.counts, sampled, strict=True):
        request.num_in_flight_tokens -= count
        if request.num_stale_output_tokens or request.status is not running or len(tokens) != 1:
            kept = _process_unusual(s, request, count, tokens, failed)
            if len(kept) != len(tokens):
                changed[request.id] = kept
            if kept and _is_complete(request):
                ended.append(request)
            continue
        token = tokens[0]
        request.token_ids.append(token)
        num_tokens = request.num_tokens = request.num_tokens + 1
        stopped = num_tokens >= request.length_cap or token in request.stop_token_ids
        if is_async:
            owed = request.num_output_placeholders = request.num_output_placeholders - 1
            known = request.num_computed_tokens - owed
            if known >= request.next_cache_at:
                cache(request, known, step)
        if stopped:
            ended.append(request)
    if not changed:
        return tuple(sampled), ended
    return tuple(changed.get(r.id, tokens) for r, tokens in zip(record.requests, sampled, strict=True)), ended


def _process_unusual(
    s: Scheduler, request: Request, count: int, tokens: tuple[int, ...], failed: Sequence[Request]
) -> tuple[int, ...]:
    """A row off the straight way: several tokens or none, stale output, a finished or failed request.

    Returns the tokens appended: up to the one that completes the request.
    """
    assert request.num_in_flight_tokens >= 0
    stale = request.num_stale_output_tokens > 0
    dropped = stale and request.drop_stale_output
    if stale:
        request.num_stale_output_tokens -= count
        assert request.num_stale_output_tokens >= 0
        if not request.num_stale_output_tokens:
            request.drop_stale_output = False
    if request.status >= FINISHED_FROM or dropped or request in failed:
        return _NOTHING
    was_running = request.status is _RUNNING
    num_before = request.num_tokens
    for token in tokens:
        request.token_ids.append(token)
        request.num_tokens += 1
        if _is_complete(request):
            break
    kept = tokens[: request.num_tokens - num_before]
    if s.config.async_scheduling and tokens and not stale:
        request.num_output_placeholders -= len(kept)
        assert request.num_output_placeholders >= 0
        if was_running:
            s.kv.cache(request, request.num_computed_tokens - request.num_output_placeholders, s.step)
    return kept


def _is_complete(request: Request) -> bool:
    """Whether the newest token ends the request."""
    return request.num_tokens >= request.length_cap or request.token_ids[-1] in request.stop_token_ids


def stop_status(s: Scheduler, request: Request) -> RequestStatus:
    """Why a request whose newest token ended it has ended."""
    if request.token_ids[-1] in request.stop_token_ids:
        return RequestStatus.STOPPED
    if request.num_tokens >= min(request.num_prompt_tokens + request.sampling.max_tokens, s.config.max_model_len):
        return RequestStatus.LENGTH_CAPPED
    return RequestStatus.POOL_CAPPED


def finish(s: Scheduler, request: Request, status: RequestStatus) -> None:
    """End a request: out of its queue (not yet out of `running`: the caller does that), blocks released through
    the fence, unless a load in the air still fills them or a save still reads them."""
    before = request.status
    if before in (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.WAITING_FOR_REMOTE_KVS):
        s.queue_of(request).remove(request)
    transition(request, status)
    s.forget(request)
    if s.emit is not None:
        reason = status.finish_reason or ""
        s.emit(RequestFinished(s.step, request.id, reason, request.num_output_tokens, s.clock()))
    keep = False
    if s.connector is not None:
        keep = s.connector.request_finished(request, request.block_ids) and status in _NORMAL_FINISH
    if before is RequestStatus.WAITING_FOR_REMOTE_KVS and request.id not in s.landed:
        s.awaiting_load[request.id] = request
    elif keep:
        s.keep_for_save(request)
    else:
        s.kv.release(request, "aborted" if status is RequestStatus.ABORTED else "finished", s.step)
    s.landed.discard(request.id)


# ---- failed loads


def fail_loads(s: Scheduler, invalid: frozenset[int], record: InFlight | None) -> list[Request]:
    """Blocks could not be filled; record: the step being processed, None for an empty one. Cut (policy
    "recompute") or collect (policy "fail") the requests that count on them: those that wait with blocks first, then
    the running ones. Returns the requests that must end with an error."""
    recompute = s.config.load_failure_policy == "recompute"
    counts = {r.id: count for r, count in zip(record.requests, record.counts, strict=True)} if record else {}
    hit: list[Request] = []
    seen: set[int] = set()
    waiting = list(s.kv_holding_waiting)
    if s.exact:
        _distrust_steps_in_flight(s, invalid, record)
    else:
        waiting = [r for r in waiting if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS]
    for request in [*waiting, *s.running]:
        bad = _bad_blocks(s, request, invalid, counts.get(request.id, 0))
        if not bad:
            continue
        hit.append(request)
        if recompute:
            _cut(s, request, bad[0] * s.kv.block_size, invalid)
        else:
            _give_up(s, request, bad, invalid, seen)
    return [] if recompute else sorted(hit, key=lambda request: request.id)


def _distrust_steps_in_flight(s: Scheduler, invalid: frozenset[int], record: InFlight | None) -> None:
    """Steps in flight computed on the bad blocks, also for requests that have lost their table since. What these
    steps have written is not to be found by lookups, and what they yield for a preempted request is dropped."""
    records = [record, *s.in_flight] if record is not None else [*s.in_flight]
    tables: list[tuple[str, list[int]]] = []
    newest: dict[str, list[int]] = {}
    for step in (in_flight.step for in_flight in records):
        for data in step.new_requests:
            newest[data.id] = list(data.block_ids)
            tables.append((data.id, newest[data.id]))
        for request_id, blocks in step.new_block_ids.items():
            if request_id in newest:
                newest[request_id] += blocks
    for request_id, table in tables:
        first = next((i for i, block in enumerate(table) if block in invalid), len(table))
        s.kv.taint(table[first:])
        request = s.requests.get(request_id)
        if first < len(table) and request is not None and request.status is RequestStatus.PREEMPTED:
            _drop_stale(s, request, table, invalid)


def _drop_stale(s: Scheduler, request: Request, table: Sequence[int], invalid: frozenset[int]) -> None:
    """A preempted request is still owed output that was computed on a bad block: it samples those tokens again."""
    dropped = request.num_stale_output_tokens
    if not dropped or request.drop_stale_output:
        return
    request.drop_stale_output = True
    if s.emit is not None:
        bad = tuple(block for block in table if block in invalid)
        s.emit(LoadFailed(s.step, request.id, bad, 0, "recompute", dropped))


def _bad_blocks(s: Scheduler, request: Request, invalid: frozenset[int], count: int) -> list[int]:
    """Indices of the bad blocks among those of its computed tokens before this step, which gave it `count` tokens.

    Where a running request is to be cut, tokens of the steps in flight behind this one are not looked at either:
    their output is dropped, and the cut must not lie beyond the known tokens.
    """
    computed = request.num_computed_tokens
    if request.status is _RUNNING and s.config.load_failure_policy == "recompute":
        computed -= request.num_in_flight_tokens - request.num_stale_output_tokens
    elif request.status is _RUNNING:
        computed -= count
    blocks = request.block_ids[: max(0, -(-computed // s.kv.block_size))]
    return [i for i, block in enumerate(blocks) if block in invalid]


def _tell_failed(s: Scheduler, request: Request, valid: int, invalid: frozenset[int], dropped: int) -> None:
    bad = tuple(block for block in request.block_ids if block in invalid)
    if s.connector is not None:
        s.connector.load_failed(request, bad)
    if s.emit is not None:
        s.emit(LoadFailed(s.step, request.id, bad, valid, s.config.load_failure_policy, dropped))


def _cut(s: Scheduler, request: Request, valid: int, invalid: frozenset[int]) -> None:
    """Policy "recompute". A running request was computing on a bad block: whatever its steps in flight yield
    is dropped (here kvsched leaves the reference, which loses a token)."""
    dropped = request.num_in_flight_tokens if request.status is _RUNNING else 0
    _tell_failed(s, request, valid, invalid, dropped)
    if s.exact or request.status is _RUNNING:
        s.kv.taint(request.block_ids[valid // s.kv.block_size :])
    request.num_computed_tokens = valid
    if request.status is _RUNNING:
        request.num_output_placeholders = 0
        request.num_stale_output_tokens = dropped
        request.drop_stale_output = dropped > 0
    elif not valid and request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
        s.kv.release(request, "load", s.step)


def _give_up(s: Scheduler, request: Request, bad: list[int], invalid: frozenset[int], seen: set[int]) -> None:
    """Policy "fail": a running request's blocks leave the prefix cache, from the first bad one on that no running
    request before it has answered for (`seen`, extended here); a loading one's have not been entered yet."""
    _tell_failed(s, request, bad[0] * s.kv.block_size, invalid, request.num_in_flight_tokens)
    if request.status is not _RUNNING:
        return
    own = [i for i in bad if request.block_ids[i] not in seen]
    seen.update(request.block_ids[i] for i in bad)
    if own:
        s.kv.uncache(request.block_ids[own[0] :], s.step)


# ---- finished transfers


def finish_transfers(s: Scheduler, transfers: Transfers) -> None:
    """Loads, then saves, each in the order reported."""
    for request_id in transfers.finished_recving:
        aborted = s.awaiting_load.pop(request_id, None)
        if s.emit is not None:
            s.emit(LoadLanded(s.step, request_id))
        if aborted is not None:
            s.kv.release(aborted, "aborted", s.step)
            continue
        request = s.requests.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            raise ValueError(f"a load is reported as landed for {request_id!r}, which waits for none")
        s.landed.add(request_id)
    for request_id in transfers.finished_sending:
        kept = s.kept_for_save.pop(request_id, None)
        if kept is None:
            raise ValueError(f"a save is reported as sent for {request_id!r}, whose blocks are not kept")
        if s.emit is not None:
            s.emit(SaveSent(s.step, request_id))
        s.kv.release(kept, "sent", s.step)
