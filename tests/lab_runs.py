"""Small runs for the tests of the lab: a scheduler driven without engine or model, its events kept.

Owns: `record`, which drives the bare scheduler the way an engine does, and a few named runs.
Knows nothing about: widgets, sessions. Tokens are a function of request and position, so that runs repeat.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kvsched.config import SchedulerConfig
from kvsched.request import Request, SamplingParams
from kvsched.sched.scheduler import Scheduler
from kvsched.step import ScheduledStep, StepResult
from kvsched.trace.events import VERSION, RunStarted


class Ask(NamedTuple):
    """A request to be made: it arrives before step `at`."""

    id: str
    num_prompt_tokens: int
    max_tokens: int
    at: int = 1
    priority: int = 0
    seed: int = 0


class Recorder:
    """A scheduler and its events. step(): one schedule() call; land(): process the oldest output."""

    def __init__(self, config: SchedulerConfig, asks: Sequence[Ask], fails: Collection[int] = ()) -> None:
        self.config = config
        head = config.to_dict() | {"defers_frees": config.defers_frees(False)}
        self.events: list[Any] = [RunStarted(0, VERSION, head, "kvsched", {})]
        self.asks = sorted(asks, key=lambda ask: ask.at)
        self.fails = set(fails)
        self.scheduler = Scheduler(
            config,
            emit=self.events.append,
            slots_fault=self._fails_call,
            clock=lambda: 0.02 * self.scheduler.step,
        )
        self.in_flight: list[ScheduledStep] = []
        self.requests: dict[str, Request] = {}
        self._add_arrivals()

    def _fails_call(self, request_id: str, call: int, step: int) -> bool:
        return call in self.fails

    def _add_arrivals(self) -> None:
        while self.asks and self.asks[0].at <= self.scheduler.step + 1:
            ask = self.asks.pop(0)
            rng = random.Random(ask.seed or ask.id)
            prompt = [rng.randrange(100, 1000) for _ in range(ask.num_prompt_tokens)]
            sampling = SamplingParams(max_tokens=ask.max_tokens)
            request = Request(ask.id, prompt, sampling, priority=ask.priority, arrival_time=float(len(self.requests)))
            self.requests[ask.id] = request
            self.scheduler.add_request(request)

    @property
    def finished(self) -> bool:
        return not self.asks and not self.scheduler.has_unfinished()

    def land(self) -> None:
        step = self.in_flight.pop(0)
        rows = []
        for request_id, start, num in zip(
            step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
        ):
            chunk = request_id in step.prefill_chunks
            rows.append(() if chunk else (100 + (sum(request_id.encode()) * 7919 + (start + num) * 104729) % 900,))
        self.scheduler.update(step, StepResult(step.step, tuple(rows)))

    def step(self) -> None:
        """One schedule() call; before it the oldest output, if no further step may be in flight."""
        if len(self.in_flight) >= self.scheduler.config.max_in_flight:
            self.land()
        self._add_arrivals()
        step = self.scheduler.schedule()
        if step.request_ids:
            self.in_flight.append(step)
        elif self.in_flight:
            self.land()


def record(
    config: SchedulerConfig, asks: Sequence[Ask], *, fails: Collection[int] = (), max_steps: int = 100_000
) -> list[Any]:
    """Events of a whole run, or of its first `max_steps` steps."""
    recorder = Recorder(config, asks, fails)
    while not recorder.finished and recorder.scheduler.step < max_steps:
        recorder.step()
    while recorder.in_flight and recorder.scheduler.step < max_steps:
        recorder.land()
    return recorder.events


SMALL_CONFIG = SchedulerConfig(
    num_blocks=11,
    block_size=4,
    max_num_seqs=3,
    max_num_batched_tokens=16,
    max_model_len=64,
    max_in_flight=3,
    reserve_full_isl=False,
    defer_block_free=True,
)
SMALL_ASKS = (
    Ask("r1", 7, 10),
    Ask("r2", 10, 8),
    Ask("r3", 6, 12, at=2),
    Ask("r4", 9, 6, at=4),
    Ask("r5", 5, 12, at=6),
    Ask("r6", 8, 9, at=8),
)


def small_run(**changes: Any) -> list[Any]:
    """Six requests in ten blocks of four tokens, three steps in flight: preemptions, guard stops, deferred frees."""
    return record(SMALL_CONFIG.with_changes(**changes), SMALL_ASKS, fails={14})


def large_run(num_blocks: int = 10_000, max_steps: int = 2_000) -> list[Any]:
    """128 at a time in a pool of the size given, under pressure."""
    rng = random.Random(2024)
    config = SchedulerConfig(
        num_blocks=num_blocks + 1,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        defer_block_free=True,
        reserve_full_isl=True,
    )
    asks = [
        Ask(f"r{i}", rng.randrange(200, 1600), rng.randrange(200, 1200), at=1 + i * 4) for i in range(max_steps // 4)
    ]
    return record(config, asks, max_steps=max_steps)
