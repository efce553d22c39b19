"""Recompute or reload after a preemption? Both sides in one run, on a real model.

    python benchmarks/offload.py [--model smollm2] [--device auto] [--contexts 32,128,512,1024] [--loads 0,4,16]
                                 [--repeats 5] [--json]

Latency. A request of so many known tokens (context) runs beside so many others that decode (load). It is preempted by
an injected failure; then, from the call of `schedule()` that takes it up again, it is timed until its next token is
delivered. "others wait": the longest time between two deliveries meanwhile, which is what everybody else feels.
Medians; the sides take turns.

Throughput. Requests of one prompt length through a pool that holds three quarters of them with one block to grow, so
that they preempt one another: output tokens per second of the whole workload (the best round of each side), and tokens
computed per output token.

The prefix cache is off on both sides: what it still holds costs neither side anything. `recompute` has no connector,
`reload` a host-memory tier with asynchronous loads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from typing import Any, NamedTuple

from kvsched.connector.host import HostTier
from kvsched.engine import Engine
from kvsched.faults import FailRequest
from kvsched.request import RequestStatus, SamplingParams
from kvsched.runner.torch_load import LoadedModel, load_model

SIDES = ("recompute", "reload")
BLOCK_SIZE = 16
_OTHER_CONTEXT = 64
_VICTIM = "victim"
_TOKENS = 500
"""Prompts are drawn from the first tokens, which every model has."""


class Latency(NamedTuple):
    """Seconds. to_token: from resumption to the next token; others_wait: longest gap between deliveries."""

    to_token: float
    others_wait: float


class Throughput(NamedTuple):
    """seconds for the workload; preemptions; computed: tokens scheduled, recomputation included."""

    seconds: float
    output_tokens: int
    preemptions: int
    computed: int


def make_engine(
    loaded: LoadedModel, side: str, device: str, num_blocks: int, max_model_len: int, **more: Any
) -> Engine:
    """An engine of one side; the fence is on for both, so that they preempt alike."""
    return Engine.from_model(
        loaded,
        device=device,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        defer_block_free=True,
        connector=HostTier(capacity_bytes=2 * 2**30) if side == "reload" else None,
        **more,
    )


class Watch:
    """Times what happens to the victim: give it to an engine as `on_event`."""

    def __init__(self) -> None:
        self.resumed: float | None = None
        self.delivered: list[float] = []
        self.result: Latency | None = None

    def __call__(self, event: Any) -> None:
        now = time.perf_counter()
        if event.kind == "preempted" and event.request == _VICTIM:
            self.resumed, self.delivered, self.result = None, [], None
        elif event.kind in ("parked", "admitted") and event.request == _VICTIM and self.resumed is None:
            self.resumed = now
        elif event.kind == "step_delivered" and self.resumed is not None and self.result is None and event.request_ids:
            self.delivered.append(now)
            row = event.request_ids.index(_VICTIM) if _VICTIM in event.request_ids else None
            if row is not None and event.tokens[row]:
                times = [self.resumed, *self.delivered]
                self.result = Latency(now - self.resumed, max(b - a for a, b in itertools.pairwise(times)))


class Preempted:
    """One engine with a victim and others that decode; preempts the victim as often as asked."""

    def __init__(self, loaded: LoadedModel, side: str, device: str, context: int, load: int) -> None:
        self.watch = Watch()
        length = context + 512
        blocks = -(-length // BLOCK_SIZE) + load * -(-(_OTHER_CONTEXT + 512) // BLOCK_SIZE) + 2
        options = {"record": False, "on_event": self.watch}
        self.engine = make_engine(loaded, side, device, blocks, length, options=options)
        draw = random.Random(context)
        for i in range(load):
            self._add(f"other{i}", [draw.randrange(_TOKENS) for _ in range(_OTHER_CONTEXT)])
        self.engine.step()
        self._add(_VICTIM, [draw.randrange(_TOKENS) for _ in range(context)])
        self.victim = self.engine.scheduler.requests[_VICTIM]
        self._settle()

    def _add(self, request_id: str, prompt: list[int]) -> None:
        self.engine.add_request(request_id, prompt, SamplingParams(max_tokens=500, ignore_eos=True))

    def _settle(self) -> None:
        """Until the victim has generated a few more tokens."""
        wanted = self.victim.num_output_tokens + 4
        while self.victim.num_output_tokens < wanted:
            self.engine.step()

    def measure(self) -> Latency:
        """Preempt once."""
        while self.victim.status is RequestStatus.RUNNING:  # with a step in flight the guard spares it
            step = self.engine.scheduler.step + 1
            self.engine.inject(FailRequest(_VICTIM, step, step))
            self.engine.step()
        while self.watch.result is None:
            self.engine.step()
        result = self.watch.result
        self._settle()
        return result


def latencies(loaded: LoadedModel, device: str, context: int, load: int, repeats: int) -> dict[str, Latency]:
    """Medians of both sides, which take turns."""
    engines = {side: Preempted(loaded, side, device, context, load) for side in SIDES}
    found: dict[str, list[Latency]] = {side: [] for side in SIDES}
    for turn in range(repeats + 1):
        for side in SIDES if turn % 2 else SIDES[::-1]:
            found[side].append(engines[side].measure())
    for one in engines.values():
        one.engine.close()
    # The first preemption of each side warms up and is not counted.
    return {side: Latency(*map(statistics.median, zip(*rows[1:], strict=True))) for side, rows in found.items()}


def throughput(loaded: LoadedModel, side: str, device: str, prompt: int, count: int, output: int) -> Throughput:
    """One workload under memory pressure."""
    begins, ends = -(-prompt // BLOCK_SIZE), -(-(prompt + output) // BLOCK_SIZE)
    num_blocks = max(ends, (3 * count // 4) * (begins + 1)) + 1
    with make_engine(loaded, side, device, num_blocks, prompt + output) as engine:
        draw = random.Random(prompt)
        prompts = [[draw.randrange(_TOKENS) for _ in range(prompt)] for _ in range(count)]
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        begin = time.perf_counter()
        outputs = engine.generate(prompts, sampling)
        seconds = time.perf_counter() - begin
        preemptions = sum(o.num_preemptions for o in outputs)
        computed = sum(sum(e.num_tokens) for e in engine.events if e.kind == "step_scheduled")
        return Throughput(seconds, sum(len(o.token_ids) for o in outputs), preemptions, computed)


def run_latency(loaded: LoadedModel, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print the first table."""
    print("latency, ms (median)       resumption to next token          others wait")
    print("context  load             recompute  reload   ratio     recompute  reload")
    rows = []
    for load in args.loads:
        for context in args.contexts:
            found = latencies(loaded, args.device, context, load, args.repeats)
            old, new = found["recompute"], found["reload"]
            ratio = old.to_token / new.to_token
            verdict = "reload wins" if ratio > 1.1 else "recompute wins" if ratio < 1 / 1.1 else "even"
            print(
                f"{context:7}{load:6}{'':12}{old.to_token * 1e3:10.1f}{new.to_token * 1e3:8.1f}{ratio:8.2f}"
                f"{old.others_wait * 1e3:14.1f}{new.others_wait * 1e3:8.1f}   {verdict}",
                flush=True,
            )
            sides = {side: one._asdict() for side, one in found.items()}
            rows.append({"context": context, "load": load, "verdict": verdict} | sides)
    return rows


