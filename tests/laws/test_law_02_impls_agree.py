"""Law 2: every implementation equals the reference, forward and gradient, in every dtype that it takes."""

from dataclasses import replace

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_PLANS, CAUSAL_SHAPES, PLANS, RUNNING_PLANS, SHAPES, SOME_PLANS, Shape
from executors import UNITS, in_turns
from fewkeys.core.graph import Columns, Graph
from fewkeys.core.validation import check_inputs
from fewkeys.execute.dispatch import EXECUTORS
from fewkeys.execute.problem import Problem, prepare
from fewkeys.execute.torch import by_block
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


@pytest.mark.parametrize(("name", "form"), in_turns(PLANS, SHAPES))
def test_forward(name, form):
    for fast, slow in both(PLANS[name], SHAPES[form]):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("name", "form"), in_turns(CAUSAL_PLANS, CAUSAL_SHAPES))
def test_causal(name, form):
    for fast, slow in both(CAUSAL_PLANS[name], CAUSAL_SHAPES[form]):
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
        monkeypatch.setattr(by_block, "CACHED_SCORES", size)
        torch.testing.assert_close(fk.attention(*shape.draw(), plan=plan, impl="torch"), whole, rtol=1e-9, atol=1e-10)


def answers(plan, shape, dtype, grad):
    """By each executor that knows the problem, what it makes of the same graph and the same stand-ins.

    End to end, one executor's statistics may put a key that is as near to one centre as to another elsewhere.
    """
    tensors = [x.requires_grad_(grad) for x in shape.draw(dtype=dtype)]
    problem = prepare(check_inputs(*tensors, **shape.options), plan)
    actual = {}
    for name in EXECUTORS:
        if EXECUTORS[name].unsupported(problem) is None:
            output = EXECUTORS[name].attend(problem)
            assert output.dtype == dtype
            actual[name] = [output.detach()]
            if grad:
                direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
                actual[name] += torch.autograd.grad(output, tensors, direction, retain_graph=True)
    return actual


DTYPES = (torch.float32, torch.bfloat16)
FORMS = {"grouped": PLANS, "cross padded": PLANS} | dict.fromkeys(
    ("causal grouped", "causal padded", "causal with offset"), CAUSAL_PLANS
)
ODD = [*((plan, False) for plan in SOME_PLANS.values()), *((plan, True) for plan in RUNNING_PLANS.values())]
PAST = RUNNING_PLANS | {"block means": PLANS["key scan, block means"]}
CASES = [
    pytest.param(plan, form, DTYPES[turn % 2], id=f"{name}-{form}-{DTYPES[turn % 2]}")
    for place, (form, plans) in enumerate(FORMS.items())
    for turn, (name, plan) in enumerate(plans.items(), place)
]
"""Plans and forms, each in one of the dtypes: the next plan, and the next form, takes the other."""


@pytest.mark.parametrize(("plan", "form", "dtype"), CASES)
def test_executors_agree_on_the_same_problem(plan, form, dtype):
    actual = answers(plan, (SHAPES | CAUSAL_SHAPES)[form], dtype, grad=False)
    assert_alike(actual, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(13, 5), (3, 19)], ids=str)
@pytest.mark.parametrize(("plan", "is_causal"), ODD, ids=[*SOME_PLANS, *RUNNING_PLANS])
def test_executors_agree_in_odd_dimensions(plan, is_causal, dims, dtype):
    """Of which no vector is a part, and which are not those of the values."""
    head_dim, value_dim = dims
    shape = Shape(query_heads=4, kv_heads=2, head_dim=head_dim, value_dim=value_dim, is_causal=is_causal)
    assert_alike(answers(plan, shape, dtype, grad=False), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["grouped", "cross padded"])
@pytest.mark.parametrize("plan", SOME_PLANS.values(), ids=SOME_PLANS)
def test_their_gradients_agree(plan, form, dtype):
    assert_alike(answers(plan, SHAPES[form], dtype, grad=True), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["causal grouped", "causal padded"])
@pytest.mark.parametrize("plan", PAST.values(), ids=PAST)
def test_their_causal_gradients_agree(plan, form, dtype):
    assert_alike(answers(plan, CAUSAL_SHAPES[form], dtype, grad=True), dtype)


def assert_alike(outputs, dtype):
    slow = outputs.pop("reference")
    assert "torch" in outputs
    for name, fast in outputs.items():
        for one, other in zip(fast, slow, strict=True):
            off = (one.double() - other.double()).abs().max()
            assert off <= UNITS[dtype] * other.double().abs().max(), name


