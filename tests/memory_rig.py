"""Drives a bare scheduler on a `MemoryModel` in random order, as scheduler, device and copies might really interleave.

At any moment one of these happens: a request arrives or is aborted; a step is scheduled; the device computes the
oldest step it has not computed; a load writes its blocks (any time between its start and its report: it is not
ordered with the compute); the oldest step's output is processed, with reports of transfers. One seed is one run.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvsched.config import SchedulerConfig
from kvsched.connector.scripted import KvRule, ScriptedConnector
from kvsched.request import Request, SamplingParams
from kvsched.sched.scheduler import Scheduler
from kvsched.step import Load, ScheduledStep, StepResult, Transfers
from tests.memory_model import MemoryModel, Violation, expected_output

_MOST_ACTIONS = 20_000


class WrongToken(AssertionError):
    """A request was given a token that was computed on wrong memory."""


class Arrival(NamedTuple):
    """A request to come."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[int, ...] = ()
    priority: int = 0


@dataclass(slots=True)
class _InFlight:
    step: ScheduledStep
    reported_before: frozenset[int]
    sampled: tuple[tuple[int, ...], ...] | None = None


@dataclass(slots=True)
class _Loading:
    load: Load
    number: int
    tokens: tuple[int, ...]
    fails_from: int | None
    written: bool = False


@dataclass(slots=True)
class Chances:
    """How often things happen, relative to each other; and how often a load fails or a request is aborted."""

    weights: Mapping[str, float] = field(
        default_factory=lambda: {"arrive": 1, "schedule": 3, "compute": 2, "write": 2, "deliver": 2}
    )
    load_fails: float = 0.0
    abort: float = 0.0


