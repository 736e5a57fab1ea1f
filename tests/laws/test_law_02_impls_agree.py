"""Law 2: every implementation equals the reference, forward and gradient, in every dtype that it takes."""

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_PLANS, CAUSAL_SHAPES, PLANS, RUNNING_PLANS, SHAPES, SOME_PLANS
from executors import UNITS
from fewkeys.core.validation import check_inputs
from fewkeys.execute import by_cohort
from fewkeys.execute.dispatch import EXECUTORS
from fewkeys.execute.torch import by_block
from fewkeys.flow import prepare
from native_cases import needs_compiler


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
        monkeypatch.setattr(by_block, "CHUNK", size)
        torch.testing.assert_close(fk.attention(*shape.draw(), plan=plan, impl="torch"), whole, rtol=1e-9, atol=1e-10)


def answers(plan, shape, dtype, grad):
    """By each executor that knows the problem, what it makes of the same graph and the same stand-ins.

    End to end, one executor's statistics may put a key that is as near to one centre as to another elsewhere.
    """
    tensors = [x.requires_grad_(grad) for x in shape.draw(dtype=dtype)]
    problem = by_cohort.plain(prepare(check_inputs(*tensors, **shape.options), plan))
    found = {}
    for name in EXECUTORS:
        if name != "triton" and EXECUTORS[name].unsupported(problem) is None:
            output = EXECUTORS[name].attend(problem)
            assert output.dtype == dtype
            found[name] = [output.detach()]
            if grad:
                direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
                found[name] += torch.autograd.grad(output, tensors, direction, retain_graph=True)
    return found


DTYPES = (torch.float32, torch.bfloat16)
FORMS = {"grouped": PLANS, "cross padded": PLANS, "causal grouped": CAUSAL_PLANS, "causal padded": CAUSAL_PLANS}
CASES = [pytest.param(plan, form, id=f"{name}-{form}") for form, plans in FORMS.items() for name, plan in plans.items()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("plan", "form"), CASES)
def test_executors_agree_on_the_same_problem(plan, form, dtype):
    found = answers(plan, (SHAPES | CAUSAL_SHAPES)[form], dtype, grad=False)
    assert_alike(found, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["grouped", "cross padded"])
@pytest.mark.parametrize("plan", SOME_PLANS.values(), ids=SOME_PLANS)
def test_their_gradients_agree(plan, form, dtype):
    assert_alike(answers(plan, SHAPES[form], dtype, grad=True), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["causal grouped", "causal padded"])
@pytest.mark.parametrize("plan", RUNNING_PLANS.values(), ids=RUNNING_PLANS)
def test_their_causal_gradients_agree(plan, form, dtype):
    assert_alike(answers(plan, CAUSAL_SHAPES[form], dtype, grad=True), dtype)


def assert_alike(found, dtype):
    slow = found.pop("reference")
    assert "torch" in found
    for name, fast in found.items():
        for one, other in zip(fast, slow, strict=True):
            off = (one.double() - other.double()).abs().max()
            assert off <= UNITS[dtype] * other.double().abs().max(), name


@needs_compiler
def test_the_kernels_are_among_them():
    known = {name for name, plan in PLANS.items() if "native" in answers(plan, SHAPES["plain"], torch.float32, False)}
    assert {"window, drop, softmax", "outliers + window, first-order means, softmax"} <= known
    assert all(isinstance(PLANS[name].weights, fk.Softmax) for name in known)
