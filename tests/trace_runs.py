"""Runs to record: a seeded one in which everything happens, and the comparison of folded with live state.

`RandomRun` drives the bare scheduler through arrivals, steps, deliveries, aborts, failed calls, loads that land, fail
or never come, saves, and settings changed on the way. One seed, one run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.connector.scripted import KvRule, ScriptedConnector
from kvsched.connector.tier import TierConnector
from kvsched.request import Request, SamplingParams
from kvsched.sched.scheduler import Scheduler
from kvsched.step import Load, ScheduledStep, StepResult, Transfers
from kvsched.trace.events import VERSION, Event, RunStarted
from kvsched.trace.state import State


def head(scheduler: Scheduler) -> RunStarted:
    """What opens the trace of a bare scheduler."""
    config = scheduler.config.to_dict() | {"defers_frees": scheduler.kv.fence.on}
    return RunStarted(0, VERSION, config, "kvsched", {})


def make_head(**settings: Any) -> RunStarted:
    """The head of a trace written by hand."""
    settings = {"block_size": 4, "defers_frees": False} | settings
    defers = settings.pop("defers_frees")
    config = SchedulerConfig(num_blocks=settings.pop("num_blocks", 9)).with_changes(**settings)
    return RunStarted(0, VERSION, config.to_dict() | {"defers_frees": defers}, "by hand", {})


def random_settings(draw: random.Random) -> dict[str, Any]:
    """Settings of a small, crowded house."""
    size = draw.choice((1, 2, 4))
    chunked = draw.random() < 0.8
    return {
        "num_blocks": draw.randrange(8, 28),
        "block_size": size,
        "max_num_seqs": draw.choice((2, 4, 16)),
        "max_num_batched_tokens": draw.choice((5, 12, 40)) if chunked else 40,
        "max_model_len": 7 * size,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": draw.choice((0, 0, 3)) if chunked else 0,
        "enable_prefix_caching": draw.random() < 0.7,
        "async_scheduling": draw.random() < 0.6,
        "max_in_flight": draw.choice((1, 2, 2, 3)),
        "policy": draw.choice(("fcfs", "priority")),
        "reserve_full_isl": draw.random() < 0.5,
        "guard": draw.choice(("stop_retry", "none")),
        "defer_block_free": draw.choice((True, True, False, "auto")),
        "load_failure_policy": draw.choice(("recompute", "fail")),
        "drop_stale_output": draw.random() < 0.2,
        "seq_slots": draw.choice(("running", "scheduled")),
    }


class RandomRun:
    """One run. events: what it told, head first. Iterating does one thing at a time and names it."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.draw = random.Random(seed)
        self.config = SchedulerConfig(num_blocks=8).with_changes(**random_settings(self.draw) | settings)
        self.rules: dict[str, KvRule] = {}
        self.connector = self._connector()
        self.events: list[Event] = []
        faulty = self.draw.random() < 0.5
        self.scheduler = Scheduler(
            self.config,
            connector=self.connector,
            emit=self.events.append,
            slots_fault=(lambda _request, call, _step: call % 17 == 0) if faulty else None,
            clock=self._clock,
        )
        self.time = 0.0
        self.events.append(head(self.scheduler))
        self.num_added = 0
        self.in_flight: deque[ScheduledStep] = deque()
        self.empty: ScheduledStep | None = None
        self.in_air: dict[str, Load] = {}
        self.saved: set[str] = set()

    def _connector(self) -> ScriptedConnector | TierConnector | None:
        """None, a scripted one, or a store of a few blocks."""
        chance = self.draw.random()
        if chance < 0.4:
            return None
        if chance < 0.75 or self.config.drop_stale_output:
            return ScriptedConnector({}, self.config.block_size)
        return TierConnector(self.config.block_size, 1, self.draw.randrange(2, 30), asynchronous=chance < 0.9)

    def _clock(self) -> float:
        return self.time

    def play(self, num_actions: int = 160) -> Iterator[str]:
        """Do so many things; yields the name of each after it."""
        for _ in range(num_actions):
            self.time += 0.25
            actions = (self.add, self.schedule, self.deliver, self.abort, self.reset, self.configure)
            (action,) = self.draw.choices(actions, (3, 12, 12, 1, 0.4, 0.2))
            if action():
                yield action.__name__

    def add(self) -> bool:
        """A request arrives: a prompt that may share its beginning with others."""
        draw, config = self.draw, self.config
        if len(self.scheduler.requests) > 8:
            return False
        most = min(config.max_model_len, config.num_usable_slots, config.max_num_batched_tokens)
        if config.enable_chunked_prefill:
            most = min(config.max_model_len, config.num_usable_slots)
        name = f"r{self.num_added}"
        self.num_added += 1
        if isinstance(self.connector, ScriptedConnector):
            self.connector.rules[name] = KvRule(
                draw.choice((0, 2, 4, 8)),
                draw.random() < 0.7,
                draw.random() < 0.3,
                draw.choice((0, 0, 2)),
                drops_stale=draw.random() < 0.2,
                unknown_after_failure=draw.choice((0, 0, 1, 2)),
            )
        tokens = [(i * 7) % 5 for i in range(draw.randrange(1, most))] + [draw.randrange(50)]
        sampling = SamplingParams(max_tokens=draw.randrange(1, 12), stop_token_ids=(3,))
        priority = draw.randrange(3)
        self.scheduler.add_request(Request(name, tokens[:most], sampling, priority=priority, arrival_time=self.time))
        return True

    def schedule(self) -> bool:
        """A call of `schedule()`, if there is room in flight."""
        if len(self.in_flight) >= self.scheduler.config.max_in_flight:
            return False
        step = self.scheduler.schedule()
        if step.is_empty:
            self.empty = step
        else:
            self.in_flight.append(step)
        self.in_air.update((load.request_id, load) for load in step.loads if load.asynchronous)
        self.saved.update(save.request_id for save in step.saves if save.final)
        return True

    def deliver(self) -> bool:
        """The oldest step's output, or an empty step's, with what transfers have ended."""
        step = self.in_flight.popleft() if self.in_flight and self.draw.random() < 0.8 else self.empty
        if step is None:
            return False
        if step is self.empty:
            self.empty = None
        transfers = self._transfers(step)
        rows = tuple(() if i in step.prefill_chunks else (self.draw.randrange(50),) for i in step.request_ids)
        self.scheduler.update(step, StepResult(step.step, rows, transfers))
        return True

    def _transfers(self, step: ScheduledStep) -> Transfers:
        landed = [name for name in self.in_air if self.draw.random() < 0.4]
        bad: set[int] = set()
        ended = [*map(self.in_air.pop, landed), *(load for load in step.loads if not load.asynchronous)]
        for load in ended:
            if self.draw.random() < 0.25:
                bad.update(load.block_ids[self.draw.randrange(len(load.block_ids)) :])
        saves_are_told = isinstance(self.connector, TierConnector)
        sendable = [n for n in self.scheduler.kept_for_save if n in self.saved or not saves_are_told]
        sent = [name for name in sendable if self.draw.random() < 0.4]
        return Transfers(tuple(landed), tuple(sent), frozenset(bad))

    def abort(self) -> bool:
        """Somebody gives up."""
        if not self.scheduler.requests:
            return False
        self.scheduler.finish_requests([self.draw.choice(list(self.scheduler.requests))])
        return True

    def reset(self) -> bool:
        """The prefix cache is emptied, if it can be."""
        # Not over a store: dropped output lets a request come back, with a second load, before its first has ended.
        may_preempt = not isinstance(self.connector, TierConnector)
        self.scheduler.reset_prefix_cache(preempt_running=may_preempt and self.draw.random() < 0.5)
        return True

    def configure(self) -> bool:
        """A setting changes on the way."""
        fence = self.draw.choice((True, "auto"))
        change = self.draw.choice(({"guard": "none"}, {"guard": "stop_retry"}, {"defer_block_free": fence}))
        self.scheduler.configure(**change)
        return True


