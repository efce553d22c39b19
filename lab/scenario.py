"""A run as a small file that does it again: JSON, or a test to attach to a bug report.

Owns: the scenario's format and its checks.
Knows nothing about: where one looks, models. A run on a model is written with the tokens it gave, so that it can be
done again without the model.
Invariants: a scenario holds what cannot be left out: settings that are not the default, requests, commands, faults that
came to pass. What it does is decided by that alone; nothing in it is ever run as code.

    {"format": "kvsched-scenario/1",
     "settings": {"num_blocks": 9, "block_size": 4}, "landing": 0, "faults": [{"kind": "fail_call", "call": 3}],
     "script": [{"add": {"request": "r0", "prompt": [5, 6, 7]}}, {"turn": 12}, {"abort": {"requests": ["r0"]}}]}
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

from kvsched.config import ConfigError, SchedulerConfig
from kvsched.engine import Engine
from kvsched.faults import Fault, FaultError, fault_from_dict, fault_to_dict
from kvsched.request import SamplingParams
from kvsched.runner.synthetic import CostModel, SyntheticRunner
from kvsched.trace.events import Event, RequestAdded, StepDelivered
from kvsched.trace.replay import Replay
from lab.bug_report import test_text
from lab.journal import Command
from lab.run import Run

FORMAT = "kvsched-scenario/1"

_REPEATED = ("turn", "schedule", "deliver")
_COMMANDS = ("add", "abort", "configure", "inject", "reset_cache", *_REPEATED)
_VOCABULARY = 32_000

Scenario = Mapping[str, Any]


class ScenarioError(ValueError):
    """A run that cannot be written as a scenario, or a file that is none; the message says why."""


# ---- from a run


def scenario_of(run: Run, step: int) -> dict[str, Any]:
    """The smallest scenario that does this run again, up to the decision of the step after `step`.

    Raises ScenarioError, or NotEnough for some recordings.
    """
    engine = run.engine
    if engine is not None and engine.scheduler.connector is not None:
        raise ScenarioError("a run with a KV connector depends on what the connector holds; a scenario cannot say that")
    cut = run.num_before(step + 1)
    commands, events = run.commands[:cut], run.events_before(cut)
    settings = run.settings
    scenario: dict[str, Any] = {"format": FORMAT, "settings": _changed(settings.to_dict(), _defaults(settings))}
    landing = settings.max_in_flight - 1 if engine is None else engine.landing
    if landing is None:
        scenario["landing"] = "live"
    elif landing != run.config.max_in_flight - 1:
        scenario["landing"] = landing
    scenario |= _runner_of(run, events)
    fired = _fired(run, step)
    first = [fault_to_dict(fault) for fault in run.first_faults if fault in fired]
    if first:
        scenario["faults"] = first
    scenario["script"] = _script(commands, events, fired)
    if step == run.num_steps:
        scenario["script"] += _to_come(run)
    return scenario


def _defaults(settings: SchedulerConfig) -> dict[str, Any]:
    return SchedulerConfig(num_blocks=settings.num_blocks).to_dict() | {"num_blocks": None}


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value != defaults[name]}


def _fired(run: Run, step: int) -> list[Fault]:
    """Faults that came to pass by then."""
    if run.engine is None:
        return run.faults
    return [fault for fault, at in run.engine.watch.fired if at <= step]


def _runner_of(run: Run, events: Sequence[Event]) -> dict[str, Any]:
    """What is needed to give the same tokens: the synthetic runner's settings, or the tokens themselves."""
    runner = run.engine.runner if run.engine is not None else None
    if isinstance(runner, SyntheticRunner) and runner.token_fn is None:
        told: dict[str, Any] = {}
        if runner.cost != CostModel():
            told["cost"] = list(runner.cost)
        if runner.vocab_size != _VOCABULARY:
            told["vocab_size"] = runner.vocab_size
        return told
    return {"tokens": _tokens_given(events)}


def _tokens_given(events: Sequence[Event]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, RequestAdded):
            if event.request in tokens:
                raise ScenarioError(f"request id {event.request!r} was used twice; a scenario tells tokens by id")
            tokens[event.request] = []
        elif isinstance(event, StepDelivered):
            for request, given in zip(event.request_ids, event.tokens, strict=True):
                tokens[request] += given
    return {request: given for request, given in tokens.items() if given}


def _script(commands: Sequence[Command], events: Sequence[Event], fired: Sequence[Fault]) -> list[dict[str, Any]]:
    arrivals = (event for event in events if isinstance(event, RequestAdded))
    script: list[dict[str, Any]] = []
    for do, group in groupby(commands, key=lambda command: command.do):
        if do in _REPEATED:
            script.append({do: sum(1 for _ in group)})
            continue
        for command in group:
            if do == "add":
                script.append({"add": _arrived(next(arrivals))})
            elif do != "inject" or fault_from_dict(command.args) in fired:
                script.append({do: dict(command.args)})
    return _joined(script)


