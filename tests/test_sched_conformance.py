"""Recorded decisions of the real scheduler (vLLM 0.32.0): every one must come out the same.

`data/conformance` holds a choice of the recordings made for this project. The whole set lies beside the checkout, in
`shared/conformance`, on machines that have it.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from kvsched.conformance import Difference, find_recordings, first_difference, load_recording
from tests.house import ROOT

CHOICE = Path(__file__).parent / "data" / "conformance"
ALL = ROOT.parent / "shared" / "conformance"


@pytest.mark.parametrize("path", find_recordings([CHOICE]), ids=lambda path: path.name.removesuffix(".json.gz"))
def test_recording_is_identical(path: Path):
    assert first_difference(load_recording(path)) is None


@pytest.mark.skipif(not ALL.is_dir(), reason="the whole set of recordings (../shared/conformance) is not here")
def test_every_shared_recording_is_identical():
    paths = find_recordings([ALL])
    differing = [path.name for path in paths if first_difference(load_recording(path)) is not None]
    assert len(paths) >= 192
    assert differing == []


def changed(recording: dict, kind: str, key: str, value: object) -> Difference | None:
    """What the replay says when one value of the first event of a kind that has something there is replaced."""
    recording = copy.deepcopy(recording)
    event = next(event for event in recording["events"] if event["do"] == kind and event[key])
    event[key] = value
    return first_difference(recording)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("schedule", "num_scheduled_tokens", [["r0", 1]]),
        ("schedule", "new_block_ids", {"r0": [9]}),
        ("schedule", "allocate_calls", 99),
        ("schedule", "after", {"free_blocks": 0}),
        ("deliver", "emitted", []),
    ],
)
def test_a_changed_value_is_found(kind: str, key: str, value: object):
    recording = load_recording(CHOICE / "vllm-guard-connector-0024.json.gz")
    difference = changed(recording, kind, key, value)
    assert difference is not None
    assert difference.do == kind
    assert list(difference.expected) == [key]


def test_a_changed_result_is_found():
    recording = load_recording(CHOICE / "vllm-guard-0018.json.gz")
    recording["result"]["allocate_calls"] += 1
    difference = first_difference(recording)
    assert difference is not None
    assert difference.do == "result"
    assert list(difference.actual) == ["allocate_calls"]
