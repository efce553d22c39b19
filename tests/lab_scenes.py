"""Small sessions for the tests of the debugger: case C01, a busy one, and one on a tiny model.

Owns: the scenes. Knows nothing about: what is tested on them. Everything is a function of the arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.engine import Engine
from kvsched.request import SamplingParams
from kvsched.runner.synthetic import CostModel
from kvsched.trace.events import Event, StepDelivered
from lab.session import Session


def c01(**settings: Any) -> Session:
    """Case C01: four requests fill eight blocks; in step 3 r0 needs a third block while step 2 is in flight."""
    defaults = {"block_size": 4, "max_num_batched_tokens": 64, "defer_block_free": True, "enable_prefix_caching": False}
    session = Session.synthetic(9, **defaults | settings)
    for i in range(4):
        session.add_request(f"r{i}", range(10 * i, 10 * i + 7), SamplingParams(max_tokens=8))
    return session


def busy(num_requests: int = 6, seed: int = 0, **settings: Any) -> Session:
    """Requests of several lengths with a common prefix, under pressure, with a clock."""
    defaults: dict[str, Any] = {
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "max_model_len": 48,
        "defer_block_free": True,
    }
    session = Session.synthetic(13, cost=CostModel(0.01, 0.001, 0.0001), **defaults | settings)
    rng = random.Random(seed)
    common = [rng.randrange(500) for _ in range(8)]
    for i in range(num_requests):
        prompt = common[: 4 * (i % 3)] + [rng.randrange(500) for _ in range(3 + i)]
        session.add_request(f"r{i}", prompt, SamplingParams(max_tokens=6 + i))
    return session


def tiny_model_remake(poison: bool = True) -> Callable[[SchedulerConfig], Engine]:
    """Makes engines on one random model; their caches begin full of NaN, so that what is not written is seen."""
    import torch

    from kvsched.runner.torch_load import load_model

    torch.set_num_threads(1)
    loaded = load_model("random:llama-tiny")

    def remake(config: SchedulerConfig) -> Engine:
        engine = Engine.from_model(loaded, device="cpu", landing=config.max_in_flight - 1, **config.to_dict())
        if poison:
            engine.runner.cache.poison()
        return engine

    return remake


def outputs(session: Session) -> dict[str, list[int]]:
    """What each request was given, in the whole history."""
    return outputs_of(session.events[:])


def outputs_of(events: list[Event]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, StepDelivered):
            for request, given in zip(event.request_ids, event.tokens, strict=True):
                tokens.setdefault(request, []).extend(given)
    return tokens


def preempted(session: Session) -> list[tuple[int, str]]:
    """(step, request) of every preemption, in order."""
    return [(event.step, event.request) for event in session.events if event.kind == "preempted"]
