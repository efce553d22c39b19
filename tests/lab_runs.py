"""Sessions to be drawn: a crowded one in which all signs occur, and one of ten thousand blocks and two thousand steps.

Owns: the scenes. Knows nothing about: widgets. Everything is a function of the arguments.
"""

from __future__ import annotations

import random
from typing import Any

from kvsched.request import SamplingParams
from lab.session import Session
from tests.lab_scenes import busy


def crowd(**settings: Any) -> Session:
    """Eight requests, twelve blocks, three steps in flight: preemptions, guard stops, deferred frees; run to an end."""
    session = busy(8, **{"max_in_flight": 3, "max_num_seqs": 3, "reserve_full_isl": False} | settings)
    session.run()
    return session


def large(num_blocks: int = 10_000, num_steps: int = 2_000) -> Session:
    """Up to 128 requests at a time, under pressure, with the fence on."""
    session = Session.synthetic(
        num_blocks + 1, max_num_seqs=128, max_num_batched_tokens=8192, max_model_len=4096, defer_block_free=True
    )
    rng = random.Random(2024)
    for i in range(num_steps // 4):
        prompt = [rng.randrange(30_000) for _ in range(rng.randrange(200, 1600))]
        session.add_request(f"r{i}", prompt, SamplingParams(max_tokens=rng.randrange(200, 1200)), at_step=1 + 4 * i)
    session.step(num_steps)
    return session
