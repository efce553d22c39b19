"""Are the engine's greedy tokens the model's own? Runs of one workload under many settings, compared token by token.

Owns: the settings, the runs, the comparison and its rule for ties.
Knows nothing about: how a reference is computed (it is handed one), tensors.
Invariants: a difference counts as a tie only if the reference's two top logits there lie within twice the largest
logit difference measured in that run before it, and never by more than 1e-3; comparison of that request stops there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvsched.config import SchedulerConfig
from kvsched.connector.base import ConnectorPair
from kvsched.engine import Engine
from kvsched.experiment.covering import pairwise
from kvsched.faults import Abort, FailCall, FailLoad, Fault, FaultPlan, HoldTransfer
from kvsched.request import SamplingParams
from kvsched.runner.base import Runner

MOST_FOR_A_TIE = 1e-3
BLOCK_SIZE = 16
_MOST_TURNS = 20_000

FACTORS: dict[str, tuple[Any, ...]] = {
    "pool": ("ample", "preempting", "barely one"),
    "depth": (1, 2, 3, 4),
    "mode": ("async", "sync"),
    "guard": ("stop_retry", "none"),
    "fence": (True, False),
    "caching": (True, False),
    "budget": (2048, 96, 24),
    "policy": ("fcfs", "priority"),
    "failures": ("none", "calls"),
    "aborts": ("none", "others"),
}
CONNECTOR_FACTORS: dict[str, tuple[Any, ...]] = FACTORS | {
    "connector": ("asynchronous", "synchronous", "disk"),
    "store": ("cold", "warm"),
    "loads": ("land", "fail at random"),
    "transfers": ("prompt", "slow"),
}


class Reference(NamedTuple):
    """A prompt's greedy continuation by the model's own forward. margins: per generated token, the difference
    between the two largest logits."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(slots=True)
class LogitGap:
    """The largest difference between engine's and reference's logits seen so far in a run."""

    largest: float = 0.0


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run came to. compared: tokens compared and equal; ties: requests whose comparison stopped at a tie;
    wrong: (request id, index of the first wrong token, expected, got)."""

    settings: Mapping[str, Any]
    compared: int
    ties: int
    wrong: tuple[tuple[str, int, int | None, int | None], ...]
    preemptions: int
    aborted: int
    loads: int
    failed_loads: int
    largest_gap: float
    unfired: tuple[Fault, ...] = field(default=())


RunnerFactory = Callable[[SchedulerConfig, LogitGap, Mapping[str, Any]], tuple[Runner, ConnectorPair | None]]
"""Makes the runner (and the connector, if the settings name one) of one run; the runner keeps `LogitGap` current."""


def plan(factors: Mapping[str, Sequence[Any]] = FACTORS, seed: int = 1) -> list[dict[str, Any]]:
    """Settings that try every pair of levels. Three combinations are left out: a synchronous scheduler gains nothing
    from many steps in flight beyond two, without the guard a fence over a pool of barely one request can keep a
    workload from ever ending (that is what the guard is for), and loads without the fence beside steps in flight
    may overwrite blocks (that is what the fence is for)."""

    def allowed(row: Mapping[str, Any]) -> bool:
        endless = row["guard"] == "none" and row["fence"] and row["pool"] == "barely one"
        unsafe = "connector" in row and not row["fence"] and row["depth"] > 1
        return not endless and not unsafe and not (row["mode"] == "sync" and row["depth"] > 2)

    return pairwise(factors, seed=seed, allowed=allowed)


def pool_size(kind: str, references: Sequence[Reference]) -> int:
    """Blocks (with the null block) of an ample pool, of one that preempts, of one that holds barely one request."""
    needs = [-(-(len(r.prompt_token_ids) + len(r.token_ids)) // BLOCK_SIZE) for r in references]
    if kind == "ample":
        return sum(needs) + 1
    if kind == "preempting":
        return max(max(needs) + 1, sum(needs) // 4) + 1
    return max(needs) + 2


def config_for(settings: Mapping[str, Any], references: Sequence[Reference]) -> SchedulerConfig:
    """The scheduler's settings for one row of the plan."""
    longest = max(len(r.prompt_token_ids) + len(r.token_ids) for r in references)
    return SchedulerConfig(
        num_blocks=pool_size(settings["pool"], references),
        block_size=BLOCK_SIZE,
        max_num_seqs=16,
        max_num_batched_tokens=settings["budget"],
        max_model_len=longest + 1,
        enable_prefix_caching=settings["caching"],
        async_scheduling=settings["mode"] == "async",
        max_in_flight=settings["depth"],
        policy=settings["policy"],
        guard=settings["guard"],
        defer_block_free=settings["fence"],
    )


