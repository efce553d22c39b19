"""Conformance: decisions recorded from the real scheduler, replayed and compared one by one."""

from kvsched.conformance.replay import (
    Difference,
    RecordingError,
    Replay,
    find_recordings,
    first_difference,
    load_recording,
)

__all__ = ["Difference", "RecordingError", "Replay", "find_recordings", "first_difference", "load_recording"]
