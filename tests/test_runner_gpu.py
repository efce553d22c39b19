"""The torch runner on CUDA: the same tokens as on the CPU, with steps in flight on a stream of their own."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvsched.request import SamplingParams
from kvsched.runner.base import Gate
from kvsched.runner.models import DEFAULT_MODEL
from tests.runner_steps import HandHost
from tests.runner_torch import ARCHITECTURES, loaded, own_logits, prompt_of, reference, running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("pad_to", [1, 8])
def test_mixed_batches_give_the_tokens_of_generate(name, pad_to):
    name = f"random:{name}"
    prompts = {"a": prompt_of(9, seed=1), "b": prompt_of(17, seed=2), "c": prompt_of(4, seed=3)}
    expected = {request_id: reference(name, prompt, 6) for request_id, prompt in prompts.items()}
    with running(name, device="cuda", pad_to=pad_to) as runner:
        host = HandHost(runner)
        for request_id, prompt in prompts.items():
            host.add(request_id, prompt)
        for counts in ({"b": 5}, {"a": 9, "b": 12}, {"c": 4, "a": 1, "b": 1}):
            host.run(counts)
        for _ in range(3):
            host.submit({"a": 1, "b": 1, "c": 1})
        while host.in_flight:
            host.land()
    for request_id, tokens in host.outputs.items():
        assert len(tokens) >= 4
        assert tokens == expected[request_id][: len(tokens)]


def test_logits_equal_those_of_the_models_own_forward():
    name = "random:llama-tiny"
    seen = []
    tokens = prompt_of(30)
    expected = own_logits(name, tokens)[-1]
    with running(name, device="cuda", on_logits=lambda step, ids, logits: seen.append(logits.cpu())) as runner:
        host = HandHost(runner)
        host.add("a", tokens)
        host.run({"a": 13})
        host.run({"a": 17})
    torch.testing.assert_close(seen[-1][0], expected, atol=1e-3, rtol=1e-3)


def test_steps_are_in_flight_and_a_gate_holds_them():
    with running(device="cuda") as runner:
        host = HandHost(runner)
        host.add("a", prompt_of(6))
        gate = Gate("the test says so")
        futures = [host.submit({"a": 6}, gate), host.submit({"a": 1}), host.submit({"a": 1})]
        assert not any(f.done() for f in futures)
        gate.open()
        results = [f.result(60) for f in futures]
        assert [r.step for r in results] == [1, 2, 3]
        assert all(a.finished_at <= b.started_at for a, b in itertools.pairwise(results))
        assert [r.sampled_token_ids[0][0] for r in results] == reference("random:llama-tiny", prompt_of(6), 3)


def test_seeded_draws_are_those_of_the_cpu():
    outputs = []
    for device in ("cpu", "cuda"):
        with running(device=device) as runner:
            host = HandHost(runner)
            host.add("a", prompt_of(6), SamplingParams(max_tokens=9, temperature=0.8, top_k=40, top_p=0.9, seed=1))
            outputs.append(host.generate("a", 12, depth=2))
    assert outputs[0] == outputs[1]


def test_blocks_move_to_the_host_and_back():
    with running(device="cuda") as runner:
        host = HandHost(runner)
        host.add("a", prompt_of(8))
        host.run({"a": 8})
        block_ids = host.tables["a"][:2]
        data = runner.cache.read_blocks(block_ids).cpu()
        runner.cache.poison()
        runner.cache.write_blocks(block_ids, data)
        torch.cuda.synchronize()
        host.run({"a": 1})
        assert host.outputs["a"] == reference("random:llama-tiny", prompt_of(8), 2)


def test_smollm2_gives_the_tokens_of_generate():
    prompt = loaded(DEFAULT_MODEL).require_tokenizer().encode("The capital of France is")
    expected = reference(DEFAULT_MODEL, prompt, 16)
    with running(DEFAULT_MODEL, device="cuda") as runner:
        host = HandHost(runner)
        host.add("a", prompt)
        assert host.generate("a", 16, depth=3) == expected


def test_an_error_in_a_step_reaches_its_future_and_all_later_ones():
    class Breaks:
        def before_step(self, step):
            raise OSError("disk gone")

    with running(device="cuda", connector=Breaks()) as runner:
        host = HandHost(runner)
        host.add("a", prompt_of(6))
        futures = [host.submit({"a": 6}), host.submit({"a": 1})]
        for future in futures:
            with pytest.raises((OSError, RuntimeError), match="disk gone"):
                future.result(60)
