"""Sums of the rows of each label, by chunks, against their definition; and their gradient."""

import torch
from hypothesis import given, strategies as st
from torch.nn.functional import one_hot

from fewkeys.sketch.sums import CHUNK, sums_by_label


def draw(rows, labels, weighted):
    """Rows, weights and labels of which some come often, and some never."""
    g = torch.Generator().manual_seed(rows)
    label = (labels * torch.rand(2, 3, rows, generator=g, dtype=torch.float64) ** 4).long()
    x = torch.randn(2, 3, rows, 5, generator=g, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(2, 3, weighted, rows, generator=g, dtype=torch.float64), label


@given(
    rows=st.one_of(st.integers(0, 5), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 3])),
    labels=st.integers(1, 300),
    weighted=st.integers(1, 3),
)
def test_sums_are_those_of_the_definition(rows, labels, weighted):
    x, weights, label = draw(rows, labels, weighted)
    actual = sums_by_label(x, weights, label, labels)
    want = torch.einsum("bhnc,bhmn,bhnx->bhmcx", one_hot(label, labels).double(), weights, x)
    torch.testing.assert_close(actual, want)
    none = torch.zeros_like(actual)
    none[:, :, :, 0] = 1
    gradients = [torch.autograd.grad(sums, x, none)[0] for sums in (actual, want)]
    torch.testing.assert_close(*gradients)


def test_a_label_without_weight_has_the_sum_zero():
    """Exactly: a mean must not be made of rounding."""
    x, weights, label = draw(200, 6, 2)
    weights = weights.masked_fill((label == 1).unsqueeze(2), 0.0)
    assert not sums_by_label(x, weights, label, 6)[:, :, :, 1].any()
