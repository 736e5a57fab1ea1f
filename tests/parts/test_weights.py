"""Kernels against their formulas, and entmax against two independent algorithms."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

import fewkeys as fk
from cases import WEIGHTS
from fewkeys.core import entmax as entmax_module
from fewkeys.core.entmax import entmax

entmax_package = pytest.importorskip("entmax")

FORMULAS = {
    "softmax": torch.exp,
    "power": lambda s: s.abs() ** 2,
    "elu": lambda s: torch.where(s > 0, s + 1, s.exp()),
    "relu": lambda s: s.clamp_min(0) ** 2,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_kernels_follow_their_formulas(name):
    scores = torch.linspace(-3, 4, 50, dtype=torch.float64).reshape(10, 5).mT
    expected = FORMULAS[name](scores)
    torch.testing.assert_close(WEIGHTS[name].normalised(scores), expected / expected.sum(-1, keepdim=True))


@pytest.mark.parametrize("low", [-12.0, -30.0, -70.0])
def test_small_weights_keep_their_digits(low):
    """In a row whose scores are all far below zero, where elu(x) itself is -1 but for its last digits."""
    scores = low - torch.linspace(0, 3, 7)
    for dtype in (torch.float32, torch.float64):
        rows = scores.to(dtype).requires_grad_()
        actual, want = fk.weights.Elu().normalised(rows), torch.softmax(rows, -1)
        torch.testing.assert_close(actual, want)
        of = torch.arange(7, dtype=dtype)
        one, other = (torch.autograd.grad((weights * of).sum(), rows)[0] for weights in (actual, want))
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_hidden_entries_have_no_weight_and_no_gradient(weights):
    scores = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores[:, 2] = -torch.inf
    scores[3] = -torch.inf
    scores.requires_grad_()
    actual = weights.normalised(scores)
    assert torch.equal(actual[3], torch.zeros(6, dtype=actual.dtype))
    assert torch.equal(actual[:, 2], torch.zeros(4, dtype=actual.dtype))
    (grad,) = torch.autograd.grad((actual * torch.arange(6)).sum(), scores)
    assert torch.isfinite(grad).all()
    assert torch.equal(grad[:, 2], torch.zeros(4, dtype=actual.dtype))


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("scale", [1, 300])
def test_a_row_in_parts_is_the_row(weights, scale):
    """Whichever part holds the largest score; with a row of which one part sees nothing."""
    scores = scale * torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores[3, :5] = -torch.inf
    for row in (scores, scores.flip(-1)):
        parts = torch.cat(weights.kernel([part.clone() for part in row.split([5, 1, 3], -1)]), -1)
        torch.testing.assert_close(parts / parts.sum(-1, keepdim=True), weights.normalised(row))


def test_powers_below_one_are_allowed():
    scores = torch.tensor([[0.25, 4.0]])
    for weights in (fk.weights.Power(0.5), fk.weights.Relu(0.5)):
        torch.testing.assert_close(weights.normalised(scores), torch.tensor([[0.2, 0.8]]))


def test_their_gradient_at_nothing_is_none():
    """x^p rises infinitely fast at 0, where a weight is zero as it is below."""
    scores = torch.tensor([[-1.0, 0.0, 4.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(fk.weights.Relu(0.5).kernel([scores])[0].sum(), scores)
    torch.testing.assert_close(grad, torch.tensor([[0.0, 0.0, 0.125]]))  # of (x / 4)^p
    scores = torch.tensor([[0.0, -0.0, 4.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(fk.weights.Power(0.5).kernel([scores])[0].sum(), scores)
    torch.testing.assert_close(grad, torch.tensor([[0.0, 0.0, 0.125]]))


LARGE_OR_SMALL = {
    "power": (fk.weights.Power(8), 1e6, 1e-6),
    "relu": (fk.weights.Relu(8), 1e6, 1e-6),
    "elu": (fk.weights.Elu(), 1e38, 1.0),
    "softcap": (fk.weights.Softcap(79.0), 1e6, 1.0),
}


@pytest.mark.parametrize("name", LARGE_OR_SMALL)
def test_weights_neither_overflow_nor_vanish(name):
    """Where f itself does, in float32: the weights and their gradients are those of float64."""
    weights, *sizes = LARGE_OR_SMALL[name]
    row = torch.linspace(0.2, 1, 9, dtype=torch.float64)
    rows = torch.stack([row * size for size in sizes] + ([-150 - row] if name == "elu" else []))
    of = torch.arange(9, dtype=torch.float64)
    answers = []
    for dtype in (torch.float32, torch.float64):
        scores = rows.to(dtype).requires_grad_()
        actual = weights.normalised(scores)
        answers.append((actual, *torch.autograd.grad((actual * of.to(dtype)).sum(), scores)))
    for actual, want in zip(*answers, strict=True):
        torch.testing.assert_close(actual, want.float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("weights", [case[0] for case in LARGE_OR_SMALL.values()], ids=LARGE_OR_SMALL)
@pytest.mark.parametrize("plan", [fk.Plan(), fk.Plan(fk.Window(9))], ids=["all keys", "window"])
def test_large_scores_and_values(weights, plan):
    """The output is finite, as that of exact attention is."""
    g = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 40, 8, dtype=torch.float64, generator=g).unbind()
    query, value, plan = query * 1e5, value * 1e36, replace(plan, weights=weights)
    want = fk.attention(query, key, value, plan=plan, impl="reference")
    for impl in ("reference", "torch"):
        actual = fk.attention(query.float(), key.float(), value.float(), plan=plan, impl=impl).double()
        torch.testing.assert_close(actual / 1e36, want / 1e36, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_scores_are_left_as_they_are(weights):
    scores = torch.linspace(-3, 4, 12, dtype=torch.float64).reshape(3, 4)
    before = scores.clone()
    weights.normalised(scores)
    assert torch.equal(scores, before)


@given(seed=st.integers(0, 10_000), n=st.integers(1, 30), scale=st.sampled_from([0.1, 1.0, 10.0, 1000.0]))
def test_entmax_equals_the_package(seed, n, scale):
    scores = scale * torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(entmax(scores, 1.5), entmax_package.entmax15(scores, dim=-1), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(entmax(scores, 2.0), entmax_package.sparsemax(scores, dim=-1), rtol=1e-7, atol=1e-9)
    for alpha in (1.2, 1.7):
        expected = entmax_package.entmax_bisect(scores, alpha, dim=-1, n_iter=80)
        torch.testing.assert_close(entmax(scores, alpha), expected, rtol=1e-6, atol=1e-7)


@given(seed=st.integers(0, 10_000), n=st.integers(2, 30))
def test_close_alphas_have_close_weights(seed, n):
    scores = 2 * torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for alpha in (1.5, 2.0):
        torch.testing.assert_close(entmax(scores, alpha), entmax(scores, alpha - 1e-10), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("alpha", [1 + 1e-7, 1.00001, 1.001])
def test_alphas_near_one_keep_their_digits(alpha):
    scores = 3 * torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    actual, want = entmax(scores, alpha), entmax(scores.double(), alpha)
    torch.testing.assert_close(actual, want.float(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(actual, scores.softmax(-1), rtol=0, atol=4 * (alpha - 1) + 1e-6)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_newton_takes_few_steps(alpha, monkeypatch):
    """As many as the module says, for 2,000 entries."""
    scores = torch.randn(5, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = entmax(scores, alpha)
    monkeypatch.setattr(entmax_module, "NEWTON_STEPS", 14)
    torch.testing.assert_close(entmax(scores, alpha), want, rtol=1e-9, atol=1e-12)


def test_entmax_is_the_argmax_it_claims_to_be():
    """No point of the simplex does better than the result (checked on a grid for three entries)."""
    scores = torch.tensor([0.7, 0.2, -0.1], dtype=torch.float64)
    steps = torch.linspace(0, 1, 101, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1).flatten(0, 1)
    grid = torch.cat([grid, 1 - grid.sum(-1, keepdim=True)], -1)
    grid = grid[grid[:, 2] >= -1e-12].clamp_min(0)
    for alpha in (1.3, 1.5, 2.0):

        def objective(p, alpha=alpha):
            return p @ scores + (p - p**alpha).sum(-1) / (alpha * (alpha - 1))

        assert (objective(grid) <= objective(entmax(scores, alpha)) + 1e-9).all()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is", "ignore:There is a perf")  # torch's, of its own transforms
@pytest.mark.parametrize("alpha", [1.3, 1.5, 1.8, 2.0])
def test_entmax_derivatives(alpha):
    """Of both modes, first and second, and one mode of the other."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 5, dtype=torch.float64, generator=g, requires_grad=True)

    def weigh(scores):
        """A row that sees one entry and one that sees none, too."""
        hidden = torch.zeros(3, 5, dtype=torch.bool)
        hidden[1, 1:], hidden[2] = True, True
        return entmax(scores.masked_fill(hidden, -torch.inf), alpha)

    assert torch.autograd.gradcheck(weigh, (scores,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(weigh, (scores,), check_fwd_over_rev=True)
    rows, along = scores.detach(), torch.randn(3, 5, dtype=torch.float64, generator=g)
    want = torch.autograd.functional.hvp(lambda x: weigh(x).square().sum(), rows, along)[1]

    def slope(x):
        return torch.func.jvp(lambda y: weigh(y).square().sum(), (x,), (along,))[1]

    torch.testing.assert_close(torch.func.grad(slope)(rows), want)
    torch.testing.assert_close(torch.func.jvp(slope, (rows,), (along,))[1], (want * along).sum())
    torch.testing.assert_close(torch.func.jacfwd(weigh)(rows), torch.autograd.functional.jacobian(weigh, rows))
