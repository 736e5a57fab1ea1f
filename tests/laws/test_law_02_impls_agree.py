"""Law 2: the linear-time implementation equals the reference, forward and gradient, in every dtype."""

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_PLANS, CAUSAL_SHAPES, PLANS, SHAPES, SOME_PLANS
from fewkeys.execute.torch import attend as linear


def both(plan, shape, dtype=torch.float64, grad=False):
    """(output, gradients) of impl torch and impl reference."""
    results = []
    for impl in ("torch", "reference"):
        inputs = [x.requires_grad_(grad) for x in shape.draw(dtype=dtype)]
        output = fk.attention(*inputs, plan=plan, impl=impl, **shape.options)
        if not grad:
            results.append([output])
            continue
        g = torch.Generator().manual_seed(1)
        direction = torch.randn(output.shape, generator=g, dtype=torch.float64).to(dtype)
        results.append([output.detach(), *torch.autograd.grad(output, inputs, direction)])
    return zip(*results, strict=True)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_forward(plan, shape):
    for fast, slow in both(plan, shape):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", CAUSAL_SHAPES.values(), ids=CAUSAL_SHAPES)
@pytest.mark.parametrize("plan", CAUSAL_PLANS.values(), ids=CAUSAL_PLANS)
def test_causal(plan, shape):
    for fast, slow in both(plan, shape):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", ["plain", "grouped", "padded", "cross"])
@pytest.mark.parametrize("plan", SOME_PLANS.values(), ids=SOME_PLANS)
def test_gradients(plan, shape):
    for fast, slow in both(plan, SHAPES[shape], grad=True):
        torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", ["causal", "causal padded"])
@pytest.mark.parametrize("name", ["leverage + window, drop, softmax", "leverage + window, drop, entmax"])
def test_causal_gradients(name, shape):
    for fast, slow in both(CAUSAL_PLANS[name], CAUSAL_SHAPES[shape], grad=True):
        torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", SOME_PLANS.values(), ids=SOME_PLANS)
def test_every_dtype(plan, dtype, grad):
    """Both compute in float32 and round once at the end: they differ by the rounding of the output dtype alone."""
    ulp = torch.finfo(dtype).eps
    for fast, slow in both(plan, SHAPES["grouped"], dtype, grad):
        assert fast.dtype == dtype
        # Selection may not differ either: it is shared. The bound is relative to the size of the tensor.
        limit = max(2 * ulp, 2e-5) * slow.double().abs().max().item()
        assert (fast.double() - slow.double()).abs().max().item() <= limit


def test_chunking_does_not_matter(monkeypatch):
    """Tiny chunks cross heads and blocks at every possible place."""
    shape, plan = SHAPES["grouped"], SOME_PLANS["outliers + window, first-order means, softmax"]
    whole = fk.attention(*shape.draw(), plan=plan, impl="torch")
    for size in (1, 700, 9000):
        monkeypatch.setattr(linear, "CHUNK", size)
        torch.testing.assert_close(fk.attention(*shape.draw(), plan=plan, impl="torch"), whole, rtol=1e-9, atol=1e-10)
