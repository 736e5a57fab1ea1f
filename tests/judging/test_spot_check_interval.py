"""Intervals of a spot check: as often right as they say, and as narrow as they can."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

import fewkeys as fk
from cases import SHAPES, Shape
from fewkeys.core.metrics import relative_error
from fewkeys.core.validation import check_inputs
from fewkeys.guard import sample
from fewkeys.guard.interval import pool, student
from fewkeys.guard.sample import Estimates

WINDOW = fk.Plan(fk.Window(9))
spot_check = fk.spot_check


def seed(number):
    return torch.Generator().manual_seed(number)


SLOTS_24 = [fk.budget(24), fk.Plan(fk.Window(24)), fk.Plan(fk.select.Leverage(24)), fk.budget(24, is_causal=True)]


@pytest.mark.long
@pytest.mark.parametrize(("plan", "heads"), [*zip(SLOTS_24, [4, 1, 4, 1], strict=True)], ids=str)
def test_intervals_cover(plan, heads):
    """In at least 93 of 100 trials at 95 percent, each with a sample of its own; two hundred are run."""
    shape = Shape(1, heads, heads, 300, 300, 16, 16, is_causal=plan == fk.budget(24, is_causal=True))
    tensors = shape.draw(dtype=torch.float32)
    few = fk.attention(*tensors, plan=plan.never_exact(), **shape.options)
    truth = float(relative_error(few, fk.attention(*tensors, impl="reference", **shape.options)).mean())
    actual = [spot_check(*tensors, plan, generator=seed(n), **shape.options) for n in range(200)]
    covered = sum(check.low <= truth <= check.high for check in actual)
    assert covered >= 2 * 93
    width = sum(check.high - check.low for check in actual) / 200
    assert 0 < width < 0.8 * truth / math.sqrt(heads)


ERRORS = {
    "random": lambda n: torch.rand(n, generator=seed(0), dtype=torch.float64) ** 4,
    "one large": lambda n: torch.nn.functional.one_hot(torch.tensor(n // 3), n).double(),
    "growing": lambda n: torch.linspace(0, 1, n, dtype=torch.float64),
    "the same in every stretch": lambda n: (torch.arange(n) % 4).double(),
}


def many(errors, count, draws=4000, number=1):
    """Samples of `count` errors each: the samples and the errors drawn."""
    nothing = torch.zeros(draws, 1, 1, 1).expand(-1, -1, errors.shape[-1], -1)
    places = torch.rand(draws, 1, count, generator=seed(number), dtype=torch.float64)
    drawn = sample.draw(check_inputs(nothing, nothing, nothing), places)
    return drawn, errors.expand(draws, 1, -1).gather(-1, drawn.index)


@pytest.mark.parametrize("count", [2, 3, 16, 19, 32])
@pytest.mark.parametrize("name", ERRORS)
def test_variance_is_at_least_the_true_one(name, count):
    """On average over draws, whatever the errors, for stretches of one length; their own variances are known."""
    errors = ERRORS[name](4 * count)
    drawn, seen = many(errors, count)
    variance = drawn.estimates(seen).variance.sum(-1)
    stretches = errors.view(count, 4)
    true = stretches.var(-1, unbiased=False).sum() / count**2
    doubt = variance.std() / math.sqrt(len(variance))
    assert drawn.mean(seen).var() == pytest.approx(float(true), rel=0.15, abs=1e-12)
    assert variance.mean() > true - 5 * doubt - 1e-12
    width = drawn.estimates(seen).freedom + 1
    groups = stretches.mean(-1).split(width.int().tolist())
    between = sum(group.var() * len(group) for group in groups) / count**2
    assert abs(variance.mean() - true - between) < 5 * doubt + 1e-12


def test_stretches_drawn_whole_add_nothing():
    """Of 17 queries 16 are drawn: a single stretch leaves a doubt, the one of two queries."""
    errors = torch.arange(17, dtype=torch.float64) ** 2
    drawn, seen = many(errors, 16, draws=1)
    assert drawn.size.flatten().tolist().count(2) == 1
    spread = drawn.estimates(seen)
    assert (spread.variance > 0).sum() == 1
    assert spread.third == 0
    whole, seen = many(errors, 17, draws=1)
    assert whole.estimates(seen).variance.sum() == whole.estimates(seen).third.sum() == 0


def test_third_moment_is_right_for_errors_in_random_order():
    errors = torch.rand(64, generator=seed(0), dtype=torch.float64) ** 4
    nothing = torch.zeros(100_000, 1, 1, 1).expand(-1, -1, 64, -1)
    order = torch.rand(100_000, 1, 64, generator=seed(1)).argsort(-1)
    places = torch.rand(100_000, 1, 16, generator=seed(2), dtype=torch.float64)
    drawn = sample.draw(check_inputs(nothing, nothing, nothing), places)
    seen = errors[order].gather(-1, drawn.index)
    estimate, third = drawn.mean(seen).flatten(), drawn.estimates(seen).third
    cube = (estimate - errors.mean()) ** 3
    doubt = (third.var() / 1e5 + cube.var() / 1e5).sqrt()
    assert abs(third.mean() - cube.mean()) < 4 * doubt
    assert third.mean() > 5 * doubt


def test_a_trend_costs_no_accuracy():
    """Stretches make the estimate far better than a simple random sample, of variance (1 - n / N) S^2 / n."""
    errors = ERRORS["growing"](64)
    drawn, seen = many(errors, 16)
    assert drawn.mean(seen).var() < 0.05 * (1 - 16 / 64) * errors.var() / 16


@given(st.integers(0, 10**6), st.integers(2, 40))
def test_intervals_hold_their_estimate(number, count):
    tensors = Shape(1, 2, 2, 45, 45, 4, 4).draw(number)
    checks = [
        spot_check(*tensors, fk.Plan(fk.Window(3)), queries=count, confidence=c, generator=seed(number))
        for c in (0.5, 0.95, 0.99)
    ]
    assert len({check.error for check in checks}) == 1
    half, usual, sure = checks
    assert 0 <= sure.low <= usual.low < half.low < usual.error < half.high < usual.high < sure.high
    assert math.isfinite(sure.high)


def test_more_queries_make_it_narrower():
    tensors = SHAPES["long"].draw()
    widths = []
    for queries in (8, 32, 128, 390, 401):
        checks = [spot_check(*tensors, WINDOW, queries=queries, generator=seed(n)) for n in range(10)]
        widths.append(sum(check.high - check.low for check in checks))
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == 0 < widths[-2] < 0.2 * widths[1]


@pytest.mark.parametrize(
    ("confidence", "freedom", "value"),
    # Quantiles from the closed forms for 1, 2 and 4 degrees, and the tables of NIST for the others.
    [
        (0.95, 1, math.tan(0.475 * math.pi)),
        (0.999, 1, math.tan(0.4995 * math.pi)),
        (0.95, 2, 0.95 * math.sqrt(2 / (1 - 0.95**2))),
        (0.5, 2, 0.5 * math.sqrt(2 / 0.75)),
        (0.95, 4, 2.776445),
        (0.9, 7, 1.894579),
        (0.95, 30, 2.042272),
        (0.99, 100, 2.625891),
        (0.95, 999.99, 1.962339),
        (0.95, 1000, 1.962339),
        (0.95, 1e9, 1.959964),
    ],
)
def test_quantiles_of_student(confidence, freedom, value):
    assert student(confidence, freedom) == pytest.approx(value, rel=2e-6)


def test_quantiles_between_whole_degrees():
    values = [student(0.95, 1 + step / 10) for step in range(100)]
    assert values == sorted(values, reverse=True)
    assert student(0.95, 2.5) == pytest.approx(3.558, rel=1e-2)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def estimates(count, mean, variance, third, freedom):
    return Estimates(count, count, torch.zeros(len(count)).long(), mean, variance[:, None], third, freedom)


def test_pooling_weighs_by_queries():
    """Two populations in one part, or in two, are the same; one of them twice as long counts twice."""
    freedom = numbers(7.0)
    both = estimates(numbers(10, 20), numbers(0.3, 0.6), numbers(0.01, 0.02), numbers(1e-4, 2e-4), freedom)
    parts = [
        estimates(*(x[i : i + 1] for x in (both.count, both.mean, both.variance[:, 0], both.third)), freedom)
        for i in (0, 1)
    ]
    assert pool([both], 0.95) == pytest.approx(pool(parts, 0.95))
    error, low, high = pool([both], 0.95)
    s = math.sqrt(0.01 / 9 + 0.02 * 4 / 9)
    t = student(0.95, s**4 / ((0.01 / 9) ** 2 / 9 + (0.02 * 4 / 9) ** 2 / 9) - 2)
    skewness = (1e-4 / 27 + 2e-4 * 8 / 27) / s**3
    assert error == pytest.approx(0.5)
    assert low == pytest.approx(0.5 - t * s)
    assert high == pytest.approx(0.5 * math.exp(t * s / 0.5) + skewness * (2 * t**2 + 1) / 6 * s)


def test_errors_that_are_not_finite():
    for value in (math.inf, math.nan):
        bad = estimates(numbers(5), numbers(value), numbers(value), numbers(value), numbers(7))
        assert all(str(x) == str(value) for x in pool([bad], 0.95))
    far = estimates(numbers(5), numbers(1.0), numbers(1.0), numbers(0.0), numbers(1))
    assert math.isfinite(pool([far], 0.9999)[2])
