"""Attention inside `torch.compile` gives the bits that it gives without, output and gradients, whatever the plan."""

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_SHAPES, SHAPES
from tiny_models import llama, tokens

SHAPE = SHAPES["grouped"]
# Torch looks at the gradients of what it hands over at a break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def inputs(shape, requires_grad=True):
    return [x.requires_grad_(requires_grad) for x in shape.draw()]


def compiled(**options):
    torch._dynamo.reset()
    return torch.compile(lambda q, k, v: 2 * fk.attention(q + 1, k, v, **options), backend="aot_eager")


def check(tensors, **options):
    want = 2 * fk.attention(tensors[0] + 1, *tensors[1:], **options)
    actual = compiled(**options)(*tensors)
    assert torch.equal(actual, want)
    for pair in zip(*(torch.autograd.grad(o.square().sum(), tensors) for o in (actual, want)), strict=True):
        assert torch.equal(*pair)


@pytest.mark.parametrize(
    "plan", [fk.budget(16), fk.Plan(), fk.Plan(fk.TopK(5)), [fk.budget(16), fk.Plan(fk.Window(5))]], ids=str
)
def test_every_plan_is_what_it_is_without(plan):
    check(inputs(SHAPE), plan=plan)


@pytest.mark.parametrize("name", ["padded", "cross padded", "one query", "causal grouped", "causal with offset"])
def test_every_shape_is_what_it_is_without(name):
    shape = (SHAPES | CAUSAL_SHAPES)[name]
    check(inputs(shape), plan=fk.budget(16, is_causal=shape.is_causal), **shape.options)


def test_selector_arguments_compile_too():
    check(inputs(SHAPE), keep=fk.select.KeyNorm(3), rest=fk.ClusterMeans(4))


def test_generators_and_guards_count_as_without():
    q, k, v = inputs(SHAPE, requires_grad=False)
    plan, guard = fk.Plan(fk.RandomKeys(4)), fk.Guard(1e-6)
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(3)
    call = torch.compile(lambda q: fk.attention(q + 1, k, v, plan=plan, generator=draw) * 2, backend="eager")
    assert torch.equal(call(q), fk.attention(q + 1, k, v, plan=plan, generator=draw.manual_seed(3)) * 2)
    torch._dynamo.reset()
    torch.compile(lambda q: fk.attention(q, k, v, plan=plan, max_error=guard), backend="eager")(q)
    assert guard.fallbacks.calls == 1


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
