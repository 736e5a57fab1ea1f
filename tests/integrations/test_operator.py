"""Compiled attention: one operator, the same output and gradients as without compiling, whatever the plan."""

import gc
import json
import weakref
from dataclasses import dataclass

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_SHAPES, PLANS, SHAPES, SOME_PLANS
from fewkeys import operator
from fewkeys.core.learned import learned_parts
from fewkeys.core.work import Work
from fewkeys.papers import sparsefinder
from fewkeys.select import Selector
from native_cases import needs_compiler
from predictors import predicted
from tiny_models import llama, tokens

SHAPE = SHAPES["grouped"]
MIXED = [fk.budget(16), fk.Plan(fk.select.Leverage(8) | fk.Window(5))]


def inputs(shape, requires_grad=True):
    return [x.requires_grad_(requires_grad) for x in shape.draw()]


def same(actual, want):
    """Up to rounding in float64: an operator computes its output without gradients, in another order."""
    torch.testing.assert_close(actual, want, atol=1e-12, rtol=1e-10)


def compiled(**options):
    torch._dynamo.reset()
    return torch.compile(lambda q, k, v: fk.attention(q, k, v, **options), fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("plan", [*SOME_PLANS.values(), fk.Plan(), fk.Plan(fk.TopK(5))], ids=str)
def test_every_plan_compiles_whole(plan):
    tensors = inputs(SHAPES["plain"])
    want = fk.attention(*tensors, plan=plan, impl="torch")
    actual = compiled(plan=plan, impl="torch")(*tensors)
    same(actual, want)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), tensors) for o in (actual, want)), strict=True):
        same(a, b)


@pytest.mark.parametrize(
    "name", ["grouped", "padded", "cross padded", "one query", "causal grouped", "causal with offset"]
)
def test_every_shape_compiles_whole(name):
    shape = (SHAPES | CAUSAL_SHAPES)[name]
    plan = fk.budget(16, is_causal=shape.is_causal)
    options = {"plan": plan, **shape.options}
    tensors = inputs(shape)
    actual, want = compiled(**options)(*tensors), fk.attention(*tensors, **options)
    same(actual, want)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), tensors) for o in (actual, want)), strict=True):
        same(a, b)


@pytest.mark.long
def test_a_plan_for_each_head_and_learned_plans_compile():
    tensors = inputs(SHAPE)
    learned = fk.Plan(
        predicted(sparsefinder.Clusters(3), SHAPE.query_heads, SHAPE.head_dim), weights=fk.weights.Entmax(1.5)
    )
    for plan in ([*MIXED, MIXED[0]][: SHAPE.kv_heads], learned):
        same(compiled(plan=plan)(*tensors), fk.attention(*tensors, plan=plan))


def test_selector_arguments_compile_too():
    tensors = inputs(SHAPE)
    options = {"keep": fk.select.KeyNorm(3), "rest": fk.ClusterMeans(4)}
    same(compiled(**options)(*tensors), fk.attention(*tensors, **options))


@dataclass(frozen=True)
class Mine(Selector):
    count: int

    def select(self, inputs):
        return fk.select.KeyNorm(self.count).select(inputs)

    def covers(self, inputs):
        return False

    def work(self, inputs):
        return Work(float(self.count))


@pytest.mark.long
def test_selectors_of_others_run_outside_the_graph():
    q, k, v = inputs(SHAPE, requires_grad=False)
    torch._dynamo.reset()
    actual = torch.compile(lambda q: fk.attention(q, k, v, keep=Mine(3)), backend="eager")(q)
    assert torch.equal(actual, fk.attention(q, k, v, keep=fk.select.KeyNorm(3)))


def test_generators_and_guards_run_outside_the_graph():
    q, k, v = inputs(SHAPE, requires_grad=False)
    plan, guard = fk.Plan(fk.RandomKeys(4)), fk.Guard(1e-6)
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(3)
    call = torch.compile(lambda q: fk.attention(q + 1, k, v, plan=plan, generator=draw) * 2, backend="eager")
    assert torch.equal(call(q), fk.attention(q + 1, k, v, plan=plan, generator=draw.manual_seed(3)) * 2)
    torch._dynamo.reset()
    torch.compile(lambda q: fk.attention(q, k, v, plan=plan, max_error=guard), backend="eager")(q)
    assert guard.fallbacks.calls == 1


