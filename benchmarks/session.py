"""What the debugger costs: opening a recording, seeking in it, holding it, looking into it, forking it.

    python benchmarks/session.py [--events 100000] [--long 1000000] [--blocks 10000] [--requests 80] [--json]

Two recordings are made by the engine (memory pressure, two steps in flight, fence on), one of `--events` events for the
times and one of `--long` for the memory; each is opened as a Session in a process of its own. Seeks go to random steps,
each after a jump, and read the state there. The promises: opening 100,000 events in 3 s, a seek in 50 ms, a million
events in 1 GB. Times are the best of three, on the wall and of the processor (cpu); promises are checked on the latter,
since the machine may have other things to do.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.engine import Engine
from kvsched.request import SamplingParams
from kvsched.runner.synthetic import CostModel, SyntheticRunner
from kvsched.trace.writer import TraceWriter
from lab.session import Session

_BEST_OF = 3
_MOST_TO_REPEAT = 200_000
"""Events of a recording that is opened more than once."""

PROMISES = {"open cpu s": 3.0, "seek max cpu ms": 50.0, "peak MB": 1000.0}


def record(path: Path, num_events: int, num_blocks: int, num_requests: int) -> None:
    """Events of a server under memory pressure, with `num_requests` always in the house."""
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_num_seqs=num_requests,
        max_num_batched_tokens=8192,
        max_model_len=num_blocks * 16,
        defer_block_free=True,
        reserve_full_isl=False,
    )
    draw = random.Random(0)
    mean = int(num_blocks * 16 * 1.1 / num_requests)  # what a request holds on average: a little too much
    with TraceWriter(path) as writer:
        runner = SyntheticRunner(CostModel(5e-3, 1e-5, 1e-7))
        engine = Engine(
            config, runner, landing=1, record=False, on_event=writer.append, max_model_len_is_explicit=False
        )
        made = 0
        while writer.num_events < num_events:
            while len(engine.scheduler.requests) < num_requests:
                prompt = [draw.randrange(1000) for _ in range(draw.randrange(mean // 2, mean))]
                engine.add_request(f"r{made}", prompt, SamplingParams(max_tokens=draw.randrange(mean // 2, mean)))
                made += 1
            engine.step()


def measure(path: Path, num_seeks: int) -> dict[str, float]:
    """Seconds, milliseconds and megabytes of one recording."""
    opened = [timed(lambda: Session(path))]
    session = opened[0][1]
    figures = {"events": len(session.events), "steps": session.num_steps, "resident MB": resident()}
    figures["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    if figures["events"] <= _MOST_TO_REPEAT:
        opened += [timed(lambda: Session(path)) for _ in range(_BEST_OF - 1)]
    figures |= {f"open {clock}s": min(each[0][n] for each in opened) for n, clock in enumerate(("", "cpu "))}
    draw = random.Random(1)
    places = [draw.randrange(session.num_steps + 1) for _ in range(num_seeks)]
    passes = [[timed(lambda step=step: session.seek(step).state)[0] for step in places] for _ in range(_BEST_OF)]
    for number, clock in enumerate(("", "cpu ")):
        ranked = sorted(min(each[number] for each in of_place) for of_place in zip(*passes, strict=True))
        figures[f"seek median {clock}ms"] = 1e3 * ranked[len(ranked) // 2]
        figures[f"seek max {clock}ms"] = 1e3 * ranked[-1]
    session.seek(session.num_steps // 2)
    looks: dict[str, Callable[[], Any]] = {
        "step and state": lambda: session.step().state,
        "back and state": lambda: session.back().state,
        "requests()": session.requests,
        "blocks()": session.blocks,
        "explain()": session.explain,
    }
    for name, look in looks.items():
        figures[f"{name} cpu ms"] = 1e3 * min(timed(look)[0][1] for _ in range(5))
    return figures


def measure_fork(num_steps: int) -> dict[str, float]:
    """Seconds of a fork at the last of so many steps, and of making these steps."""
    session = Session.synthetic(1000, max_num_seqs=64, defer_block_free=True, max_model_len=2048)
    for i in range(64):
        session.add_request(f"r{i}", range(i, 200 + i), SamplingParams(max_tokens=1500))
    (_, stepping), _ = timed(lambda: session.step(num_steps))
    (_, forking), _ = timed(lambda: session.fork(session.num_steps))
    events = len(session.events)
    return {"steps": num_steps, "events": events, "make them cpu s": stepping, "fork at the last cpu s": forking}


def timed(call: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """((seconds on the wall, of the processor), what it returns)."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = call()
    return (time.perf_counter() - wall, time.process_time() - cpu), value


def resident() -> float:
    """Megabytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def in_a_process(*arguments: str) -> dict[str, float]:
    """This script, with these arguments, in a fresh process."""
    command = [sys.executable, __file__, *arguments]
    figures: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return figures


def report(title: str, figures: dict[str, float], promised: dict[str, float]) -> None:
    """Print a table."""
    print(title)
    for name, value in figures.items():
        shown = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
        note = ""
        if name in promised:
            note = f"   {'kept' if value <= promised[name] else 'BROKEN'}: at most {promised[name]:,.0f}"
        print(f"{name:>22}  {shown}{note}")


def main() -> int:
    """Record, measure in fresh processes, print; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--long", type=int, default=1_000_000, help="0 leaves the long recording out")
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--seeks", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fork", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure or args.fork:
        print(json.dumps(measure(args.measure, args.seeks) if args.measure else measure_fork(args.fork)))
        return 0
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for title, num_events in (("recording", args.events), ("long recording", args.long)):
            if num_events:
                path = Path(folder) / "recording.jsonl"
                record(path, num_events, args.blocks, args.requests)
                results[title] = in_a_process("--measure", str(path), "--seeks", str(args.seeks))
    results["fork of a synthetic run"] = in_a_process("--fork", "2000")
    broken = False
    for title, figures in results.items():
        asked = {"recording": PROMISES, "long recording": {"peak MB": PROMISES["peak MB"]}}.get(title, {})
        broken |= any(figures[name] > most for name, most in asked.items())
        if not args.json:
            report(title, figures, asked)
    if args.json:
        print(json.dumps(results))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
