"""Replays decisions recorded from the real scheduler and compares every one; the frozen workload.

Owns: the reading of recordings (format kvsched-conformance/1), the comparison, the `conformance` command.
Knows nothing about: engines, runners, models: it drives the bare scheduler.
Invariants: a recording is identical only if every event was replayed and every value in it was equal.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsched.config import SchedulerConfig
from kvsched.connector.scripted import KvRule, ScriptedConnector
from kvsched.request import Request, SamplingParams
from kvsched.sched.scheduler import Scheduler
from kvsched.step import ScheduledStep, StepResult, Transfers

FORMAT = "kvsched-conformance/1"


class RecordingError(ValueError):
    """A file that is no recording, or one that cannot be replayed; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event at which scheduler and recording part. expected, actual: the values that differ, by name;
    before: the state before the event."""

    event: int
    do: str
    expected: Mapping[str, Any]
    actual: Mapping[str, Any]
    before: Mapping[str, Any]


def load_recording(path: Path) -> dict[str, Any]:
    """Read one recording (.json or .json.gz). Raises RecordingError if it is none."""
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        data = json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise RecordingError(f"{path}: cannot be read as a recording: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordingError(f"{path}: not a recording in format {FORMAT!r}")
    return data


def find_recordings(paths: list[Path]) -> list[Path]:
    """Recordings among files and folders, sorted. Raises RecordingError if a path holds none."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*.json.gz")) + sorted(
                p for p in path.rglob("*.json") if p.name != "frozen-workload.json"
            )
            if not inside:
                raise RecordingError(f"{path}: no recording (*.json.gz, *.json) in this folder")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise RecordingError(f"{path}: no such file or folder")
    return found


def config_of(recording: Mapping[str, Any]) -> SchedulerConfig:
    """The configuration a recording was made with."""
    settings = {key: value for key, value in recording["config"].items() if key != "connector"}
    connector = recording["config"].get("connector")
    if connector:
        settings["load_failure_policy"] = connector["load_failure_policy"]
    settings["guard"] = "stop_retry" if recording["guard"] else "none"
    return SchedulerConfig.from_dict(settings)


