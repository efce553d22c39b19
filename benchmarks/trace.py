"""What it costs to open a recording, to seek in it, to hold it: on recordings made here by the scheduler.

    python benchmarks/trace.py [--events 100000] [--blocks 10000] [--requests 80] [--block-size 16] [--json]

Seek times are of `Replay.state_at` at random places, each after a jump. Memory is the growth of this process while
the file is opened, and its peak. Every row runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.request import Request, SamplingParams
from kvsched.sched.scheduler import Scheduler
from kvsched.step import StepResult
from kvsched.trace.events import VERSION, Event, RunStarted
from kvsched.trace.reader import read_events
from kvsched.trace.replay import Replay
from kvsched.trace.writer import TraceWriter


def record(num_events: int, num_blocks: int, num_requests: int, block_size: int, seed: int = 0) -> Iterator[Event]:
    """Events of a server under memory pressure: two steps in flight, fence on, `num_requests` always in the house."""
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=num_requests,
        max_num_batched_tokens=8192,
        max_model_len=num_blocks * block_size,
        defer_block_free=True,
        reserve_full_isl=False,
    )
    draw = random.Random(seed)
    events: list[Event] = [RunStarted(0, VERSION, config.to_dict() | {"defers_frees": True}, "benchmark", {})]
    scheduler = Scheduler(config, emit=events.append)
    mean = int(num_blocks * block_size * 1.1 / num_requests)  # what a request holds on average: a little too much
    made = told = 0
    steps: list[Any] = []
    while told < num_events:
        while len(scheduler.requests) < num_requests:
            prompt = [draw.randrange(1000) for _ in range(draw.randrange(mean // 2, mean))]
            limit = draw.randrange(mean // 2, mean)
            scheduler.add_request(Request(f"r{made}", prompt, SamplingParams(max_tokens=limit), arrival_time=made))
            made += 1
        while len(steps) < config.max_in_flight:
            step = scheduler.schedule()
            if step.is_empty:
                break
            steps.append(step)
        step = steps.pop(0)
        rows = tuple(() if i in step.prefill_chunks else (draw.randrange(1000),) for i in step.request_ids)
        scheduler.update(step, StepResult(step.step, rows))
        told += len(events)
        yield from events
        events.clear()


def measure(path: Path, num_seeks: int = 200) -> dict[str, float]:
    """Seconds (on the wall, and of this process's CPU) and bytes of reading, opening and seeking one trace file."""
    figures: dict[str, float] = {"file MB": path.stat().st_size / 1e6}
    wall, cpu = _clocks()
    count = sum(1 for _ in read_events(path))
    figures |= {"read s": _clocks()[0] - wall, "read CPU s": _clocks()[1] - cpu}
    before = _resident()
    wall, cpu = _clocks()
    replay = Replay.open(path)
    figures |= {"open s": _clocks()[0] - wall, "open CPU s": _clocks()[1] - cpu}
    figures |= {"events": count, "steps": replay.num_steps, "held MB": (_resident() - before) / 1e6}
    draw = random.Random(1)
    seeks = []
    for _ in range(num_seeks):
        index = draw.randrange(count + 1)
        start = _clocks()
        replay.state_at(index)
        seeks.append(tuple(1e3 * (b - a) for a, b in zip(start, _clocks(), strict=True)))
    for name, times in zip(("seek", "seek CPU"), zip(*seeks, strict=True), strict=True):
        ranked = sorted(times)
        figures |= {f"{name} median ms": ranked[len(ranked) // 2], f"{name} max ms": ranked[-1]}
    figures["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return figures


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    """Record, measure in a fresh process, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", type=Path, help="measure this trace file instead of recording one")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording.jsonl"
        start = time.perf_counter()
        with TraceWriter(path) as writer:
            writer.extend(record(args.events, args.blocks, args.requests, args.block_size))
        wrote = time.perf_counter() - start
        command = [sys.executable, __file__, "--measure", str(path)]
        figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    figures["record and write s"] = wrote
    if args.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:>20}  {value:,.2f}" if isinstance(value, float) else f"{name:>20}  {value:,}")


if __name__ == "__main__":
    main()
