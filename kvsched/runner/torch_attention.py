"""Paged attention, as transformers calls it.

Owns: the attention function registered under `IMPLEMENTATION`, and the device form of an attention plan.
Knows nothing about: requests, sampling, models beyond their attention modules.
Invariants: a token's result depends on the slots of its own request below its own position, and on nothing else,
whatever the other slots hold (NaN included): stale slots are taken out of the scores *and* out of the values,
since 0 x NaN is NaN. No dense mask over the whole step is ever built: transformers makes none for an attention
function that has no mask function registered.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from transformers import AttentionInterface

from kvsched.runner.torch_cache import PagedCache
from kvsched.runner.torch_plan import AttentionPlan, Chunk, DecodeGroup, Ints
from kvsched.runner.torch_streams import Put

IMPLEMENTATION = "kvsched_paged"
"""Name of this attention function among transformers' attention implementations."""


class _Decode(NamedTuple):
    """tokens: [n]; rows: [layers, n x width]; stale: [m] or None; length: of every row if all are equal, else
    None; mask: [n, 1, 1, width x block size], -inf at stale slots, or None."""

    tokens: Tensor
    rows: Tensor
    stale: Tensor | None
    length: int | None
    mask: Tensor | None


class _Chunk(NamedTuple):
    """tokens [first, last) of the step; rows: [layers, blocks]; mask: [last - first, length] or None (causal)."""

    first: int
    last: int
    rows: Tensor
    length: int
    mask: Tensor | None


