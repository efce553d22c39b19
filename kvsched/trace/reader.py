"""Reading a trace file.

Owns: `read_events`, `read_trace`: the version check, and errors that name file, line and remedy.
Knows nothing about: what events mean; it never runs anything from a file.
Invariants: what was written comes back equal. A cut last line is a warning and everything before it is read; any
other damage is a `TraceError`.
"""

from __future__ import annotations

import gzip
import warnings
import zlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import orjson

from kvsched.trace.events import VERSION, Event, RunStarted, kind_of
from kvsched.trace.log import EventLog
from kvsched.trace.plain import TraceCutWarning, TraceError, from_plain
from kvsched.trace.writer import is_gzipped


def read_trace(path: str | PathLike[str]) -> EventLog:
    """All events of a trace file, held compactly. Raises TraceError; warns TraceCutWarning (see `read_events`)."""
    return EventLog(read_events(path))


def read_events(path: str | PathLike[str]) -> Iterator[Event]:
    """The events of a trace file, one by one.

    Raises TraceError naming the file, the line and the remedy for whatever is wrong with it, a newer version
    included. A last line that was cut short gives a TraceCutWarning instead.
    """
    path = Path(path)
    number = 0
    for number, line in enumerate(_lines(path), 1):
        plain = _parse(path, number, line)
        if plain is None:
            _warn_cut(path, number)
            break
        try:
            if number == 1:
                _check_head(plain)
            event = from_plain(plain)
            if number > 1 and isinstance(event, RunStarted):
                raise TraceError("a second run starts here; a trace holds one run: split the file before this line")
        except TraceError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        yield event
    if number == 0 or (number == 1 and plain is None):
        raise TraceError(f"{path}, line 1: no complete event; the run ended before it began: record it again")


def _parse(path: Path, number: int, line: bytes) -> Any:
    """The JSON value of a line, None for a last line that was cut."""
    try:
        return orjson.loads(line)
    except ValueError as error:
        if not line.endswith(b"\n"):
            return None
        what = f"not JSON ({error})" if line.strip() else "empty"
        raise TraceError(
            f"{path}, line {number}: {what}; the file was damaged after it was written: restore it, or cut it"
            f" before this line (the {number - 1} lines above are sound)"
        ) from None


def _warn_cut(path: Path, number: int) -> None:
    text = f"{path}, line {number}: the last line was cut (the run was killed); read the {number - 1} events above it"
    warnings.warn(text, TraceCutWarning, stacklevel=3)


def _check_head(plain: Any) -> None:
    """The first line must open a run, in a version that can be read."""
    kind = plain.get("kind") if isinstance(plain, dict) else None
    if kind != kind_of(RunStarted):
        raise TraceError(f"a trace opens with run_started, not {kind!r}; this is no kvsched trace")
    version = plain.get("version")
    if type(version) is not int or version < 1:
        raise TraceError(f"version is {version!r}; it must be 1 or above: record the run again")
    if version > VERSION:
        raise TraceError(f"written in version {version} of the format, this kvsched reads up to {VERSION}: upgrade it")


def _lines(path: Path) -> Iterator[bytes]:
    """Lines with their line ends; a compressed file that was cut ends where its data end."""
    if not is_gzipped(path):
        with path.open("rb") as file:
            yield from file
        return
    rest = b""
    for block in _decompressed(path):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def _decompressed(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rb") as file:
        try:
            while block := file.read1():
                yield block
        except EOFError:
            warnings.warn(f"{path}: the compressed file was cut (the run was killed)", TraceCutWarning, stacklevel=4)
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{path}: damaged compressed data ({error}); restore the file from a copy") from None
