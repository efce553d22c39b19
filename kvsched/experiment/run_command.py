"""The command `kvsched run`: a workload on a model or on the synthetic runner, with a table of what came of it.

Owns: its arguments, the progress bar, what it prints and in which order.
Knows nothing about: how arguments become engines (run_setup), how requests are served (serve), what is in the tables
(run_report).
Exit code: 0 if all was served, 1 if a run gave up, 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from kvsched import __version__
from kvsched.config import SchedulerConfig
from kvsched.experiment.run_report import RunResult, num_equal_answers, requests_table, results_table, run_to_dict
from kvsched.experiment.run_setup import DEFAULTS, DEMONSTRATION, NUM_SYNTHETIC_BLOCKS, Maker, Setup, prepare
from kvsched.experiment.serve import Interrupt, Recorder, Served, check_items, from_arrival, serve
from kvsched.experiment.workload import WorkItem
from kvsched.trace.metrics import run_metrics
from kvsched.trace.writer import is_gzipped

_FEW = 12
"""Up to so many requests are listed without being asked for."""

_NEXT = "notebooks/06-the-cascade.ipynb"
_DESCRIPTION = """\
Serve a workload and print what came of it: preemptions, recomputed tokens, latencies.

Without a workload it is a short demonstration: eight questions on the default model, in
a KV cache too small for all of them ({} usable blocks of {} tokens), two steps in flight,
the fence on. It runs twice, with the guard off and on, and prints the answers and both
results side by side. Every option below can be added to it.""".format(
    DEMONSTRATION["num_blocks"] - 1, DEMONSTRATION["block_size"]
)
_EXAMPLES = """\
examples:
  kvsched run                                             the demonstration
  kvsched run --trace run.jsonl                           the same, and keep all events
  kvsched run questions.txt --chat --max-tokens 64        a prompt a line, through the model's chat template
  kvsched run --requests 20 --prompt-len 64-256 --output-len 16-64 --rate 2
  kvsched run --synthetic --requests 80 --num-blocks 101 --fence on --guard both
  kvsched run --synthetic --requests 4 --fail-calls 5,9 --json

a line of a .jsonl file of prompts:
  {"prompt": "Why is the sky blue?", "max_tokens": 32, "priority": 0, "arrival": 1.5, "id": "sky"}