def faults_for(settings: Mapping[str, Any], num_requests: int) -> FaultPlan:
    """Injected failures, failed loads and slow transfers, as a row asks for them."""
    faults: list[Fault] = []
    if settings["failures"] == "calls":
        faults += [FailCall(call) for call in (5, 23, 24, 61, 110, 111, 112, 190)]
    draw = random.Random(num_requests)
    if settings.get("loads") == "fail at random":
        failing = [f"r{i}" for i in range(num_requests) if draw.random() < 0.4]
        faults += [FailLoad(request, occurrence, draw.randint(0, 1)) for request in failing for occurrence in (1, 2)]
    if settings.get("transfers") == "slow":
        names = [f"r{i}" for i in range(num_requests)] + [f"other{i}" for i in range(3)]
        faults += [HoldTransfer(name, kind, draw.randint(1, 5)) for name in names for kind in ("load", "save")]
    return FaultPlan(tuple(faults))


def run(settings: Mapping[str, Any], references: Sequence[Reference], make_runner: RunnerFactory) -> RunReport:
    """Serve all prompts under one row's settings and compare every token."""
    config = config_for(settings, references)
    gap = LogitGap()
    runner, connector = make_runner(config, gap, settings)
    faults = faults_for(settings, len(references))
    tokens: dict[str, tuple[int, ...]] = {}
    with Engine(config, runner, connector=connector, faults=faults, landing=config.max_in_flight - 1) as engine:
        _add_requests(engine, settings, references)
        for _ in range(_MOST_TURNS):
            if not engine.has_unfinished_requests():
                break
            engine.step()
        else:
            raise RuntimeError(f"{dict(settings)}: not finished after {_MOST_TURNS} turns")
        engine.drain()
        tokens = {f"r{i}": engine.output(f"r{i}").token_ids for i in range(len(references))}
        counts = _count(engine.events)
        unfired = tuple(engine.faults_never_fired)
    compared = ties = 0
    wrong = []
    for i, reference in enumerate(references):
        same, at = compare(reference, tokens[f"r{i}"], gap.largest)
        compared += same
        if at == "tie":
            ties += 1
        elif at == "wrong":
            wrong.append((f"r{i}", same, _at(reference.token_ids, same), _at(tokens[f"r{i}"], same)))
    return RunReport(settings, compared, ties, tuple(wrong), *counts, gap.largest, unfired)


def _add_requests(engine: Engine, settings: Mapping[str, Any], references: Sequence[Reference]) -> None:
    """All at once; requests to be aborted some steps later stand between the others and share their prompts. A warm
    store has seen every prompt before."""
    if settings.get("store") == "warm":
        for i, reference in enumerate(references):
            engine.add_request(f"warm{i}", reference.prompt_token_ids, SamplingParams(max_tokens=1))
        engine.drain()
        engine.scheduler.reset_prefix_cache()
    for i, reference in enumerate(references):
        sampling = SamplingParams(max_tokens=len(reference.token_ids), ignore_eos=True)
        if settings["aborts"] == "others" and i < 3:
            engine.inject(Abort(f"other{i}", engine.scheduler.step + 3 + 7 * i))
            engine.add_request(f"other{i}", reference.prompt_token_ids, sampling, priority=i % 3, arrival_time=float(i))
        arrival = i + 0.5
        engine.add_request(f"r{i}", reference.prompt_token_ids, sampling, priority=(i * 7) % 4, arrival_time=arrival)


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _count(events: Sequence[Any]) -> tuple[int, int, int, int]:
    """(preemptions, aborted requests, loads started, loads failed)."""
    kinds = [event.kind for event in events]
    aborted = sum(1 for event in events if event.kind == "request_finished" and event.reason == "abort")
    return kinds.count("preempted"), aborted, kinds.count("load_started"), kinds.count("load_failed")


def compare(reference: Reference, got: Sequence[int], gap: float) -> tuple[int, str]:
    """Tokens equal from the start, and "equal", "tie" or "wrong" for what comes then."""
    for i, expected in enumerate(reference.token_ids):
        if i >= len(got) or got[i] != expected:
            is_tie = i < len(got) and reference.margins[i] <= min(2 * gap, MOST_FOR_A_TIE)
            return i, "tie" if is_tie else "wrong"
    if len(got) != len(reference.token_ids):
        return len(reference.token_ids), "wrong"
    return len(reference.token_ids), "equal"
