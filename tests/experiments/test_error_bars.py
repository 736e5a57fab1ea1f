"""Error bars of single queries: as often right as they say, whatever the keys are."""

import math

import pytest
import torch
from experiments.decoders.bars import error_bars, half_width
from experiments.decoders.hard_keys import HARD, KEYS, divided, hidden, random, rare
from experiments.decoders.random_codes import RandomCodes

import fewkeys as fk
from cases import Shape
from fewkeys.core.metrics import relative_error

SCAN = fk.budget(24, is_causal=True)
CAUSAL = Shape(2, 4, 2, 96, 96, 16, 8, is_causal=True)


def seed(number):
    return torch.Generator().manual_seed(number)


OPTIONS = ({"most": 64}, {"error": 0.3, "confidence": 0.8})
"""All keys are tried with the defaults, every third with one of these, in turns."""


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in HARD), *zip([*HARD][::3], 2 * OPTIONS, strict=True)], ids=str
)
def test_bars_hold(name, options):
    trials, confidence = 60, options.get("confidence", 0.95)
    missed = HARD[name]().missed(trials, **options)["missed"]
    assert missed * trials <= (1 - confidence) * trials + 2


def test_hard_keys_are_what_they_say():
    case = hidden()
    kept = case.plan.keep.graph(case.query, case.key, scale=1.0).to_mask()
    assert not kept[0, 0, 0, 300]
    assert float((case.query @ case.key.mT).softmax(-1)[0, 0, 0, 300]) == pytest.approx(0.5, abs=1e-3)


def test_two_values_are_covered_exactly():
    """Draws that are one with a small chance, otherwise zero, by their binomial distribution and no sample."""
    for miss in (0.1, 0.05, 0.0125):
        for count in (16, 64, 512):
            hits = torch.arange(count + 1, dtype=torch.float64)
            ways = torch.lgamma(torch.tensor(count + 1.0).double()) - torch.lgamma(hits + 1)
            ways = ways - torch.lgamma(count - hits + 1)
            deviation = (hits * (count - hits) / (count * (count - 1))).sqrt()
            width = half_width(deviation, torch.ones(()).double(), count, miss)
            for chance in torch.logspace(-4, -0.01, 300, dtype=torch.float64):
                probability = (ways + hits * chance.log() + (count - hits) * (1 - chance).log()).exp()
                covered = probability[(hits / count - chance).abs() <= width].sum()
                assert covered >= 1 - miss, (miss, count, float(chance))


def test_the_sample_has_no_bias():
    """Over many draws and rotations, the mean output is that of exact attention."""
    case = divided()
    outputs = torch.stack(
        [
            error_bars(case.query, case.key, case.value, case.plan, scale=1.0, error=1e-9, generator=seed(n)).output
            for n in range(200)
        ]
    ).flatten(1)
    off = (outputs.mean(0) - case.exact.flatten()) / (outputs.std(0) / math.sqrt(len(outputs)))
    assert off.square().mean() < 1.6
    # A known bias of a hundredth is seen.
    assert ((outputs.mean(0) * 1.01 - case.exact.flatten()) / outputs.std(0) * math.sqrt(200)).square().mean() > 2


def test_errors_of_codes_have_the_size_that_is_said():
    case = hidden()
    exact = (case.query @ case.key.mT)[0, 0, 0]
    off, size = [], []
    for number in range(200):
        codes = RandomCodes.of(case.key, None, seed(number))
        square = (case.query.norm() * codes.rest[0, 0]).square()
        off.append(codes.log_weights(case.query)[0, 0, 0] - square - exact)
        size.append(square)
    mean, spread = torch.stack(off).mean(0), torch.stack(off).square().mean(0) / torch.stack(size).mean(0)
    assert mean.abs().max() < 0.2
    assert spread.min() > 0.5
    assert spread.max() < 1.5


@pytest.mark.parametrize(
    "plan", [SCAN, fk.Plan(fk.Window(9)), fk.budget(24, is_causal=True, memory="constant")], ids=str
)
def test_bars_of_all_queries_hold(plan):
    query, key, value = CAUSAL.draw(dtype=torch.float32)
    options = {**CAUSAL.options, "lengths": torch.tensor([96, 61])}
    bars = error_bars(query, key, value, plan, most=128, **options)
    exact = fk.attention(query, key, value, **options)
    real = torch.arange(96) < options["lengths"][:, None, None]
    missed = (relative_error(bars.output, exact) > bars.error + 1e-5) & real
    assert missed.float().mean() < 0.05
    assert torch.equal(bars.reached, bars.error <= 0.05)
    assert set(bars.drawn.unique().tolist()) <= {0, 64, 128}
    assert bars.reached[:, :, 0].all()
    assert not bars.reached.all()


