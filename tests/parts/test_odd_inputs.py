"""Inputs that are rare and right: their outputs are defined, and the same however they are told."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fewkeys as fk
from cases import PLANS, RUNNING_PLANS, SHAPES
from executors import in_turns
from native_cases import needs_compiler
from odd_keys import EXTREME

NATIVE = pytest.param("native", marks=needs_compiler)
ALL = {**PLANS, **RUNNING_PLANS}


@pytest.mark.parametrize(("name", "impl"), in_turns(ALL, ["auto", "torch", "reference"]))
def test_sequences_without_a_key_give_zero(name, impl):
    plan = ALL[name].never_exact()
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    for lengths in ([0, 0], [70, 0]):
        options = {"lengths": torch.tensor(lengths), "is_causal": plan.rest.needs_causal}
        output = fk.attention(q, k, v, plan=plan, impl=impl, **options)
        assert output.isfinite().all()
        assert not output[1].any()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_views_that_promise_another_sign(impl, is_causal):
    tensors = SHAPES["long"].draw(dtype=torch.float32)
    plan = fk.budget(24, is_causal=is_causal).never_exact()
    want = fk.attention(*(-x for x in tensors), plan=plan, impl=impl, is_causal=is_causal)
    actual = fk.attention(*(torch._neg_view(x) for x in tensors), plan=plan, impl=impl, is_causal=is_causal)
    assert torch.equal(actual, want)


WAYS = [(kind, "auto", False) for kind in EXTREME] + [("all", "torch", False), ("all", "reference", False)]
WAYS += [
    (kind, impl, True)
    for kind in ("large values", "large keys", "large queries", "large scale")
    for impl in ("auto", "torch")
]


@pytest.mark.parametrize(("kind", "impl", "gradient"), WAYS)
def test_finite_where_exact_attention_is(kind, impl, gradient):
    """Each plan in every third way, the next plan in the next ones."""
    *factors, scale = EXTREME[kind]
    leaves = [x * by for x, by in zip(SHAPES["long"].draw(dtype=torch.float32), factors, strict=True)]
    leaves = [x.requires_grad_(gradient) for x in leaves]
    for turn, (name, plan) in enumerate(ALL.items(), WAYS.index((kind, impl, gradient))):
        if turn % 3:
            continue
        causal = plan.rest.needs_causal
        output = fk.attention(*leaves, plan=plan.never_exact(), is_causal=causal, impl=impl, scale=scale)
        assert output.isfinite().all(), name
        if gradient and output.requires_grad:
            actual = torch.autograd.grad((output / factors[2]).sum(), leaves, allow_unused=True)
            assert all(x is None or x.isfinite().all() for x in actual), name


WEIGHTS = [fk.Softmax(), fk.weights.Elu(), fk.weights.Relu(2.0), fk.weights.Power(1.0), fk.weights.Entmax(1.5)]


@pytest.mark.parametrize("kind", [kind for kind in EXTREME if kind != "small"])  # its scores are zero in float32
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("reach", [None, 3])
def test_exact_attention_of_all_weights_is_that_of_float64(reach, weights, kind):
    *factors, scale = EXTREME[kind]
    rows = [x * by for x, by in zip(SHAPES["plain"].draw(dtype=torch.float32), factors, strict=True)]
    table = None if reach is None else torch.linspace(-2, 2, rows[0].shape[1] * (2 * reach + 1)).view(-1, 2 * reach + 1)
    options = {"weights": weights, "scale": scale, "distance_bias": table}
    want = fk.attention(*(x.double() for x in rows), impl="reference", **options).float()
    for impl in ("auto", "reference"):
        actual = fk.attention(*rows, impl=impl, **options)
        torch.testing.assert_close(actual / factors[2], want / factors[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_units_do_not_matter(impl):
    """Large values with small keys, or queries with keys: bit for bit the output in other units."""
    q, k, v = SHAPES["long"].draw(dtype=torch.float32)
    for plan in (fk.budget(24).never_exact(), fk.Plan(fk.Window(9), fk.ClusterMeans(4, rank=2)), fk.Plan(fk.TopK(5))):
        want = fk.attention(q, k, v, plan=plan, impl=impl)
        for by in (2.0**60, 2.0**100):
            assert torch.equal(fk.attention(q, k, v * by, plan=plan, impl=impl), want * by)
            assert torch.equal(fk.attention(q * by, k / by, v, plan=plan, impl=impl), want)


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_one_wild_head_leaves_the_others_alone(impl):
    q, k, v = SHAPES["long"].draw(dtype=torch.float32)
    plan = fk.budget(24).never_exact()
    want = fk.attention(q, k, v, plan=plan, impl=impl)
    k, v = k.clone(), v.clone()
    k[0, 0] *= 1e19
    v[0, 0] *= 1e25
    actual = fk.attention(q, k, v, plan=plan, impl=impl)
    others = torch.ones(q.shape[:2], dtype=torch.bool)
    others[0, : q.shape[1] // k.shape[1]] = False
    assert torch.equal(actual[others], want[others])


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize(("size", "scale"), [(8000, None), (1, 1e20)])
@pytest.mark.parametrize("plan", [fk.Plan(), fk.Plan(fk.Window(9)), fk.Plan(fk.TopK(9))], ids=str)
def test_float16_has_scores_beyond_its_range(plan, size, scale, impl):
    q, k, v = (x * by for x, by in zip(SHAPES["long"].draw(dtype=torch.float16), (size, size, 1), strict=True))
    output = fk.attention(q, k, v, plan=plan, scale=scale, impl=impl)
    want = fk.attention(q.double(), k.double(), v.double(), plan=plan, scale=scale, impl="reference")
    assert output.dtype == torch.float16
    torch.testing.assert_close(output, want.half(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("plan", [fk.Plan(), fk.Plan(fk.Window(9)), fk.Plan(fk.TopK(9))], ids=str)
def test_one_wild_query_leaves_the_others_alone(plan, impl):
    q, k, v = SHAPES["long"].draw()
    q[:, :, 5] *= 1e15
    want = fk.attention(q, k, v, plan=plan, impl="reference", is_causal=True)
    actual = fk.attention(q.float(), k.float(), v.float(), plan=plan, impl=impl, is_causal=True)
    torch.testing.assert_close(actual, want.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize(
    ("plan", "is_causal"),
    [
        (fk.Plan(fk.Window(9)), False),
        (fk.Plan(fk.Window(9)), True),
        (fk.Plan(fk.Window(9) | fk.Sinks(2)), True),
        (fk.Plan(fk.select.KeyNorm(9)), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1e13, 1e30])
def test_queries_that_do_not_see_a_wild_key_do_not_notice_it(size, is_causal, plan, impl):
    rows = SHAPES["long"].draw(dtype=torch.float32)
    want = fk.attention(*rows, plan=plan, impl=impl, is_causal=is_causal)
    rows[1][:, :, 75] *= size
    actual = fk.attention(*rows, plan=plan, impl=impl, is_causal=is_causal)
    assert torch.equal(actual[:, :, :70], want[:, :, :70])


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_queries_of_a_scan_do_not_notice_a_later_wild_key(impl):
    rows, plan = SHAPES["long"].draw(dtype=torch.float32), fk.Plan(fk.KeyScan(9), fk.BlockMeans(3))
    want = fk.attention(*rows, plan=plan, impl=impl, is_causal=True)
    rows[1][:, :, 75] *= 1e13
    actual = fk.attention(*rows, plan=plan, impl=impl, is_causal=True)
    torch.testing.assert_close(actual[:, :, :75], want[:, :, :75])


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1e13, 1e30])
def test_exact_attention_among_one_wild_key(size, is_causal, impl):
    """Queries far against it weigh the others as if it were not there."""
    q, k, v = SHAPES["long"].draw()
    k[:, :, 5] *= size
    want = fk.attention(q, k, v, impl="reference", is_causal=is_causal)
    actual = fk.attention(q.float(), k.float(), v.float(), impl=impl, is_causal=is_causal)
    torch.testing.assert_close(actual, want.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("weights", [fk.Softmax(), fk.weights.Elu()], ids=str)
@pytest.mark.parametrize("keep", [fk.select.Leverage(7), fk.select.KeyNorm(7) | fk.Window(9)], ids=str)
def test_stand_ins_without_keys_have_no_say(keep, weights, impl):
    """In a list are all keys of some cluster, whose score is 0 while all others are far below."""
    q, k, v = SHAPES["long"].draw()
    q[..., 0] += 30
    k[..., 0] -= 60
    k[:, :, 3:6] -= 40
    plan = fk.Plan(keep, fk.ClusterMeans(6), weights)
    want = fk.attention(q, k, v, plan=plan, impl="reference")
    actual = fk.attention(q.float(), k.float(), v.float(), plan=plan, impl=impl)
    torch.testing.assert_close(actual, want.float(), rtol=0.02, atol=0.02)


def test_tensors_without_numbers_are_refused_clearly():
    q = torch.randn(1, 2, 70, 8)
    plan = fk.budget(24).never_exact()
    with pytest.raises(ValueError, match=r"query: .* whose numbers can be read, got one of layout .* meta"):
        fk.attention(*(q.to("meta"),) * 3, plan=plan)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=r"query: .* got one that .* FakeTensorMode records"):
        fk.attention(*(mode.from_tensor(q),) * 3, plan=plan)
    for call in (
        lambda x: fk.attention(x, x, x, plan=plan),
        lambda x: fk.stream(fk.budget(24, is_causal=True)).append(x, x),
    ):
        with pytest.raises(ValueError, match=r"(query|key): .* got one inside torch\.vmap"):
            torch.vmap(call)(q[None])


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("plan", [fk.budget(24).never_exact(), fk.Plan()], ids=str)
@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_trace_is_refused(plan, impl):
    """It would keep the same keys whatever they are, and its sizes are tensors, which kernels cannot read."""
    q = torch.randn(1, 2, 70, 8)
    with pytest.raises(ValueError, match=r"^query: expected .* got one that torch\.jit\.trace.*; compile by"):
        torch.jit.trace(lambda q: fk.attention(q, q, q, plan=plan, impl=impl), q)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_second_derivatives_of_entmax(alpha):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 9, 3, dtype=torch.float64, generator=draw, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: fk.attention(x, x.flip(2), x, weights=fk.weights.Entmax(alpha)), x)


@pytest.mark.parametrize("impl", ["torch", NATIVE])
def test_among_equal_keys_the_first_are_chosen(impl):
    """Whatever computes the scores: keys that are equal, or zero, are told apart by their places alone."""
    q, k, v = SHAPES["long"].draw(dtype=torch.float32)
    for key in (
        torch.zeros_like(k),
        k[:, :, :1].expand_as(k),
        k[:, :, ::7].repeat_interleave(7, 2)[:, :, : k.shape[2]],
    ):
        key = key.contiguous()
        for plan in (fk.budget(24).never_exact(), fk.Plan(fk.Window(3), fk.ClusterMeans(6, 2))):
            actual = fk.attention(q[..., : key.shape[-1]], key, v[:, :, : key.shape[2]], plan=plan, impl=impl)
            want = fk.attention(q[..., : key.shape[-1]], key, v[:, :, : key.shape[2]], plan=plan, impl="reference")
            torch.testing.assert_close(actual, want, atol=1e-4, rtol=1e-4)
