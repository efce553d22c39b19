"""A transformers model that attends through the paged cache.

Owns: `PagedModel`: the private copy of a model's module tree, its forward pass over a flat step, and the proof that
paged attention is what the model wants.
Knows nothing about: requests, threads, sampling.
Invariants: the model it was made from is left as it was, on its own device; the copy shares those of its tensors that
are on the right device already, and has a configuration and layers of its own. A model that would be wrong
under paged attention is refused by name when it is made, never run: first by its configuration, then by a short
trial, which must call paged attention once in every layer and give the logits of the model's own attention.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvsched.runner.models import ModelUnavailable
from kvsched.runner.torch_attention import IMPLEMENTATION, AttentionRefused, DeviceAttention, attending
from kvsched.runner.torch_cache import PagedCache, cache_shape
from kvsched.runner.torch_linear import can_pack, pack_linears, watching_inputs
from kvsched.runner.torch_plan import plan_attention

_TRIAL_TOKENS = 9
_TRIAL_BLOCK = 4
_TRIAL_TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""Largest difference of logits, relative to the largest logit, that rounding explains."""


class PagedModel:
    """name: for messages. pack: pack linear weights for speed where that can be done (CPU, float32).

    Raises ModelUnavailable, naming the model and the reason, for a model that paged attention cannot serve.
    """

    def __init__(self, model: Any, name: str, device: torch.device, *, pack: bool = True) -> None:
        self.name = name
        self.device = device
        refuse_by_config(model.config, name)
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters:
            raise _refusal(name, model.config.model_type, "it takes no position ids")
        self._takes_rows = "logits_to_keep" in parameters
        self._model = _copy_on(device, model).eval()
        with watching_inputs(self._model) as sharing:
            own_logits = _own_logits(self._model, device)
        self.config = self._model.config
        self.dtype: torch.dtype = model.dtype
        if pack and can_pack(device, self.dtype):
            pack_linears(self._model, sharing)
        self._model.set_attn_implementation(IMPLEMENTATION)
        self._try_out(own_logits)

    @property
    def module(self) -> Any:
        """The private copy."""
        return self._model

    def forward(self, tokens: Tensor, positions: Tensor, attention: DeviceAttention, rows: Tensor) -> Tensor:
        """[t] tokens and positions -> [n, vocabulary] logits at `rows` ([n] indices of the step's tokens)."""
        options: dict[str, Any] = {"logits_to_keep": rows} if self._takes_rows else {}
        with attending(attention):
            output = self._model(
                input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **options
            )
        logits: Tensor = output.logits[0]
        return logits if self._takes_rows else logits[rows]

    def _try_out(self, own_logits: Tensor) -> None:
        """Compute a short sequence in two steps, a chunk and a decode, and compare."""
        cache = PagedCache(cache_shape(self.config, _TRIAL_BLOCK, self.dtype), 4, self.device)
        cache.poison()
        tokens = _trial_tokens(self.config, self.device)
        found = []
        try:
            with torch.inference_mode():
                for start, end in itertools.pairwise((0, _TRIAL_TOKENS - 1, _TRIAL_TOKENS)):
                    attention = _trial_attention(start, end, cache)
                    positions = torch.arange(start, end, device=self.device)
                    found.append(self.forward(tokens[start:end], positions, attention, positions - start))
                    self._check_calls(attention.calls)
        except AttentionRefused as error:
            raise self._refusal(str(error)) from error
        difference = (torch.cat(found) - own_logits).abs().max() / own_logits.abs().max()
        if not difference <= _TRIAL_TOLERANCE.get(self.dtype, 0.0):
            raise self._refusal(
                f"with plain paged attention its logits differ from its own by {difference:.2g} of the largest one"
            )

    def _check_calls(self, calls: list[int]) -> None:
        expected = list(range(self.config.num_hidden_layers))
        if sorted(calls) != expected:
            raise self._refusal(
                f"{len(set(calls))} of its {len(expected)} layers call transformers' attention interface, each of"
                " which must do so once"
            )

    def _refusal(self, reason: str) -> ModelUnavailable:
        kind = getattr(self.config, "model_type", type(self._model).__name__)
        return _refusal(self.name, kind, reason)


def _refusal(name: str, kind: str, reason: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"{name} ({kind}) cannot run on paged attention: {reason}. Choose a decoder-only model with full causal"
        " attention (Llama, Qwen3, OPT, GPT-2 and the like)"
    )


def refuse_by_config(config: Any, name: str) -> None:
    """Raise ModelUnavailable if a configuration says that the model wants another attention."""
    kind = getattr(config, "model_type", "?")
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(name, kind, "it is an encoder-decoder")
    if not hasattr(config, "num_attention_heads") or not hasattr(config, "num_hidden_layers"):
        raise _refusal(name, kind, "its configuration states no attention heads and layers")
    other_layers = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other_layers:
        raise _refusal(name, kind, f"it has layers of type {', '.join(other_layers)}")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise _refusal(name, kind, f"it attends within a sliding window of {config.sliding_window} tokens")
    if getattr(config, "attention_chunk_size", None):
        raise _refusal(name, kind, f"it attends within chunks of {config.attention_chunk_size} tokens")
    if getattr(config, "alibi", False) or kind in ("bloom", "mpt"):
        raise _refusal(name, kind, "it uses ALiBi position biases")
    if getattr(config, "attn_logit_softcapping", None):
        raise _refusal(name, kind, f"it caps attention scores at {config.attn_logit_softcapping}")


def _copy_on(device: torch.device, model: nn.Module) -> Any:
    """A copy of the module tree and the configuration; tensors are shared, or copied if on another device."""
    tensors: dict[int, Tensor] = {id(t): t.to(device) for t in model.buffers()}
    for parameter in model.parameters():
        on_device = parameter.device == device
        moved = parameter if on_device else nn.Parameter(parameter.detach().to(device), requires_grad=False)
        tensors[id(parameter)] = moved
    return copy.deepcopy(model, memo=tensors)


def _trial_tokens(config: Any, device: torch.device) -> Tensor:
    return (torch.arange(_TRIAL_TOKENS, device=device) * 7 + 3).remainder(config.vocab_size)


def _trial_attention(start: int, end: int, cache: PagedCache) -> DeviceAttention:
    """One request in blocks 3, 1, 2, computing [start, end)."""
    table = np.array([3, 1, 2])
    positions = np.arange(start, end)
    slots = table[positions // _TRIAL_BLOCK] * _TRIAL_BLOCK + positions % _TRIAL_BLOCK
    plan = plan_attention(np.array([start]), np.array([end - start]), table[None], _TRIAL_BLOCK, 64)
    return DeviceAttention(plan, slots, cache, lambda array: torch.from_numpy(array).to(cache.device))


def _own_logits(model: Any, device: torch.device) -> Tensor:
    """[trial tokens, vocabulary] logits of the trial by the model's own attention."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=_trial_tokens(model.config, device).unsqueeze(0), use_cache=False).logits[0]
    return logits