def test_more_draws_are_made_for_a_smaller_error():
    query, key, value = CAUSAL.draw(dtype=torch.float32)
    few, many = (error_bars(query, key, value, SCAN, error=e, is_causal=True) for e in (0.5, 0.05))
    assert 0 < few.drawn.float().mean() < 0.7 * many.drawn.float().mean()
    assert few.reached.float().mean() > many.reached.float().mean()


def test_masked_is_deleted_and_the_future_does_not_count():
    query, key, value = CAUSAL.draw(dtype=torch.float32)
    plan, first = fk.Plan(fk.Window(9)), slice(0, 61)
    whole = error_bars(query, key, value, plan, is_causal=True, most=64)
    key[:, :, 61:], value[:, :, 61:] = 7.0, -100.0
    other = error_bars(query, key, value, plan, is_causal=True, most=64)
    masked = error_bars(query, key, value, plan, is_causal=True, most=64, lengths=torch.tensor([61, 61]))
    for bars in (other, masked):
        torch.testing.assert_close(bars.output[:, :, first], whole.output[:, :, first])
        torch.testing.assert_close(bars.error[:, :, first], whole.error[:, :, first], rtol=1e-3, atol=1e-5)


def test_same_seed_same_bars():
    tensors = CAUSAL.draw(dtype=torch.float32)
    once, again = (error_bars(*tensors, SCAN, is_causal=True, generator=seed(3)) for _ in range(2))
    assert torch.equal(once.output, again.output)
    assert torch.equal(once.error, again.error)
    assert not torch.equal(once.output, error_bars(*tensors, SCAN, is_causal=True, generator=seed(4)).output)


def test_a_plan_that_keeps_every_key_is_exact():
    tensors = CAUSAL.draw(dtype=torch.float32)
    bars = error_bars(*tensors, fk.budget(256, is_causal=True), is_causal=True)
    assert bars.reached.all()
    assert not bars.drawn.any()
    assert not bars.error.any()
    torch.testing.assert_close(bars.output, fk.attention(*tensors, is_causal=True))


def test_a_sample_that_says_nothing_has_no_bar():
    case = rare(0.02, 70.0)
    bars = error_bars(case.query, case.key, case.value, case.plan, scale=1.0)
    assert bars.error.isinf().all()
    assert not bars.reached.any()


@pytest.mark.parametrize("factors", [(1e18, 1.0, 1.0), (1.0, 1e18, 1e15), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_numbers_give_finite_outputs(factors, dtype):
    tensors = [t * f for t, f in zip(CAUSAL.draw(dtype=dtype), factors, strict=True)]
    bars = error_bars(*tensors, SCAN, is_causal=True, most=64)
    exact = fk.attention(*tensors, is_causal=True)
    assert bars.output.dtype == dtype
    assert bars.output.isfinite().all()
    assert not bars.error.isnan().any()
    assert not (relative_error(bars.output, exact) > bars.error + (0.02 if dtype == torch.bfloat16 else 1e-4)).any()


@pytest.mark.parametrize(
    ("message", "change"),
    {
        "error: expected a finite number": {"error": 0.0},
        "confidence: expected a finite number": {"confidence": 1.0},
        "most: expected at least 2": {"most": 1},
        "plan: expected a fewkeys.Plan, got list": {"plan": [SCAN]},
        "plan: expected one with Softmax": {"plan": fk.Plan(fk.Window(3), weights=fk.weights.Power(2.0))},
        "distance_bias: expected None": {"distance_bias": torch.zeros(1, 3)},
        "value: expected no gradient": {"value": torch.ones(1, 1, KEYS, 64).requires_grad_()},
        "nothing: expected": {"nothing": 1},
    }.items(),
    ids=lambda of: of if isinstance(of, str) else "",
)
def test_bad_input_is_named(message, change):
    case = random()
    call = {"query": case.query, "key": case.key, "value": case.value, "plan": case.plan} | change
    with pytest.raises((ValueError, TypeError), match=f"^{message}" if "nothing" not in message else "nothing"):
        error_bars(**call)


def test_a_sample_without_spread_has_the_bar_of_keys_that_no_draw_met():
    """All keys and values are one: only `c B / m` is left of the widths, of numerator and sum of weights."""
    tokens, draws, miss = 1000, 64, 0.05
    query = torch.randn(1, 2, tokens, 8, generator=torch.Generator().manual_seed(0))
    key, value = (torch.full((1, 2, tokens, 8), number) for number in (0.3, 2.0))
    bars = error_bars(query, key, value, fk.Plan(fk.Window(1)), confidence=1 - miss, most=draws)
    others = (tokens - 1) / tokens  # of the sum of all weights
    width = -math.log(miss) / draws * others
    radius = 2 * width / (1 - width)
    torch.testing.assert_close(bars.error, torch.full((1, 2, tokens), radius / (1 - radius)), rtol=1e-3, atol=0)
    torch.testing.assert_close(bars.output, value, rtol=1e-5, atol=0)
