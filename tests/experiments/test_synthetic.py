"""Synthetic problems are drawn from the models they state."""

import math

import pytest
import torch
from experiments.levattention.synthetic import planted, random_signs
from hypothesis import given, strategies as st

from fewkeys.papers.levattention import leverage_scores, universal_set


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def softmax(problem):
    return torch.softmax(problem.query @ problem.key.mT / problem.key.shape[-1] ** 0.5, -1)


@given(seed=st.integers(0, 1000), n=st.integers(1, 50), d=st.integers(1, 20), c=st.floats(0.1, 5))
def test_random_signs_are_signs(seed, n, d, c):
    problem = random_signs(n, d, c, generator=generator(seed))
    assert torch.equal(problem.key.abs(), torch.full((1, 1, n, d), c))
    assert torch.equal(problem.query, problem.key)
    assert problem.query.data_ptr() != problem.key.data_ptr()
    assert problem.relevant.all()
    assert problem.value.shape == problem.key.shape


def test_random_signs_are_fair():
    key = random_signs(2000, 30, 1.0, generator=generator()).key[0, 0]
    assert key.mean(0).abs().max() < 5 / math.sqrt(2000)
    correlation = key.T @ key / 2000 - torch.eye(30)
    assert correlation.abs().max() < 5 / math.sqrt(2000)


@pytest.mark.parametrize(("n", "d", "c"), [(200, 64, 2.5), (1000, 64, 3.0), (500, 256, 1.5)])
def test_the_whole_diagonal_of_random_signs_is_heavy(n, d, c):
    delta, scale = 1e-3, d**-0.5
    gap = d - math.sqrt(2 * d * math.log(n**2 / (2 * delta)))
    bound = 1 / (1 + (n - 1) * math.exp(-scale * c**2 * gap))
    assert bound > 0.5
    for seed in range(3):
        problem = random_signs(n, d, c, generator=generator(seed))
        heavy = softmax(problem)[0, 0].diagonal()
        assert heavy.min() >= bound - 1e-6
        # No other function of growth |s|^2 has this: its universal set cannot hold all keys.
        assert universal_set(problem.key, 0.5).sum() <= 2 * d
        squares = (problem.query @ problem.key.mT).square()[0, 0]
        share = squares.diagonal() / squares.sum(-1)
        torch.testing.assert_close(share.mean(), torch.tensor(d / (n + d)), rtol=0.1, atol=0)


@pytest.mark.parametrize("combine", [1, 3])
def test_planted_problems_have_the_stated_moments(combine):
    n, d, r, m, strength, noise, leak = 20_000, 16, 5, 20_000, 3.0, 0.5, 0.1
    problem = planted(n, d, r, m, strength=strength, combine=combine, noise=noise, leak=leak, generator=generator(1))
    key, query, mark = problem.key[0, 0], problem.query[0, 0], problem.relevant[0, 0]
    assert mark.sum() == r
    rare = key[mark]
    torch.testing.assert_close(rare @ rare.T, torch.eye(r), rtol=0, atol=1e-5)
    # Irrelevant keys: variance leak^2 along the rare directions, one across.
    other = key[~mark]
    inside = other @ rare.T
    torch.testing.assert_close(inside.std(), torch.tensor(leak), rtol=0.03, atol=0)
    torch.testing.assert_close(
        (other - inside @ rare).square().sum(-1).mean(), torch.tensor(d - r + 0.0), rtol=0.03, atol=0
    )
    assert inside.mean(0).abs().max() < 5 * leak / math.sqrt(n)
    # Scores of the usual scale: `combine` times the strength, else zero, plus noise.
    score = query @ rare.T / d**0.5
    chosen = score > strength / 2
    assert (chosen.sum(-1) == combine).double().mean() > 0.97
    residual = score - strength * chosen
    torch.testing.assert_close(residual.std(), torch.tensor(noise), rtol=0.03, atol=0)
    torch.testing.assert_close(chosen.double().mean(0), torch.full((r,), combine / r).double(), rtol=0, atol=0.03)
    spread = (query @ other.T[:, :500] / d**0.5).var()
    expected = noise**2 * (d - r + r * leak**2) + strength**2 * combine * leak**2
    torch.testing.assert_close(spread, torch.tensor(expected), rtol=0.1, atol=0)


@given(seed=st.integers(0, 1000), n=st.integers(300, 3000), leak=st.floats(0, 0.3))
def test_leverage_of_relevant_keys_is_what_is_stated(seed, n, leak):
    problem = planted(n, 16, 6, 1, leak=leak, generator=generator(seed))
    scores = leverage_scores(problem.key.double())[problem.relevant]
    rare = problem.key[problem.relevant].double()
    chi = (problem.key[~problem.relevant].double() @ rare.T).square().sum(0)
    assert (scores >= 1 / (1 + chi) - 1e-6).all()
    torch.testing.assert_close(chi, torch.full((6,), (n - 6) * leak**2).double(), rtol=0.6, atol=1e-6)


@pytest.mark.parametrize("n", [500, 5000])
def test_leverage_finds_what_the_norm_hides(n):
    problem = planted(n, 64, 16, 400, noise=0.2, generator=generator())
    mark = problem.relevant[0, 0]
    best = leverage_scores(problem.key)[0, 0].topk(16).indices
    assert mark[best].all()
    assert not mark[problem.key[0, 0].norm(dim=-1).topk(n // 2).indices].any()
    heavy = softmax(problem)[0, 0] >= 0.2
    assert heavy[:, mark].sum() >= 0.99 * heavy.sum()
    assert heavy[:, mark].any(-1).double().mean() > 0.9


def test_positions_are_random_and_seeds_are_obeyed():
    first, same, other = (planted(50, 8, 3, 5, generator=generator(seed)) for seed in (0, 0, 1))
    for name in ("query", "key", "value", "relevant"):
        assert torch.equal(getattr(first, name), getattr(same, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))
    places = sum(planted(50, 8, 3, 5, generator=generator(seed)).relevant[0, 0].int() for seed in range(200))
    assert places.min() > 0
    assert places.max() < 30
    one, two = (random_signs(40, 8, generator=generator(seed)) for seed in (0, 0))
    assert torch.equal(one.key, two.key)


def test_bad_input_is_named():
    g = generator()
    refusals = {
        "n: expected at least 1, got 0": lambda: random_signs(0, 3, generator=g),
        "d: expected an integer, got float": lambda: random_signs(3, 3.0, generator=g),
        "c: expected a finite number": lambda: random_signs(3, 3, -1.0, generator=g),
        "generator: expected a torch.Generator, got int": lambda: random_signs(3, 3, generator=0),
        "relevant: expected fewer than n=9 and d=4, got 4": lambda: planted(9, 4, 4, 1, generator=g),
        "combine: expected at most relevant=2, got 3": lambda: planted(9, 4, 2, 1, combine=3, generator=g),
        "queries: expected at least 1": lambda: planted(9, 4, 2, 0, generator=g),
        "strength: expected a finite number": lambda: planted(9, 4, 2, 1, strength=0.0, generator=g),
        "noise: expected a number that is not negative, got -0.1": lambda: planted(9, 4, 2, 1, noise=-0.1, generator=g),
        "leak: expected a number that is not negative": lambda: planted(9, 4, 2, 1, leak=-1.0, generator=g),
        "generator: expected a torch.Generator, got NoneType": lambda: planted(9, 4, 2, 1, generator=None),
    }
    for message, call in refusals.items():
        with pytest.raises((ValueError, TypeError), match=f"^{message}"):
            call()
