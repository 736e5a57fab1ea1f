"""The optimal approximations: against brute force, their own optimality conditions, and each other."""

import itertools
import math
import sys

import pytest
import torch
from experiments.value_aware import skew
from hypothesis import given, settings, strategies as st

import fewkeys as fk
from fewkeys.papers import value_aware
from fewkeys.papers.value_aware import supports
from fewkeys.papers.value_aware.caratheodory import caratheodory
from fewkeys.papers.value_aware.simplex import nearest_in_hull

SOLVERS = ("auto", "greedy", "eliminate")
DTYPE = torch.float64
seeds = st.integers(0, 10_000)


def problem(seed, keys=10, dims=6, rows=8, sharp=2.0, lead=()):
    g = torch.Generator().manual_seed(seed)
    weights = (sharp * torch.randn(*lead, rows, keys, generator=g, dtype=DTYPE)).softmax(-1)
    return weights, torch.randn(*lead, keys, dims, generator=g, dtype=DTYPE)


def error(approx, weights, values):
    return ((approx - weights).double() @ values.double()).norm(dim=-1)


def check_simplex(weights, r=None, slack=1e-12):
    assert (weights >= 0).all()
    assert ((weights.sum(-1) - 1).abs() <= slack).all()
    if r is not None:
        assert int((weights > 0).sum(-1).max()) <= r


def brute_force(weights, values, r):
    """The smallest error over all supports, by a way of its own.

    The best weights on a support are positive on some part of it, and there they solve the problem without signs. So:
    every subset of at most r values, the least-squares solution of sum one, and the best of those that are positive.
    """
    target = weights @ values
    best = torch.full(target.shape[:1], torch.inf, dtype=DTYPE)
    for size in range(1, r + 1):
        for chosen in itertools.combinations(range(values.shape[0]), size):
            points = values[list(chosen)]
            others = (target - points[0]) @ torch.linalg.pinv(points[1:] - points[0])
            w = torch.cat([1 - others.sum(1, keepdim=True), others], 1)
            distance = (w @ points - target).norm(dim=1)
            best = torch.where((w >= -1e-9).all(1) & (distance < best), distance, best)
    return best


# --- exact: r >= rho + 1


def degenerate(kind, values):
    if kind == "duplicates":
        return values[torch.arange(values.shape[0]) % 3]
    if kind == "rank deficient":
        return values[:, :2] @ values[:2] if values.shape[1] >= 2 else values
    if kind == "far away":
        return values + 1e4
    if kind == "all alike":
        return values[:1].expand_as(values).clone()
    if kind == "scales apart":
        return values * torch.logspace(-6, 6, values.shape[1], dtype=DTYPE)
    return values


KINDS = ("plain", "duplicates", "rank deficient", "far away", "all alike", "scales apart")


@given(seed=seeds, keys=st.integers(1, 60), dims=st.integers(1, 9), kind=st.sampled_from(KINDS), zeros=st.booleans())
def test_caratheodory_is_exact(seed, keys, dims, kind, zeros):
    weights, values = problem(seed, keys, dims, sharp=4.0)
    values = degenerate(kind, values)
    if zeros:
        hidden = torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
        hidden[:, 0] = False
        weights = weights.masked_fill(hidden, 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
    for actual in (
        value_aware.value_aware(weights, values, dims + 1),
        caratheodory(weights, values),
    ):
        check_simplex(actual, dims + 1)
        # Every move is exact up to rounding of numbers as large as the values.
        assert error(actual, weights, values).max() <= 1e-12 * values.abs().max() * math.sqrt(dims)
        assert not ((actual > 0) & (weights == 0)).any()


def test_fewer_are_enough_for_values_in_a_plane():
    """r = rank + 1 suffices, however many coordinates the values are written in."""
    g = torch.Generator().manual_seed(0)
    values = torch.randn(50, 3, generator=g, dtype=DTYPE) @ torch.randn(3, 20, generator=g, dtype=DTYPE) + 7
    weights, _ = problem(1, keys=50)
    actual = value_aware.value_aware(weights, values, 4)
    check_simplex(actual, 4)
    assert error(actual, weights, values).max() < 1e-12
    assert error(value_aware.value_aware(weights, values, 3), weights, values).min() > 1e-6


@pytest.mark.parametrize("size", [1e-300, 1e-150, 1e200, 1e307])
def test_the_unit_of_values_does_not_matter(size):
    """Also where their squares leave the range of float64."""
    weights, values = problem(3, keys=30, dims=8)
    for r in (1, 4, 9):
        actual = error(value_aware.value_aware(weights, values * size, r), weights, values)
        expected = error(value_aware.value_aware(weights, values, r), weights, values)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-12)