class Replay:
    """Drives a fresh scheduler through a recording, event by event.

    emit: called with the scheduler's events, as in Scheduler.
    """

    def __init__(self, recording: Mapping[str, Any], emit: Any = None) -> None:
        self.recording = recording
        self.specs = {spec["id"]: spec for spec in recording["requests"]}
        config = config_of(recording)
        fails = frozenset(recording["fail_allocate_calls"])
        self.scheduler = Scheduler(
            config,
            connector=self._connector(config.block_size),
            emit=emit,
            slots_fault=(lambda request_id, call, step: call in fails) if fails else None,
        )
        self.requests: dict[str, Request] = {}
        self.in_flight: list[ScheduledStep] = []
        self._empty: ScheduledStep | None = None

    def _connector(self, block_size: int) -> ScriptedConnector | None:
        if not self.recording["config"].get("connector"):
            return None
        rules = {}
        for request_id, spec in self.specs.items():
            kv = spec.get("kv", {})
            tokens = kv.get("external_blocks", 0) * block_size
            rules[request_id] = KvRule(tokens, kv.get("asynchronous", False), kv.get("save_steps", 0) > 0)
        return ScriptedConnector(rules, block_size)

    def apply(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the event says; returns what came of it, in the recording's form."""
        do = event["do"]
        if do == "add":
            outcome = self._add(event)
        elif do == "abort":
            self.scheduler.finish_requests([event["request"]])
            outcome = {}
        elif do == "schedule":
            outcome = self._schedule()
        elif do == "deliver":
            outcome = self._deliver(event)
        else:
            raise RecordingError(f"unknown event {do!r}")
        return outcome | {"after": self.state()}

    def _add(self, event: Mapping[str, Any]) -> dict[str, Any]:
        spec = self.specs[event["request"]]
        sampling = SamplingParams(max_tokens=spec["max_tokens"], stop_token_ids=tuple(spec["stop_token_ids"]))
        request = Request(
            spec["id"],
            spec["prompt"],
            sampling,
            priority=spec["priority"],
            arrival_time=event["arrival_time"],
        )
        self.requests[request.id] = request
        self.scheduler.add_request(request)
        return {}

    def _schedule(self) -> dict[str, Any]:
        step = self.scheduler.schedule()
        if step.is_empty:
            self._empty = step
        else:
            self.in_flight.append(step)
        joined = {data.id: data for data in step.new_requests}
        blocks = {i: list(step.new_block_ids.get(i, ())) for i in step.request_ids}
        blocks.update({i: list(data.block_ids) for i, data in joined.items()})
        counts = zip(step.request_ids, step.num_scheduled_tokens, strict=True)
        return {
            "num_scheduled_tokens": [list(row) for row in counts],
            "new_block_ids": blocks,
            "new": [i for i, data in joined.items() if not data.resumed],
            "resumed": sorted(i for i, data in joined.items() if data.resumed),
            "block_table_starts": {i: data.num_computed_tokens for i, data in joined.items() if not data.resumed},
            "preempted": list(step.preempted),
            "allocate_calls": step.allocate_calls,
        }

    def _deliver(self, event: Mapping[str, Any]) -> dict[str, Any]:
        rows = event["sampled"]
        if rows:
            if not self.in_flight:
                raise RecordingError("a step is delivered, but none is in flight")
            step = self.in_flight.pop(0)
        elif self._empty is not None:
            step = self._empty
        else:
            raise RecordingError("an empty step is delivered, but none was scheduled")
        if tuple(row[0] for row in rows) != step.request_ids:
            raise RecordingError(f"delivered requests {[row[0] for row in rows]} are not those of step {step.step}")
        transfers = Transfers(
            tuple(event.get("finished_recving", ())),
            tuple(event.get("finished_sending", ())),
            frozenset(event.get("invalid_block_ids", ())),
        )
        result = StepResult(step.step, tuple(tuple(row[1]) for row in rows), transfers)
        output = self.scheduler.update(step, result)
        emitted = [[i, list(tokens)] for i, tokens in output.emitted]
        emitted += [[i, []] for i, reason in output.finished.items() if reason == "error"]
        return {"emitted": emitted, "finished": output.finished}

    def state(self) -> dict[str, Any]:
        """The scheduler's state in the form of a recording's `after`."""
        s = self.scheduler
        return {
            "free_blocks": s.kv.pool.num_free,
            "running": [request.id for request in s.running],
            "waiting": [request.id for request in s.waiting],
            "loading": [request.id for request in s.kv_holding_waiting],
            "sched_step_seq": s.kv.fence.sched_seq,
            "processed_step_seq": s.kv.fence.processed_seq,
            "deferred": [[entry.fence, list(entry.block_ids)] for entry in s.kv.fence.deferred],
        }

    def result(self) -> dict[str, Any]:
        """Outputs, preemptions and calls for slots of the whole run, in the recording's form."""
        return {
            "outputs": {i: request.output_token_ids for i, request in self.requests.items()},
            "finish": {i: r.status.finish_reason for i, r in self.requests.items() if r.is_finished},
            "preemptions": {i: request.num_preemptions for i, request in self.requests.items()},
            "allocate_calls": self.scheduler.allocate_calls,
            "drained": not self.scheduler.has_unfinished(),
        }


def first_difference(recording: Mapping[str, Any]) -> Difference | None:
    """Replay a recording; None if every decision is identical. Raises RecordingError if it cannot be replayed."""
    replay = Replay(recording)
    recorded = recording["events"]
    for index, event in enumerate(recorded):
        before = replay.state()
        try:
            actual = replay.apply(event)
        except RecordingError:
            raise
        except (KeyError, ValueError, AssertionError) as error:
            raise RecordingError(f"event {index} ({event['do']}) cannot be replayed: {error!r}") from error
        wrong = {key: value for key, value in actual.items() if _plain(value) != _plain(event.get(key))}
        if wrong:
            return Difference(index, event["do"], {key: event.get(key) for key in wrong}, wrong, before)
    expected, actual = recording["result"], replay.result()
    wrong = {k: v for k, v in actual.items() if k in expected and _plain(v) != _plain(expected[k])}
    if wrong:
        return Difference(len(recorded), "result", {k: expected[k] for k in wrong}, wrong, replay.state())
    return None


def _plain(value: Any) -> Any:
    """What JSON would make of a value, with the order of mappings left aside."""
    return json.loads(json.dumps(value, sort_keys=True))