def _joined(script: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Repeats that stand side by side, once a fault between them is gone, are one."""
    joined: list[dict[str, Any]] = []
    for entry in script:
        (do,) = entry
        if do in _REPEATED and joined and do in joined[-1]:
            joined[-1][do] += entry[do]
        else:
            joined.append(entry)
    return joined


def _to_come(run: Run) -> list[dict[str, Any]]:
    """Requests that have not arrived yet."""
    entries = []
    eos = run.engine.eos_token_ids if run.engine is not None else ()
    for command in run.agenda:
        args = command.args
        if command.do != "add" or isinstance(args["prompt"], str):
            raise ScenarioError(f"{command.do} at step {command.step + 1} is still to come; run on until it has come")
        sampling = dict(args["sampling"])
        if not sampling["ignore_eos"]:
            sampling["stop_token_ids"] = sorted({*sampling["stop_token_ids"], *eos})
        request = _request(args["request"], args["prompt"], sampling, args["priority"], args["arrival_time"] or 0.0)
        entries.append({"add": request | {"at_step": command.step + 1}})
    return entries


def _arrived(event: RequestAdded) -> dict[str, Any]:
    return _request(event.request, event.prompt_token_ids, event.sampling, event.priority, event.arrival_time)


def _request(
    name: str, prompt: Sequence[int], sampling: Mapping[str, Any], priority: int, arrival_time: float
) -> dict[str, Any]:
    request: dict[str, Any] = {"request": name, "prompt": list(prompt)}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in sampling.items()}
    changed = _changed(given, asdict(SamplingParams()))
    if changed:
        request["sampling"] = {k: list(v) if isinstance(v, tuple) else v for k, v in changed.items()}
    return request | _changed(
        {"priority": priority, "arrival_time": arrival_time}, {"priority": 0, "arrival_time": 0.0}
    )


def write_scenario(path: str | PathLike[str], scenario: Scenario) -> None:
    """Write it as JSON: one line per command."""
    head = {key: value for key, value in scenario.items() if key != "script"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    script = ",\n  ".join(json.dumps(entry) for entry in scenario["script"])
    lines.append(f' "script": [\n  {script}\n ]')
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


# ---- to a run


def open_scenario(path: str | PathLike[str]) -> Run:
    """Do a scenario again. Raises ScenarioError, naming the file and the entry that is wrong."""
    try:
        scenario = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path}: cannot be read as a scenario: {error}") from error
    try:
        return run_scenario(scenario)
    except (ScenarioError, ConfigError, FaultError) as error:
        raise ScenarioError(f"{path}: {error}") from error


def run_scenario(scenario: Any) -> Run:
    """A run that does what the scenario says. Raises ScenarioError for anything that is no scenario."""
    if not isinstance(scenario, Mapping) or scenario.get("format") != FORMAT:
        raise ScenarioError(f"not a scenario in format {FORMAT!r}")
    unknown = sorted(
        set(scenario) - {"format", "settings", "landing", "cost", "vocab_size", "tokens", "faults", "script"}
    )
    if unknown or not isinstance(scenario.get("script"), list):
        raise ScenarioError(
            f"unknown key {', '.join(unknown)}" if unknown else "its script is missing: a list of commands"
        )
    config = SchedulerConfig.from_dict(scenario["settings"])
    runner_of = _runner_maker(scenario)

    def remake(changed: SchedulerConfig) -> Engine:
        landing = scenario.get("landing", changed.max_in_flight - 1)
        landing = None if landing == "live" else landing
        return Engine(changed, runner_of(), landing=landing, max_model_len_is_explicit=False)

    engine = remake(config)
    for fault in scenario.get("faults", ()):
        engine.inject(fault_from_dict(fault))
    run = Run(engine, Replay(), remake, owned=True)
    for number, entry in enumerate(scenario["script"], 1):
        try:
            _carry_out(run, entry)
        except (KeyError, TypeError, ValueError) as error:
            raise ScenarioError(f"entry {number} of its script, {json.dumps(entry)[:80]}: {error}") from error
    return run


def _runner_maker(scenario: Scenario) -> Callable[[], SyntheticRunner]:
    cost = CostModel(*scenario.get("cost", ()))
    vocab_size = scenario.get("vocab_size", _VOCABULARY)
    given = scenario.get("tokens")
    if given is None:
        return lambda: SyntheticRunner(cost, vocab_size)
    lengths = {e["add"]["request"]: len(e["add"]["prompt"]) for e in scenario["script"] if "add" in e}
    return lambda: SyntheticRunner(cost, vocab_size, token_fn=_told(given, lengths))


def _told(given: Mapping[str, Sequence[int]], lengths: Mapping[str, int]) -> Callable[[str, int], int]:
    """Recorded tokens; where the recording ends, tokens that mean nothing."""

    def token(request: str, position: int) -> int:
        tokens, index = given.get(request, ()), position - lengths[request]
        if 0 <= index < len(tokens):
            return tokens[index]
        return zlib.crc32(f"{request}/{position}".encode()) % _VOCABULARY

    return token


def _carry_out(run: Run, entry: Any) -> None:
    if not isinstance(entry, Mapping) or len(entry) != 1 or next(iter(entry)) not in _COMMANDS:
        raise ScenarioError(f"a command is one of {', '.join(_COMMANDS)} with what belongs to it")
    ((do, value),) = entry.items()
    if do in _REPEATED:
        for _ in range(value):
            run.do(do)
    elif do == "add":
        args = {"priority": 0, "arrival_time": None} | {k: v for k, v in value.items() if k != "at_step"}
        args["sampling"] = SamplingParams(**value.get("sampling", {})).to_dict()
        if "at_step" in value:
            run.plan(Command(0, value["at_step"] - 1, "add", args))
        else:
            run.do("add", args)
    else:
        run.do(do, value)


# ---- to a test


def write_pytest(path: str | PathLike[str], run: Run, step: int) -> None:
    """Write a test that does the run again up to there and asserts what came of it; it needs kvsched alone.

    Raises ScenarioError, also for a name that pytest would not find.
    """
    name = Path(path).name
    if not (name.startswith("test_") and name.endswith(".py")):
        raise ScenarioError(f"{name}: pytest finds files named test_….py; choose such a name")
    events = run.events_before(run.num_before(step + 1))
    Path(path).write_text(test_text(scenario_of(run, step), events), encoding="utf-8")