PREPARING = ("means, softmax", "first-order means", "running means", "block means", "cohorts")
# Its heads fill vectors of every instruction set.
WIDE = {"wide": replace(SHAPES["grouped"], head_dim=40, value_dim=33)}
PREPARED = [
    pytest.param(plan, form, id=f"{name}-{form}")
    for form, plans in {"grouped": PLANS, "padded": PLANS, "wide": PLANS, "causal grouped": CAUSAL_PLANS}.items()
    for name, plan in plans.items()
    if any(word in name for word in PREPARING) and isinstance(plan.weights, fk.Softmax)
]


@needs_compiler
@pytest.mark.parametrize(("plan", "form"), PREPARED)
def test_what_kernels_prepare_is_what_torch_prepares(plan, form):
    """End to end: statistics, clusters, scans and the past. None of these inputs has keys that nearly tie."""
    shape = (SHAPES | CAUSAL_SHAPES | WIDE)[form]
    inputs = shape.draw(dtype=torch.float32)
    if EXECUTORS["native"].unsupported(prepare(check_inputs(*inputs, **shape.options), plan)) is not None:
        return
    fast, slow = (fk.attention(*inputs, plan=plan, impl=impl, **shape.options) for impl in ("native", "torch"))
    assert (fast - slow).abs().max() <= 10 * UNITS[torch.float32] * slow.abs().max()


@needs_compiler
@pytest.mark.parametrize("form", ["grouped", "causal grouped"])
@pytest.mark.parametrize("name", ["window, drop, softmax", "sinks + window, drop, softmax"])
def test_rounding_is_to_the_nearest(name, form):
    """bfloat16 answers lie on both sides of those in float32: cut off, they would lack half a unit, 2^-9 to 2^-8."""
    shape = (SHAPES | CAUSAL_SHAPES)[form]
    inputs = shape.draw(dtype=torch.bfloat16)
    actual = fk.attention(*inputs, plan=PLANS[name], impl="native", **shape.options).double()
    exact = fk.attention(*(x.float() for x in inputs), plan=PLANS[name], impl="native", **shape.options).double()
    off = (actual / exact - 1).clamp(-0.1, 0.1)  # of numbers near zero, all is rounding
    assert off.mean().abs() <= 2**-11


@needs_compiler
def test_the_kernels_are_among_them():
    native_plans = {
        name for name, plan in PLANS.items() if "native" in answers(plan, SHAPES["plain"], torch.float32, False)
    }
    assert {"window, drop, softmax", "outliers + window, first-order means, softmax"} <= native_plans
    assert all(isinstance(PLANS[name].weights, fk.Softmax) for name in native_plans)


@pytest.mark.parametrize("has_list", [False, True])
@pytest.mark.parametrize("rest", [fk.Drop(), fk.ClusterMeans(4)], ids=str)
def test_rules_that_keep_no_key(rest, has_list):
    """As one's own rule may: nothing, or a list without entries."""
    x = check_inputs(*SHAPES["plain"].draw(dtype=torch.float64))
    index = torch.zeros((x.batch, x.kv_heads, 0), dtype=torch.int64)
    graph = Graph(x, columns=Columns.shared(index, index > 0, x.queries) if has_list else None)
    problem = Problem(x, graph, rest.prepare(x, graph, fk.Softmax()), fk.Softmax())
    torch.testing.assert_close(by_block.attend(problem), EXECUTORS["reference"].attend(problem))


@pytest.mark.parametrize("form", ["padded", "causal padded"])
def test_rules_that_list_the_future_and_padding(form):
    """As one's own rule may: neither is ever kept, whatever the executor."""

    class Own(fk.Window, listed=False):
        def select(self, inputs):
            index = torch.tensor([0, inputs.keys - 1]).expand(inputs.batch, inputs.kv_heads, -1)
            lists = Columns.shared(index, torch.ones_like(index, dtype=torch.bool), inputs.queries)
            return Graph(inputs, band=(2, 3), columns=lists)

    shape = {**SHAPES, **CAUSAL_SHAPES}[form]
    rows, least = shape.draw(dtype=torch.float32), min(shape.lengths)
    outputs = [fk.attention(*rows, keep=Own(6), impl=impl, **shape.options) for impl in ("reference", "torch", "auto")]
    for output in outputs[1:]:
        torch.testing.assert_close(output[:, :, :least], outputs[0][:, :, :least], rtol=1e-4, atol=1e-5)


def test_scans_beside_stand_ins_of_ones_own():
    class Own(fk.ClusterMeans, listed=False):
        def check_beside(self, keep):
            pass

    ((actual, expected),) = both(fk.Plan(fk.KeyScan(8), Own(4)), SHAPES["plain"])
    torch.testing.assert_close(actual, expected)
