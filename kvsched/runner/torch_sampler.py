"""From logits to tokens.

Owns: greedy choice, temperature, top-k, top-p, and the number in [0, 1) that decides a draw.
Knows nothing about: requests, batches, stop tokens, models.
Invariants: a token depends on its row of logits, its parameters, its seed and its position alone, hence not on the
schedule. The draw inverts the cumulative distribution in vocabulary order at `uniform(seed, position)`, which is
integer arithmetic on the host and so the same on every device. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsched.request import SamplingParams
from kvsched.runner.torch_streams import Put


def uniform(seeds: Sequence[int], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """[n] numbers in [0, 1), multiples of 2^-40: a hash of seed and position (splitmix64, twice)."""
    words = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
    mixed = _mix(_mix(words) ^ positions.astype(np.uint64))
    return (mixed >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Draws(NamedTuple):
    """The rows of a step that are drawn, not greedy; on the device.

    rows: [n] rows of the logits. temperature, uniform: [n] float64. filtered: which of the n rows keep only their
    likeliest tokens; top_k (0: all), top_p: of those.
    """

    rows: Tensor
    temperature: Tensor
    uniform: Tensor
    filtered: Tensor
    top_k: Tensor
    top_p: Tensor


def plan_draws(sampling: Sequence[SamplingParams], positions: NDArray[np.int64], put: Put) -> Draws | None:
    """Sort a step's rows by what they need. positions: [n] of the tokens to be sampled. None: all are greedy."""
    rows = np.flatnonzero([s.temperature > 0 for s in sampling])
    if len(rows) == 0:
        return None
    drawn = [sampling[i] for i in rows.tolist()]
    filtered = np.flatnonzero([s.top_k > 0 or s.top_p < 1 for s in drawn])
    return Draws(
        rows=put(rows),
        temperature=put(np.array([s.temperature for s in drawn])),
        uniform=put(uniform([s.seed or 0 for s in drawn], positions[rows])),
        filtered=put(filtered),
        top_k=put(np.array([drawn[i].top_k for i in filtered.tolist()], dtype=np.int64)),
        top_p=put(np.array([drawn[i].top_p for i in filtered.tolist()], dtype=np.float64)),
    )


def sample(logits: Tensor, draws: Draws | None) -> Tensor:
    """[n, vocabulary] logits -> [n] tokens (int64)."""
    tokens = logits.argmax(dim=-1)
    if draws is None:
        return tokens
    scores = logits.index_select(0, draws.rows).double()
    scores -= scores.amax(dim=-1, keepdim=True)
    scores /= draws.temperature.unsqueeze(1)
    if draws.filtered.shape[0]:
        kept = keep_likeliest(scores.index_select(0, draws.filtered), draws.top_k, draws.top_p)
        scores.index_copy_(0, draws.filtered, kept)
    cumulative = torch.softmax(scores, dim=-1).cumsum(dim=-1)
    target = draws.uniform.unsqueeze(1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return tokens.index_copy(0, draws.rows, drawn)


def keep_likeliest(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf for all but the likeliest tokens of each row: [n, v] scores, [n] top_k (0: all), [n] top_p.

    top_p is measured among what top_k leaves. Tokens with equal scores stay or go together, so that the choice
    depends on the scores alone.
    """
    size = scores.shape[-1]
    ordered = _descending(scores)
    top_k = torch.where(top_k > 0, top_k, size).clamp(max=size).unsqueeze(1)
    least = ordered.gather(1, top_k - 1)
    ordered = ordered.masked_fill(ordered < least, float("-inf"))
    probabilities = torch.softmax(ordered, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    inside = (before < top_p.unsqueeze(1)) | (top_p >= 1).unsqueeze(1)
    count = inside.sum(dim=-1, keepdim=True).clamp(min=1)
    least = torch.maximum(least, ordered.gather(1, count - 1))
    return scores.masked_fill(scores < least, float("-inf"))


def _descending(scores: Tensor) -> Tensor:
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)  # several times faster than torch's
    return scores.sort(dim=-1, descending=True).values
