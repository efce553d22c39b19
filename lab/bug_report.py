"""A scenario as the text of a pytest function.

Owns: the text. Knows nothing about: files, sessions; it never runs what it writes.
Invariants: the text needs kvsched alone, and passes as long as the same decisions are made; values stand in it as
`repr` has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pprint import pformat
from typing import Any

from kvsched.trace.events import Event, StepScheduled

_WIDTH = 110
_MOST_SHOWN = 40

_CHECKED = {
    "preempted": ("step", "request", "wanted_by"),
    "slots_failed": ("step", "request", "needed", "free"),
    "guard_stopped": ("step", "request", "victim"),
    "request_finished": ("step", "request", "reason", "num_output_tokens"),
}
"""What the test asserts of these events, by kind."""

_HEAD = '''"""A run of kvsched, step by step; written by lab.Session.to_pytest. It needs kvsched alone.

{summary}
"""

{imports}

'''

_IMPORTS = {
    "SchedulerConfig": "from kvsched.config import SchedulerConfig",
    "Engine": "from kvsched.engine import Engine",
    "fault_from_dict": "from kvsched.faults import fault_from_dict",
    "SamplingParams": "from kvsched.request import SamplingParams",
    "SyntheticRunner": "from kvsched.runner.synthetic import CostModel, SyntheticRunner",
}

_TOKENS = '''
TOKENS = {tokens}
"""What the model gave, by request."""


def token(request, position):
    index = position - LENGTHS[request]
    return TOKENS[request][index] if request in TOKENS and index < len(TOKENS[request]) else 0


LENGTHS = {lengths}
"""Tokens of each prompt."""

'''

_DEFINE = '''
def found(engine, kind, *names):
    """What events of a kind say, in order."""
    return [tuple(getattr(event, name) for name in names) for event in engine.events if event.kind == kind]


def test_scenario():
'''


def test_text(scenario: Mapping[str, Any], events: Sequence[Event]) -> str:
    """The whole file. events: of the run, to say what is asserted."""
    body = [*_set_up(scenario), *_drive(scenario["script"]), "", *_checks(events)]
    tokens = ""
    if "tokens" in scenario:
        lengths = {e["add"]["request"]: len(e["add"]["prompt"]) for e in scenario["script"] if "add" in e}
        tokens = _TOKENS.format(tokens=_value(scenario["tokens"]), lengths=_value(lengths))
    text = tokens + _DEFINE + "\n".join(f"    {line}".rstrip() for line in body) + "\n"
    imports = "\n".join(line for name, line in _IMPORTS.items() if name in text)
    return _HEAD.format(summary=_summary(events), imports=imports) + text


test_text.__test__ = False  # type: ignore[attr-defined]  # for pytest: it writes tests, it is none


def _summary(events: Sequence[Event]) -> str:
    counts = {kind: sum(1 for e in events if e.kind == kind) for kind in ("step_scheduled", *_CHECKED)}
    return ", ".join(f"{kind}: {number}" for kind, number in counts.items())


def _set_up(scenario: Mapping[str, Any]) -> Iterator[str]:
    settings = scenario["settings"]
    depth = settings.get("max_in_flight", 2)
    landing = scenario.get("landing", depth - 1)
    runner = [f"CostModel(*{scenario['cost']})"] if "cost" in scenario else []
    runner += [f"vocab_size={scenario['vocab_size']}"] if "vocab_size" in scenario else []
    runner += ["token_fn=token"] if "tokens" in scenario else []
    yield from _lines("config = SchedulerConfig(", [f"{name}={value!r}" for name, value in settings.items()], ")")
    options = [f"landing={None if landing == 'live' else landing}", "max_model_len_is_explicit=False"]
    yield f"engine = Engine(config, SyntheticRunner({', '.join(runner)}), {', '.join(options)})"
    for fault in scenario.get("faults", ()):
        yield f"engine.inject(fault_from_dict({fault!r}))"


def _drive(script: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    calls = {"turn": "step", "schedule": "schedule", "deliver": "deliver"}
    for entry in script:
        ((do, value),) = entry.items()
        if do in calls:
            call = f"engine.{calls[do]}()"
            yield from [call] if value == 1 else [f"for _ in range({value}):", f"    {call}"]
        elif do == "add" and "at_step" not in value:
            yield from _add(value)
        elif do == "abort":
            yield f"engine.abort({', '.join(map(repr, value['requests']))})"
        elif do == "inject":
            yield f"engine.inject(fault_from_dict({dict(value)!r}))"
        elif do == "configure":
            yield from _configure(value)
        elif do == "reset_cache":
            yield f"engine.scheduler.reset_prefix_cache({_arguments(value)})"


def _configure(settings: Mapping[str, Any]) -> Iterator[str]:
    if "max_in_flight" in settings:
        yield "keeps_full = engine.landing == engine.config.max_in_flight - 1"
    yield f"engine.scheduler.configure({_arguments(settings)})"
    if "max_in_flight" in settings:
        yield "engine.landing = engine.config.max_in_flight - 1 if keeps_full else engine.landing"


def _add(request: Mapping[str, Any]) -> Iterator[str]:
    more = {k: v for k, v in request.items() if k in ("priority", "arrival_time")}
    sampling = f"SamplingParams({_arguments(request.get('sampling', {}))})"
    options = f", {_arguments(more)}" if more else ""
    yield from f"prompt = {_value(request['prompt'])}".splitlines()
    yield f"engine.add_request({request['request']!r}, prompt, {sampling}{options})"


def _checks(events: Sequence[Event]) -> Iterator[str]:
    for kind, names in _CHECKED.items():
        rows = [tuple(getattr(e, name) for name in names) for e in events if e.kind == kind]
        call = f"found(engine, {kind!r}, {', '.join(map(repr, names))})"
        if len(rows) > _MOST_SHOWN:
            yield f"assert len({call}) == {len(rows)}"
            call, rows = f"{call}[:{_MOST_SHOWN}]", rows[:_MOST_SHOWN]
        yield from _lines(f"assert {call} == [", [repr(row) for row in rows], "]")
    last = next((e for e in reversed(events) if isinstance(e, StepScheduled)), None)
    if last is not None:
        names = ("step", "request_ids", "num_tokens", "calls", "free")
        yield f"last = found(engine, 'step_scheduled', {', '.join(map(repr, names))})[-1]"
        yield from f"assert last == {_value(tuple(getattr(last, name) for name in names))}".splitlines()


def _lines(opening: str, items: Sequence[str], closing: str) -> Iterator[str]:
    """On one line if it fits, else an item a line."""
    one = opening + ", ".join(items) + closing
    if len(one) <= _WIDTH:
        yield one
        return
    yield opening
    yield from [f"    {item}," for item in items]
    yield closing


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _value(value: Any) -> str:
    return pformat(value, width=_WIDTH, compact=True, sort_dicts=False)
