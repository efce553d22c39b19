"""From the arguments of `kvsched run` to what is run: a workload, settings, faults, engines.

Owns: which arguments go together, the defaults, the demonstration's settings, how engines are made.
Knows nothing about: serving, tables.
Invariants: whatever is wrong with the arguments is said before a model is loaded. torch is imported only if a model is
asked for; its weights are read and laid out once, however many engines are made.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.connector.host import HostTier
from kvsched.engine import Engine, chat_text
from kvsched.experiment.prompts import PROMPTS
from kvsched.experiment.workload import WorkItem, as_bytes, at_rate, parse_lengths, read_prompts, synthetic
from kvsched.faults import FailCall, FaultPlan
from kvsched.request import SamplingParams
from kvsched.runner.models import DEFAULT_MODEL
from kvsched.runner.synthetic import CostModel, SyntheticRunner

SETTINGS = (
    "num_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "max_in_flight",
    "async_scheduling",
    "policy",
    "enable_prefix_caching",
    "defer_block_free",
)
DEFAULTS: dict[str, Any] = {
    "model": DEFAULT_MODEL,
    "device": "auto",
    "dtype": "float32",
    "max_tokens": 32,
    "prompt_len": "64",
    "output_len": "32",
    "shared_prefix": 0,
    "temperature": 0.0,
    "guard": "on",
    "chat": False,
    "ignore_eos": False,
    "step_ms": 10.0,
    "token_us": 50.0,
}
DEMONSTRATION: dict[str, Any] = {
    "num_blocks": 27,
    "block_size": 8,
    "max_in_flight": 2,
    "defer_block_free": "on",
    "guard": "both",
    "landing": "1",
    "max_tokens": 20,
}
"""Eight questions and answers come to some 40 blocks of 8, what they share counted once; 26 are usable. Results land
after one further step, whatever the machine's speed, so that every run shows the same preemptions."""

NUM_DEMONSTRATION_PROMPTS = 8
NUM_SYNTHETIC_BLOCKS = 512
_FENCE = {"on": True, "off": False, "auto": "auto"}
_GUARDS = {"on": "stop_retry", "off": "none"}
_ONLY_WITH_REQUESTS = ("prompt_len", "output_len", "shared_prefix")
_ONLY_WITH_MODEL = ("model", "device", "dtype", "connector", "chat", "temperature", "ignore_eos")
_ONLY_WITH_SYNTHETIC = ("step_ms", "token_us")


@dataclass(slots=True)
class Setup:
    """What is to be run. items: None for synthetic prompts, which are made once the vocabulary is known.

    demonstration: no workload was asked for. guards: "off" before "on". landing: None is live.
    """

    args: argparse.Namespace
    demonstration: bool
    guards: tuple[str, ...]
    settings: dict[str, Any]
    faults: FaultPlan
    landing: int | None
    items: list[WorkItem] | None
    make_items: Callable[[int], list[WorkItem]]

    def sampling(self, item: WorkItem, index: int) -> SamplingParams:
        """How a request draws its tokens; each has its own seed."""
        args = self.args
        ignore_eos = args.ignore_eos or args.requests is not None
        return SamplingParams(
            max_tokens=item.max_tokens, temperature=args.temperature, seed=args.seed + index, ignore_eos=ignore_eos
        )

    def workload(self, vocab_size: int) -> list[WorkItem]:
        """The requests. vocab_size: synthetic token ids lie below it."""
        items = self.make_items(vocab_size) if self.items is None else self.items
        return items if self.args.rate is None else at_rate(items, self.args.rate, self.args.seed)


def prepare(args: argparse.Namespace) -> Setup:
    """Check the arguments, fill in the defaults, read the files. Raises ValueError, or OSError for a file."""
    _check_together(args)
    demonstration = args.prompts is None and args.requests is None
    if demonstration:
        _fill(args, DEMONSTRATION | ({} if args.synthetic else {"chat": True}))
    _fill(args, DEFAULTS)
    settings = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    if "defer_block_free" in settings:
        settings["defer_block_free"] = _FENCE[settings["defer_block_free"]]
    if args.synthetic:
        settings.setdefault("num_blocks", NUM_SYNTHETIC_BLOCKS)
    SchedulerConfig(**({"num_blocks": 2} | settings))
    SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    if args.patience < 1:
        raise ValueError(f"--patience is {args.patience}; give 1 turn or more")
    lengths = [parse_lengths(f"--{name}-len", getattr(args, f"{name}_len")) for name in ("prompt", "output")]

    def make_items(vocab_size: int) -> list[WorkItem]:
        prompt_len, output_len = lengths
        options = {"vocab_size": vocab_size, "seed": args.seed, "shared_prefix": args.shared_prefix}
        return synthetic(args.requests, prompt_len, output_len, **options)

    items = _prompts(args, demonstration)
    setup = Setup(args, demonstration, _guards(args), settings, _faults(args), _landing(args), items, make_items)
    setup.workload(vocab_size=2)  # for its errors
    return setup


