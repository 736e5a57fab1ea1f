"""Gradients of what compiled kernels compute are those of torch's operations."""

from dataclasses import replace

import pytest
import torch

import fewkeys as fk
from cases import SHAPES
from fewkeys.core.validation import check_inputs
from fewkeys.execute import dispatch, native as native_plans
from fewkeys.execute.problem import Problem
from native_cases import CASES, FORMS, MEANS, has_kernel, needs_compiler

pytestmark = needs_compiler

CLOSE = {torch.float32: {"atol": 3e-5, "rtol": 2e-4}, torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2}}
COHORTS = fk.Plan(fk.Outliers(5, 6, cohorts=4), fk.ClusterMeans(6, rank=3, cohorts=4))


@pytest.fixture
def taken(monkeypatch):
    """How often the kernel was taken."""
    calls, recomputed = [], native_plans.recomputed
    monkeypatch.setattr(native_plans, "recomputed", lambda *args: calls.append(args) or recomputed(*args))
    return calls


def by_torch(call):
    """Attention by torch's operations, of the same stand-ins: another rounding of clusters would be another plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_plans, "unsupported", lambda _: "no gradients here")
        return call()


def gradients(shape, plan, dtype=torch.float32):
    """The output and the gradients of queries, keys and values."""
    tensors = [x.requires_grad_() for x in shape.draw(dtype=dtype)]
    output = fk.attention(*tensors, plan=plan, impl="auto", **shape.options)
    push = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    return (output.detach(), *torch.autograd.grad(output, tensors, push))


@pytest.mark.parametrize(("plan", "form", "dtype"), CASES, ids=str)
def test_they_are_those_of_torch(plan, form, dtype, taken):
    shape = FORMS[form]
    actual = gradients(shape, plan, dtype)
    count = has_kernel(plan, check_inputs(*shape.draw(dtype=dtype), **shape.options))
    assert len(taken) == count
    want = by_torch(lambda: gradients(shape, plan, dtype))
    assert len(taken) == count
    assert all(x.abs().sum() > 0 for x in actual[1:])
    for pair in zip(actual, want, strict=True):
        torch.testing.assert_close(*pair, **CLOSE[dtype])


@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (5, 33), (64, 64), (80, 96)])
@pytest.mark.parametrize("plan", [MEANS[0], COHORTS], ids=str)
def test_head_sizes(plan, dim, value_dim):
    form = SHAPES["cross padded"]
    shape = replace(form, head_dim=dim, value_dim=value_dim)
    actual, want = gradients(shape, plan), by_torch(lambda: gradients(shape, plan))
    for pair in zip(actual, want, strict=True):
        torch.testing.assert_close(*pair, **CLOSE[torch.float32])


@pytest.mark.parametrize("plan", [MEANS[0], COHORTS], ids=str)
def test_the_number_of_threads_changes_nothing(plan):
    """Keys that many queries see get their gradients in the same order."""
    form = SHAPES["grouped"]
    shape = replace(form, queries=1400, keys=1400)
    threads, actual = torch.get_num_threads(), []
    for number in (1, 3):
        torch.set_num_threads(number)
        actual.append(gradients(shape, plan))
    torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*actual, strict=True))


@pytest.mark.parametrize("plan", [MEANS[0], COHORTS], ids=str)
def test_long_sequences(plan):
    """More pieces than one, and keys at their seams."""
    form = SHAPES["padded"]
    shape = replace(form, batch=1, queries=1400, keys=1400, lengths=(1377,))
    actual, want = gradients(shape, plan), by_torch(lambda: gradients(shape, plan))
    for pair in zip(actual, want, strict=True):
        torch.testing.assert_close(*pair, **CLOSE[torch.float32])


@pytest.mark.parametrize("plan", [MEANS[0], COHORTS], ids=str)
def test_gradients_of_gradients(plan, taken):
    """They go through torch's operations, whatever made the first ones."""

    def squared():
        shape = SHAPES["grouped"]
        tensors = [x.requires_grad_() for x in shape.draw(dtype=torch.float32)]
        output = fk.attention(*tensors, plan=plan, impl="auto", **shape.options)
        first = torch.autograd.grad(output.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), tensors)

    actual = squared()
    assert taken
    for pair in zip(actual, by_torch(squared), strict=True):
        torch.testing.assert_close(*pair, rtol=1e-3, atol=2e-2)


def test_stand_ins_made_by_hand(taken):
    """All their numbers may require gradients, also those that plans take for constants."""
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    x = check_inputs(q, k, v)
    graph = fk.select.KeyNorm(4).select(x)
    means = MEANS[1].rest.prepare(x, graph, fk.Softmax())
    leaves = [part.clone().requires_grad_() for part in (means.key, means.bias)]
    problem = Problem(x, graph, replace(means, key=leaves[0], bias=leaves[1]), fk.Softmax())
    actual, want = (
        torch.autograd.grad(call().square().sum(), leaves)
        for call in (lambda: dispatch.attend(problem), lambda: by_torch(lambda: dispatch.attend(problem)))
    )
    assert len(taken) == 1
    for pair in zip(actual, want, strict=True):
        torch.testing.assert_close(*pair, **CLOSE[torch.float32])
