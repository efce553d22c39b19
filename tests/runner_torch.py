"""What the tests of the torch runner share: models loaded once, runners that are closed, references."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from kvsched.runner.torch_load import LoadedModel, load_model
from kvsched.runner.torch_runner import TorchRunner, create_runner

torch.set_num_threads(1)  # test processes share few cores; waiting for one another would cost more than it gains

ARCHITECTURES = ("llama-tiny", "qwen3-tiny", "opt-tiny", "gpt2-tiny")


@cache
def loaded(name: str) -> LoadedModel:
    """A model, loaded once per test process."""
    return load_model(name)


@contextmanager
def running(name: str = "random:llama-tiny", *, poison: bool = True, **options: Any) -> Iterator[TorchRunner]:
    """A runner on a small pool that starts full of NaN."""
    settings = {"num_blocks": 64, "block_size": 4, "device": "cpu"} | options
    runner = create_runner(loaded(name), **settings)
    if poison:
        runner.cache.poison()
    yield runner
    runner.close()


def prompt_of(length: int, seed: int = 0, vocab_size: int = 512) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


@cache
def _reference(name: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    tokens = torch.tensor([prompt])
    output = loaded(name).model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
        do_sample=False,
    )  # fmt: skip
    return tuple(output[0, len(prompt) :].tolist())


def reference(name: str, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens by transformers' generate."""
    return list(_reference(name, tuple(prompt), num_tokens))


def own_logits(name: str, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] logits by the model's own forward."""
    with torch.inference_mode():
        return loaded(name).model(torch.tensor([tokens]), use_cache=False).logits[0]