def test_single_precision_at_the_size_of_a_model():
    """512 keys, 32 dimensions, float32: the only error left is the rounding of the result, well under 1e-6."""
    weights, values = problem(0, keys=512, dims=32, rows=40, sharp=3.0, lead=(2,))
    weights, values = weights.float(), values.float() + 1
    weights = weights / weights.sum(-1, keepdim=True)
    actual = value_aware.value_aware(weights, values, 33)
    assert actual.dtype == torch.float32
    check_simplex(actual, 33, slack=1e-6)
    exact = weights.double() @ values.double()
    assert (error(actual, weights, values) / exact.norm(dim=-1)).max() <= 1e-6


# --- between


@given(
    seed=seeds, r=st.integers(1, 12), keys=st.integers(1, 12), dims=st.integers(1, 9), method=st.sampled_from(SOLVERS)
)
def test_on_the_simplex_and_never_worse_than_oblivious(seed, r, keys, dims, method):
    weights, values = problem(seed, keys, dims)
    actual = value_aware.value_aware(weights, values, r, method)
    check_simplex(actual, r)
    for form in ("renormalised", "projected"):
        oblivious = error(value_aware.value_oblivious(weights, r, form), weights, values)
        assert (error(actual, weights, values) <= oblivious + 1e-10).all()


@given(seed=seeds, r=st.integers(1, 6), method=st.sampled_from(SOLVERS))
def test_never_worse_than_oblivious_with_many_keys(seed, r, method):
    weights, values = problem(seed, keys=90, dims=8, rows=5)
    actual = value_aware.value_aware(weights, values, r, method)
    check_simplex(actual, r)
    oblivious = value_aware.value_oblivious(weights, r, "projected")
    assert (error(actual, weights, values) <= error(oblivious, weights, values) + 1e-12).all()


@pytest.mark.long
@pytest.mark.parametrize("keys", [11, 80])
@settings(max_examples=3)
@given(seed=seeds)
def test_error_never_increases_with_r(keys, seed):
    weights, values = problem(seed, keys, dims=6, rows=3)
    errors = [error(value_aware.value_aware(weights, values, r), weights, values) for r in range(1, 9)]
    for fewer, more in itertools.pairwise(errors):
        assert (more <= fewer + 1e-12).all()
    assert errors[-1].max() < 1e-12


CASES = [(n, d, r) for n, d in ((8, 4), (10, 5), (10, 8), (10, 16)) for r in (2, 3, 4) if r <= min(d, n - 1)]


def rows_of(weights, values):
    return supports.Mixtures(values, weights, weights @ values, torch.ones_like(weights, dtype=torch.bool))


@pytest.mark.long
def test_against_brute_force():
    """ "auto" stays within 5 % of the optimum on average."""
    gaps = {"top r": [], **{method: [] for method in SOLVERS}}
    for number, (keys, dims, r) in enumerate(CASES):
        weights, values = problem(number, keys, dims, rows=12)
        best = brute_force(weights, values, r)
        for method in SOLVERS:
            actual = error(value_aware.value_aware(weights, values, r, method), weights, values)
            assert (actual >= best - 1e-9).all()  # nothing beats brute force
            gaps[method].append(float(actual.mean() / best.mean()))
        top = supports.oblivious(rows_of(weights, values), r)
        gaps["top r"].append(float(top.error.sqrt().mean() / best.mean()))
    mean = {name: sum(ratios) / len(ratios) for name, ratios in gaps.items()}
    assert mean["auto"] <= 1.05
    # Choosing the values earns something over the largest weights, even with these re-fitted.
    assert max(mean[method] for method in SOLVERS) < 1.4 < mean["top r"]
    # "auto" earns its cost: each solver alone is further off.
    assert mean["auto"] < min(mean["greedy"], mean["eliminate"])


