"""However strong the scores are, a plan's output stays within a stated multiple of the values, forward and gradient."""

import math

import pytest
import torch
from experiments.sparsefinder import baselines
from hypothesis import given, settings, strategies as st

import fewkeys as fk
from executors import rotated
from native_cases import needs_compiler

NATIVE = pytest.param("native", marks=needs_compiler)
PLANS = [
    (fk.Plan(fk.Outliers(4, 6) | fk.Window(5), fk.ClusterMeans(6, 3)), 1 + math.sqrt(3)),
    (fk.Plan(fk.Window(3), fk.ClusterMeans(5, 2)), 1 + math.sqrt(2)),
    (fk.budget(64), 1 + math.sqrt(8)),
    (fk.Plan(fk.Outliers(4, 6, cohorts=8), fk.ClusterMeans(6, 3, cohorts=8)), 1 + math.sqrt(3)),
    (fk.Plan(fk.Window(5), fk.ClusterMeans(7)), 1.0),
    (fk.Plan(fk.Window(5), fk.rest.UniformSample(7)), 1.0),
    (fk.Plan(baselines.Routing(7), fk.ClusterMeans(7)), 1.0),
]
CAUSAL = [(fk.budget(32, is_causal=True, memory="constant"), 1.0), (fk.budget(64, is_causal=True), 1.0)]


def inputs(strength, seed=0, tokens=200, dim=8, dtype=torch.float32, kind="normal"):
    """Scores of standard deviation `strength`; `kind` says how values move with keys."""
    draw = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, heads, tokens, dim, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    if kind == "aligned":  # the first order sees all there is to see
        value = key.flip(-1) + 0.1 * value
    if kind == "few":
        key[:, :, 8:] *= 0.01
    return (query * strength).to(dtype), key.to(dtype), value.to(dtype)


def largest(rows):
    return torch.linalg.vector_norm(rows.double(), dim=-1).amax().item()


@pytest.mark.parametrize("impl", ["reference", "torch", NATIVE])
@pytest.mark.parametrize(("turn", "strength"), [*enumerate((1, 30, 100, 1e5))])
def test_outputs_stay_within_the_stated_multiple(turn, strength, impl):
    turn += ["reference", "torch", "native"].index(impl)
    q, k, v = inputs(strength, kind=["normal", "aligned", "few"][turn % 3])
    for plans, causal in ((PLANS, False), (CAUSAL, True)):
        for plan, multiple in plans:
            left_to_torch = isinstance(plan.rest, fk.rest.RunningMeans)
            if impl == "native" and (left_to_torch or isinstance(plan.keep, baselines.Routing)):
                continue
            output = fk.attention(q, k, v, plan=plan.never_exact(), impl=impl, is_causal=causal)
            assert largest(output) <= multiple * largest(v) * (1 + 1e-5), (plan, largest(output) / largest(v))


@given(
    st.sampled_from(PLANS[:4]),
    st.floats(0.01, 1e6),
    st.sampled_from(["normal", "aligned", "few"]),
    st.integers(0, 2**31),
    st.integers(2, 80),
)
@settings(max_examples=40, deadline=None)
def test_the_multiple_holds_of_anything(case, strength, kind, seed, tokens):
    plan, multiple = case
    q, k, v = inputs(strength, seed, tokens, kind=kind, dtype=torch.float64)
    output = fk.attention(q, k, v, plan=plan.never_exact(), impl="torch")
    assert largest(output) <= multiple * largest(v) * (1 + 1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_stay_finite(dtype):
    q, k, v = inputs(300.0, kind="aligned", dtype=dtype)
    v = v * (1000 if dtype == torch.float16 else 1e30)
    for plan, _ in PLANS:
        assert fk.attention(q, k, v, plan=plan.never_exact()).isfinite().all(), plan


@pytest.mark.parametrize(
    ("scale", "impl", "dtype"),
    rotated([1e5, -1e7, 1e9, 1e20, -1e25], ["auto", "reference", "torch"], [torch.float32, torch.bfloat16]),
)
def test_the_multiple_holds_of_huge_scores(scale, impl, dtype):
    """Queries that have a mean, whose scores are as large: nothing of it may be left in what the first order adds."""
    q, k, v = inputs(1.0, dtype=dtype)
    q = q + 1
    for plan, multiple in PLANS:
        output = fk.attention(q, k, v, plan=plan.never_exact(), scale=scale, impl=impl)
        assert largest(output) <= (1.02 if dtype == torch.bfloat16 else 1 + 1e-5) * multiple * largest(v), plan


@pytest.mark.parametrize("impl", ["torch", NATIVE])
@pytest.mark.parametrize("strength", [1, 30, 300])
def test_gradients_agree_on_both_sides_of_the_bound(strength, impl):
    """Beyond it the term is constant: its part of the gradient is gone, and no other."""
    leaves = [x.requires_grad_() for x in inputs(strength, kind="aligned")]
    plan = PLANS[0][0]
    actual = {}
    for way in ("reference", impl):
        output = fk.attention(*leaves, plan=plan, impl=way)
        actual[way] = torch.autograd.grad((output * torch.linspace(-1, 1, output.shape[-1])).sum(), leaves)
    for one, other in zip(actual["reference"], actual[impl], strict=True):
        torch.testing.assert_close(one, other, atol=2e-4 * one.abs().max().item(), rtol=2e-3)


def test_the_bound_is_met_by_some_queries_and_not_by_others():
    """Else the tests above say nothing."""
    q, k, v = inputs(3.0, kind="aligned")
    from fewkeys.core.validation import check_inputs

    x = check_inputs(q, k, v)
    plan = PLANS[0][0]
    stand_ins = plan.rest.prepare(x, plan.keep.select(x), plan.weights)
    middle, reach = stand_ins.bounds[:, :, 0].split(1, 2)
    along = x.grouped_query().flatten(2, 3) * x.scale @ stand_ins.left[:, :, 0]
    assert 0.05 < ((along - middle).abs() > reach).float().mean() < 0.95
