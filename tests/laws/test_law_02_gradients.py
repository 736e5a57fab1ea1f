"""Gradients flow through what is kept and what stands in, never through the selection; checked in float64."""

from dataclasses import replace

import pytest
import torch

import fewkeys as fk
from cases import CASES, SOFTMAX_PLANS, SOME_PLANS, Shape
from executors import FORMS, WAYS, runs
from fewkeys.core.validation import check_inputs
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem

SHAPE = Shape(batch=1, query_heads=2, kv_heads=1, queries=21, keys=21, head_dim=2, value_dim=2)
# Relu has kinks that finite differences trip over; test_impls_agree.py covers it.
SMOOTH = [name for name, plan in SOFTMAX_PLANS.items() if not plan.keep.is_oracle]
DROPPING = [way for way in WAYS if way.impl in ("reference", "torch", "native")]
PLANS = {n: p for n, p in SOME_PLANS.items() if "relu" not in n}


@pytest.mark.parametrize("name", [n for n in PLANS if "first-order" not in n])
def test_gradcheck_with_the_selection_held_fixed(name):
    """First-order means are left out: finite differences would move what is a choice there (tilt, subspace, spread)."""
    plan = PLANS[name]
    q, k, v = (x.requires_grad_() for x in SHAPE.draw())
    frozen = check_inputs(q.detach(), k.detach(), v.detach())
    graph = plan.keep.select(frozen)
    plan.rest.prepare(frozen, graph, plan.weights)  # fills the statistics that carry no gradient

    def run(query, key, value):
        inputs = check_inputs(query, key, value)
        inputs._memory.update(frozen._memory)
        held = replace(graph, inputs=inputs)
        return dispatch.attend(Problem(inputs, held, plan.rest.prepare(inputs, held, plan.weights), plan.weights))

    assert run(q, k, v).requires_grad
    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.parametrize(("name", "form", "way"), runs(SMOOTH, ["plain", "grouped"], gradients=True))
def test_values_get_all_the_weight_there_is(name, form, way):
    """The output is an average of values: the gradients of its sum over the values sum to one per output entry."""
    shape = FORMS[form]
    q, k, v = shape.draw(dtype=way.dtype)
    v.requires_grad_()
    output = way.attend(q, k, v, plan=CASES[name].part, **shape.options)
    output.sum().backward()
    per_head = torch.full((shape.batch, shape.kv_heads), float(output[0, 0].numel() * shape.query_heads))
    way.assert_close(v.grad.double().sum((2, 3)), per_head / shape.kv_heads)


@pytest.mark.parametrize("way", DROPPING, ids=str)
@pytest.mark.parametrize("keep", [fk.select.Leverage(4), fk.select.KeyNorm(4), fk.TopK(4), fk.Outliers(4, 3)], ids=str)
def test_dropped_keys_get_no_gradient(keep, way):
    if way.impl == "native" and keep == fk.TopK(4):
        return  # refused: a list for every query
    q, k, v = SHAPE.draw(dtype=way.dtype)
    k.requires_grad_()
    way.attend(q, k, v, keep=keep).square().sum().backward()
    used = keep.graph(q, k.detach(), v).to_mask().any(2).any(1)
    assert torch.equal(k.grad[0, 0].abs().sum(-1) > 0, used[0])
