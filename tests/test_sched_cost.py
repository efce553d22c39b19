"""What a step costs depends neither on the size of the pool nor on the number of waiting requests.

Counted, not timed: lines of Python executed during a call of `schedule()` and the update of a step's output; a loop
over anything that grows would execute more. (What built-in functions do inside does not show; the benchmark measures.)
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from kvsched.request import Request, SamplingParams
from tests.drive import Drive


def count_lines(action: Callable[[], Any]) -> int:
    """Lines of Python executed by `action()`, iterations of comprehensions included."""
    lines = 0

    def note(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return note

    gc.disable()  # others may have hung functions of theirs on the collector
    sys.settrace(note)
    try:
        action()
    finally:
        sys.settrace(None)
        gc.enable()
    return lines


@cache
def waiting(count: int) -> list[Request]:
    """Requests that will wait; none of them is ever scheduled, so that several runs can share them."""
    sampling = SamplingParams(max_tokens=1)
    return [Request(f"w{i:06}", [1, 2, 3], sampling, priority=1, arrival_time=9.0 + i) for i in range(count)]


def costs(usable: int, num_waiting: int, policy: str, *, full: bool = False) -> list[int]:
    """Lines executed in each of 12 calls of `schedule()`, and updates after them, with `num_waiting` in the queue.

    full: eight requests hold the whole pool and preempt each other, and a long one stands first in the queue.
    Otherwise the eight just decode, and all places to run are taken.
    """
    drive = Drive(
        usable, 2, max_num_seqs=9 if full else 8, defer_block_free=True, policy=policy, enable_prefix_caching=True
    )
    drive.scheduler.emit = drive.scheduler.kv.emit = drive.scheduler.kv.fence.emit = None
    for i in range(8):
        drive.add(f"r{i}", 7, 200)
    drive.add("long", 60, 1, priority=1)
    for request in waiting(num_waiting):
        drive.scheduler.add_request(request)
    counted = [count_lines(drive.turn) for _ in range(12)]
    assert len(drive.waiting) > num_waiting
    assert (drive.preemptions > 0) == full
    return counted


def test_the_count_sees_a_loop():
    def walk(size: int) -> Callable[[], Any]:
        return lambda: [x for x in range(size)]  # noqa: C416

    assert count_lines(walk(1000)) - count_lines(walk(10)) > 900


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_step_costs_the_same_in_a_pool_of_a_million_blocks(policy):
    assert costs(1_000, 5, policy) == costs(1_000_000, 5, policy)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("full", [False, True])
def test_a_step_costs_the_same_with_a_hundred_thousand_waiting(policy, full):
    usable = 16 if full else 1_000
    few, many = (costs(usable, count, policy, full=full) for count in (100, 100_000))
    assert few == many


def teardown_module() -> None:
    """Let the hundred thousand go."""
    waiting.cache_clear()
