"""Exact attention is right wherever its definition is, whatever torch's own kernels do there."""

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_SHAPES, SHAPES
from fewkeys.core.validation import check_inputs
from fewkeys.execute import exact, reference

FORMS = {**SHAPES, **CAUSAL_SHAPES}


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_any_scale(form, dtype, scale):
    """A negative scale prefers the keys that are least alike, zero takes the mean of all that is seen."""
    shape = FORMS[form]
    x = check_inputs(*shape.draw(dtype=dtype), scale=scale, **shape.options)
    want = reference.attend_exact(x, fk.Softmax())
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(exact.attend(x, fk.Softmax()), want, **close)
