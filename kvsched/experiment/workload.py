"""Workloads: which requests come, with what prompts, and when.

Owns: `WorkItem`, reading prompts from a file, synthetic prompts of given lengths, arrivals at a rate.
Knows nothing about: engines, models, tokenizers, clocks.
Invariants: the same arguments give the same workload; ids are unique; arrivals are finite and not negative. Whatever
is wrong with a file is a `WorkloadError` that names the file, the line and the remedy.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any

from kvsched.request import WORD


class WorkloadError(ValueError):
    """A workload that makes no sense; the message names the input and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One request to come.

    prompt: text or token ids. max_tokens: most tokens to generate. priority: smaller goes first under the PRIORITY
    policy. arrival: seconds after the start of the run. source: where it was asked for, for messages.
    """

    id: str
    prompt: str | tuple[int, ...]
    max_tokens: int
    priority: int = 0
    arrival: float = 0.0
    source: str = ""


# ---- from a file


def read_prompts(path: str | PathLike[str], max_tokens: int) -> list[WorkItem]:
    """The requests of a file, in its order; blank lines are skipped. max_tokens: for those that do not say.

    A name ending in .jsonl: an object a line, {"prompt": text or list of token ids} and, if wanted, "max_tokens",
    "priority", "arrival" (seconds after the start) and "id". Any other name: plain text, one prompt a line.
    Raises WorkloadError, or OSError for a file that cannot be opened.
    """
    path = Path(path)
    if path.suffix == ".json":
        raise WorkloadError(f"{path}: one JSON document cannot be read; write an object a line and name it .jsonl")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: byte {error.start} is no UTF-8 text; save the file as UTF-8") from error
    filled = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise WorkloadError(f"{path}: there is no prompt in it; write one a line")
    items: list[WorkItem] = []
    lines_of_ids: dict[str, int] = {}
    for index, (number, line) in enumerate(filled):
        where = f"{path}, line {number}"
        default = WorkItem(id=f"r{index}", prompt=line, max_tokens=max_tokens, source=where)
        item = _from_object(line, default) if path.suffix == ".jsonl" else default
        if item.id in lines_of_ids:
            raise WorkloadError(f"{where}: id {item.id!r} is that of line {lines_of_ids[item.id]}; give another one")
        lines_of_ids[item.id] = number
        items.append(item)
    return items


def _from_object(line: str, default: WorkItem) -> WorkItem:
    """The request in a line of a .jsonl file. Raises WorkloadError."""
    where = default.source
    try:
        data = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f'{where}: not JSON ({error}); write an object like {{"prompt": "…"}}') from error
    if not isinstance(data, dict) or "prompt" not in data:
        raise WorkloadError(f'{where}: there is no "prompt"; write an object like {{"prompt": "…", "max_tokens": 16}}')
    unknown = sorted(set(data) - set(_FIELDS))
    if unknown:
        raise WorkloadError(f"{where}: unknown field {', '.join(unknown)}; the fields are {', '.join(_FIELDS)}")
    for name, value in data.items():
        is_right, remedy = _FIELDS[name]
        if not is_right(value):
            raise WorkloadError(f"{where}: {name} is {json.dumps(value, ensure_ascii=False):.60}; give {remedy}")
    if isinstance(data["prompt"], list):
        data["prompt"] = tuple(data["prompt"])
    return replace(default, **data)


def _is_prompt(value: Any) -> bool:
    return bool(value) and (isinstance(value, str) or (isinstance(value, list) and all(map(_is_whole, value))))


def _is_whole(value: Any) -> bool:
    return type(value) is int and value in WORD


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (_is_prompt, "a text or a list of token ids, not empty"),
    "max_tokens": (lambda value: _is_whole(value) and value >= 1, "a whole number from 1 on"),
    "priority": (_is_whole, "a whole number"),
    "arrival": (_is_time, "seconds after the start, 0 or more"),
    "id": (lambda value: isinstance(value, str) and bool(value), "a text that is not empty"),
}


# ---- synthetic


def parse_lengths(name: str, text: str) -> tuple[int, int]:
    """"64" or "64-256" as (least, most), in tokens. name: what it is, for the message of a WorkloadError."""
    first, dash, second = text.partition("-")
    if first.isdecimal() and (second.isdecimal() if dash else True):
        least, most = int(first), int(second if dash else first)
        if 1 <= least <= most:
            return least, most
    raise WorkloadError(f"{name} is {text!r}; give a number of tokens from 1 on (64), or a range of them (64-256)")


def synthetic(
    num_requests: int,
    prompt_len: tuple[int, int],
    output_len: tuple[int, int],
    *,
    vocab_size: int,
    seed: int = 0,
    shared_prefix: int = 0,
) -> list[WorkItem]:
    """Requests of random tokens, all at once.

    prompt_len, output_len: (least, most) tokens, drawn evenly. vocab_size: token ids lie below it. shared_prefix: how
    many leading tokens all prompts have in common; they count in prompt_len. Raises WorkloadError.
    """
    if num_requests < 1:
        raise WorkloadError(f"the number of requests is {num_requests}; ask for at least 1")
    if not 0 <= shared_prefix < prompt_len[0]:
        raise WorkloadError(
            f"the shared prefix has {shared_prefix} tokens, the shortest prompt {prompt_len[0]}; give 0 to "
            f"{prompt_len[0] - 1}, or longer prompts"
        )
    rng = random.Random(seed)
    prefix = [rng.randrange(vocab_size) for _ in range(shared_prefix)]
    items = []
    for index in range(num_requests):
        length, max_tokens = rng.randint(*prompt_len), rng.randint(*output_len)
        prompt = (*prefix, *(rng.randrange(vocab_size) for _ in range(length - shared_prefix)))
        item = WorkItem(id=f"r{index}", prompt=prompt, max_tokens=max_tokens, source=f"synthetic request {index}")
        items.append(item)
    return items


def at_rate(items: Sequence[WorkItem], rate: float, seed: int = 0) -> list[WorkItem]:
    """The same requests, arriving in their order as a Poisson process; the first one comes at once.

    rate: requests per second on average. Raises WorkloadError, also for requests that have arrivals of their own.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise WorkloadError(f"the rate is {rate}; give requests per second, above 0")
    timed = next((item for item in items if item.arrival), None)
    if timed is not None:
        raise WorkloadError(f"{timed.source}: it has an arrival of its own; take it out, or leave the rate out")
    rng = random.Random(f"arrivals {seed}")
    times = accumulate((rng.expovariate(rate) for _ in items[1:]), initial=0.0)
    return [replace(item, arrival=time) for item, time in zip(items, times, strict=True)]


def as_bytes(items: Sequence[WorkItem]) -> list[WorkItem]:
    """The same requests with each text as its UTF-8 bytes, one token a byte: for runs without a tokenizer."""
    return [
        replace(item, prompt=tuple(item.prompt.encode())) if isinstance(item.prompt, str) else item for item in items
    ]