"""


# ---- arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "kvsched run [FILE | --requests N] [options]"
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    _add_workload(parser)
    _add_machine(parser)
    _add_scheduler(parser)
    group = parser.add_argument_group("faults")
    group.add_argument("--faults", metavar="FILE", help="a plan of faults, as FaultPlan.save writes it")
    group.add_argument("--fail-calls", metavar="5,9,12", help="these calls for slots fail, counted over the run from 1")
    group = parser.add_argument_group("results")
    group.add_argument(
        "--trace", type=Path, metavar="OUT", help="write all events to OUT, .jsonl or .jsonl.gz; of two runs to "
        "OUT.guard-off.jsonl and OUT.guard-on.jsonl"
    )  # fmt: skip
    group.add_argument("--json", action="store_true", help="print one JSON object, and nothing else, on stdout")
    group.add_argument(
        "--requests-table", action="store_true", help=f"a line per request (up to {_FEW} requests always)"
    )
    group.add_argument(
        "--patience", type=int, default=1000, metavar="N",
        help="give up after N turns in a row without a token (default: 1000): with the guard off some workloads "
        "never end",
    )  # fmt: skip


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload (none: the demonstration)")
    add = group.add_argument
    add("prompts", nargs="?", metavar="FILE", help="prompts: plain text, one a line; or .jsonl, an object a line")
    add("--requests", type=int, metavar="N", help="N synthetic requests of random tokens instead of a file")
    add("--prompt-len", metavar="L", help="tokens per synthetic prompt: 64, or from a range, 64-256 (default: 64)")
    add("--output-len", metavar="L", help="tokens that a synthetic request generates, likewise (default: 32)")
    add("--shared-prefix", type=int, metavar="N", help="the first N tokens are the same in all synthetic prompts")
    add("--rate", type=float, metavar="R", help="R requests a second (Poisson) instead of all at once")
    add("--max-tokens", type=int, metavar="N", help=f"most tokens per answer (default: {DEFAULTS['max_tokens']})")
    add("--temperature", type=float, metavar="T", help="0 takes the likeliest token (default: 0)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, arrivals, draws, random weights (default: 0)")
    add("--ignore-eos", action="store_const", const=True, help="go on past the end of text (always with --requests)")
    add("--chat", action="store_const", const=True, help="put each text in the model's chat template")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what runs it").add_argument
    add("--model", metavar="NAME", help="smollm2 (default), random:llama-tiny and the like, a folder, or a hub id")
    add("--device", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="of the weights (default: float32)")
    add("--connector", choices=("host",), help="a tier in the host's memory: full blocks are saved there, and loaded")
    add("--synthetic", action="store_true", help="no model: tokens without meaning, in virtual time; a text stands for "
        "its UTF-8 bytes, one token a byte")  # fmt: skip
    add("--step-ms", type=float, metavar="MS", help="virtual cost of a step (default: 10)")
    add("--token-us", type=float, metavar="US", help="virtual cost of each token in a step (default: 50)")


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduler (defaults as in SchedulerConfig)")
    add = group.add_argument
    add("--num-blocks", type=int, metavar="N", help="blocks in the pool, one of them reserved (default: 256 MiB on a "
        f"model, {NUM_SYNTHETIC_BLOCKS} with --synthetic)")  # fmt: skip
    add("--block-size", type=int, metavar="N", help="tokens per block")
    add("--max-num-seqs", type=int, metavar="N", help="requests that may run at once")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens that a step may compute")
    add("--max-model-len", type=int, metavar="N", help="longest sequence in tokens (default: what the model can)")
    add("--depth", type=int, dest="max_in_flight", metavar="N", help="steps in flight at most (max_in_flight)")
    add("--async", dest="async_scheduling", action="store_const", const=True, help="schedule on tokens not known yet")
    add("--sync", dest="async_scheduling", action="store_const", const=False, help="wait for tokens")
    add("--policy", choices=("fcfs", "priority"), help="order of waiting requests, and choice of the victim")
    add("--no-prefix-caching", dest="enable_prefix_caching", action="store_const", const=False,
        help="never find a block again by its content")  # fmt: skip
    add("--fence", dest="defer_block_free", choices=("on", "off", "auto"), help="freed blocks wait for steps in flight")
    add("--guard", choices=("on", "off", "both"), help="take no victim whose blocks are behind the fence; both: two "
        "runs, side by side (default: on; in the demonstration both)")  # fmt: skip
    add("--landing", metavar="N", help="results land after N further steps, or live: as they come (default on a model)")


# ---- running


def run(args: argparse.Namespace) -> int:
    """Serve the workload, once or twice, and print what came of it; returns the exit code."""
    if args.trace is not None:
        _check_trace(args.trace)
    setup = prepare(args)
    with _status(None if args.synthetic else f"loading {args.model} …"):
        maker = Maker(setup)
    items = setup.workload(maker.vocab_size)
    to_serve = maker.readable(items)
    if not args.json:
        _say(_introduction(setup, maker, items))
    results: list[RunResult] = []
    with Interrupt() as interrupt:
        for guard in setup.guards:
            results.append(_one_run(setup, maker, guard, to_serve, interrupt))
            if results[-1].served.stopped == "interrupted":
                break
    if args.json:
        print(json.dumps(_to_dict(setup, maker, results), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        _print(setup, results, items)
    stopped = [result.served.stopped for result in results]
    return 130 if "interrupted" in stopped else 1 if any(stopped) else 0


def _check_trace(path: Path) -> None:
    is_gzipped(path)  # for its error
    if not path.parent.is_dir():
        raise ValueError(f"--trace {path}: there is no folder {path.parent}; make it first")


def _trace_path(setup: Setup, guard: str) -> Path | None:
    path: Path | None = setup.args.trace
    if path is None or len(setup.guards) == 1:
        return path
    suffix = ".jsonl.gz" if is_gzipped(path) else ".jsonl"
    return path.with_name(f"{path.name.removesuffix(suffix)}.guard-{guard}{suffix}")


def _one_run(setup: Setup, maker: Maker, guard: str, items: Sequence[WorkItem], interrupt: Interrupt) -> RunResult:
    """Raises ValueError for settings or requests that cannot be served, before anything is written."""
    recorder = Recorder()
    sampling = {item.id: setup.sampling(item, index) for index, item in enumerate(items)}
    path = _trace_path(setup, guard)
    with warnings.catch_warnings(record=True) as caught, maker.engine(guard, recorder) as engine:
        check_items(engine, items)
        if path is not None:
            recorder.open(path)
        try:
            with _progress(guard, items) as on_turn:
                served = serve(
                    engine,
                    items,
                    lambda item: sampling[item.id],
                    patience=setup.args.patience,
                    interrupt=interrupt,
                    on_turn=on_turn,
                )
        finally:
            recorder.close()
    texts = {}
    if engine.tokenizer is not None:
        decode = engine.tokenizer.decode
        texts = {request: decode(tokens, skip_special_tokens=True) for request, tokens in served.tokens.items()}
    return RunResult(
        guard=guard,
        settings=engine.config.to_dict() | {"defers_frees": engine.scheduler.kv.fence.on},
        metrics=run_metrics(from_arrival(recorder.log)),
        served=served,
        texts=texts,
        fired=engine.watch.fired,
        never_fired=engine.faults_never_fired,
        warnings=[str(warning.message) for warning in caught],
        trace=None if path is None else str(path),
    )


# ---- on the terminal


def _status(text: str | None) -> Any:
    """A line on stderr while something takes its time, if there is something to say and a terminal to say it on."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.status(text) if text and console.is_terminal else nullcontext()


