"""The tier on disk: what a restart finds again, and what it must not find."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvsched.connector.disk import DiskTier, disk_key, path_of
from kvsched.engine import Engine
from kvsched.kv.hashing import request_block_hashes
from kvsched.request import Request, SamplingParams
from kvsched.runner.torch_cache import cache_shape
from kvsched.runner.torch_disk import DiskMedium, FolderInUseError
from kvsched.runner.torch_load import load_model
from kvsched.runner.torch_offload import StoreWarning
from tests.runner_torch import loaded, prompt_of, reference
from tests.tier_media import SHAPE

MODEL = "random:llama-tiny"
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPT = prompt_of(31, seed=1)


def serve(folder: Path, prompt: list[int] = PROMPT, *, model: Any = None, block_size: int = 4, **tier: Any):
    """A new engine on the folder serves one prompt. Returns (its tokens, tokens computed for it, events)."""
    with Engine.from_model(
        loaded(MODEL) if model is None else model,
        device="cpu",
        num_blocks=40,
        block_size=block_size,
        max_model_len=100,
        landing=1,
        connector=DiskTier(folder=folder, **tier),
    ) as engine:
        (output,) = engine.generate([prompt], GREEDY)
        computed = sum(sum(e.num_tokens) for e in engine.events if e.kind == "step_scheduled")
        return list(output.token_ids), computed, engine.events


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_restart_does_not_compute_what_was_seen_before(tmp_path, asynchronous):
    expected = reference(MODEL, PROMPT, 4)
    assert serve(tmp_path, asynchronous=asynchronous)[:2] == (expected, 31 + 3)
    assert len(files(tmp_path)) == 34 // 4
    assert serve(tmp_path, asynchronous=asynchronous)[:2] == (expected, 31 - 28 + 3)
    longer = PROMPT[:18] + prompt_of(20, seed=2)
    tokens, computed, _ = serve(tmp_path, longer, asynchronous=asynchronous)
    assert tokens == reference(MODEL, longer, 4)
    assert computed == 38 - 16 + 3  # four shared blocks


def test_the_last_block_is_on_disk_when_the_engine_is_closed(tmp_path):
    """One token: the request ends with the step that computes its whole prompt."""
    with Engine.from_model(
        loaded(MODEL), device="cpu", num_blocks=40, block_size=4, connector=DiskTier(folder=tmp_path)
    ) as engine:
        engine.generate([PROMPT], SamplingParams(max_tokens=1))
    assert len(files(tmp_path)) == 31 // 4


@pytest.mark.parametrize("other", ["weights", "dtype", "block size"])
def test_another_model_never_finds_a_hit(tmp_path, other):
    serve(tmp_path)
    if other == "block size":
        _, computed, events = serve(tmp_path, block_size=8)
    else:
        model = load_model(MODEL, seed=1) if other == "weights" else load_model(MODEL, dtype="bfloat16")
        _, computed, events = serve(tmp_path, model=model)
    assert computed == 31 + 3
    assert [e for e in events if e.kind in ("load_started", "load_failed")] == []
    assert serve(tmp_path)[1] == 31 - 28 + 3  # and the first model still finds its own


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def block_of(folder: Path, index: int) -> Path:
    """The file of the prompt's block `index`."""
    model = loaded(MODEL)
    layout = cache_shape(model.config, 4, torch.float32).layout
    content = request_block_hashes(Request("x", PROMPT, GREEDY), index + 1, 4)[index]
    return path_of(folder, disk_key(model.weights_id, layout, content))


