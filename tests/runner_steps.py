"""Hand-made steps: a minimal host that drives a runner without the scheduler."""

from __future__ import annotations

import itertools
from concurrent.futures import Future

from kvsched.request import SamplingParams
from kvsched.runner.base import Gate, Runner
from kvsched.step import Load, RequestData, Save, ScheduledStep, StepResult

GREEDY = SamplingParams(max_tokens=10_000)


class HandHost:
    """Decides steps as told, hands out blocks in the order given, and keeps what each request has been sampled.

    Steps may be submitted ahead: positions are counted here, tokens are only looked at by `land`.
    """

    def __init__(self, runner: Runner, block_size: int = 4, block_ids: list[int] | None = None) -> None:
        self.runner = runner
        self.block_size = block_size
        self.free = block_ids if block_ids is not None else list(range(1, 1000))
        self.numbers = itertools.count(1)
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.sampling: dict[str, SamplingParams] = {}
        self.joining: dict[str, bool] = {}
        self.gone: list[str] = []
        self.preempted: list[str] = []
        self.in_flight: list[tuple[ScheduledStep, Future[StepResult]]] = []

    def add(self, request_id: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> None:
        """A request that joins with the next step that computes something of it."""
        self.prompts[request_id], self.outputs[request_id] = list(prompt), []
        self.computed[request_id], self.tables[request_id] = 0, []
        self.sampling[request_id], self.joining[request_id] = sampling, False

    def finish(self, request_id: str) -> None:
        self._release(request_id)
        self.gone.append(request_id)

    def preempt(self, request_id: str) -> None:
        """Take its blocks; it joins again, from the start, with all tokens landed by then."""
        self._release(request_id)
        self.preempted.append(request_id)
        self.computed[request_id] = 0
        self.joining[request_id] = True

    def _release(self, request_id: str) -> None:
        self.free[:0] = reversed(self.tables[request_id])
        self.tables[request_id] = []

    def decide(self, counts: dict[str, int], **transfers: tuple[Load, ...] | tuple[Save, ...]) -> ScheduledStep:
        """A step that computes so many tokens of each request."""
        new, new_blocks, chunks, starts = [], {}, set(), []
        for request_id, count in counts.items():
            start = self.computed[request_id]
            starts.append(start)
            known = self.prompts[request_id] + self.outputs[request_id]
            owed = sum(request_id in step.request_ids for step, _ in self.in_flight)
            if start + count < len(known) and not owed:
                chunks.add(request_id)
            missing = -(-(start + count) // self.block_size) - len(self.tables[request_id])
            blocks = [self.free.pop(0) for _ in range(missing)]
            self.tables[request_id] += blocks
            if request_id in self.joining:
                resumed = self.joining.pop(request_id)
                new.append(self._data(request_id, known, resumed))
            elif blocks:
                new_blocks[request_id] = tuple(blocks)
            self.computed[request_id] = start + count
        step = ScheduledStep(
            step=next(self.numbers),
            seq=0,
            request_ids=tuple(counts),
            num_scheduled_tokens=tuple(counts.values()),
            num_computed_tokens=tuple(starts),
            prefill_chunks=frozenset(chunks),
            new_block_ids=new_blocks,
            new_requests=tuple(new),
            preempted=tuple(self.preempted),
            finished_request_ids=tuple(self.gone),
            allocate_calls=0,
            **transfers,  # type: ignore[arg-type]
        )
        self.preempted, self.gone = [], []
        return step

    def _data(self, request_id: str, known: list[int], resumed: bool) -> RequestData:
        return RequestData(
            id=request_id,
            token_ids=tuple(known),
            block_ids=tuple(self.tables[request_id]),
            num_computed_tokens=0,
            num_prompt_tokens=len(self.prompts[request_id]),
            sampling=self.sampling[request_id],
            resumed=resumed,
        )

    def submit(self, counts: dict[str, int], gate: Gate | None = None) -> Future[StepResult]:
        step = self.decide(counts)
        future = self.runner.submit(step, gate)
        self.in_flight.append((step, future))
        return future

    def land(self) -> StepResult:
        """Take the oldest result and append its tokens."""
        step, future = self.in_flight.pop(0)
        result = future.result(timeout=60)
        for request_id, tokens in zip(step.request_ids, result.sampled_token_ids, strict=True):
            self.outputs[request_id] += tokens
        return result

    def run(self, counts: dict[str, int]) -> StepResult:
        """Submit and land everything."""
        self.submit(counts)
        while len(self.in_flight) > 1:
            self.land()
        return self.land()

    def generate(self, request_id: str, num_tokens: int, depth: int = 1) -> list[int]:
        """Prefill a request in one step and decode it, with `depth` steps in flight."""
        self.submit({request_id: len(self.prompts[request_id])})
        for _ in range(num_tokens - 1):
            while len(self.in_flight) >= depth:
                self.land()
            self.submit({request_id: 1})
        while self.in_flight:
            self.land()
        return self.outputs[request_id]
