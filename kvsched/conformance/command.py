"""The command `kvsched conformance`.

Owns: its arguments and what it prints. Knows nothing about: how recordings are replayed.
Exit code: 0 if everything is identical, 1 if anything differs or cannot be replayed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsched.conformance.frozen import Outcome, Row, recorded_rows
from kvsched.conformance.frozen import run as run_row
from kvsched.conformance.replay import Difference, RecordingError, find_recordings, first_difference, load_recording

_SHIFTED = ("blocks", "depth", "mode", "output_len", "guard", "fence")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE_OR_FOLDER", help="recordings to replay")
    parser.add_argument("--frozen", action="store_true", help="run the frozen workload instead of recordings")
    frozen = parser.add_argument_group("one row of the frozen workload (without any: the eight recorded rows)")
    frozen.add_argument("--blocks", type=int, metavar="N", help="blocks in the pool, the null block included")
    frozen.add_argument("--depth", type=int, metavar="N", help="steps in flight at most")
    mode = frozen.add_mutually_exclusive_group()
    mode.add_argument("--async", dest="mode", action="store_const", const="async", help="asynchronous scheduling")
    mode.add_argument("--sync", dest="mode", action="store_const", const="sync", help="synchronous scheduling")
    frozen.add_argument("--output-len", type=int, metavar="N", help="tokens that every request generates")
    frozen.add_argument("--guard", choices=("on", "off"), help="stop the retry when the victim is fenced")
    frozen.add_argument("--fence", choices=("on", "off"), help="deferred frees")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Replay recordings, or run the frozen workload; returns the exit code."""
    if args.frozen:
        if args.paths:
            raise ValueError("--frozen takes no files; leave them out, or leave --frozen out")
        return _run_frozen(args)
    if any(getattr(args, name) is not None for name in _SHIFTED):
        raise ValueError("--blocks, --depth, --async, --sync, --output-len, --guard and --fence go with --frozen")
    if not args.paths:
        raise ValueError("name at least one recording or folder of recordings, or say --frozen")
    return _replay_all(args.paths, args.json)


# ---- recordings


def _replay_all(paths: list[Path], as_json: bool) -> int:
    results: list[dict[str, Any]] = []
    identical = 0
    try:
        found = find_recordings(paths)
    except RecordingError as error:
        print(f"cannot be replayed: {error}")
        return 1
    for path in found:
        entry: dict[str, Any] = {"file": str(path), "identical": False}
        try:
            difference = first_difference(load_recording(path))
        except RecordingError as error:
            entry["error"] = str(error)
        else:
            entry["identical"] = difference is None
            entry["difference"] = difference
        identical += entry["identical"]
        results.append(entry)
        if not as_json and not entry["identical"]:
            _print_failure(entry)
    if as_json:
        plain = {"identical": identical, "of": len(found), "files": results}
        print(json.dumps(plain, indent=1, default=_difference_to_dict))
    else:
        print(f"identical {identical} of {len(found)}")
    return 0 if identical == len(found) else 1


def _difference_to_dict(value: object) -> dict[str, Any]:
    assert isinstance(value, Difference)
    return {name: getattr(value, name) for name in value.__slots__}


def _print_failure(entry: Mapping[str, Any]) -> None:
    if "error" in entry:
        print(f"{entry['file']}: cannot be replayed: {entry['error']}")
        return
    difference: Difference = entry["difference"]
    print(f"{entry['file']}: first difference at event {difference.event} ({difference.do})")
    for name in difference.expected:
        expected, actual = difference.expected[name], difference.actual[name]
        if isinstance(expected, dict) and isinstance(actual, dict):
            keys = [key for key in {**expected, **actual} if expected.get(key) != actual.get(key)]
            expected = {key: expected.get(key) for key in keys}
            actual = {key: actual.get(key) for key in keys}
        print(f"  {name}\n    recorded {json.dumps(expected)}\n    kvsched  {json.dumps(actual)}")
    print("  state before")
    for name, value in difference.before.items():
        print(f"    {name:18} {json.dumps(value)}")


# ---- the frozen workload


def _row_from(args: argparse.Namespace) -> Row:
    given = {
        "num_blocks": args.blocks,
        "depth": args.depth,
        "async_scheduling": None if args.mode is None else args.mode == "async",
        "output_len": args.output_len,
        "guard": None if args.guard is None else args.guard == "on",
        "fence": None if args.fence is None else args.fence == "on",
    }
    row = Row(condition="own")._replace(**{name: value for name, value in given.items() if value is not None})
    if row.output_len < 1:
        raise ValueError(f"--output-len is {row.output_len}; it must be at least 1")
    return row


def _run_frozen(args: argparse.Namespace) -> int:
    own = any(getattr(args, name) is not None for name in _SHIFTED)
    rows: list[tuple[Row, Outcome | None]] = [(_row_from(args), None)] if own else list(recorded_rows())
    results = []
    for row, recorded in rows:
        start = time.process_time()
        outcome = run_row(row)
        seconds = time.process_time() - start
        results.append((row, outcome, None if recorded is None else outcome == recorded, seconds))
        if not args.json:
            _print_row(*results[-1], header=len(results) == 1)
    if args.json:
        plain = [
            row._asdict() | outcome._asdict() | {"identical": same, "cpu_seconds": round(seconds, 3)}
            for row, outcome, same, seconds in results
        ]
        print(json.dumps(plain, indent=1))
    elif not own:
        print(f"identical {sum(bool(same) for _, _, same, _ in results)} of {len(results)}")
    return 1 if any(same is False for _, _, same, _ in results) else 0


def _print_row(row: Row, outcome: Outcome, same: bool | None, seconds: float, header: bool) -> None:
    if header:
        print(
            f"{'condition':14}{'guard':>6}{'preempt':>9}{'calls':>7}{'empty':>7}{'futile':>7}{'tokens':>9}{'CPU s':>7}"
            f"  digest            recorded"
        )
    verdict = {True: "identical", False: "DIFFERS", None: "-"}[same]
    print(
        f"{row.condition:14}{'on' if row.guard else 'off':>6}{outcome.preemptions:9}{outcome.schedule_calls:7}"
        f"{outcome.empty_calls:7}{outcome.calls_preempting_but_empty:7}{outcome.tokens_computed:9}{seconds:7.2f}"
        f"  {outcome.digest[:16]}  {verdict}"
    )
