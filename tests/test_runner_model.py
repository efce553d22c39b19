"""Models on paged attention: the same logits as transformers' own forward, and refusals by name."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from kvsched.runner.models import ModelUnavailable
from kvsched.runner.torch_linear import PackedLinear, can_pack, pack_linears, watching_inputs
from kvsched.runner.torch_load import LoadedModel, weights_digest
from kvsched.runner.torch_model import PagedModel
from kvsched.runner.torch_runner import create_runner
from tests.runner_steps import HandHost
from tests.runner_torch import ARCHITECTURES, loaded, own_logits, prompt_of, running

CPU = torch.device("cpu")
TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("pack", [True, False])
def test_logits_equal_those_of_the_models_own_forward(name, pack):
    """A prompt in chunks of 5, 1, 7 and 8 tokens, beside another request; every sampled row is compared."""
    name = f"random:{name}"
    prompts = {"a": prompt_of(21, seed=1), "b": prompt_of(9, seed=2)}
    seen: dict[str, list[torch.Tensor]] = {"a": [], "b": []}

    def keep(step, request_ids, logits):
        for request_id, row in zip(request_ids, logits, strict=True):
            seen[request_id].append(row)

    with running(name, on_logits=keep, pack_weights=pack) as runner:
        host = HandHost(runner)
        for request_id, prompt in prompts.items():
            host.add(request_id, prompt)
        for counts in ({"a": 5}, {"a": 1, "b": 9}, {"b": 1, "a": 7}, {"a": 8, "b": 1}, {"a": 1, "b": 1}, {"a": 1}):
            host.run(counts)
    for request_id, prompt in prompts.items():
        tokens = prompt + host.outputs[request_id]
        expected = own_logits(name, tokens)[len(prompt) - 1 : len(tokens) - 1]
        torch.testing.assert_close(torch.stack(seen[request_id]), expected, atol=2e-4, rtol=1e-4)


def test_the_model_it_was_made_from_is_left_as_it_was():
    model = loaded("random:llama-tiny").model
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    paged = PagedModel(model, "mine", CPU)
    assert model.config._attn_implementation != paged.config._attn_implementation
    assert not any(isinstance(m, PackedLinear) for m in model.modules())
    for name, (address, tensor) in before.items():
        now = model.state_dict()[name]
        assert now.data_ptr() == address, name
        assert torch.equal(now, tensor), name
    assert weights_digest(paged.module) == weights_digest(model)


@pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this build of torch has no oneDNN packing")
def test_packed_layers_hold_the_same_weights_and_give_the_same_products():
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 160)
    packed = PackedLinear(linear)
    assert torch.equal(packed.weight, linear.weight)
    for rows in (0, 1, 2, 7, 33, 300):
        hidden = torch.randn(1, rows, 96)
        with torch.inference_mode():
            torch.testing.assert_close(packed(hidden), linear(hidden))


class Sharing(torch.nn.Module):
    """Three layers on one input, one of them without a bias; then one on another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(24, 8), torch.nn.Linear(24, 16, bias=False)
        self.c, self.out = torch.nn.Linear(24, 40), torch.nn.Linear(64, 24)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.a(hidden), self.b(hidden), self.c(hidden)], dim=-1).tanh())


@pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this build of torch has no oneDNN packing")
@torch.inference_mode()
def test_layers_that_share_an_input_become_one_product():
    torch.manual_seed(0)
    model = Sharing()
    plain = copy.deepcopy(model)
    with watching_inputs(model) as groups:
        model(torch.randn(1, 5, 24))
    assert groups == [[model.a, model.b, model.c], [model.out]]
    pack_linears(model, groups)
    assert model.a._product is model.b._product is model.c._product is not model.out._product
    for name in ("a", "b", "c", "out"):
        assert torch.equal(getattr(model, name).weight, getattr(plain, name).weight)
    first, second = torch.randn(1, 3, 24), torch.randn(1, 3, 24)
    for hidden in (first, second):
        torch.testing.assert_close(model(hidden), plain(hidden))
    # In any order, in part, and again: never the product with an earlier input.
    for name, hidden in (("c", first), ("a", second), ("a", second), ("b", first), ("b", second), ("c", second)):
        torch.testing.assert_close(getattr(model, name)(hidden), getattr(plain, name)(hidden))


@pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this build of torch has no oneDNN packing")
def test_a_llamas_query_key_and_value_are_one_product():
    layer = PagedModel(loaded("random:llama-tiny").model, "mine", CPU).module.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    assert attention.q_proj._product is attention.k_proj._product is attention.v_proj._product
    assert mlp.gate_proj._product is mlp.up_proj._product is not mlp.down_proj._product


def refused(config: transformers.PreTrainedConfig, name: str = "mine") -> str:
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelUnavailable, match=f"^{name} .*cannot run on paged attention") as caught:
        PagedModel(model.eval(), name, CPU)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("mistral", {"num_key_value_heads": 2, "sliding_window": 8}, "sliding window of 8 tokens"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_attention"),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 16}, "sliding_attention"),
        ("bloom", {}, "ALiBi"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("gpt_oss", {"num_local_experts": 2, "head_dim": 16, "num_key_value_heads": 2}, "sliding_attention"),
    ],
)
def test_a_configuration_that_wants_another_attention_is_refused_by_name(kind, settings, reason):
    layers = {"n_head": 2, "n_layer": 2} if kind == "bloom" else {}
    config = transformers.AutoConfig.for_model(kind, **(TINY | layers | settings))
    assert reason in refused(config)


def test_an_encoder_decoder_is_refused_by_name():
    config = transformers.AutoConfig.for_model("bart", d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=64)
    config.is_encoder_decoder = True
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(ModelUnavailable, match=r"mine \(bart\) .* encoder-decoder"):
        PagedModel(model, "mine", CPU)


class NoAttention(torch.nn.Module):
    """An attention layer that goes its own way."""

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_model_that_bypasses_the_interface_in_one_layer_is_refused_by_the_trial():
    model = transformers.AutoModelForCausalLM.from_config(loaded("random:llama-tiny").config)
    model.model.layers[1].self_attn = NoAttention()
    with pytest.raises(ModelUnavailable, match=r"mine \(llama\) .* 2 of its 3 layers call transformers' attention"):
        PagedModel(model, "mine", CPU)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"sliding_window": 4}, "takes sliding_window"),
        ({"s_aux": torch.zeros(1)}, "takes s_aux"),
        ({"softcap": 50.0}, "takes softcap"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "drops out"),
        ({"attention_mask": torch.zeros(1, 1, 9, 9)}, "attention mask of its own"),
    ],
)
def test_a_model_that_passes_another_attention_on_is_refused_by_the_trial(option, reason, monkeypatch):
    from kvsched.runner import torch_attention

    def passes_on(module, query, key, value, attention_mask, **kwargs):
        return torch_attention.paged_attention(
            module, query, key, value, **({"attention_mask": None} | kwargs | option)
        )

    transformers.AttentionInterface.register("kvsched_test", passes_on)
    monkeypatch.setattr("kvsched.runner.torch_model.IMPLEMENTATION", "kvsched_test")
    with pytest.raises(ModelUnavailable, match=rf"mine \(llama\) .*{reason}"):
        PagedModel(loaded("random:llama-tiny").model, "mine", CPU)


def test_a_model_whose_cache_is_not_what_it_says_is_refused_by_the_trial():
    config = copy.deepcopy(loaded("random:llama-tiny").config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config.num_key_value_heads = 4
    with pytest.raises(ModelUnavailable, match=r"keys and values \(\[2, 16\], \[2, 16\]\) do not have the \[4, 16\]"):
        PagedModel(model, "mine", CPU)


def test_a_model_whose_logits_come_out_different_is_refused(monkeypatch):
    """The last line of defence, for whatever no list foresees."""
    from kvsched.runner import torch_model

    own = torch_model._own_logits
    monkeypatch.setattr(torch_model, "_own_logits", lambda *a: own(*a) + 1.0)
    with pytest.raises(ModelUnavailable, match=r"mine \(llama\) .* its logits differ from its own by"):
        PagedModel(loaded("random:llama-tiny").model, "mine", CPU)


def test_create_runner_names_the_model_it_refuses():
    config = transformers.AutoConfig.for_model("mistral", **TINY, num_key_value_heads=2, sliding_window=8)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelUnavailable, match="my-mistral"):
        create_runner(LoadedModel("my-mistral", model, None, config, (), 64), device="cpu")
