"""Metrics and oracles against their definitions."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

import fewkeys as fk
from fewkeys.papers import value_aware


def masks(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(2, 3, 5, 7, generator=g) < 0.4, torch.rand(2, 3, 5, 7, generator=g) < 0.3


@given(seed=st.integers(0, 1000))
def test_graph_metrics(seed):
    predicted, gold = masks(seed)
    for b in range(2):
        for h in range(3):
            p, g = predicted[b, h], gold[b, h]
            actual = sum(bool(p[i, j]) for i, j in g.nonzero())
            assert fk.metrics.recall(predicted, gold)[b, h] == pytest.approx(actual / int(g.sum()) if g.any() else 1)
            assert fk.metrics.sparsity(predicted)[b, h] == pytest.approx(1 - int(p.sum()) / 35)
            whole = sum(all(bool(p[i, j]) for j in g[i].nonzero()) for i in range(5))
            assert fk.metrics.exact_fraction(predicted, gold)[b, h] == pytest.approx(whole / 5)


def test_mass_and_error():
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    mask = torch.tensor([[True, False, True], [False, True, False]])
    torch.testing.assert_close(fk.metrics.mass(weights, mask), torch.tensor([0.7, 0.1]))
    exact = torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]])
    approx = torch.tensor([[3.0, 5.0], [0.0, 0.0], [0.0, 0.0]])
    assert fk.metrics.output_error(approx, exact) == pytest.approx((0.2 + 1.0 + 0.0) / 3)
    assert math.isnan(fk.metrics.output_error(exact / 0, exact))


@given(seed=st.integers(0, 1000), r=st.integers(1, 9))
def test_value_oblivious(seed, r):
    g = torch.Generator().manual_seed(seed)
    weights = torch.randn(4, 8, generator=g, dtype=torch.float64).softmax(-1)
    for form in ("renormalised", "projected"):
        actual = value_aware.value_oblivious(weights, r, form)
        assert ((actual > 0).sum(-1) <= r).all()
        torch.testing.assert_close(actual.sum(-1), torch.ones(4, dtype=torch.float64))
        kept = actual > 0
        assert (weights.masked_fill(kept, 0).amax(-1) <= weights.masked_fill(~kept, 1).amin(-1)).all()
    ratio = value_aware.value_oblivious(weights, r) / weights
    scale = ratio.amax(-1, keepdim=True)
    assert torch.allclose(ratio, torch.where(ratio > 0, scale, 0.0))
    # The projected form is the nearest point of the simplex on its support: all kept entries move by the same amount.
    actual = value_aware.value_oblivious(weights, r, "projected")
    difference = (actual - weights)[actual > 0]
    assert difference.min() >= -1e-12
    for row, target in zip(actual, weights, strict=True):
        gap = (row - target)[row > 0]
        assert torch.allclose(gap, gap[:1].expand_as(gap))


def test_top_k_is_the_renormalised_oblivious_oracle():
    """Two ways to the same output: attention over TopK, and value_oblivious weights times the values."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=g, dtype=torch.float64) for _ in range(3))
    weights = (q @ k.mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(fk.attention(q, k, v, keep=fk.TopK(6)), value_aware.value_oblivious(weights, 6) @ v)
    # Known identity: the error is the dropped mass times the distance between dropped and kept means.
    kept = value_aware.value_oblivious(weights, 6) > 0
    dropped = weights.masked_fill(kept, 0)
    delta = dropped.sum(-1, keepdim=True)
    gap = (dropped / delta) @ v - value_aware.value_oblivious(weights, 6) @ v
    error = (fk.attention(q, k, v, keep=fk.TopK(6)) - weights @ v).norm(dim=-1)
    torch.testing.assert_close(error, (delta * gap).norm(dim=-1))


def test_errors_have_gradients():
    rows = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda rows: fk.metrics.relative_error(*rows), rows)


@pytest.mark.parametrize(
    ("unit", "dtype"),
    [
        *((2.0**power, torch.float32) for power in (126, -100, -130)),
        *((2.0**power, torch.float64) for power in (500, -500)),
    ],
)
def test_errors_do_not_depend_on_the_unit(unit, dtype):
    """Also where differences or squares of outputs overflow or vanish."""
    g = torch.Generator().manual_seed(0)
    approx, exact = torch.randn(2, 5, 4, generator=g, dtype=dtype).clamp(-1.9, 1.9).unbind()
    want = fk.metrics.relative_error(approx, exact)
    torch.testing.assert_close(fk.metrics.relative_error(approx * unit, exact * unit), want, rtol=1e-4, atol=0)
