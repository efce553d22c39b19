"""Sampling: tokens depend on logits, parameters, seed and position alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvsched.request import SamplingParams
from kvsched.runner.torch_sampler import keep_likeliest, plan_draws, sample, uniform

V = 1000


def logits_of(rows: int, seed: int = 0, vocab: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, sampling: list[SamplingParams], positions: list[int]) -> list[int]:
    return sample(logits, plan_draws(sampling, np.array(positions), torch.from_numpy)).tolist()


MIX = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=20, seed=2),
    SamplingParams(temperature=1.3, top_p=0.9, seed=3),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.5, seed=4),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=3, top_p=0.1, seed=9),
]


def test_a_row_does_not_depend_on_its_batch():
    logits = logits_of(len(MIX))
    positions = list(range(10, 10 + len(MIX)))
    together = draw(logits, MIX, positions)
    alone = [draw(logits[i : i + 1], MIX[i : i + 1], positions[i : i + 1])[0] for i in range(len(MIX))]
    order = [4, 2, 6, 0, 5, 1, 3]
    shuffled = draw(logits[order], [MIX[i] for i in order], [positions[i] for i in order])
    assert together == alone
    assert [together[i] for i in order] == shuffled


def test_greedy_takes_the_likeliest_whatever_else_is_asked():
    logits = logits_of(len(MIX))
    tokens = draw(logits, MIX, [5] * len(MIX))
    best = logits.argmax(-1).tolist()
    assert tokens[0] == best[0]
    assert tokens[-1] == best[-1]


def test_seed_and_position_decide_the_draw():
    logits = logits_of(1).expand(40, -1)
    hot = [SamplingParams(temperature=1.5, seed=7)] * 40
    by_position = draw(logits, hot, list(range(40)))
    assert by_position == draw(logits, hot, list(range(40)))
    assert len(set(by_position)) > 10
    by_seed = draw(logits, [SamplingParams(temperature=1.5, seed=s) for s in range(40)], [3] * 40)
    assert len(set(by_seed)) > 10
    none = draw(logits, [SamplingParams(temperature=1.5)] * 40, list(range(40)))
    assert none == draw(logits, [SamplingParams(temperature=1.5, seed=0)] * 40, list(range(40)))


def test_tiny_temperature_is_greedy():
    logits = logits_of(5)
    assert draw(logits, [SamplingParams(temperature=1e-30)] * 5, [1] * 5) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("sampling", [{}, {"top_k": 4}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.7}])
def test_drawn_tokens_follow_the_distribution(sampling):
    """20000 draws over 12 tokens against the exact probabilities, by chi-square (bound: p about 1e-6)."""
    count = 20_000
    row = torch.linspace(-1.0, 1.5, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(2))]
    params = SamplingParams(temperature=0.8, seed=11, **sampling)
    drawn = np.bincount(draw(row.expand(count, -1), [params] * count, list(range(count))), minlength=12)
    expected = brute_force(row.double().numpy() / 0.8, params.top_k, params.top_p) * count
    assert (drawn[expected == 0] == 0).all()
    inside = expected > 0
    assert (((drawn - expected) ** 2)[inside] / expected[inside]).sum() < 50


def brute_force(scores: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities after top-k, then top-p, token by token."""
    order = np.argsort(-scores)[: top_k or None]
    weights = np.exp(scores[order] - scores.max())
    weights /= weights.sum()
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= top_p:
            break
        kept.append((token, weight))
        mass += weight
    result = np.zeros(len(scores))
    for token, weight in kept:
        result[token] = weight / mass
    return result


def test_only_the_likeliest_tokens_are_kept():
    scores = logits_of(6, seed=4).double()
    top_k = torch.tensor([1, 5, 0, 0, 17, 2 * V])
    top_p = torch.tensor([1.0, 1.0, 0.3, 1.0, 0.6, 1.0], dtype=torch.float64)
    kept = keep_likeliest(scores, top_k, top_p).isfinite()
    for row in range(6):
        expected = brute_force(scores[row].numpy(), min(int(top_k[row]), V), float(top_p[row])) > 0
        assert kept[row].tolist() == expected.tolist()


def test_equal_scores_stay_together():
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.0]], dtype=torch.float64)
    kept = keep_likeliest(scores, torch.tensor([1]), torch.tensor([1.0], dtype=torch.float64))
    assert kept.isfinite().tolist() == [[False, True, True, False]]


def test_the_uniform_numbers_are_fixed_and_even():
    """Their values are part of what makes runs repeat; a change would change every seeded run."""
    assert uniform([0, 1], np.array([0, 5])).tolist() == GOLDEN
    many = uniform(list(range(300)) * 300, np.repeat(np.arange(300), 300))
    assert 0.0 <= many.min() < 1e-3
    assert 1 - 1e-3 < many.max() < 1.0
    counts = np.histogram(many, bins=64, range=(0, 1))[0]
    expected = len(many) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 140  # 63 degrees of freedom: p about 1e-7
    assert uniform([-1], np.array([0]))[0] != uniform([1], np.array([0]))[0]


GOLDEN = [0.6524484863739417, 0.6924455848738944]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_the_same_tokens():
    logits = logits_of(len(MIX), vocab=50_000)
    positions = np.arange(3, 3 + len(MIX))
    on_gpu = sample(logits.cuda(), plan_draws(MIX, positions, lambda a: torch.from_numpy(a).cuda()))
    assert on_gpu.tolist() == draw(logits, MIX, positions.tolist())