def age(folder: Path) -> None:
    """Make the order of writing visible on clocks of any grain."""
    for i, path in enumerate(sorted(files(folder), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, ns=(10**18 + i, 10**18 + i))


def test_a_damaged_file_is_told_and_its_block_computed_again(tmp_path):
    """A flipped bit in the data; found by its checksum when it is loaded."""
    serve(tmp_path)
    flip(block_of(tmp_path, 2), -100)
    with pytest.warns(StoreWarning, match="damaged: its content does not match"):
        tokens, computed, _ = serve(tmp_path)
    assert tokens == reference(MODEL, PROMPT, 4)
    assert computed == 31 - 8 + 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serve(tmp_path)[1] == 31 - 28 + 3  # replaced by a sound one


@pytest.mark.parametrize("damage", ["truncated", "empty", "header"])
def test_a_broken_file_is_skipped_at_the_start(tmp_path, damage):
    serve(tmp_path)
    victim = block_of(tmp_path, 3)
    data = victim.read_bytes()
    victim.write_bytes({"truncated": data[:-1], "empty": b"", "header": b"\xff" * 8 + data[8:]}[damage])
    with pytest.warns(StoreWarning, match=f"1 files are no sound blocks, skipped: {victim.name}"):
        tokens, computed, _ = serve(tmp_path)
    assert tokens == reference(MODEL, PROMPT, 4)
    assert computed == 31 - 12 + 3
    assert len(victim.read_bytes()) == len(data)  # computed again, and written whole
    assert serve(tmp_path)[1] == 31 - 28 + 3


def test_foreign_files_are_skipped_and_left_alone(tmp_path):
    serve(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    save_file({"kv": torch.zeros(3)}, tmp_path / f"{'ab' * 16}.safetensors")
    one = block_of(tmp_path, 0)
    renamed = tmp_path / f"{'cd' * 16}.safetensors"
    renamed.write_bytes(one.read_bytes())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.warns(StoreWarning, match="3 files are no sound blocks") as caught:
        tokens, computed, _ = serve(tmp_path, capacity_bytes=10**6)
    told = str(caught[0].message)
    assert "not written by kvsched" in told
    assert "renamed" in told
    assert "not the name of a block" in told
    assert (tokens, computed) == (reference(MODEL, PROMPT, 4), 31 - 28 + 3)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_that_vanished_is_a_failed_load(tmp_path):
    serve(tmp_path)
    with Engine.from_model(
        loaded(MODEL), device="cpu", num_blocks=40, block_size=4, landing=1, connector=DiskTier(folder=tmp_path)
    ) as engine:
        block_of(tmp_path, 1).unlink()
        with pytest.warns(StoreWarning, match="could not be read"):
            (output,) = engine.generate([PROMPT], GREEDY)
        assert list(output.token_ids) == reference(MODEL, PROMPT, 4)


def test_a_disk_that_is_full_costs_the_hit_only(tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvsched.runner.torch_disk.write_atomically", full)
    with pytest.warns(StoreWarning, match="could not be written"):
        tokens, _, _ = serve(tmp_path)
    assert tokens == reference(MODEL, PROMPT, 4)
    assert files(tmp_path) == []


def test_the_bound_holds_and_the_longest_unused_goes(tmp_path):
    serve(tmp_path)
    age(tmp_path)
    size = files(tmp_path)[0].stat().st_size
    other = prompt_of(31, seed=3)
    serve(tmp_path, other, capacity_bytes=10 * size)
    assert len(files(tmp_path)) == 10
    assert serve(tmp_path, other, capacity_bytes=10 * size)[1] == 31 - 28 + 3
    serve(tmp_path, other, capacity_bytes=3 * size)  # a smaller bound holds at once
    assert len(files(tmp_path)) == 3


def test_a_file_takes_what_the_bound_counts(tmp_path):
    medium = DiskMedium(tmp_path, SHAPE)
    medium.put([b"k" * 16], torch.ones(1, 2, 4, 2, 1, 8))
    (path,) = files(tmp_path)
    assert path.stat().st_size == medium.block_bytes
    assert set(load_file(path)) == {"kv"}
    medium.close()


def test_one_engine_at_a_time(tmp_path):
    first = DiskMedium(tmp_path, SHAPE)
    with pytest.raises(FolderInUseError, match="close that one first"):
        DiskMedium(tmp_path, SHAPE)
    first.close()
    first.close()
    DiskMedium(tmp_path, SHAPE).close()


def test_a_refused_bound_lets_the_folder_go(tmp_path):
    with pytest.raises(ValueError, match="one stored block takes"):
        serve(tmp_path, capacity_bytes=50)
    DiskMedium(tmp_path, SHAPE).close()


def test_what_a_crash_left_half_written_is_removed(tmp_path):
    (tmp_path / ".partial-123-abc").write_bytes(b"half a block")
    DiskMedium(tmp_path, SHAPE).close()
    assert not list(tmp_path.glob(".partial*"))