@pytest.mark.long
def test_the_operator_obeys_torch():
    q, k, v = inputs(SHAPE)
    names = [operator.name_of(plan) for plan in (fk.budget(16), MIXED[: SHAPE.kv_heads], fk.Plan(fk.TopK(4)))]
    lengths = torch.full((SHAPE.batch,), SHAPE.keys - 2)
    for name in names:
        for real in (None, lengths):
            torch.library.opcheck(operator.attend, (q, k, v, real, None, name, False, None, 0, "torch"))


def test_plans_are_found_by_their_names():
    for plan in (*PLANS.values(), tuple(MIXED), (fk.budget(16),)):
        name = operator.name_of(plan)
        assert operator.plan_of(name) == plan
        assert [json.loads(line) for line in name.splitlines()] == [
            layer_plan.to_dict() for layer_plan in ((plan,) if isinstance(plan, fk.Plan) else plan)
        ]
    name = operator.name_of(fk.Plan(predicted(sparsefinder.Clusters(3), 2, 4)))
    assert isinstance(operator.plan_of(name).keep, sparsefinder.Predicted)
    operator._by_fingerprint.clear()  # as in another process
    operator._latest.clear()
    operator.plan_of.cache_clear()
    with pytest.raises(ValueError, match="learned"):
        operator.plan_of(name)


@pytest.mark.long
def test_plans_are_not_kept_for_ever():
    """The last ones are, since compiled code may outlive its plan; those before are freed."""
    first = fk.Plan(predicted(sparsefinder.Clusters(3), 2, 4), weights=fk.weights.Entmax(1.5))
    name, learned = operator.name_of(first), [weakref.ref(part) for part in learned_parts(first)]
    operator.plan_of(name)
    del first
    gc.collect()
    assert operator.plan_of(name)
    assert all(part() is not None for part in learned)
    most = max(operator.PLANS, operator.LEARNED)
    for seed in range(most):
        other = fk.Plan(predicted(sparsefinder.Clusters(3), 2, 4, seed=seed + 1), weights=fk.weights.Entmax(1.5))
        operator.plan_of(operator.name_of(other))
    gc.collect()
    assert all(part() is None for part in learned)
    assert len(operator._by_fingerprint) <= operator.LEARNED + 2 * operator.PLANS  # a projection and centroids each
    assert operator.plan_of.cache_info().currsize <= operator.PLANS


@pytest.mark.parametrize("impl", [pytest.param("native", marks=needs_compiler), "torch"])
def test_the_executor_asked_for_answers_backward_too(impl):
    tensors = [x.requires_grad_() for x in SHAPE.draw(dtype=torch.float32)]
    actual = compiled(plan=fk.budget(16), impl=impl)(*tensors)
    want = fk.attention(*tensors, plan=fk.budget(16), impl=impl)
    torch.testing.assert_close(actual, want)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), tensors) for o in (actual, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_bad_input_is_refused_as_without_compiling():
    q, k, v = inputs(SHAPE, requires_grad=False)
    with pytest.raises(ValueError, match="impl: expected"):
        compiled(plan=fk.budget(16), impl="fast")(q, k, v)


@pytest.mark.long
@torch.no_grad()
def test_a_model_with_a_plan_compiles():
    model, ids = llama(), tokens(2, 24)
    plan = fk.Plan(fk.Window(5) | fk.Sinks(2))
    with fk.apply(model, plan):
        want = model(ids).logits
        torch._dynamo.reset()
        actual = torch.compile(model, backend="eager")(ids).logits
    torch.testing.assert_close(actual, want)
    assert not torch.allclose(want, model(ids).logits)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_in_a_plan_that_change_from_call_to_call(dynamic):
    """Each is compiled once, and none breaks the graph; also where torch traces numbers as symbols from the first."""
    query = torch.randn(1, 2, 70, 8, generator=torch.Generator().manual_seed(0))

    @torch.compile(fullgraph=True, backend="eager", dynamic=dynamic)
    def compiled(query, count):
        one = fk.attention(query, query, query, keep=fk.Window(count), rest=fk.ClusterMeans(count, 2))
        return one + fk.attention(query, query, query, plan=fk.budget(4 * count))

    for count in (5, 7, 9):
        want = fk.attention(query, query, query, keep=fk.Window(count), rest=fk.ClusterMeans(count, 2))
        want = want + fk.attention(query, query, query, plan=fk.budget(4 * count))
        torch.testing.assert_close(compiled(query, count), want)
