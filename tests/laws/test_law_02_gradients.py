"""Gradients flow through what is kept and what stands in, never through the selection; checked in float64."""

from dataclasses import replace

import pytest
import torch

import fewkeys as fk
from cases import SOME_PLANS, Shape
from fewkeys.core.validation import check_inputs
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem

SHAPE = Shape(batch=1, query_heads=2, kv_heads=1, queries=21, keys=21, head_dim=3, value_dim=2)
# Relu has kinks that finite differences trip over; test_impls_agree.py covers it.
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


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_values_get_all_the_weight_there_is(plan):
    """The output is an average of values: the gradients of its sum over the values sum to one per output entry."""
    q, k, v = SHAPE.draw()
    v.requires_grad_()
    fk.attention(q, k, v, plan=plan, impl="torch").sum().backward()
    torch.testing.assert_close(v.grad.sum(), torch.tensor(2.0 * 21 * 2, dtype=torch.float64))


@pytest.mark.parametrize("keep", [fk.Leverage(4), fk.KeyNorm(4), fk.TopK(4), fk.Outliers(4, 3)], ids=str)
def test_dropped_keys_get_no_gradient(keep):
    q, k, v = SHAPE.draw()
    k.requires_grad_()
    fk.attention(q, k, v, keep=keep, impl="torch").square().sum().backward()
    used = keep.graph(q, k, v).to_mask().any(2).any(1)
    assert torch.equal(k.grad[0, 0].abs().sum(-1) > 0, used[0])