@contextmanager
def _progress(guard: str, items: Sequence[WorkItem]) -> Iterator[Callable[[Served], None]]:
    """A bar on stderr, on a terminal only; what it gives is called after each turn."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda served: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[so_far]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"guard {guard}", total=sum(item.max_tokens for item in items), so_far="")

        def on_turn(served: Served) -> None:
            num_tokens = sum(map(len, served.tokens.values()))
            so_far = f"{served.num_ended} of {len(items)} requests, {num_tokens} tokens"
            is_done = served.num_ended == len(items)
            bar.update(task, completed=bar.tasks[0].total if is_done else num_tokens, so_far=so_far)

        yield on_turn


def _say(*lines: str) -> None:
    """Print text as it is, wrapped at words; lines that are empty as well."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for line in lines:
        console.print(line)


def _introduction(setup: Setup, maker: Maker, items: Sequence[WorkItem]) -> str:
    settings, args = setup.settings, setup.args
    if not setup.demonstration:
        requests = "1 request" if len(items) == 1 else f"{len(items):,} requests"
        source = "synthetic" if args.requests is not None else f"from {args.prompts}"
        how = "" if args.rate is None else f", {args.rate:g} a second"
        return f"{requests}, {source}{how}, on {maker.name}"
    blocks = f"{settings['num_blocks'] - 1} usable blocks of {settings['block_size']} tokens"
    small = " (too few for all of them at once, so that requests are preempted)" if _is_small(settings) else ""
    defers = SchedulerConfig(**settings).defers_frees(args.connector is not None)
    fence = "on: blocks of a preempted request come back only after these steps" if defers else "off"
    runs = "It runs twice, with the guard off and on" if len(setup.guards) == 2 else f"The guard is {args.guard}"
    return (
        f"A demonstration: {len(items)} prompts on {maker.name}, {blocks} in the KV cache{small}. Steps "
        f"in flight: up to {settings['max_in_flight']}. The fence is {fence}. {runs}: the guard takes no victim "
        f"whose blocks could not come back now."
    )


def _is_small(settings: Mapping[str, Any]) -> bool:
    """Whether the pool is the demonstration's own."""
    return all(settings[name] == DEMONSTRATION[name] for name in ("num_blocks", "block_size"))


def _print(setup: Setup, results: Sequence[RunResult], items: Sequence[WorkItem]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if setup.args.requests_table or len(items) <= _FEW:
        console.print(requests_table(results, items))
    clock = "in virtual time" if setup.args.synthetic else "in real time, which varies"
    console.print(results_table(results, clock))
    _say(*_notes(results), *_verdict(results))


def _notes(results: Sequence[RunResult]) -> list[str]:
    lines = []
    for result in results:
        where = f"guard {result.guard}: " if len(results) > 1 else ""
        if result.served.why:
            lines.append(f"{where}{result.served.why}")
        lines += [f"{where}warning: {text}" for text in result.warnings]
        lines += [f"{where}this fault never came to pass: {fault}" for fault in result.never_fired]
        lines += [f"{where}events in {result.trace}"] if result.trace else []
    return lines


def _verdict(results: Sequence[RunResult]) -> list[str]:
    """What differs between two runs, in words, and where to read on."""
    if len(results) < 2 or any(result.served.stopped == "interrupted" for result in results):
        return []
    off, on = results
    if not on.settings["defers_frees"]:
        return ["The fence is off, so the guard has nothing to do; give --fence on, with two or more steps in flight."]
    a, b = off.metrics, on.metrics
    counts = (
        f"With the guard off there were {a.num_preemptions:,} preemptions, and {a.num_recomputed_tokens:,} tokens were "
        f"computed again; with the guard on {b.num_preemptions:,} and {b.num_recomputed_tokens:,}."
    )
    same, num = num_equal_answers(results), len(on.served.tokens)
    alike = f"Token for token {same:,} of {num:,} answers are the same."
    if a.num_preemptions <= b.num_preemptions:
        return [f"{counts} Here the guard saved nothing; another --num-blocks may show what it is for. {alike}"]
    why = (
        "Without the guard a victim is taken even if its blocks cannot come back now: it loses them in vain, and the "
        "next one is taken, the cascade."
    )
    return [f"{counts} {why} {alike} Next: open {_NEXT} (make lab, or kvsched-lab) to see it step by step."]


def _to_dict(setup: Setup, maker: Maker, results: Sequence[RunResult]) -> dict[str, Any]:
    return {
        "kvsched": __version__,
        "runner": maker.name,
        "demonstration": setup.demonstration,
        "num_requests": len(results[0].served.tokens),
        "seed": setup.args.seed,
        "rate": setup.args.rate,
        "clock": "virtual" if setup.args.synthetic else "real",
        "num_equal_answers": num_equal_answers(results) if len(results) > 1 else None,
        "runs": [run_to_dict(result) for result in results],
    }
