"""Drives the bare scheduler without a runner: for tests that state what is decided in which call.

The driver of the public reports, depth d (steps in flight at most): call `schedule()`, queue a non-empty step, then
process the oldest one when d are queued or when the call came back empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.connector.scripted import KvRule, ScriptedConnector
from kvsched.request import Request, SamplingParams
from kvsched.sched.output import StepOutput
from kvsched.sched.scheduler import Scheduler
from kvsched.step import NO_TRANSFERS, ScheduledStep, StepResult, Transfers


class Drive:
    """One scheduler, its steps in flight, and what came out.

    usable: blocks without the null block. The defaults of the public reports: block size 4, budget 64, prefix caching
    and deferred frees off. rules: a scripted connector. fail_calls: numbers of the calls for slots that fail
    (the set may grow while the run goes on).
    token: (request id, index in its output) -> the token sampled; by default 1000 x (how manieth request, from 1) +
    index.
    """

    def __init__(
        self,
        usable: int,
        depth: int = 1,
        *,
        rules: Mapping[str, KvRule] | None = None,
        whole_blocks: bool = True,
        fail_calls: set[int] | None = None,
        token: Callable[[str, int], int] | None = None,
        exact: bool = False,
        **settings: Any,
    ) -> None:
        settings = {
            "block_size": 4,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": False,
            "defer_block_free": False,
            "max_in_flight": depth,
        } | settings
        config = SchedulerConfig(num_blocks=usable + 1).with_changes(**settings)
        self.connector = None
        if rules is not None:
            self.connector = ScriptedConnector(rules, config.block_size, whole_blocks=whole_blocks)
        self.events: list[Any] = []
        self.scheduler = Scheduler(
            config,
            connector=self.connector,
            emit=self.events.append,
            slots_fault=None if fail_calls is None else lambda _, call, __: call in fail_calls,
            exact=exact,
        )
        self.depth = depth
        self.in_flight: deque[ScheduledStep] = deque()
        self.calls: list[ScheduledStep] = []
        self.requests: dict[str, Request] = {}
        self._number: dict[str, int] = {}
        self.emitted: dict[str, list[int]] = {}
        self._token = token

    # ---- driving

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int, **options: Any) -> Request:
        """Add a request. prompt: tokens, or their number. options: priority, stop_token_ids; arrival is the order of
        adding."""
        number = self._number[request_id] = len(self.requests) + 1
        base = 100_000 * number
        tokens = prompt if isinstance(prompt, list) else [base + i for i in range(prompt)]
        sampling = SamplingParams(max_tokens=max_tokens)
        options = {"arrival_time": float(len(self.requests))} | options
        request = Request(request_id, tokens, sampling, **options)
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        self.emitted.setdefault(request_id, [])
        return request

    def schedule(self) -> ScheduledStep:
        """One call; a non-empty step goes in flight."""
        step = self.scheduler.schedule()
        self.calls.append(step)
        if not step.is_empty:
            self.in_flight.append(step)
        return step

    def deliver(self, transfers: Transfers = NO_TRANSFERS) -> StepOutput:
        """Process the oldest step in flight."""
        return self._update(self.in_flight.popleft(), transfers)

    def report(self, *, recving: tuple[str, ...] = (), invalid: frozenset[int] = frozenset()) -> StepOutput:
        """Report transfers through the last call, which was empty."""
        step = self.calls[-1]
        assert step.is_empty, "only an empty step can report transfers alone"
        return self._update(step, Transfers(recving, (), invalid))

    def _update(self, step: ScheduledStep, transfers: Transfers) -> StepOutput:
        output = self.scheduler.update(step, StepResult(step.step, self._sample(step), transfers))
        for request_id, tokens in output.emitted:
            self.emitted[request_id] += tokens
        return output

    def _sample(self, step: ScheduledStep) -> tuple[tuple[int, ...], ...]:
        rows = []
        for request_id, start, count in zip(
            step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
        ):
            index = start + count - self.requests[request_id].num_prompt_tokens
            rows.append(() if request_id in step.prefill_chunks else (self.token_at(request_id, index),))
        return tuple(rows)

    def token_at(self, request_id: str, index: int) -> int:
        """The token sampled as number `index` (from 0) of a request's output."""
        if self._token is not None:
            return self._token(request_id, index)
        return 1000 * self._number[request_id] + index

    def turn(self) -> ScheduledStep:
        """One call, then what the driver processes after it."""
        step = self.schedule()
        if len(self.in_flight) >= self.depth or (step.is_empty and self.in_flight):
            self.deliver()
        return step

    def run(self, limit: int = 500) -> None:
        """Turn until everything has finished and nothing is in flight."""
        while self.scheduler.has_unfinished() or self.in_flight:
            assert len(self.calls) < limit, f"not finished after {limit} calls"
            self.turn()

    # ---- looking

    @property
    def free(self) -> int:
        """Free blocks."""
        return self.scheduler.kv.pool.num_free

    @property
    def deferred(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """Deferred frees: (fence, request, blocks)."""
        return [tuple(entry) for entry in self.scheduler.kv.fence.deferred]

    @property
    def running(self) -> list[str]:
        """Ids in `running`, in order."""
        return [request.id for request in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        """Ids in `waiting`, in order."""
        return [request.id for request in self.scheduler.waiting]

    @property
    def loading(self) -> list[str]:
        """Ids in `kv_holding_waiting`, in order."""
        return [request.id for request in self.scheduler.kv_holding_waiting]

    @property
    def preemptions(self) -> int:
        """Preemptions of the whole run."""
        return sum(request.num_preemptions for request in self.requests.values())

    @property
    def non_empty(self) -> list[ScheduledStep]:
        """Calls that scheduled something."""
        return [step for step in self.calls if not step.is_empty]

    @property
    def num_tokens_computed(self) -> int:
        """Scheduled tokens of the whole run."""
        return sum(step.total_tokens for step in self.calls)

    def log(self) -> list[tuple[Any, ...]]:
        """Every decision of the run, to compare two runs."""
        return [(scheduled(step), step.preempted, step.allocate_calls, dict(step.new_block_ids)) for step in self.calls]

    def happened(self, kind: str) -> list[Any]:
        """Events of one kind, in order."""
        return [event for event in self.events if event.kind == kind]


def scheduled(step: ScheduledStep) -> dict[str, int]:
    """Tokens per request of a step, in its order."""
    return dict(zip(step.request_ids, step.num_scheduled_tokens, strict=True))