class Rig:
    """One run. seed: of everything random. rules: of the scripted connector, None for none."""

    def __init__(
        self,
        seed: int,
        config: SchedulerConfig,
        arrivals: list[Arrival],
        rules: Mapping[str, KvRule] | None = None,
        chances: Chances | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.chances = chances or Chances()
        connector = None if rules is None else ScriptedConnector(rules, config.block_size, whole_blocks=False)
        self.events: list[Any] = []
        self.scheduler = Scheduler(
            config, connector=connector, emit=self.events.append, cap_at_pool=True, exact=True
        )
        self.memory = MemoryModel(config.num_blocks, config.block_size)
        self.requests: dict[str, Request] = {}
        self.emitted: dict[str, list[int]] = {}
        self.in_flight: deque[_InFlight] = deque()
        self._to_come = deque(arrivals)
        self._sync: list[_Loading] = []
        self._async: list[_Loading] = []
        self._num_loads = 0
        self._reported: set[int] = set()
        self._excusable: dict[int, frozenset[int]] = {}

    # ---- the run

    def run(self) -> None:
        """Until everything has ended and nothing is in flight or in the air."""
        for _ in range(_MOST_ACTIONS):
            if not (self._to_come or self.scheduler.has_unfinished() or self.in_flight or self._pending()):
                return
            self._act()
            check_books(self.scheduler)
        raise AssertionError(f"not finished after {_MOST_ACTIONS} actions: {self.scheduler.requests}")

    def _pending(self) -> bool:
        return bool(self._async or self.scheduler.awaiting_load or self.scheduler.kept_for_save)

    def _act(self) -> None:
        weights = self.chances.weights
        (action,) = self.rng.choices(list(weights), list(weights.values()))
        if action == "arrive" and self._to_come:
            self._add(self._to_come.popleft())
        elif action == "schedule" and len(self.in_flight) < self.scheduler.config.max_in_flight:
            self._schedule()
        elif action == "compute":
            self._compute_next()
        elif action == "write" and (unwritten := [x for x in (*self._sync, *self._async) if not x.written]):
            self._write(self.rng.choice(unwritten))
        elif action == "deliver" and self.in_flight:
            self._deliver(self.in_flight.popleft())
        if self.rng.random() < self.chances.abort and self.requests:
            self.scheduler.finish_requests([self.rng.choice(list(self.requests))])

    def _add(self, arrival: Arrival) -> None:
        request = Request(
            arrival.id,
            arrival.prompt,
            SamplingParams(max_tokens=arrival.max_tokens),
            priority=arrival.priority,
            arrival_time=float(len(self.requests)),
            stop_token_ids=arrival.stop,
        )
        self.requests[request.id] = request
        self.emitted[request.id] = []
        self.scheduler.add_request(request)

    def _schedule(self) -> None:
        step = self.scheduler.schedule()
        for load in step.loads:
            self._num_loads += 1
            fails = self.rng.random() < self.chances.load_fails
            entry = _Loading(
                load,
                self._num_loads,
                tuple(self.requests[load.request_id].token_ids),
                self.rng.randrange(len(load.block_ids)) if fails else None,
            )
            (self._async if load.asynchronous else self._sync).append(entry)
        if step.is_empty:
            self._update(step, (), self._report_of(step))
        else:
            self.in_flight.append(_InFlight(step, frozenset(self._reported)))

    def _compute_next(self) -> None:
        for entry in self.in_flight:
            if entry.sampled is None:
                self._compute(entry)
                return

    def _compute(self, entry: _InFlight) -> None:
        loads = {id(load) for load in entry.step.loads}
        for loading in self._sync:
            if id(loading.load) in loads and not loading.written:
                self._write(loading)
        entry.sampled = self.memory.compute(entry.step)
        self._excusable[entry.step.step] = entry.reported_before

    def _write(self, loading: _Loading) -> None:
        self.memory.fill(loading.load, loading.tokens, loading.number, loading.fails_from)
        loading.written = True

    # ---- reports

    def _deliver(self, entry: _InFlight) -> None:
        if entry.sampled is None:
            self._compute(entry)
        assert entry.sampled is not None
        self._update(entry.step, entry.sampled, self._report_of(entry.step))

    def _report_of(self, step: ScheduledStep) -> Transfers:
        """Failed blocks of the step's own loads, and what of the transfers in the air is reported now."""
        mine = {id(load) for load in step.loads}
        ended = [entry for entry in self._sync if id(entry.load) in mine and entry.written]
        self._sync = [entry for entry in self._sync if entry not in ended]
        landed = [entry for entry in self._async if entry.written and self.rng.random() < 0.6]
        self._async = [entry for entry in self._async if entry not in landed]
        self.rng.shuffle(landed)
        invalid: set[int] = set()
        for entry in (*ended, *landed):
            if entry.fails_from is not None:
                invalid.update(entry.load.block_ids[entry.fails_from :])
                self._reported.add(entry.number)
        sent = [request_id for request_id in self.scheduler.kept_for_save if self.rng.random() < 0.5]
        return Transfers(tuple(entry.load.request_id for entry in landed), tuple(sent), frozenset(invalid))

    def _update(self, step: ScheduledStep, sampled: tuple[tuple[int, ...], ...], transfers: Transfers) -> None:
        output = self.scheduler.update(step, StepResult(step.step, sampled, transfers))
        for request_id, tokens in output.emitted:
            if min(tokens) < 0:
                raise WrongToken(f"step {step.step}: {request_id} is given a token computed on wrong memory")
            self.emitted[request_id] += tokens

    # ---- verdicts

    def wrong_reads(self) -> list[Violation]:
        """Violations, without those of steps that had been scheduled before the failure of the synchronous load they
        computed on was reported: their output is dropped."""
        return [v for v in self.memory.violations if not self._is_excused(v)]

    def _is_excused(self, violation: Violation) -> bool:
        load = getattr(violation.found, "load", None)
        return load is not None and load not in self._excusable[violation.step]

    def check_outputs(self) -> None:
        """Every output is exact, as far as it goes; those of normally ended requests go to their end."""
        for request in self.requests.values():
            most = min(request.sampling.max_tokens, self.scheduler.config.max_model_len - request.num_prompt_tokens)
            right = expected_output(request.prompt_token_ids, most, tuple(request.stop_token_ids))
            got = request.output_token_ids
            assert self.emitted[request.id] == got, request
            assert got == right[: len(got)], request
            if request.status.finish_reason in ("stop", "length"):
                assert got == right, request
        pool = self.scheduler.kv.pool
        assert pool.num_free == pool.num_blocks - 1
        assert not self.scheduler.kv.fence.deferred


def check_books(s: Scheduler) -> None:
    """Reference counts equal the holders; free are those that nobody holds."""
    tables = [r.block_ids for group in (s.requests, s.awaiting_load, s.kept_for_save) for r in group.values()]
    tables += [list(entry.block_ids) for entry in s.kv.fence.deferred]
    holders = Counter(block for table in tables for block in table)
    pool = s.kv.pool
    assert {b: pool.refs(b) for b in range(pool.num_blocks) if pool.refs(b)} == holders
    free = list(pool.free_ids())
    assert len(free) == pool.num_free
    assert set(free) == set(range(1, pool.num_blocks)) - set(holders)
    for request in s.requests.values():
        assert min(request.num_output_placeholders, request.num_in_flight_tokens, request.num_stale_output_tokens) >= 0
        assert request.num_computed_tokens <= request.num_slots


# ---- random workloads


def random_rig(seed: int, mode: str) -> Rig:
    """A small workload on a small pool. mode: "plain" (no connector), "loads", or "failing" (loads fail, too).

    Prompts are cut from two texts, some with a slip in the middle, so that prefixes are shared and part ways anywhere.
    """
    rng = random.Random(f"{mode} {seed}")
    config = _random_config(rng)
    texts = [[rng.randrange(40) for _ in range(30)] for _ in range(2)]
    longest = min(24, config.num_usable_slots - 1, config.max_model_len - 2)
    arrivals, rules = [], {}
    for i in range(rng.randint(2, 10)):
        prompt = rng.choice(texts)[: rng.randint(1, longest)]
        if rng.random() < 0.3:
            prompt[rng.randrange(len(prompt))] = rng.randrange(40)
        stop = tuple(rng.sample(range(40), rng.choice([0, 0, 3])))
        arrivals.append(Arrival(f"r{i}", tuple(prompt), rng.randint(1, 12), stop, rng.randint(0, 2)))
        if rng.random() < 0.6:
            rules[f"r{i}"] = KvRule(
                external_tokens=rng.randint(0, 24),
                asynchronous=rng.random() < 0.5,
                keeps_blocks=rng.random() < 0.3,
                unknown_lookups=rng.choice([0, 0, 1, 3]),
                once=rng.random() < 0.3,
                drops_stale=rng.random() < 0.3,
            )
    chances = Chances(
        {action: rng.choice([0.5, 1, 2, 4]) for action in ("arrive", "schedule", "compute", "write", "deliver")},
        load_fails=0.4 if mode == "failing" else 0.0,
        abort=rng.choice([0.0, 0.0, 0.02]),
    )
    return Rig(seed, config, arrivals, None if mode == "plain" else rules, chances)


def _random_config(rng: random.Random) -> SchedulerConfig:
    depth = rng.randint(1, 4)
    return SchedulerConfig(
        num_blocks=rng.randint(9, 25),
        block_size=rng.choice([2, 4]),
        max_num_seqs=rng.choice([2, 4, 16]),
        max_num_batched_tokens=rng.choice([6, 16, 64]),
        max_model_len=rng.choice([30, 200]),
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        enable_prefix_caching=rng.random() < 0.8,
        async_scheduling=depth > 1 or rng.random() < 0.5,
        max_in_flight=depth,
        policy=rng.choice(["fcfs", "priority"]),
        reserve_full_isl=rng.random() < 0.7,
        guard=rng.choice(["stop_retry", "stop_retry", "none"]),
        load_failure_policy=rng.choice(["recompute", "fail"]),
        drop_stale_output=rng.random() < 0.2,
    )