@given(seed=seeds, method=st.sampled_from(SOLVERS), r=st.sampled_from([1, 3, 6]))
def test_mask_hides_keys(seed, method, r):
    """A masked key gets nothing, and the result is that of the visible keys alone."""
    weights, values = problem(seed, keys=12, dims=5)
    visible = torch.arange(12) % 3 != 0
    weights = weights.masked_fill(~visible, 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    actual = value_aware.value_aware(weights, values, r, method, mask=visible)
    check_simplex(actual, r)
    assert not (actual > 0)[:, ~visible].any()
    if r == 1:  # exact: what the hidden values are cannot matter
        deleted = value_aware.value_aware(weights[:, visible], values[visible], r, method)
        torch.testing.assert_close(actual[:, visible], deleted)


def test_causal_mask_with_fewer_visible_keys_than_r():
    weights, values = problem(3, keys=9, dims=6, rows=9)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    weights = weights.masked_fill(~visible, 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    for method in SOLVERS:
        actual = value_aware.value_aware(weights, values, 4, method, mask=visible)
        check_simplex(actual, 4)
        assert not (actual > 0)[~visible].any()
        assert error(actual, weights, values)[:4].max() < 1e-9  # up to four keys are visible: all of them


@given(seed=seeds)
def test_one_weight_is_the_nearest_value(seed):
    weights, values = problem(seed)
    for method in SOLVERS:
        actual = value_aware.value_aware(weights, values, 1, method)
        assert torch.equal(actual.argmax(-1), torch.cdist(weights @ values, values).argmin(-1))
        assert torch.equal(actual.amax(-1), torch.ones(8, dtype=DTYPE))


# --- statements about error


@given(seed=seeds)
def test_identity_of_the_error_of_dropping(seed):
    """Renormalising on any support errs by (dropped mass) x (distance between the means of dropped and kept)."""
    weights, values = problem(seed)
    kept = torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    kept[:, 0], kept[:, 1] = True, False
    inside, outside = weights * kept, weights * ~kept
    dropped = outside.sum(-1, keepdim=True)
    distance = (outside / dropped) @ values - (inside / (1 - dropped)) @ values
    actual = error(inside / (1 - dropped), weights, values)
    torch.testing.assert_close(actual, dropped[:, 0] * distance.norm(dim=-1))


@pytest.mark.long
@settings(max_examples=10)
@given(seed=seeds, r=st.integers(1, 7))
def test_orthogonal_values_of_equal_norm_make_sight_useless(seed, r):
    """Then the aware optimum is the projected oblivious one: same support, same weights.

    With `v_i v_j = c^2 [i = j]`, `|sum (a_j - b_j) v_j|^2 = c^2 |a - b|^2`. On a support S the best b adds delta / |S|
    to every a_j, delta the dropped mass, and `|a - b|^2 = sum_{not S} a_j^2 + delta^2 / |S|`. Exchanging a kept entry
    for a larger dropped one lowers the sum and delta, so the r largest are best.
    """
    g = torch.Generator().manual_seed(seed)
    values = 3 * torch.linalg.qr(torch.randn(12, 12, generator=g, dtype=DTYPE)).Q[:8]
    weights, _ = problem(seed, keys=8)
    aware, oblivious = value_aware.value_aware(weights, values, r), value_aware.value_oblivious(weights, r, "projected")
    torch.testing.assert_close(aware, oblivious, rtol=0, atol=1e-7)
    assert torch.equal(aware > 1e-9, oblivious > 1e-9)


# --- the re-fit


def at_nearest(points):
    """All weight on the point nearest to zero."""
    return torch.nn.functional.one_hot(points.square().sum(-1).argmin(1), points.shape[1]).to(points)


def test_the_re_fit_starts_anywhere():
    """From any legal start the same optimum, down to points that repeat."""
    g = torch.Generator().manual_seed(0)
    points = torch.randn(50, 7, 4, generator=g, dtype=DTYPE) + 1
    points[:, 3] = points[:, 5]
    allowed = torch.ones(50, 7, dtype=torch.bool)
    start = torch.rand(50, 7, generator=g, dtype=DTYPE) * torch.tensor([1, 0, 1, 1, 0, 1, 1])
    sizes = []
    for begin in (at_nearest(points), start / start.sum(1, keepdim=True)):
        weights = nearest_in_hull(points, allowed, begin)
        check_simplex(weights)
        sizes.append((weights[:, None] @ points)[:, 0].norm(dim=1))
    torch.testing.assert_close(sizes[0], sizes[1], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("thin", [False, True])
def test_the_re_fit_reaches_zero_where_it_can(thin):
    """The target inside the hull, with near twins; and the hull thinner in some directions by 1e-7."""
    g = torch.Generator().manual_seed(0)
    points = torch.randn(100, 20, 8, generator=g, dtype=DTYPE)
    if thin:
        points *= torch.logspace(-5, 2, 8, dtype=DTYPE)
    inside = torch.rand(100, 20, generator=g, dtype=DTYPE)
    points -= (inside / inside.sum(1, keepdim=True))[:, None] @ points
    points[:, 1] = points[:, 0] + 1e-7 * points[:, 2]
    weights = nearest_in_hull(points, torch.ones(100, 20, dtype=torch.bool), at_nearest(points))
    check_simplex(weights)
    # The Gram matrix squares the points: half the digits of float64 are what a thin hull can count on.
    size = (weights[:, None] @ points)[:, 0].norm(dim=1) / points.norm(dim=2).amax(1)
    assert size.max() <= (torch.finfo(DTYPE).eps ** 0.5 * 8**0.5 if thin else 1e-11)


# --- shapes, kernels, blocks


@pytest.mark.parametrize(
    "kernel", [fk.Softmax(), fk.weights.Power(2.0), fk.weights.Elu(), fk.weights.Relu(2.0), fk.weights.Entmax(1.5)]
)
def test_every_kernel(kernel):
    g = torch.Generator().manual_seed(0)
    scores, values = torch.randn(1, 2, 6, 20, generator=g), torch.randn(1, 2, 20, 5, generator=g)
    scores[0, 0, 0] = -scores[0, 0, 0].abs()  # Relu has no weight at all for this row
    weights = kernel.normalised(scores)
    dead = weights.sum(-1) == 0
    assert bool(dead.any()) == isinstance(kernel, fk.weights.Relu)
    previous = torch.inf
    for r in (1, 3, 6):
        actual = value_aware.value_aware(weights, values, r)
        assert ((actual.sum(-1) - (~dead).float()).abs() < 1e-5).all()
        now = float(error(actual, weights, values).mean())
        assert now <= previous
        previous = now
    assert previous < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("r", [1, 3, 7])
def test_heads_rows_and_blocks_do_not_mix(r, monkeypatch):
    weights, values = problem(0, keys=10, dims=6, rows=3, lead=(2, 2))
    whole = value_aware.value_aware(weights, values, r)
    alone = value_aware.value_aware(weights[1, 1, 2:3], values[1, 1], r)
    torch.testing.assert_close(whole[1, 1, 2:3], alone, rtol=0, atol=1e-9)
    monkeypatch.setattr(sys.modules["fewkeys.papers.value_aware.value_aware"], "BLOCK", 1)
    torch.testing.assert_close(value_aware.value_aware(weights, values, r), whole, rtol=0, atol=1e-9)
    shared = value_aware.value_aware(weights, values[1, 1], r)
    torch.testing.assert_close(shared[1, 1], whole[1, 1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    weights, values = (t.to(dtype) for t in problem(0, keys=40, dims=4))
    for r in (1, 3, 5):
        actual = value_aware.value_aware(weights, values, r)
        assert actual.dtype == dtype
        check_simplex(actual.double(), r, slack=r * torch.finfo(dtype).eps)


def test_no_gradient_and_inputs_untouched():
    weights, values = problem(0)
    before = weights.clone(), values.clone()
    actual = value_aware.value_aware(weights.requires_grad_(), values.requires_grad_(), 3)
    assert not actual.requires_grad
    assert torch.equal(weights, before[0])
    assert torch.equal(values, before[1])


# --- skew


@given(seed=seeds, keys=st.integers(1, 20), r=st.integers(1, 25))
def test_skew(seed, keys, r):
    weights, _ = problem(seed, keys)
    for i, row in enumerate(weights.tolist()):
        assert skew.top_mass(weights, r)[i] == pytest.approx(sum(sorted(row)[::-1][:r]))
        assert skew.entropy(weights)[i] == pytest.approx(-sum(a * math.log(a) for a in row))
        assert skew.gini(weights)[i] == pytest.approx(sum(abs(a - b) for a in row for b in row) / (2 * keys))


def test_skew_at_its_ends():
    ends = torch.tensor([[0.25] * 4, [0, 1, 0, 0], [0] * 4])
    assert skew.entropy(ends)[:2].tolist() == pytest.approx([math.log(4), 0])
    assert skew.gini(ends)[:2].tolist() == pytest.approx([0, 0.75])
    assert skew.top_mass(ends, 1)[:2].tolist() == [0.25, 1]
    assert skew.top_mass(ends, 1)[2].isnan()
    half = torch.full((3000,), 1 / 3000, dtype=torch.float16)
    assert skew.entropy(half) == pytest.approx(math.log(3000), rel=1e-5)


# --- refusals

W, V = problem(0, keys=6, dims=3, rows=2, lead=(2,))
M = torch.ones(2, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: value_aware.value_aware(W, V, 0), ValueError, "r: expected at least 1, got 0"),
        (lambda: value_aware.value_aware(W, V, 2.0), TypeError, "r: expected an integer"),
        (lambda: value_aware.value_aware(W, V, 2, "best"), ValueError, "method: expected 'auto'.*got 'best'"),
        (lambda: value_aware.value_aware(W.tolist(), V, 2), TypeError, "weights: expected a floating tensor.*list"),
        (lambda: value_aware.value_aware(W, V.long(), 2), TypeError, "values: expected a floating tensor.*int64"),
        (lambda: value_aware.value_aware(W[0, 0], V, 2), ValueError, "weights: expected a non-empty tensor"),
        (lambda: value_aware.value_aware(W, V[:, :5], 2), ValueError, "values: expected 6 rows.*got 5"),
        (lambda: value_aware.value_aware(W, V[:1].repeat(3, 1, 1), 2), ValueError, "values: .*repeat_interleave"),
        (lambda: value_aware.value_aware(W, V[None].repeat(3, 1, 1, 1), 2), ValueError, "values: .*broadcast"),
        (lambda: value_aware.value_aware(-W, V, 2), ValueError, "weights: expected no negative entries"),
        (lambda: value_aware.value_aware(2 * W, V, 2), ValueError, "weights: expected rows that sum to one.*sum 2"),
        (lambda: value_aware.value_aware(W / 0, V, 2), ValueError, "weights: expected finite numbers"),
        (lambda: value_aware.value_aware(W, V / 0, 2), ValueError, "values: expected finite numbers"),
        (lambda: value_aware.value_aware(W, V, 2, mask=M.float()), TypeError, "mask: expected a bool tensor"),
        (lambda: value_aware.value_aware(W, V, 2, mask=M[:, :5]), ValueError, "mask: expected a shape that broadcasts"),
        (lambda: value_aware.value_aware(W, V, 2, mask=~M), ValueError, "mask: expected True wherever weights are pos"),
        (lambda: value_aware.value_oblivious(-W, 2), ValueError, "weights: expected no negative entries"),
        (lambda: value_aware.value_oblivious(2 * W, 2), ValueError, "weights: expected rows that sum to one.*sum 2"),
        (lambda: value_aware.value_oblivious(W / 0, 2), ValueError, "weights: expected finite numbers"),
        (lambda: skew.top_mass(W, 0), ValueError, "r: expected at least 1"),
        (lambda: skew.entropy([1.0]), TypeError, "weights: expected a floating tensor"),
        (lambda: skew.gini(-W), ValueError, "weights: expected no negative"),
        (lambda: skew.gini(W[..., :0]), ValueError, "weights: expected a last dimension"),
    ],
)
def test_refusals(call, kind, words):
    with pytest.raises(kind, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
