"""The frozen workload: 80 requests in one burst, in the shape of the original GPU experiment, without model or clock.

Owns: the workload, its driver, the digest of all decisions, the eight recorded rows.
Knows nothing about: recordings of other runs.
Invariants: everything is a function of the row's settings; equal digests mean that every scheduled count, block
id, preemption and finish was equal and came in the same order.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from importlib.resources import files
from typing import Any, NamedTuple

from kvsched.config import SchedulerConfig
from kvsched.request import Request, SamplingParams
from kvsched.sched.scheduler import Scheduler
from kvsched.step import ScheduledStep, StepResult

NUM_REQUESTS = 80
PROMPT_LEN = 256
SEED = 1792


class Row(NamedTuple):
    """Settings of one run. num_blocks counts the null block; depth: steps in flight at most."""

    condition: str = "affected"
    guard: bool = True
    num_blocks: int = 6200
    depth: int = 2
    async_scheduling: bool = True
    output_len: int = 1792
    fence: bool = True


class Outcome(NamedTuple):
    """What a run came to. Calls are calls of `schedule()`."""

    preemptions: int
    schedule_calls: int
    empty_calls: int
    calls_preempting_but_empty: int
    tokens_computed: int
    digest: str


CONDITIONS = {
    "affected": Row(),
    "async_off": Row("async_off", depth=1, async_scheduling=False),
    "connector_off": Row("connector_off", fence=False),
    "osl_1280": Row("osl_1280", output_len=1280),
}


def recorded_rows() -> list[tuple[Row, Outcome]]:
    """The eight rows recorded from the real scheduler."""
    data = json.loads(files("kvsched.conformance").joinpath("frozen_rows.json").read_text())
    rows = []
    for row in data["rows"]:
        settings = CONDITIONS[row["condition"]]._replace(guard=row["arm"] == "guard")
        rows.append((settings, Outcome(**{field: row[field] for field in Outcome._fields})))
    return rows


def config_for(row: Row) -> SchedulerConfig:
    """The scheduler's settings for a row."""
    return SchedulerConfig(
        num_blocks=row.num_blocks,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        max_model_len=PROMPT_LEN + row.output_len + 16,
        async_scheduling=row.async_scheduling,
        max_in_flight=row.depth,
        guard="stop_retry" if row.guard else "none",
        defer_block_free=row.fence,
    )


def make_requests(output_len: int) -> list[Request]:
    """The burst: equal output lengths, random prompts."""
    rng = random.Random(SEED)
    sampling = SamplingParams(max_tokens=output_len)
    return [
        Request(
            f"r{i}",
            [rng.randrange(100, 1000) for _ in range(PROMPT_LEN)],
            sampling,
            arrival_time=float(i),
        )
        for i in range(NUM_REQUESTS)
    ]


def token_at(request_index: int, position: int) -> int:
    """The token "sampled" at a position of a request (counted from the start of the prompt)."""
    return 100 + (request_index * 7919 + position * 104729) % 900


def run(row: Row) -> Outcome:
    """Run the workload to its end. The driver fills the pipe, then delivers the oldest step."""
    scheduler = Scheduler(config_for(row))
    for request in make_requests(row.output_len):
        scheduler.add_request(request)
    tally = _Tally()
    in_flight: deque[ScheduledStep] = deque()
    while scheduler.has_unfinished():
        while len(in_flight) < row.depth:
            step = scheduler.schedule()
            tally.scheduled(step)
            if step.is_empty:
                break
            in_flight.append(step)
        assert in_flight, "nothing in flight and nothing can be scheduled: the workload is stuck"
        step = in_flight.popleft()
        sampled = tuple(
            () if request_id in step.prefill_chunks else (token_at(int(request_id[1:]), start + count),)
            for request_id, start, count in zip(
                step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
            )
        )
        tally.delivered(scheduler.update(step, StepResult(step.step, sampled)).finished)
    return tally.outcome()


class _Tally:
    """Counts and the digest, event by event."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._encode = json.JSONEncoder(separators=(",", ":")).encode
        self._counts = dict.fromkeys(Outcome._fields[:-1], 0)

    def scheduled(self, step: ScheduledStep) -> None:
        joined = {data.id: data.block_ids for data in step.new_requests}
        blocks = [(i, joined.get(i) or step.new_block_ids.get(i, ())) for i in step.request_ids]
        counts = list(zip(step.request_ids, step.num_scheduled_tokens, strict=True))
        self._line(["schedule", counts, blocks, step.preempted])
        self._counts["schedule_calls"] += 1
        self._counts["empty_calls"] += step.is_empty
        self._counts["calls_preempting_but_empty"] += step.is_empty and bool(step.preempted)
        self._counts["preemptions"] += len(step.preempted)
        self._counts["tokens_computed"] += step.total_tokens

    def delivered(self, finished: dict[str, str]) -> None:
        self._line(["deliver", list(finished)])

    def _line(self, value: list[Any]) -> None:
        self._digest.update((self._encode(value) + "\n").encode())

    def outcome(self) -> Outcome:
        return Outcome(**self._counts, digest=self._digest.hexdigest())
