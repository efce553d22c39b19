"""SmolLM2 in float32: greedy tokens equal those of transformers' generate."""

from __future__ import annotations

import pytest

from kvsched.runner.models import DEFAULT_MODEL
from tests.runner_steps import HandHost
from tests.runner_torch import loaded, reference, running

PROMPTS = ("The capital of France is", "def fibonacci(n):\n    ")
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = loaded(DEFAULT_MODEL).require_tokenizer()
    return [tokenizer.encode(text) for text in PROMPTS]


def test_greedy_tokens_equal_generate(prompts):
    """Both prompts together, the second in chunks, with two steps in flight, in a pool full of NaN."""
    with running(DEFAULT_MODEL) as runner:
        host = HandHost(runner)
        host.add("a", prompts[0])
        host.add("b", prompts[1])
        host.run({"a": len(prompts[0]), "b": 3})
        host.run({"b": len(prompts[1]) - 3, "a": 1})
        host.submit({"a": 1, "b": 1})
        for _ in range(NUM_TOKENS - 3):
            host.submit({"a": 1, "b": 1})
            host.land()
        host.land()
    for request_id, prompt in zip("ab", prompts, strict=True):
        expected = reference(DEFAULT_MODEL, prompt, NUM_TOKENS)
        assert len(host.outputs[request_id]) >= NUM_TOKENS - 1
        assert host.outputs[request_id][:NUM_TOKENS] == expected[: len(host.outputs[request_id])]
