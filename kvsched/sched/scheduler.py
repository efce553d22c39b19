"""The scheduler: add, schedule, update, abort.

Owns: all requests that live, the queues, the steps in flight; it is the one place where state becomes a step
and a result becomes state. The two passes of a step stand in `running` and `waiting`, the output in `output`.
Knows nothing about: runners, models, clocks (it asks `clock` only to stamp events).
Invariants: see kvsched/invariants.py; a step handed out is never changed.

    add_request ──▶ waiting ──▶ running ──▶ finished
                      ▲   ╲        │
                      │    kv_holding_waiting (a load in the air, or just landed)
                      └── preempted┘

There is one scheduler: `async_scheduling` (schedule on tokens not known yet) and `max_in_flight` (how many
steps the engine keeps in flight) are independent settings. The bare scheduler checks nothing about what a
request asks for; that is the engine's door.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.connector.base import SchedulerConnector
from kvsched.kv.manager import KVManager
from kvsched.request import NEVER, Request, RequestRefused, RequestStatus
from kvsched.sched.draft import Draft, InFlight
from kvsched.sched.output import StepOutput, fail_loads, finish, finish_transfers, process_rows, stop_status
from kvsched.sched.queue import WaitingQueue, make_queue
from kvsched.sched.running import preempt, schedule_running
from kvsched.sched.waiting import schedule_waiting
from kvsched.step import NO_TRANSFERS, RequestData, ScheduledStep, StepResult
from kvsched.trace import events

SlotsFault = Callable[[str, int, int], bool]
"""(request id, number of the call for slots over the whole run, step) -> whether that call is made to fail."""

_ADJUSTABLE = frozenset({"guard", "defer_block_free", "max_in_flight"})
_NO_CHUNKS: frozenset[str] = frozenset()
_NO_BLOCKS: MappingProxyType[str, tuple[int, ...]] = MappingProxyType({})


class Scheduler:
    """Decides step by step.

    config: the settings.
    connector: the scheduler's half of a KV connector.
    emit: called with every event as it happens; None records nothing.
    slots_fault: decides which calls for slots are made to fail.
    clock: seconds, to stamp events.
    num_fruitless: calls of `schedule()` since the last delivered token that preempted and scheduled nothing.
    cap_at_pool: end a request that outgrows the whole pool (finish reason "pool") instead of preempting it for
        ever; the engine sets it.
    exact: do what is right in three places where the reference, and so the replay of its recordings, does not; the
        engine sets it. Blocks that stand in the prefix cache and were never filled, since the very step that was to
        fill them lost its request to a preemption (PRIORITY), are kept from lookups. What steps in flight have
        computed on a block whose load failed is not trusted, whoever they computed it for. With nothing going on that
        could free a block, a request that holds blocks and lacks slots is passed over, so that loads landed behind
        it go on.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        connector: SchedulerConnector | None = None,
        emit: Callable[[Any], None] | None = None,
        slots_fault: SlotsFault | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        cap_at_pool: bool = False,
        exact: bool = False,
    ) -> None:
        self.config = config
        self.connector = connector
        self.emit = emit
        self.slots_fault = slots_fault
        self.clock = clock
        self.cap_at_pool = cap_at_pool
        self.exact = exact
        # No position from here on is ever computed: the token that would stand there ends its request.
        self.last_position = config.max_model_len - 1
        if cap_at_pool:
            self.last_position = min(self.last_position, config.num_usable_slots)
        defers = config.defers_frees(connector is not None and connector.can_load)
        self.kv = KVManager(config, defers, emit)
        self.step = 0
        self.allocate_calls = 0
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: WaitingQueue = make_queue(config.policy)
        self.kv_holding_waiting: WaitingQueue = make_queue(config.policy)
        self.landed: set[str] = set()
        self.prefilling: dict[str, Request] = {}
        self.awaiting_load: dict[str, Request] = {}
        self.kept_for_save: dict[str, Request] = {}
        self.in_flight: deque[InFlight] = deque()
        self.num_fruitless = 0
        self._finished_since: list[str] = []

    # ---- requests

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused for an id that is in use."""
        if request.id in self.requests or request.id in self.awaiting_load or request.id in self.kept_for_save:
            raise RequestRefused(f"request id {request.id!r} is in use; wait until it ends, or choose another id")
        request.length_cap = min(request.num_final_tokens, self.config.max_model_len)
        if self.cap_at_pool:
            request.length_cap = min(request.length_cap, self.config.num_usable_slots + 1)
            request.num_final_tokens = min(request.num_final_tokens, request.length_cap)
        self.requests[request.id] = request
        self.waiting.add(request)
        if self.emit is not None:
            prompt = tuple(request.token_ids)
            sampling = request.sampling.to_dict() | {"stop_token_ids": sorted(request.stop_token_ids)}
            self.emit(
                events.RequestAdded(
                    self.step, request.id, prompt, sampling, request.priority, request.arrival_time, self.clock()
                )
            )

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus = RequestStatus.ABORTED
    ) -> list[str]:
        """End requests from outside. Unknown and finished ids are ignored; returns the ids that were ended."""
        ended = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            finish(self, request, status)
            ended.append(request_id)
        return ended

    def has_unfinished(self) -> bool:
        """Whether any request lives."""
        return bool(self.requests)

    def queue_of(self, request: Request) -> WaitingQueue:
        """The queue in which a waiting request stands: with blocks, or a load that failed, it is the one looked
        at first."""
        holding = self.kv_holding_waiting
        return holding if request in holding else self.waiting

    def forget(self, request: Request) -> None:
        """A request has ended: it no longer lives here."""
        del self.requests[request.id]
        self.prefilling.pop(request.id, None)
        self._finished_since.append(request.id)

    def keep_for_save(self, request: Request) -> None:
        """Hold a finished request's blocks until its save is reported as sent."""
        self.kept_for_save[request.id] = request
        if self.emit is not None:
            self.emit(events.BlocksKept(self.step, request.id, tuple(request.block_ids)))

    # ---- a step

    def schedule(self) -> ScheduledStep:
        """Decide the next step: running requests first, then waiting ones if nothing was preempted."""
        self.step += 1
        config = self.config
        chunk_cap = NEVER
        if config.long_prefill_token_threshold and len(self.requests) > 1:
            chunk_cap = config.long_prefill_token_threshold
        draft = Draft(self.step, config.max_num_batched_tokens, chunk_cap, self.allocate_calls)
        schedule_running(self, draft)
        if not draft.preempted and len(self.requests) > len(self.running):
            schedule_waiting(self, draft)
        if draft.preempted and not draft.requests:
            self._note_no_progress(draft)
        step = self._freeze(draft)
        if self.connector is not None:
            loads, saves = self.connector.step_transfers(step)
            if loads or saves:
                step = step._replace(loads=loads, saves=saves)
                self._tell_transfers(step)
        if self.emit is not None:
            self.emit(
                events.StepScheduled(
                    self.step,
                    step.seq,
                    step.request_ids,
                    step.num_scheduled_tokens,
                    step.num_computed_tokens,
                    step.prefill_chunks,
                    step.allocate_calls,
                    self.kv.pool.num_free,
                    self.clock(),
                )
            )
        if draft.requests:
            self.in_flight.append(InFlight(step, step.seq, draft.requests, draft.counts))
        return step

    def _freeze(self, draft: Draft) -> ScheduledStep:
        """Commit the decision to the requests' counters and make the step of it."""
        requests, counts = draft.requests, draft.counts
        seq = self.kv.fence.next_seq() if requests else self.kv.fence.sched_seq
        joined = tuple([self._request_data(request) for request in draft.joined]) if draft.joined else ()
        starts = tuple([request.num_computed_tokens for request in requests])
        chunks = draft.prefill_chunks
        owed = 1 if self.config.async_scheduling else 0
        for request, count in zip(requests, counts, strict=True):
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            request.last_sched_seq = seq
        if owed:
            for request in requests:
                request.num_output_placeholders += 1
        for request in chunks:
            request.num_output_placeholders -= owed
        if self.prefilling:
            still = {request.id for request in chunks}
            for request in requests:
                if request.id in self.prefilling and request.id not in still:
                    del self.prefilling[request.id]
        if self.kv.tainted:
            for request, start, count in zip(requests, starts, counts, strict=True):
                self.kv.recomputed(request, start, start + count)
        finished: tuple[str, ...] = ()
        if self._finished_since:
            finished, self._finished_since = tuple(self._finished_since), []
        return ScheduledStep(
            self.step,
            seq,
            tuple([request.id for request in requests]),
            tuple(counts),
            starts,
            frozenset([request.id for request in chunks]) if chunks else _NO_CHUNKS,
            MappingProxyType(draft.new_blocks) if draft.new_blocks else _NO_BLOCKS,
            joined,
            tuple(draft.preempted),
            finished,
            self.allocate_calls - draft.allocate_calls_before,
        )

    def _note_no_progress(self, draft: Draft) -> None:
        self.num_fruitless += 1
        if self.emit is not None:
            self.emit(events.NoProgress(self.step, tuple(draft.preempted), self.num_fruitless))

    def _request_data(self, request: Request) -> RequestData:
        return RequestData(
            request.id,
            tuple(request.token_ids),
            tuple(request.block_ids),
            request.num_computed_tokens,
            request.num_prompt_tokens,
            request.sampling,
            request.num_preemptions > 0,
        )

    def _tell_transfers(self, step: ScheduledStep) -> None:
        if self.emit is None:
            return
        for load in step.loads:
            self.emit(
                events.LoadStarted(
                    self.step, load.request_id, load.block_ids, load.num_tokens, load.asynchronous, load.after_step
                )
            )
        for save in step.saves:
            self.emit(events.SaveStarted(self.step, save.request_id, save.block_ids))

    # ---- its output

    def update(self, step: ScheduledStep, result: StepResult) -> StepOutput:
        """Process the output of the oldest step in flight, or of an empty step (which can report transfers).

        Raises ValueError for a step that is not the oldest in flight, or a result that does not fit it.
        """
        sampled = result.sampled_token_ids
        if len(sampled) != len(step.request_ids):
            raise ValueError(
                f"step {step.step} has {len(step.request_ids)} requests, its result {len(sampled)} rows"
            )
        record = None
        if step.request_ids:
            if not self.in_flight or self.in_flight[0].step is not step:
                oldest = self.in_flight[0].step.step if self.in_flight else "none"
                raise ValueError(f"step {step.step} is not the oldest in flight ({oldest}); results come in order")
            record = self.in_flight.popleft()
            if record.seq:
                self.kv.fence.advance(self.step)
        invalid = result.transfers.invalid_block_ids
        failed: Sequence[Request] = fail_loads(self, invalid, record) if invalid else ()
        tokens: tuple[tuple[int, ...], ...] = ()
        ended: list[Request] = []
        if record is not None:
            tokens, ended = process_rows(self, record, sampled, failed)
            if self.num_fruitless and any(tokens):
                self.num_fruitless = 0
        if self.emit is not None:
            self.emit(events.StepDelivered(self.step, step.step, step.request_ids, tokens, self.clock()))
        for request in ended:
            finish(self, request, stop_status(self, request))
        for request in failed:
            finish(self, request, RequestStatus.ERROR)
        ended += failed
        finished: dict[str, str] = {}
        if ended:
            finished = {request.id: request.status.finish_reason or "" for request in ended}
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        if result.transfers is not NO_TRANSFERS:
            finish_transfers(self, result.transfers)
        if self.connector is not None:
            self.connector.step_processed(step, result)
        return StepOutput(step.step, step.request_ids, tokens, finished)

    # ---- changes while running

    def configure(self, **changes: Any) -> None:
        """Change guard, defer_block_free or max_in_flight from here on. Raises ValueError for other settings.

        Turning the fence off returns all deferred blocks at once; turning it on counts the steps in flight.
        """
        other = sorted(set(changes) - _ADJUSTABLE)
        if other:
            raise ValueError(
                f"{', '.join(other)} cannot change while running; only {', '.join(sorted(_ADJUSTABLE))} can"
            )
        self.config = self.kv.config = self.config.with_changes(**changes)
        fence = self.kv.fence
        defers = self.config.defers_frees(self.connector is not None and self.connector.can_load)
        if self.emit is not None:
            self.emit(events.ConfigChanged(self.step, dict(changes), defers))
        if fence.on and not defers:
            fence.open(self.step)
        elif defers and not fence.on:
            fence.on = True
            for record in self.in_flight:
                if not record.seq:
                    record.seq = fence.next_seq()
                    for request in record.requests:
                        request.last_sched_seq = record.seq

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget all cached blocks. While blocks are in use this does nothing and returns False, unless running
        requests may be preempted for it; their stale output is dropped."""
        if preempt_running:
            for request in reversed(self.running):
                preempt(self, request, "", "cache_reset", drop_stale=True)
            self.running = []
        if self.kv.pool.num_free != self.config.num_usable_blocks:
            return False
        self.kv.uncache_all()
        if self.emit is not None:
            self.emit(events.CacheReset(self.step))
        return True