def recorded(seed: int, num_actions: int = 160, **settings: Any) -> list[Event]:
    """The events of one random run."""
    run = RandomRun(seed, **settings)
    for _ in run.play(num_actions):
        pass
    return run.events


_COUNTERS = (
    "status",
    "num_computed_tokens",
    "num_output_placeholders",
    "num_in_flight_tokens",
    "num_stale_output_tokens",
    "drop_stale_output",
    "last_sched_seq",
    "num_preemptions",
    "block_ids",
    "output_token_ids",
    "num_tokens",
)


def differences(scheduler: Scheduler, state: State) -> dict[str, tuple[Any, Any]]:
    """What the live scheduler and the folded state disagree about: name -> (live, folded)."""
    pool, fence = scheduler.kv.pool, scheduler.kv.fence
    blocks = range(scheduler.config.num_blocks)
    pairs: dict[str, tuple[Any, Any]] = {
        "step": (scheduler.step, state.step),
        "running": ([r.id for r in scheduler.running], state.running),
        "waiting": ([r.id for r in scheduler.waiting], state.waiting),
        "loading": ([r.id for r in scheduler.kv_holding_waiting], state.loading),
        "queue lengths": (
            (len(scheduler.running), len(scheduler.waiting), len(scheduler.kv_holding_waiting)),
            (state.num_running, state.num_waiting, state.num_loading),
        ),
        "free queue": (list(pool.free_ids()), state.free_queue()),
        "next free": (list(pool.free_ids())[:3], state.next_free(3)),
        "free": (pool.num_free, state.num_free),
        "references": ([pool.refs(b) for b in blocks[1:]], [state.refs(b) for b in blocks[1:]]),
        "cached": ({b: h for b, h in enumerate(pool.hashes) if h is not None}, state.cached_blocks()),
        "seq": ((fence.sched_seq, fence.processed_seq, fence.on), _seq(state)),
        "deferred": ([tuple(entry) for entry in fence.deferred], [tuple(entry)[:3] for entry in state.deferred]),
        "in flight": (
            [(record.step.step, record.seq) for record in scheduler.in_flight],
            [(flight.step, flight.seq) for flight in state.flights],
        ),
        "kept": (sorted(scheduler.kept_for_save), sorted(r.id for r in state.unsettled() if r.kept)),
        "landed": (sorted(scheduler.landed), sorted(r.id for r in state.unsettled() if r.load_landed)),
        "calls": (scheduler.allocate_calls, state.num_slot_calls),
    }
    for request in scheduler.requests.values():
        folded = state.request(request.id)
        for name in _COUNTERS:
            pairs[f"{request.id}.{name}"] = (getattr(request, name), getattr(folded, name))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _seq(state: State) -> tuple[int, int, bool]:
    return state.sched_step_seq, state.processed_step_seq, state.fence_on
