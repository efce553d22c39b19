"""Writing a trace: one event a line, as it happens.

Owns: `TraceWriter` and the choice of file format by suffix. Knows nothing about: what events mean.
Invariants: every complete line is one event; the first is `run_started`. What was written reaches the operating
system at the end of every step, so a killed process loses the step it was in and cuts at most the last line.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from kvsched.trace.events import Event, RequestFinished, RunStarted, StepDelivered, StepScheduled
from kvsched.trace.plain import TraceError, to_plain

SUFFIXES = (".jsonl", ".jsonl.gz")
_FLUSH_AFTER = (RunStarted, StepScheduled, StepDelivered, RequestFinished)
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def is_gzipped(path: Path) -> bool:
    """Whether a trace of this name is compressed. Raises TraceError for a suffix that is none of `SUFFIXES`."""
    if path.name.endswith(SUFFIXES):
        return path.name.endswith(".gz")
    raise TraceError(f"{path}: a trace's name ends in {' or '.join(SUFFIXES)}; rename it")


class TraceWriter:
    """Writes events to `path` (`.jsonl`, or `.jsonl.gz` for gzip); an existing file is replaced.

    A context manager. `append` is also what a scheduler's `emit` can be set to.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.num_events = 0
        gzipped = is_gzipped(self.path)
        self._raw: BinaryIO = self.path.open("wb")
        self._file: BinaryIO = self._raw
        if gzipped:
            stream = gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=self._raw, mtime=0)
            self._file = cast(BinaryIO, stream)

    def append(self, event: Event) -> None:
        """Write one event. Raises TraceError if it has no exact JSON form (a NaN, say) or is not in its place."""
        if (self.num_events == 0) != isinstance(event, RunStarted):
            where = f"{self.path}: event {self.num_events} is {event.kind}"
            raise TraceError(f"{where}; a trace opens with run_started and holds one run")
        try:
            line = _ENCODER.encode(to_plain(event))
        except (TypeError, ValueError) as error:
            raise TraceError(f"{self.path}: {event.kind} has no JSON form ({error}): {event!r:.200}") from error
        self._file.write(line.encode() + b"\n")
        self.num_events += 1
        if isinstance(event, _FLUSH_AFTER):
            self.flush()

    def extend(self, events: Iterable[Event]) -> None:
        """Write several events."""
        for event in events:
            self.append(event)

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Finish the file. May be called twice; nothing can be written afterwards."""
        self._file.close()
        self._raw.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_trace(path: str | PathLike[str], events: Iterable[Event]) -> None:
    """Write a whole recording."""
    with TraceWriter(path) as writer:
        writer.extend(events)
