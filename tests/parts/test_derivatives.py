"""Derivatives of recommended plans, however somebody asks for them: `torch.func`, forward mode, second ones."""

from itertools import chain, combinations

import pytest
import torch
from experiments.sparsefinder import baselines

import fewkeys as fk
from executors import rotated

# Torch's own, of its forward mode and of `vmap`.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in (".torch.jit.script. is", "There is a perf")]
PLANS = {
    "cohorts": (fk.budget(64), 70),
    "cohorts without a first-order term": (fk.budget(7), 70),
    "shared lists": (fk.budget(64, cohorts=1), 70),
    "key scan": (fk.budget(24, is_causal=True), 150),
    "constant memory": (fk.budget(24, is_causal=True, memory="constant"), 70),
    "all keys there are": (fk.Plan(fk.Window(401)), 70),
    "groups": (fk.Plan(baselines.Strided(8)), 70),
    "entmax": (fk.Plan(fk.Window(9) | fk.select.Leverage(4), weights=fk.weights.Entmax(1.5)), 70),
}
"""Plans, and the keys of a sequence."""
WAYS = [("auto", torch.float64), ("torch", torch.float64), ("auto", torch.float32)]
SUBSETS = [*chain.from_iterable(combinations(range(3), count) for count in (1, 2, 3))]
"""Which of query, key and value want gradients."""


def draw(name, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, PLANS[name][1], 4, generator=g, dtype=torch.float64).to(dtype) for _ in range(3)]


def loss_of(name, impl):
    plan = PLANS[name][0].never_exact()
    is_causal = plan.keep.causal and plan.rest.causal
    return lambda *rows: fk.attention(*rows, plan=plan, is_causal=is_causal, impl=impl).square().sum()


def gradients(name, impl="reference", dtype=torch.float64):
    rows = [x.requires_grad_() for x in draw(name, dtype)]
    return torch.autograd.grad(loss_of(name, impl)(*rows), rows)


def assert_close(actual, want, dtype):
    limit = 1e-8 if dtype == torch.float64 else 1e-2
    for one, other in zip(actual, want, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=limit * float(other.abs().max()))


@pytest.mark.parametrize(("impl", "dtype"), WAYS, ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_transforms(name, impl, dtype):
    rows, loss, want = draw(name, dtype), loss_of(name, impl), gradients(name)
    assert_close(torch.func.grad(loss, (0, 1, 2))(*rows), want, dtype)
    output, back = torch.func.vjp(loss, *rows)
    assert_close(back(torch.ones_like(output)), want, dtype)
    along = [x.flip(2) for x in rows]
    _, change = torch.func.jvp(loss, tuple(rows), tuple(along))
    total = sum((x.double() * y).sum() for x, y in zip(along, want, strict=True))
    assert_close([change], [total], dtype)


@pytest.mark.parametrize("name", PLANS)
def test_many_directions_at_once(name):
    """`jacrev` of several outputs goes back through all of them by vmap."""
    query, key, value = draw(name)
    plan = PLANS[name][0].never_exact()
    is_causal = plan.keep.causal and plan.rest.causal

    def first(key):
        return fk.attention(query, key, value, plan=plan, is_causal=is_causal)[0, 0, -3:]

    wanted = key.clone().requires_grad_()
    want = [torch.autograd.grad(part, wanted, retain_graph=True)[0] for part in first(wanted).flatten().unbind()]
    torch.testing.assert_close(torch.func.jacrev(first)(key).flatten(0, 1), torch.stack(want))


def second(name, subset, impl, dtype):
    rows = [x.requires_grad_(place in subset) for place, x in enumerate(draw(name, dtype))]
    chosen = [rows[place] for place in subset]
    actual = torch.autograd.grad(loss_of(name, impl)(*rows), chosen, create_graph=True)
    along = (part.flip(2).detach() for part in actual)
    return torch.autograd.grad(sum((x * y).sum() for x, y in zip(actual, along, strict=True)), chosen)


@pytest.mark.parametrize(("name", "subset", "way"), rotated(PLANS, SUBSETS, WAYS))
def test_second_derivatives_of_some(name, subset, way):
    impl, dtype = way
    want = second(name, subset, "reference", torch.float64)
    assert_close(second(name, subset, impl, dtype), want, dtype)
