"""The race that the fence closes, on real models: off, a late step overwrites what a load has filled; on, it cannot.

With two steps in flight, fence off (times run down; r1's chunk is step n):

    scheduler                           compute              load
    n:     r1's first blocks            step n is held
    n + 1: r1 aborted, its blocks free
           r2 gets them, load starts                         fills r2's blocks
    n + 2: the load has landed          step n writes r1's keys and values into r2's blocks
    n + 3: r2 is admitted               r2 reads them: wrong tokens
"""

from __future__ import annotations

import pytest
import torch

from kvsched import invariants
from kvsched.runner.models import DEFAULT_MODEL
from kvsched.scenarios import StaleWriteRace, stale_write_race
from tests.runner_torch import loaded, reference

TINY = ("random:llama-tiny", "random:qwen3-tiny", "random:opt-tiny", "random:gpt2-tiny")


def run(name: str, fence: bool) -> StaleWriteRace:
    return stale_write_race(fence=fence, model=loaded(name), max_tokens=8)


def reader_prompt(race: StaleWriteRace) -> list[int]:
    (added,) = (e for e in race.events if e.kind == "request_added" and e.request == race.reader)
    return list(added.prompt_token_ids)


@pytest.mark.parametrize("name", [*TINY, DEFAULT_MODEL])
def test_without_the_fence_the_second_requests_tokens_are_wrong(name):
    race = run(name, fence=False)
    assert list(race.expected) == reference(name, reader_prompt(race), 8)
    assert race.got != race.expected
    assert race.first_wrong is not None
    assert len(race.blocks) >= 6
    (load,) = (e for e in race.events if e.kind == "load_started" and e.request == race.reader)
    assert set(race.blocks) == set(load.block_ids)  # whole blocks, all of them
    (held,) = (e for e in race.events if e.kind == "step_scheduled" and e.step == race.step)
    assert held.request_ids == (race.writer,)
    assert race.writer in held.prefill_chunks


@pytest.mark.parametrize("name", [*TINY, DEFAULT_MODEL])
def test_with_the_fence_the_same_script_gives_the_exact_tokens(name):
    race = run(name, fence=True)
    assert list(race.got) == list(race.expected) == reference(name, reader_prompt(race), 8)
    assert (race.first_wrong, race.blocks) == (None, ())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_race_and_its_cure_on_a_gpu():
    off, on = (stale_write_race(fence=fence, model=loaded(TINY[0]), device="cuda") for fence in (False, True))
    assert off.first_wrong is not None
    assert off.blocks
    assert on.first_wrong is None
    assert not on.blocks


def test_the_invariant_names_block_step_and_both_requests():
    race = run(TINY[0], fence=False)
    (found,) = invariants.find_stale_writes(race.events)
    assert found.invariant == "stale_write_hazard"
    assert set(found.blocks) == set(race.blocks)
    assert set(found.requests) == {race.writer, race.reader}
    assert found.steps == (race.step,)
    assert [str(v) for v in invariants.check_all(race.events)] == [str(found)]  # and nothing else is wrong


def test_the_invariants_are_silent_with_the_fence_on():
    assert invariants.check_all(run(TINY[0], fence=True).events) == []


def test_every_run_is_the_same():
    first, second = run(TINY[0], fence=False), run(TINY[0], fence=False)
    assert (first.got, first.blocks, first.step) == (second.got, second.blocks, second.step)
    assert [e.kind for e in first.events] == [e.kind for e in second.events]


def test_the_report_reads_well():
    off, on = run(TINY[0], fence=False), run(TINY[0], fence=True)
    blocks = ", ".join(map(str, off.blocks))
    wrong = off.first_wrong
    assert repr(off).splitlines() == [
        "stale write race on random:llama-tiny, fence off",
        f"  step {off.step}: a prefill chunk of r1, held until the load of r2 had landed; r1 was aborted meanwhile",
        f"  blocks {blocks}: filled by the load of r2, overwritten by step {off.step}",
        f"  first wrong token of r2: number {wrong}, {off.got[wrong]} instead of {off.expected[wrong]}",
    ]
    assert repr(on).splitlines()[2:] == [
        f"  the load of r2 filled no block that step {on.step} could still write",
        "  all 8 tokens of r2 are right",
    ]