class DeviceAttention:
    """One step's attention on the device: where to write, what to read.

    slots: [num_tokens] slot of each token, padding included. Padding tokens get zeros.
    """

    def __init__(self, plan: AttentionPlan, slots: Ints, cache: PagedCache, put: Put) -> None:
        self.cache = cache
        self.calls: list[int] = []
        self._one_group = len(plan.decode) == 1 and len(plan.decode[0].tokens) == len(slots)
        self.slots = cache.slots_of_layers(put(slots))
        self._decode = [self._put_decode(group, put) for group in plan.decode]
        self._chunks = [self._put_chunk(chunk, put) for chunk in plan.chunks]

    def _put_decode(self, group: DecodeGroup, put: Put) -> _Decode:
        tokens, rows = put(group.tokens), self.cache.blocks_of_layers(put(group.block_ids))
        length = int(group.lengths[0])
        if (group.lengths == length).all():
            return _Decode(tokens, rows, None, length, None)
        shape = self.cache.shape
        width = len(group.block_ids) // len(group.tokens) * shape.block_size
        stale = put(group.stale)
        mask = torch.zeros(len(group.tokens) * width, dtype=shape.dtype, device=self.cache.device)
        mask.index_fill_(0, stale, float("-inf"))
        return _Decode(tokens, rows, stale, None, mask.view(-1, 1, 1, width))

    def _put_chunk(self, chunk: Chunk, put: Put) -> _Chunk:
        rows = self.cache.blocks_of_layers(put(chunk.block_ids))
        count = chunk.last - chunk.first
        mask = None
        if count < chunk.length:
            visible = torch.ones((count, chunk.length), dtype=torch.bool, device=self.cache.device)
            visible = visible.tril(diagonal=chunk.length - count)
            mask = torch.zeros(visible.shape, dtype=self.cache.shape.dtype, device=self.cache.device)
            mask.masked_fill_(~visible, float("-inf"))
        return _Chunk(chunk.first, chunk.last, rows, chunk.length, mask)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store this layer's keys and values and attend.

        query: [tokens, heads, head dim]; key, value: [tokens, kv heads, head dim]. Returns the shape of query.
        """
        self.calls.append(layer)
        self.cache.write(self.slots[layer], key, value)
        if self._one_group:  # the usual step: nothing to take apart
            return _attend_decode(query, self._gather_decode(self._decode[0], layer), self._decode[0], scale)
        out = torch.zeros_like(query)
        for group in self._decode:
            kv = self._gather_decode(group, layer)
            out.index_copy_(0, group.tokens, _attend_decode(query.index_select(0, group.tokens), kv, group, scale))
        for chunk in self._chunks:
            kv = self.cache.gather(chunk.rows[layer])[: chunk.length]
            out[chunk.first : chunk.last] = _attend_chunk(query[chunk.first : chunk.last], kv, chunk.mask, scale)
        return out

    def _gather_decode(self, group: _Decode, layer: int) -> Tensor:
        kv = self.cache.gather(group.rows[layer])
        if group.stale is not None:
            kv.index_fill_(0, group.stale, 0.0)
        return kv


def _attend_decode(query: Tensor, kv: Tensor, group: _Decode, scale: float | None) -> Tensor:
    """query: [n, heads, head dim]; kv: [n x width, 2, kv heads, head dim]. Returns the shape of query."""
    kv = kv.view(query.shape[0], -1, *kv.shape[1:])[:, : group.length]
    key, value = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    attend = decode_grouped if query.device.type == "cpu" else decode_folded
    return attend(query, key, value, group.mask, scale)


def decode_grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """One query position per row, torch sharing key heads among query heads: on the CPU it does so without a copy.

    query: [n, heads, head dim]; key, value: [n, kv heads, slots, head dim]; mask: [n, 1, 1, slots] or None.
    """
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query.unsqueeze(2), key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
    )
    return out.reshape(query.shape)


def decode_folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The same, with the query heads that share a key head in the place of query positions (they see the same
    slots): CUDA's fast kernels share no heads when there is a mask."""
    num_rows, _, head_dim = query.shape
    num_kv_heads = key.shape[1]
    folded = query.reshape(num_rows, num_kv_heads, -1, head_dim)
    if mask is not None:
        mask = mask.expand(-1, num_kv_heads, folded.shape[2], -1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return out.reshape(query.shape)


def _attend_chunk(query: Tensor, kv: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """query: [n, heads, head dim]; kv: [length, 2, kv heads, head dim]. Returns the shape of query.

    Key heads stand in the place of the batch, so that the query heads of a group share them without a copy.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[2]
    groups = num_heads // num_kv_heads
    key = kv[:, 0].transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
    value = kv[:, 1].transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
    split = query.reshape(num_tokens, num_kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(split, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


_CHANGES_ATTENTION = frozenset(
    {"sliding_window", "softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices", "block_mask"}
)


class AttentionRefused(ValueError):
    """A model asks for an attention that is not plain causal attention over all known positions."""


def _refuse_other_attention(mask: Tensor | None, dropout: float, options: dict[str, Any]) -> None:
    if mask is not None:
        raise AttentionRefused("it brings an attention mask of its own")
    if dropout:
        raise AttentionRefused(f"it drops out attention weights ({dropout}); put the model in eval mode")
    if options.get("is_causal") is False:
        raise AttentionRefused("its attention is not causal")
    for name in _CHANGES_ATTENTION.intersection(options):
        if options[name] is not None:
            raise AttentionRefused(f"its attention takes {name}")


_thread = threading.local()


@contextmanager
def attending(attention: DeviceAttention) -> Iterator[None]:
    """Within it, the models of this thread attend through `attention`."""
    _thread.attention = attention
    try:
        yield
    finally:
        del _thread.attention


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls, once a layer.

    query: [1, heads, tokens, head dim]; key, value: [1, kv heads, tokens, head dim], of the step's tokens only.
    Returns [1, tokens, heads, head dim].
    """
    attention: DeviceAttention | None = getattr(_thread, "attention", None)
    if attention is None:
        raise RuntimeError("a model with paged attention runs inside `attending(...)` only; use a runner")
    _refuse_other_attention(attention_mask, dropout, kwargs)
    layer: Any = getattr(module, "layer_idx", None)
    if layer is None:
        raise AttentionRefused("its attention layers do not know their number (layer_idx)")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    shape = attention.cache.shape
    if not key.shape[1:] == value.shape[1:] == (shape.num_kv_heads, shape.head_dim):
        raise AttentionRefused(
            f"a layer's keys and values ({list(key.shape[1:])}, {list(value.shape[1:])}) do not have the"
            f" {[shape.num_kv_heads, shape.head_dim]} that its configuration states"
        )
    return attention.run(layer, query, key, value, scaling).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, paged_attention)