def run_throughput(loaded: LoadedModel, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print the second table."""
    print("\nthroughput, output tokens/s             computed per output token    preemptions")
    print(" prompt  requests      recompute  reload   ratio     recompute  reload     recompute  reload")
    rows = []
    for count in args.requests:
        for prompt in args.prompts:
            found: dict[str, list[Throughput]] = {side: [] for side in SIDES}
            for turn in range(args.rounds):
                for side in SIDES if turn % 2 else SIDES[::-1]:
                    found[side].append(throughput(loaded, side, args.device, prompt, count, args.output))
            best = {side: min(runs, key=lambda run: run.seconds) for side, runs in found.items()}
            old, new = best["recompute"], best["reload"]
            speed = {side: run.output_tokens / run.seconds for side, run in best.items()}
            cost = {side: run.computed / run.output_tokens for side, run in best.items()}
            print(
                f"{prompt:7}{count:10}{speed['recompute']:15.1f}{speed['reload']:8.1f}"
                f"{speed['reload'] / speed['recompute']:8.2f}{cost['recompute']:14.2f}{cost['reload']:8.2f}"
                f"{old.preemptions:14}{new.preemptions:8}",
                flush=True,
            )
            rows.append({"prompt": prompt, "requests": count} | {s: t._asdict() for s, t in best.items()})
    return rows


def numbers(text: str) -> list[int]:
    """"1,2,3" -> [1, 2, 3]."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure, print, and say where reloading wins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--contexts", type=numbers, default=[32, 128, 512, 1024], help="known tokens of the victim")
    parser.add_argument("--loads", type=numbers, default=[0, 4, 16], help="other requests, decoding")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=numbers, default=[32, 128, 512], help="prompt lengths of the throughput part")
    parser.add_argument("--requests", type=numbers, default=[4, 12], help="requests of the throughput part")
    parser.add_argument("--output", type=int, default=48, help="tokens to generate per request there")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the throughput part")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON at the end")
    args = parser.parse_args()
    loaded = load_model(args.model)
    rows = run_latency(loaded, args)
    totals = run_throughput(loaded, args)
    for verdict in ("reload wins", "even", "recompute wins"):
        cells = [f"{r['context']}/{r['load']}" for r in rows if r["verdict"] == verdict]
        print(f"{verdict} (context/load): {', '.join(cells) or 'nowhere'}")
    if args.json:
        print(json.dumps({"latency": rows, "throughput": totals}))


if __name__ == "__main__":
    main()
