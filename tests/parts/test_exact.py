"""Exact attention is right wherever its definition is, whatever torch's own kernels do there."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import fewkeys as fk
from cases import CAUSAL_SHAPES, SHAPES
from fewkeys.core.validation import check_inputs
from fewkeys.execute import exact

FORMS = {**SHAPES, **CAUSAL_SHAPES}


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_any_scale(form, dtype, scale):
    """A negative scale prefers the keys that are least alike, zero takes the mean of all that is seen."""
    shape = FORMS[form]
    x = check_inputs(*shape.draw(dtype=dtype), scale=scale, **shape.options)
    want = exact.attend(replace(x, impl="reference"), fk.Softmax())
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(exact.attend(x, fk.Softmax()), want, **close)


def test_gradients_of_a_scale_of_zero():
    """Queries do not matter: their gradient is zero, and there is one."""
    query, key, value = SHAPES["plain"].draw()
    output = fk.attention(query.requires_grad_(), key, value, scale=0.0)
    output.sum().backward()
    assert query.grad.count_nonzero() == 0


@pytest.mark.parametrize("lengths", [None, (90, 31)])
@pytest.mark.parametrize("offset", [0, 1, 13])
def test_causal_queries_skip_the_keys_that_all_of_them_may_not_see(monkeypatch, offset, lengths):
    """By blocks of queries: the same answer, from little more than the visible pairs."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 90, 8, generator=draw, dtype=torch.float64)
    options = {"is_causal": True, "query_offset": offset, "lengths": lengths and torch.tensor(lengths)}
    want = fk.attention(query, key, value, impl="reference", **options)
    pairs = []

    def counted(q, k, *arguments, is_causal=False, **more):
        pairs.append(q.shape[2] * k.shape[2] * (0.5 if is_causal else 1.0))
        return scaled_dot_product_attention(q, k, *arguments, is_causal=is_causal, **more)

    monkeypatch.setattr(exact, "ROWS", 8)
    monkeypatch.setattr(exact, "scaled_dot_product_attention", counted)
    torch.testing.assert_close(fk.attention(query, key, value, **options), want)
    assert sum(pairs) <= 0.75 * 90 * 90
