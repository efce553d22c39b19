"""Decode steps of the torch runner against transformers' generate, in turn, in one run.

    python benchmarks/decode.py [--model NAME] [--batch 1 8 32] [--context 128] [--steps 24] [--rounds 3]
                                [--threads N] [--device cpu] [--json]

Every request has a prompt of --context tokens; then --steps tokens are decoded, with two steps in flight on our
side. Per batch size and side the best round counts: the median decode step and the fastest one in wall time, and CPU
time per step (all threads); the latter two say more on a machine that is busy otherwise. "bound" is the time it takes
to read the weights once, at the speed at which this machine sums up a tensor larger than its caches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor

from kvsched.request import SamplingParams
from kvsched.runner.torch_load import LoadedModel, load_model
from kvsched.runner.torch_runner import TorchRunner, create_runner
from kvsched.step import RequestData, ScheduledStep

BLOCK_SIZE = 16


class Cost(NamedTuple):
    """Of one decode step: seconds of wall time (median, and of the fastest) and of CPU time (mean)."""

    wall: float
    fastest: float
    cpu: float


def measure(boundaries: list[tuple[float, float]]) -> Cost:
    """From (wall, CPU) clocks read between steps."""
    walls = [b[0] - a[0] for a, b in itertools.pairwise(boundaries)]
    return Cost(statistics.median(walls), min(walls), (boundaries[-1][1] - boundaries[0][1]) / len(walls))


def clocks() -> tuple[float, float]:
    """Wall time and CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


class Steps:
    """Hand-made steps for a fixed batch: one prefill each, then decode."""

    def __init__(self, prompts: list[list[int]], num_tokens: int) -> None:
        self.prompts = prompts
        self.num_blocks = -(-(len(prompts[0]) + num_tokens + 1) // BLOCK_SIZE)
        self.names = tuple(f"r{i}" for i in range(len(prompts)))
        self.number = 0
        self.start = 0

    def step(self, counts: tuple[int, ...], **fields: Any) -> ScheduledStep:
        self.number += 1
        names = self.names[: len(counts)]
        step = ScheduledStep(
            self.number, 0, names, counts, (self.start,) * len(counts), frozenset(), {},
            fields.get("new", ()), (), fields.get("gone", ()), 0,
        )  # fmt: skip
        self.start += counts[0] if counts else 0
        return step

    def prefill(self) -> ScheduledStep:
        sampling = SamplingParams(max_tokens=10_000)
        new = tuple(
            RequestData(
                name, tuple(prompt), tuple(range(1 + i * self.num_blocks, 1 + (i + 1) * self.num_blocks)), 0,
                len(prompt), sampling, resumed=False,
            )
            for i, (name, prompt) in enumerate(zip(self.names, self.prompts, strict=True))
        )  # fmt: skip
        return self.step((len(self.prompts[0]),) * len(self.names), new=new)

    def decode(self) -> ScheduledStep:
        return self.step((1,) * len(self.names))

    def finish(self) -> ScheduledStep:
        return self.step((), gone=self.names)


def ours(runner: TorchRunner, prompts: list[list[int]], num_tokens: int) -> tuple[Cost, list[list[int]]]:
    """Decode with two steps in flight."""
    steps = Steps(prompts, num_tokens)
    columns = [runner.submit(steps.prefill()).result().sampled_token_ids]
    in_flight = runner.submit(steps.decode())
    boundaries = []
    for _ in range(num_tokens - 2):
        following = runner.submit(steps.decode())
        columns.append(in_flight.result().sampled_token_ids)
        boundaries.append(clocks())
        in_flight = following
    columns.append(in_flight.result().sampled_token_ids)
    runner.submit(steps.finish()).result()
    return measure(boundaries), [[column[i][0] for column in columns] for i in range(len(prompts))]


class _Clock(LogitsProcessor):
    def __init__(self) -> None:
        self.boundaries: list[tuple[float, float]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.boundaries.append(clocks())
        return scores


def theirs(loaded: LoadedModel, prompts: list[list[int]], num_tokens: int) -> tuple[Cost, list[list[int]]]:
    """The same by transformers."""
    tokens = torch.tensor(prompts, device=loaded.model.device)
    clock = _Clock()
    output = loaded.model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
        do_sample=False, logits_processor=[clock],
    )  # fmt: skip
    return measure(clock.boundaries[1:]), output[:, tokens.shape[1] :].tolist()


def read_speed(device: torch.device) -> float:
    """Bytes per second of summing up 400 MB, best of five."""
    tensor = torch.ones(100_000_000, device=device)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        float(tensor.sum())
        best = min(best, time.perf_counter() - begin)
    return tensor.nbytes / best


def compare(loaded: LoadedModel, runner: TorchRunner, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(100, runner.vocab_size, (batch, args.context), generator=generator).tolist()
    sides: dict[str, Callable[[], tuple[Cost, list[list[int]]]]] = {
        "kvsched": lambda: ours(runner, prompts, args.steps),
        "transformers": lambda: theirs(loaded, prompts, args.steps),
    }
    found: dict[str, list[tuple[Cost, list[list[int]]]]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            found[name].append(side())
    best = {name: Cost(*map(min, zip(*(c for c, _ in rounds), strict=True))) for name, rounds in found.items()}
    same = sum(a == b for a, b in zip(found["kvsched"][0][1], found["transformers"][0][1], strict=True))
    return {
        "batch": batch,
        **{f"{name}_{kind}_ms": getattr(best[name], kind) * 1e3 for name in best for kind in Cost._fields},
        "kvsched_tokens_per_s": batch / best["kvsched"].wall,
        "transformers_tokens_per_s": batch / best["transformers"].wall,
        "same_tokens": f"{same} of {batch}",
    }


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load_model(args.model)
    blocks = max(args.batch) * (-(-(args.context + args.steps + 1) // BLOCK_SIZE)) + 1
    runner = create_runner(loaded, device=args.device, num_blocks=blocks, block_size=BLOCK_SIZE)
    loaded.model.to(runner.device)
    weights = sum(p.nbytes for p in loaded.model.parameters())
    bound = weights / read_speed(runner.device) * 1e3
    rows = [compare(loaded, runner, batch, args) for batch in args.batch]
    runner.close()
    if args.json:
        print(json.dumps({"bound_ms": bound, "threads": args.threads, "rows": rows}))
        return
    print(f"{args.model}, {weights / 1e6:.0f} MB of weights, {args.threads} threads, bound {bound:.1f} ms a step")
    print("ms a step: median, fastest, CPU\n")
    print(
        "batch           kvsched            tokens/s         transformers           tokens/s   ratio (fastest)   same"
    )
    for row in rows:
        ours_ms, theirs_ms = ([row[f"{n}_{k}_ms"] for k in Cost._fields] for n in ("kvsched", "transformers"))
        print(
            f"{row['batch']:5}   {ours_ms[0]:7.1f} {ours_ms[1]:7.1f} {ours_ms[2]:7.1f}"
            f"   {row['kvsched_tokens_per_s']:8.1f}   {theirs_ms[0]:7.1f} {theirs_ms[1]:7.1f} {theirs_ms[2]:7.1f}"
            f"   {row['transformers_tokens_per_s']:8.1f}   {theirs_ms[0] / ours_ms[0]:5.2f}"
            f" ({theirs_ms[1] / ours_ms[1]:.2f})   {row['same_tokens']}"
        )


if __name__ == "__main__":
    main()