def _fill(args: argparse.Namespace, defaults: dict[str, Any]) -> None:
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_together(args: argparse.Namespace) -> None:
    """Raises ValueError for options that contradict each other."""

    def refuse(names: tuple[str, ...], because: str) -> None:
        given = [_option(name) for name in names if getattr(args, name) is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: {because}")

    if args.prompts is not None and args.requests is not None:
        raise ValueError(f"{args.prompts} and --requests are two workloads; give one of them")
    if args.requests is None:
        refuse(_ONLY_WITH_REQUESTS, "only for synthetic prompts; say how many with --requests N, or leave it out")
    else:
        refuse(("max_tokens",), "only for prompts that are given; with --requests say --output-len")
        refuse(("chat",), "only for prompts that are text; leave it out with --requests")
    if args.synthetic:
        refuse(_ONLY_WITH_MODEL, "needs a model, and --synthetic runs without one; leave it out")
        if args.landing == "live":
            raise ValueError("--landing live needs a model, results in virtual time are never late; give a number")
    else:
        refuse(_ONLY_WITH_SYNTHETIC, "only a cost in virtual time; give --synthetic with it, or leave it out")


def _prompts(args: argparse.Namespace, demonstration: bool) -> list[WorkItem] | None:
    if args.requests is not None:
        return None
    if demonstration:
        some = PROMPTS[:NUM_DEMONSTRATION_PROMPTS]
        return [
            WorkItem(id=f"r{index}", prompt=prompt, max_tokens=args.max_tokens, source=f"prompt {index}")
            for index, prompt in enumerate(some)
        ]
    return read_prompts(args.prompts, args.max_tokens)


def _guards(args: argparse.Namespace) -> tuple[str, ...]:
    return ("off", "on") if args.guard == "both" else (args.guard,)


def _landing(args: argparse.Namespace) -> int | None:
    if args.landing is None or args.landing == "live":
        return None
    if not args.landing.isdecimal():
        raise ValueError(f"--landing is {args.landing!r}; give a number of further steps (0 or more), or live")
    return int(args.landing)


def _faults(args: argparse.Namespace) -> FaultPlan:
    plan = FaultPlan() if args.faults is None else FaultPlan.load(args.faults)
    if args.fail_calls is None:
        return plan
    words = [word.strip() for word in args.fail_calls.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"--fail-calls is {args.fail_calls!r}; give numbers of calls for slots from 1 on: 5,9,12")
    return FaultPlan((*plan.faults, *(FailCall(int(word)) for word in words)))


# ---- engines


class Maker:
    """Makes one engine after the other for the same setup; `vocab_size` and `name` are the runner's.

    Loads the model, if there is one. Raises ModelUnavailable (a ValueError) that says how to get it.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        args = setup.args
        self._is_used = False
        self._runner: Any
        if args.synthetic:
            self._runner = SyntheticRunner(CostModel(args.step_ms / 1000, args.token_us / 1e6))
            self.name = "the synthetic runner"
        else:
            from kvsched.runner.torch_runner import create_runner

            self._runner = create_runner(
                args.model,
                device=args.device,
                dtype=args.dtype,
                seed=args.seed,
                num_blocks=setup.settings.get("num_blocks"),
                block_size=setup.settings.get("block_size", 16),
                max_model_len=setup.settings.get("max_model_len"),
            )
            self.name = f"{self._runner.model_name} ({self._runner.device})"
        self.vocab_size: int = self._runner.vocab_size
        self.tokenizer = None if args.synthetic else self._runner.tokenizer

    def readable(self, items: list[WorkItem]) -> list[WorkItem]:
        """The same requests as the runner reads them: texts in the chat template, if that was asked for, or as bytes
        where there is no model. Raises ValueError for texts and a model that has no tokenizer."""
        if self.setup.args.synthetic:
            return as_bytes(items)
        if self.tokenizer is None and any(isinstance(item.prompt, str) for item in items):
            raise ValueError(
                f"{self.name} has no tokenizer, so it reads no text; ask for synthetic prompts (--requests 8), or "
                f"give token ids in a .jsonl file"
            )
        if not self.setup.args.chat:
            return items
        return [replace(i, prompt=self._chat(i.prompt)) if isinstance(i.prompt, str) else i for i in items]

    def _chat(self, prompt: str) -> str:
        assert self.tokenizer is not None
        return chat_text(self.tokenizer, [{"role": "user", "content": prompt}])

    def engine(self, guard: str, on_event: Callable[[Any], None]) -> Engine:
        """An engine at its start. guard: "on" or "off". Raises ConfigError for settings that could not be served."""
        if self._is_used:
            self._runner = self._runner.fresh()
        self._is_used = True
        setup, runner = self.setup, self._runner
        settings = setup.settings | {"guard": _GUARDS[guard]}
        options: dict[str, Any] = {"faults": setup.faults, "record": False, "on_event": on_event}
        explicit = "max_model_len" in setup.settings
        if not setup.args.synthetic:
            return Engine.on_runner(
                runner,
                landing=setup.landing,
                connector=HostTier() if setup.args.connector == "host" else None,
                max_model_len_is_explicit=explicit,
                options=options,
                **settings,
            )
        config = SchedulerConfig(**settings)
        options["meta"] = {"runner": "synthetic", "cost": runner.cost._asdict()}
        landing = config.max_in_flight - 1 if setup.landing is None else setup.landing
        return Engine(config, runner, landing=landing, max_model_len_is_explicit=explicit, **options)
