"""The loop: keeps up to `max_in_flight` steps in flight; joins scheduler, runner and connector.

Owns: when steps are scheduled, submitted and landed; the events of the run; carrying faults out.
Knows nothing about: how steps are decided or computed; notebooks.
Invariants: results are processed in the order in which steps were scheduled; with a stated landing two runs of
the same inputs make the same decisions, whatever the runner's speed; nothing waits for ever (`EngineStuck`).

One `step()`, two steps in flight, landing=1 (a result lands after one further step):

    schedule 1, submit          in flight: 1
    schedule 2, submit          in flight: 1 2     then land 1
    schedule 3, submit          in flight: 2 3     then land 2
    schedule 4: empty           in flight: 3       then land 3 (nothing else can go on)

An engine belongs to one thread: call it from there only.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, Self

from kvsched.config import SchedulerConfig
from kvsched.connector.base import ConnectorPair
from kvsched.door import check_config, check_request
from kvsched.faults import (
    Abort,
    Fault,
    FaultNeverFired,
    FaultPlan,
    FaultWatch,
    HoldExecution,
    HoldResult,
    fault_to_dict,
)
from kvsched.outputs import RequestOutput, TokenOutput
from kvsched.request import Request, RequestRefused, SamplingParams
from kvsched.runner.base import Gate, Runner
from kvsched.runner.synthetic import CostModel, SyntheticRunner
from kvsched.sched.output import StepOutput
from kvsched.sched.scheduler import Scheduler
from kvsched.step import NO_TRANSFERS, ScheduledStep, StepResult
from kvsched.trace.events import VERSION, FaultInjected, RunStarted
from kvsched.transfers import TransferDesk
from kvsched.watchdog import WARN_AT, NoProgressWarning, warning_text

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvsched.connector.disk import DiskTier
    from kvsched.connector.host import HostTier
    from kvsched.runner.torch_runner import TorchRunner

_MOST_IDLE_TURNS = 1000
"""Consecutive turns in which nothing is scheduled, computed or transferred, before the engine says it is stuck."""


class EngineStuck(RuntimeError):
    """Requests wait, but nothing is in flight and nothing can be scheduled."""


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer (transformers' all have it)."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def chat_text(tokenizer: Tokenizer, turns: Sequence[Mapping[str, str]]) -> str:
    """A conversation ([{"role": "user", "content": "…"}, …]) in the model's chat template, up to where the answer
    begins."""
    text: str = tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, tokenize=False)
    return text


@dataclass(slots=True)
class _Submitted:
    step: ScheduledStep
    future: Future[StepResult]
    number: int
    failed_blocks: frozenset[int]
    gate: Gate | None
    turns_to_hold: int

    @property
    def is_gated(self) -> bool:
        """Whether its execution still waits for something."""
        return self.gate is not None and not self.gate.is_open


class Engine:
    """Serves requests.

    config: the scheduler's settings; its max_model_len must fit the pool unless `max_model_len_is_explicit` is
        False (it then stands for what the model can do, and the pool bounds requests one by one).
    runner: computes steps.
    connector: both halves of a KV connector.
    faults: what is to be broken, and when.
    landing: after how many further steps a result lands (a full pipe, or a step in which nothing can be
        scheduled, lands the oldest earlier); None: as results come.
    tokenizer: needed for prompts and outputs as text. eos_token_ids: end a request unless it ignores them.
    record: keep all events in `events`. on_event: called with each event as it happens.
    meta: free data for the head of the trace.

    Raises ConfigError (a ValueError) for settings that could block it for ever.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        *,
        connector: ConnectorPair | None = None,
        faults: FaultPlan | None = None,
        landing: int | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        record: bool = True,
        on_event: Callable[[Any], None] | None = None,
        max_model_len_is_explicit: bool = True,
        meta: dict[str, Any] | None = None,
    ) -> None:
        check_config(config, max_model_len_is_explicit)
        if landing is not None and landing < 0:
            raise ValueError(f"landing is {landing}; give 0 or more further steps, or None for live results")
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.landing = landing
        self.events: list[Any] = []
        self.watch = FaultWatch(faults.faults if faults else ())
        self._record = record
        self._on_event = on_event
        self._gates: list[tuple[HoldExecution, Gate]] = []
        wants_events = record or on_event is not None or bool(self.watch.of(HoldExecution))
        self.scheduler = Scheduler(
            config,
            connector=connector.scheduler if connector else None,
            emit=self._emit if wants_events else None,
            slots_fault=self._slots_fault if self.watch.fails_slots else None,
            clock=runner.now,
            cap_at_pool=True,
            exact=True,
        )
        self._desk = self._make_desk(connector)
        self.ticks = 0
        self._in_flight: deque[_Submitted] = deque()
        self._num_submitted = 0
        self._side: list[Future[StepResult]] = []
        self._forgotten: tuple[str, ...] = ()
        self._idle = 0
        self._requests: dict[str, Request] = {}
        self._prompts: dict[str, str] = {}
        self._closed = False
        if wants_events:
            told = config.to_dict() | {"defers_frees": self.scheduler.kv.fence.on}
            self._emit(RunStarted(0, VERSION, told, "kvsched", dict(meta or {})))

    def _make_desk(self, connector: ConnectorPair | None) -> TransferDesk | None:
        if connector is None or connector.worker is None:
            return None
        landing = connector.transfer_landing
        if landing is None and self.landing is not None:
            landing = 1
        return TransferDesk(connector.worker, landing, self.watch, self._note_fault)

    @classmethod
    def synthetic(
        cls,
        num_blocks: int,
        *,
        cost: CostModel | None = None,
        vocab_size: int = 32_000,
        token_fn: Callable[[str, int], int] | None = None,
        landing: int | None = None,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Self:
        """An engine without a model, in virtual time (see SyntheticRunner).

        landing: max_in_flight - 1 if None, since virtual results are never late. options: further arguments of
        Engine. settings: those of SchedulerConfig.
        """
        config = SchedulerConfig(num_blocks=num_blocks).with_changes(**settings)
        runner = SyntheticRunner(cost, vocab_size, token_fn=token_fn)
        return cls(
            config,
            runner,
            landing=config.max_in_flight - 1 if landing is None else landing,
            max_model_len_is_explicit="max_model_len" in settings,
            **dict(options or {}),
        )

    @classmethod
    def from_model(
        cls,
        model: Any = "smollm2",
        *,
        device: str = "auto",
        dtype: str = "float32",
        seed: int = 0,
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        landing: int | None = None,
        connector: HostTier | DiskTier | None = None,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Self:
        """An engine that runs a model; needs torch and transformers.

        model: "smollm2", "random:llama-tiny" and the like, a folder, a hub id, or a LoadedModel.
        device: "auto", "cpu" or "cuda". num_blocks or kv_cache_memory (bytes): the size of the pool.
        connector: a store that full blocks are copied to, and loaded back from.
        options: further arguments of Engine. settings: those of SchedulerConfig; max_model_len defaults to what
        the model can do.
        Raises ModelUnavailable (a ValueError) that says how to get a missing model.
        """
        from kvsched.runner.torch_runner import create_runner

        explicit = "max_model_len" in settings
        runner = create_runner(
            model,
            device=device,
            dtype=dtype,
            seed=seed,
            num_blocks=num_blocks,
            kv_cache_memory=kv_cache_memory,
            max_model_len=settings.get("max_model_len"),
            block_size=settings.get("block_size", 16),
        )
        return cls.on_runner(
            runner,
            landing=landing,
            connector=connector,
            max_model_len_is_explicit=explicit,
            options=options,
            **settings,
        )

    @classmethod
    def on_runner(
        cls,
        runner: TorchRunner,
        *,
        landing: int | None = None,
        connector: HostTier | DiskTier | None = None,
        max_model_len_is_explicit: bool = False,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Self:
        """As `from_model`, on a runner that is there already, and new (see `TorchRunner.fresh`): its pool, its block
        size and its longest sequence are the engine's."""
        of_runner = {"block_size": runner.block_size, "max_model_len": runner.max_model_len}
        config = SchedulerConfig(num_blocks=runner.num_blocks).with_changes(**(settings | of_runner))
        given: dict[str, Any] = {
            "tokenizer": runner.tokenizer,
            "eos_token_ids": runner.eos_token_ids,
            "meta": {"model": runner.model_name, "device": str(runner.device)},
        } | dict(options or {})
        if connector is not None:
            from kvsched.runner.torch_tiers import open_tier

            given["connector"] = open_tier(connector, runner)
        return cls(config, runner, landing=landing, max_model_len_is_explicit=max_model_len_is_explicit, **given)

    # ---- requests

    @property
    def config(self) -> SchedulerConfig:
        """The settings in force."""
        return self.scheduler.config

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request.

        prompt: text (needs a tokenizer) or token ids. priority: smaller goes first under the PRIORITY policy.
        arrival_time: seconds on the runner's clock; now if None.
        Raises RequestRefused (a ValueError) for a request that could never be served, or whose id is in use.
        """
        sampling = sampling or SamplingParams()
        request = Request(
            request_id,
            self.check_request(request_id, prompt, priority=priority),
            sampling,
            priority=priority,
            arrival_time=self.runner.now() if arrival_time is None else arrival_time,
            stop_token_ids=() if sampling.ignore_eos else self.eos_token_ids,
        )
        self.scheduler.add_request(request)
        self._requests[request_id] = request
        if isinstance(prompt, str):
            self._prompts[request_id] = prompt
        else:
            self._prompts.pop(request_id, None)

    def check_request(self, request_id: str, prompt: str | Sequence[int], *, priority: int = 0) -> list[int]:
        """The prompt's token ids. Raises RequestRefused for a request that could never be served; queues nothing."""
        token_ids = self._encode(request_id, prompt)
        vocab_size = getattr(self.runner, "prompt_vocab_size", None)
        check_request(self.config, request_id, token_ids, vocab_size, priority)
        return token_ids

    def _encode(self, request_id: str, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            try:
                return [index(token) for token in prompt]
            except TypeError as error:
                raise RequestRefused(
                    f"request {request_id!r}: the prompt must be text or a sequence of token ids: {error}"
                ) from error
        if self.tokenizer is None:
            raise RequestRefused(
                f"request {request_id!r}: the prompt is text, but this engine has no tokenizer; give token ids"
            )
        return list(self.tokenizer.encode(prompt))

    def abort(self, *request_ids: str) -> list[str]:
        """Abort requests at once; unknown and finished ids are ignored. Returns the ids that were ended."""
        return self.scheduler.finish_requests(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether any request lives."""
        return self.scheduler.has_unfinished()

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not yet processed."""
        return len(self._in_flight)

    # ---- the loop

    def step(self) -> list[TokenOutput]:
        """One turn: schedule a step and submit it, then process the results that land.

        Returns what requests got. While the pipe is full and its oldest step is held by a fault nothing is
        scheduled; the turn passes all the same. Raises EngineStuck rather than turn for ever.
        """
        self.ticks += 1
        outputs: list[TokenOutput] = []
        while self._is_full():  # more than once where the depth was lowered
            if self._hold_oldest():
                self._count_idle_turns(busy=not self._in_flight[0].is_gated)
                return outputs
            outputs += self.deliver()
        step = self.schedule()
        outputs += self._land(step)
        moving = any(not entry.is_gated for entry in list(self._in_flight)[:1])
        moving |= self._desk is not None and self._desk.can_move(self._compute_is_held())
        self._count_idle_turns(not step.is_empty or bool(outputs) or moving)
        return outputs

    def schedule(self) -> ScheduledStep:
        """Decide the next step and submit it (half of `step`). Raises ValueError when the pipe is full."""
        if self._is_full():
            raise ValueError(
                f"{len(self._in_flight)} steps are in flight, max_in_flight is {self.config.max_in_flight}: deliver one"
            )
        for fault in self.watch.of(Abort):
            if fault.step == self.scheduler.step + 1 and self.abort(fault.request):
                self._note_fault(fault)
        step = self.scheduler.schedule()
        if step.preempted and step.is_empty and self.scheduler.num_fruitless == WARN_AT:
            text = warning_text(self.config, self.scheduler.kv.fence, step.preempted, step.step)
            warnings.warn(text, NoProgressWarning, stacklevel=2)
        self._submit(step)
        return step

    def deliver(self) -> list[TokenOutput]:
        """Process the oldest step in flight, waiting for its result (the other half of `step`). With nothing in
        flight: raises ValueError."""
        if not self._in_flight:
            raise ValueError("nothing is in flight; schedule a step first")
        entry = self._in_flight[0]
        if entry.gate is not None and entry.is_gated:
            raise ValueError(f"step {entry.step.step} is held by a fault until {entry.gate.name}; go on without it")
        self._in_flight.popleft()
        result = entry.future.result()
        self._check_side_steps()
        self.runner.advance(result.finished_at)
        transfers = result.transfers
        if self._desk is not None:
            ended = self._desk.collect(self.ticks, compute_held=self._compute_is_held())
            invalid = transfers.invalid_block_ids | entry.failed_blocks | ended.invalid_block_ids
            transfers = ended._replace(invalid_block_ids=invalid)
        return self._outputs_of(self.scheduler.update(entry.step, result._replace(transfers=transfers)))

    def _submit(self, step: ScheduledStep) -> None:
        failed = self._desk.start(step, self.ticks) if self._desk is not None else frozenset()
        if step.is_empty:
            self._forgotten += step.finished_request_ids
            if step.saves:
                self._side.append(self.runner.submit(step))
            return
        sent = step
        if self._forgotten:
            sent = step._replace(finished_request_ids=self._forgotten + step.finished_request_ids)
            self._forgotten = ()
        gate = self._gate_for(step)
        future = self.runner.submit(sent, gate)
        turns = sum(fault.steps for fault in self.watch.of(HoldResult) if fault.step == step.step)
        self._num_submitted += 1
        self._in_flight.append(_Submitted(step, future, self._num_submitted, failed, gate, turns))

    def _land(self, step: ScheduledStep) -> list[TokenOutput]:
        """Process what lands after a `schedule()` call."""
        outputs: list[TokenOutput] = []
        progressed = not step.is_empty
        while self._in_flight:
            lands = self._is_ripe(self._in_flight[0]) or self._is_full() or not progressed
            if not lands or self._hold_oldest():
                break
            outputs += self.deliver()
            progressed = True
        if step.is_empty and self._desk is not None and self._desk.pending:
            ended = self._desk.collect(
                self.ticks, wait=not progressed, compute_held=self._compute_is_held()
            )
            if ended != NO_TRANSFERS:
                result = StepResult(step.step, (), ended)
                outputs += self._outputs_of(self.scheduler.update(step, result))
        return outputs

    def _is_full(self) -> bool:
        return len(self._in_flight) >= self.config.max_in_flight

    def _is_ripe(self, entry: _Submitted) -> bool:
        """Whether a result lands of itself: it has come (live), or enough further steps were submitted."""
        if self.landing is None:
            return entry.future.done()
        return self._num_submitted - entry.number >= self.landing

    def _hold_oldest(self) -> bool:
        """Whether a fault keeps the oldest step, which would land now, for another turn; ask once a turn."""
        entry = self._in_flight[0]
        if entry.is_gated:
            return True
        if not entry.turns_to_hold:
            return False
        entry.turns_to_hold -= 1
        for fault in self.watch.of(HoldResult):
            if fault.step == entry.step.step:
                self._note_fault(fault)
        return True

    def _outputs_of(self, output: StepOutput) -> list[TokenOutput]:
        rows = [TokenOutput(i, tokens, output.finished.get(i)) for i, tokens in output.emitted]
        told = {row.request_id for row in rows}
        rows += [TokenOutput(i, (), reason) for i, reason in output.finished.items() if i not in told]
        return rows

    def _compute_is_held(self) -> bool:
        """Whether a step in flight, hence every one behind it, still waits at a gate."""
        return any(entry.is_gated for entry in self._in_flight)

    def _count_idle_turns(self, busy: bool) -> None:
        """Raises EngineStuck rather than turn for ever."""
        self._idle = 0 if busy or not self.has_unfinished_requests() else self._idle + 1
        if self._idle < _MOST_IDLE_TURNS:
            return
        living = ", ".join(request.id for request in list(self.scheduler.requests.values())[:5])
        gates = "; ".join(f"step {fault.step} waits for {gate.name}" for fault, gate in self._gates) or "none"
        faults = ", ".join(str(fault) for fault, _ in self.watch.fired) or "none"
        raise EngineStuck(
            f"nothing moved in {self._idle} turns, with {self.scheduler.kv.pool.num_free} blocks free; requests: "
            f"{living}; held steps: {gates}; faults that came to pass: {faults}. Give a fault an end (until_step), "
            f"hold for something that can happen, or abort the requests"
        )

    def _check_side_steps(self) -> None:
        """A failure in an empty step that only carried transfers must not pass unseen."""
        waiting = []
        for future in self._side:
            if future.done():
                future.result()
            else:
                waiting.append(future)
        self._side = waiting

    # ---- serving

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> Iterator[TokenOutput]:
        """Add one request per prompt and yield tokens of all requests as they come, until these have ended.

        sampling: one for all, or one per prompt. request_ids: "r0", "r1", … if None.
        Raises RequestRefused before anything runs if one of them is refused; none stays queued then.
        """
        ids = self._add_all(prompts, sampling, priorities, request_ids)
        return self._stream_until_ended(set(ids))

    def _stream_until_ended(self, ids: set[str]) -> Iterator[TokenOutput]:
        while any(request_id in self.scheduler.requests for request_id in ids):
            yield from self.step()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Run one request per prompt to its end; outputs in the order of the prompts. Arguments as in `stream`.

        Warns (FaultNeverFired) of faults that have not come to pass.
        """
        ids = self._add_all(prompts, sampling, priorities, request_ids)
        for _ in self._stream_until_ended(set(ids)):
            pass
        self.drain()
        self._warn_of_unfired_faults()
        return [self.output(request_id) for request_id in ids]

    def chat(
        self,
        conversations: Sequence[Sequence[dict[str, str]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """As `generate`, for conversations ([{"role": "user", "content": "…"}, …]) through the model's chat
        template. Raises ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer, hence no chat template; use generate() with token ids")
        return self.generate([chat_text(self.tokenizer, turns) for turns in conversations], sampling, **options)

    def _add_all(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        priorities: Sequence[int] | None,
        request_ids: Sequence[str] | None,
    ) -> list[str]:
        if isinstance(prompts, str):
            raise ValueError("prompts is one text; give a list of prompts")
        each = [sampling] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else list(sampling)
        ranks = [0] * len(prompts) if priorities is None else list(priorities)
        ids = [f"r{i}" for i in range(len(prompts))] if request_ids is None else list(request_ids)
        for name, given in (("sampling", each), ("priorities", ranks), ("request_ids", ids)):
            if len(given) != len(prompts):
                raise ValueError(f"{name} has {len(given)} entries for {len(prompts)} prompts; give one per prompt")
        added: list[str] = []
        try:
            for request_id, prompt, params, rank in zip(ids, prompts, each, ranks, strict=True):
                self.add_request(request_id, prompt, params, priority=rank)
                added.append(request_id)
        except Exception:
            self.abort(*added)
            raise
        return ids

    def drain(self) -> list[TokenOutput]:
        """Process everything in flight and in the air, scheduling nothing new if nothing lives."""
        outputs = self._step_while_busy()
        if self._desk is not None and self.scheduler.kept_for_save:  # these saves go out with the next step
            outputs += self.step()
            outputs += self._step_while_busy()
        for future in self._side:
            future.result()
        self._side = []
        return outputs

    def _step_while_busy(self) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        while self._in_flight or self.has_unfinished_requests() or (self._desk is not None and self._desk.pending):
            outputs += self.step()
        return outputs

    def output(self, request_id: str) -> RequestOutput:
        """A finished request's output. Raises ValueError if it is unknown or still lives."""
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(f"request {request_id!r} is unknown to this engine")
        reason = request.status.finish_reason
        if reason is None:
            raise ValueError(f"request {request_id!r} has not ended; call step() until it has")
        tokens = request.output_token_ids
        text = None
        if self.tokenizer is not None:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        prompt = self._prompts.get(request_id)
        prompt_ids = tuple(request.prompt_token_ids)
        return RequestOutput(request_id, prompt, prompt_ids, tuple(tokens), text, reason, request.num_preemptions)

    # ---- faults and events

    def inject(self, fault: Fault) -> None:
        """One more fault, from now on. Raises FaultError if it makes no sense, ValueError if this engine, made
        without events, cannot carry it out."""
        if isinstance(fault, HoldExecution) and self.scheduler.emit is None:
            raise ValueError("hold_execution waits for an event, but this engine has none; make it with record=True")
        self.watch.add(fault)
        if self.watch.fails_slots:
            self.scheduler.slots_fault = self._slots_fault

    @property
    def faults_never_fired(self) -> list[Fault]:
        """Planned faults that have not come to pass so far."""
        return self.watch.never_fired

    def _slots_fault(self, request_id: str, call: int, step: int) -> bool:
        fault = self.watch.slots_fault(request_id, call, step)
        if fault is None:
            return False
        self._note_fault(fault)
        return True

    def _note_fault(self, fault: Fault) -> None:
        first = self.watch.note(fault, self.scheduler.step)
        if first and self.scheduler.emit is not None:
            self._emit(FaultInjected(self.scheduler.step, fault_to_dict(fault)))

    def _gate_for(self, step: ScheduledStep) -> Gate | None:
        for fault in self.watch.of(HoldExecution):
            if fault.step == step.step:
                self._note_fault(fault)
                gate = Gate(f"{fault.until} {dict(fault.where)}")
                self._gates.append((fault, gate))
                return gate
        return None

    def _emit(self, event: Any) -> None:
        if self._record:
            self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)
        if self._gates:
            self._open_gates(event)

    def _open_gates(self, event: Any) -> None:
        for fault, gate in list(self._gates):
            if event.kind == fault.until and all(getattr(event, k) == v for k, v in fault.where.items()):
                gate.open()
                self._gates.remove((fault, gate))

    def _warn_of_unfired_faults(self) -> None:
        for fault in self.watch.never_fired:
            warnings.warn(f"never came to pass: {fault}", FaultNeverFired, stacklevel=3)

    @cached_property
    def registry(self) -> CollectorRegistry:
        """This engine's metrics under the names that vLLM uses (see kvsched.trace.prometheus), made when first asked
        for: for `prometheus_client.generate_latest(engine.registry)` or `start_http_server(8000, registry=…)`. They are
        counted when somebody scrapes. Raises ValueError on an engine that keeps no events."""
        if not self._record:
            raise ValueError("metrics are counted from events, but this engine keeps none; make it with record=True")
        from kvsched.trace.prometheus import EngineMetrics

        name = getattr(self.runner, "model_name", type(self.runner).__name__)
        return EngineMetrics(self.events, name, has_connector=self.scheduler.connector is not None).registry

    # ---- the end

    def close(self) -> None:
        """Open all gates and stop the runner. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for _, gate in self._gates:
            gate.open()
        self.runner.close()
        if self._desk is not None:
            self._desk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
