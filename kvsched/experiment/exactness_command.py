"""The command `kvsched exactness`: the engine's greedy tokens against the model's own, over many settings.

Owns: its arguments and the table. Knows nothing about: how runs are compared (see exactness).
Exit code: 0 if every difference is a tie, 1 otherwise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvsched.experiment import exactness
from kvsched.experiment.exactness import CONNECTOR_FACTORS, FACTORS, RunReport, plan
from kvsched.experiment.prompts import PROMPTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--model", default="smollm2", help="as in Engine.from_model (default: smollm2)")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), metavar="N", help="how many of the prompts")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens to generate per prompt")
    parser.add_argument("--runs", type=int, default=None, metavar="N", help="only the first N runs of the plan")
    parser.add_argument("--connector", action="store_true", help="with a host-memory tier, failing loads, slow saves")
    parser.add_argument("--seed", type=int, default=1, help="seed of the plan")


def run_plan(args: argparse.Namespace) -> list[RunReport]:
    """Make the references, run the plan, print a line per run."""
    from kvsched.runner.torch_exactness import ModelUnderTest

    if not 1 <= args.prompts <= len(PROMPTS):
        raise ValueError(f"--prompts is {args.prompts}; there are {len(PROMPTS)}")
    factors = CONNECTOR_FACTORS if args.connector else FACTORS
    rows = plan(factors, args.seed)[: args.runs]
    print(f"model {args.model}, {args.prompts} prompts, {args.tokens} tokens each, {len(rows)} runs, seed {args.seed}")
    under_test = ModelUnderTest(args.model, PROMPTS[: args.prompts], args.tokens)
    print("reference: transformers' generate, each prompt alone")
    print(header(factors))
    reports = []
    for row in rows:
        start = time.perf_counter()
        reports.append(exactness.run(row, under_test.references, under_test.make_runner))
        print(line(factors, reports[-1], time.perf_counter() - start), flush=True)
    return reports


def header(factors: Mapping[str, Sequence[Any]]) -> str:
    """Column titles."""
    columns = "".join(f"{name:>{_width(name, levels)}}" for name, levels in factors.items())
    return f"{columns}{'compared':>10}{'ties':>6}{'wrong':>6}{'preempt':>9}{'loads':>7}{'failed':>7}{'gap':>9}{'s':>7}"


def line(factors: Mapping[str, Sequence[Any]], report: RunReport, seconds: float) -> str:
    """One run."""
    columns = "".join(f"{report.settings[name]!s:>{_width(name, levels)}}" for name, levels in factors.items())
    return (
        f"{columns}{report.compared:10}{report.ties:6}{len(report.wrong):6}{report.preemptions:9}{report.loads:7}"
        f"{report.failed_loads:7}{report.largest_gap:9.1e}{seconds:7.1f}"
    )


def _width(name: str, levels: Sequence[Any]) -> int:
    return max(len(name), *(len(str(level)) for level in levels)) + 2


def run(args: argparse.Namespace) -> int:
    """Run the plan and sum it up; returns the exit code."""
    reports = run_plan(args)
    wrong = [(report, entry) for report in reports for entry in report.wrong]
    for report, (request_id, index, expected, got) in wrong:
        print(f"{dict(report.settings)}: {request_id} token {index}: expected {expected}, got {got}")
    compared = sum(report.compared for report in reports)
    ties = sum(report.ties for report in reports)
    print(f"{compared} tokens compared and equal, {ties} ties, {len(wrong)} wrong, in {len(reports)} runs")
    return 1 if wrong else 0
