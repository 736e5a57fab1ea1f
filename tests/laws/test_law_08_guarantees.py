"""Law 8: the universal set misses no heavy entry, for random, structured and gradient-optimised queries."""

import pytest
import torch
from hypothesis import given, strategies as st

import fewkeys as fk
from executors import WAYS
from fewkeys.papers import levattention
from odd_keys import KINDS, keys


def attack(k, steps=60):
    """Queries pushed by gradient ascent towards giving each key the largest possible weight |s|^2 / sum |s|^2."""
    q = k.clone().requires_grad_()
    with torch.no_grad():
        q += 1e-3
    for _ in range(steps):
        scores = torch.einsum("bhid,bhjd->bhij", q, k).square()
        share = scores.diagonal(dim1=-2, dim2=-1) / scores.sum(-1).clamp_min(1e-300)
        (grad,) = torch.autograd.grad(share.clamp_min(1e-12).log().sum(), q)
        with torch.no_grad():
            q += 0.3 * grad * q.norm(dim=-1, keepdim=True) / grad.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return q.detach()


@pytest.mark.parametrize("eps", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_no_heavy_entry_outside_the_universal_set(kind, eps):
    k = keys(kind)
    chosen = levattention.universal_set(k, eps)
    # The optimal query for key j is known: (K^T K)^+ k_j.
    best = k @ torch.linalg.pinv(k.mT @ k)
    g = torch.Generator().manual_seed(1)
    for q in (best, attack(k), torch.randn(1, 2, 500, k.shape[-1], generator=g, dtype=k.dtype), k):
        entries = torch.einsum("bhid,bhjd->bhij", q, k).square()
        entries = entries / entries.sum(-1, keepdim=True).clamp_min(1e-300)
        missed = (entries > eps * (1 + 1e-9)) & ~chosen.unsqueeze(2)
        assert not missed.any()
    rank = torch.linalg.matrix_rank(k)
    assert (chosen.sum(-1) <= rank / eps + 1e-9).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_attained_and_sum_to_the_rank(kind):
    k = keys(kind)
    scores = levattention.leverage_scores(k)
    q = k @ torch.linalg.pinv(k.mT @ k)
    entries = (q @ k.mT).square()
    attained = entries.diagonal(dim1=-2, dim2=-1) / entries.sum(-1).clamp_min(1e-300)
    torch.testing.assert_close(scores, attained, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(scores.sum(-1), torch.linalg.matrix_rank(k).double(), rtol=1e-6, atol=1e-6)


@given(seed=st.integers(0, 1000), n=st.integers(1, 40), d=st.integers(1, 8))
def test_scores_ignore_invertible_changes_of_basis(seed, n, d):
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(1, 1, n, d, generator=g, dtype=torch.float64)
    change = torch.randn(d, d, generator=g, dtype=torch.float64) + 3 * torch.eye(d, dtype=torch.float64)
    torch.testing.assert_close(
        levattention.leverage_scores(k), levattention.leverage_scores(k @ change), rtol=1e-5, atol=1e-7
    )


def test_zero_keys_have_score_zero():
    assert torch.equal(levattention.leverage_scores(torch.zeros(1, 1, 5, 3)), torch.zeros(1, 1, 5))


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, 4.0])
def test_selector_keeps_the_universal_set(power):
    k = keys("heavy tail")
    mask = levattention.Sensitivity(eps=0.1, power=power).graph(k, k).to_mask()
    assert torch.equal(mask[:, :, 0], levattention.universal_set(k, 0.1, power))


@pytest.mark.parametrize("way", [way for way in WAYS if way.impl in ("reference", "torch", "native")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_executor_attends_to_every_heavy_entry(kind, way):
    """Through the output: with one value per key, a query's output tells which keys it attended to."""
    k, eps = keys(kind).to(way.dtype), 0.1
    q = torch.cat([k.double() @ torch.linalg.pinv(k.double().mT @ k.double()), attack(k.double(), 20)], 2)
    q = (q / q.norm(dim=-1, keepdim=True).clamp_min(1e-30)).to(way.dtype)
    scores = q.double() @ k.double().mT
    entries = scores.square() / scores.square().sum(-1, keepdim=True).clamp_min(1e-300)
    one_each = torch.eye(k.shape[2], dtype=way.dtype).expand(1, 2, -1, -1)
    # So small a scale that no weight vanishes, however large the negative score.
    scale = 1.0 / scores.abs().max().item()
    actual = way.attend(q, k, one_each, keep=fk.select.Leverage(eps=eps), scale=scale)
    assert not ((entries > eps * (1 + 1e-3)) & (actual == 0)).any()
    assert ((actual > 0).sum(-1) <= k.shape[-1] / eps).all()
    kept = levattention.universal_set(k, eps).any(-1, keepdim=True)  # none, where every key has many like it
    way.assert_close(actual.double().sum(-1), kept.expand_as(actual[..., 0]).to(way.dtype))
