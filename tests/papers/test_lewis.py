"""Law 8 for `|s|^p`: the bounds hold against queries optimised to break them, and sum to what the theorem says."""

import pytest
import torch
from hypothesis import given, strategies as st

from fewkeys.papers.levattention import leverage_scores, lewis, universal_set
from fewkeys.papers.levattention.lewis import TOLERANCE, lewis_weights, tensor_bounds
from fewkeys.papers.levattention.tensor_power import tensor_features, width
from odd_keys import KINDS, keys

POWERS = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def own_share(query, key, f):
    """What query j gives to key j, (1, H, N): the quantity an adversary drives up."""
    weights = f(torch.einsum("bhid,bhjd->bhij", query, key))
    return weights.diagonal(dim1=-2, dim2=-1) / weights.sum(-1).clamp_min(1e-300)


def adversaries(key, f, steps=25):
    """Queries found by gradient ascent from `(K^T K)^+ k_j` and from k_j, the best of the way."""
    best = torch.zeros(key.shape[:-1], dtype=key.dtype)
    for start in (key @ torch.linalg.pinv(key.mT @ key, hermitian=True), key):
        best = torch.maximum(best, own_share(start, key, f))
        q = start + 1e-3 * start.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        q = (q / q.norm(dim=-1, keepdim=True).clamp_min(1e-30)).requires_grad_()
        optimiser = torch.optim.Adam([q], lr=0.03)
        for _ in range(steps):
            share = own_share(q, key, f)
            best = torch.maximum(best, share.detach())
            (-share.clamp_min(1e-12).log().sum()).backward()
            optimiser.step()
            optimiser.zero_grad()
    return best


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_adversary_passes_the_bound(kind, power):
    k = keys(kind, n=60, d=4)
    share = adversaries(k, lambda s: s.abs() ** power)
    scores = leverage_scores(k, power)
    assert (share <= scores * (1 + 1e-7)).all()
    # The adversaries are no straw men: for p = 2 they reach the bound, else half of some, unless duplicates void it.
    if kind != "duplicates":
        assert (share / scores.clamp_min(1e-300)).amax() > (0.999 if power == 2 else 0.5)
    for eps in (0.05, 0.3):
        chosen = universal_set(k, eps, power)
        assert not ((share >= eps) & ~chosen).any()
        rank = torch.linalg.matrix_rank(k).double()
        assert (chosen.sum(-1) <= rank ** max(1.0, power / 2) / eps * (1 + 1e-5)).all()


@pytest.mark.parametrize("power", POWERS)
def test_no_random_query_finds_an_entry_outside(power):
    for kind in KINDS:
        k = keys(kind, d=3)
        q = torch.randn(1, 2, 1000, 3, generator=torch.Generator().manual_seed(1), dtype=k.dtype)
        entries = (q @ k.mT).abs() ** power
        entries = entries / entries.sum(-1, keepdim=True).clamp_min(1e-300)
        assert not ((entries >= 0.1) & ~universal_set(k, 0.1, power).unsqueeze(2)).any()


@pytest.mark.parametrize("power", [30.0, 60.0, 62.0, 300.0, 1000.0])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_high_powers_do_not_underflow(power, d):
    """`(1 / sqrt(n))^p` is zero in float64, but no entry is."""
    k = torch.randn(1, 1, 3000, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q = torch.cat([k[:, :, :100], k[:, :, k[0, 0].norm(dim=-1).topk(9).indices]], 2)
    entries = (power * (q @ k.mT).abs().log()).softmax(-1)
    needed = (entries >= 0.1).any(2)
    assert needed.any()
    assert not (needed & ~universal_set(k, 0.1, power)).any()


@pytest.mark.parametrize("power", [0.5, 1.0, 1.9, 2.5, 3.0, 4.0, 5.0, 7.5, 12.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fixed_point_is_reached(kind, power, monkeypatch):
    k = keys(kind)
    actual = lewis_weights(k, power)
    assert actual.steps < 100
    assert (actual.excess <= TOLERANCE * max(1.0, power / 2)).all()
    rank = torch.linalg.matrix_rank(k).double()
    torch.testing.assert_close(actual.weights.sum(-1), rank, rtol=0.05, atol=0)
    assert (actual.bounds.sum(-1) <= rank ** max(1.0, power / 2) * (1 + 1e-5)).all()
    if 1 <= power <= 4:
        monkeypatch.setattr(lewis, "TOLERANCE", 1e-10)
        actual = lewis_weights(k, power)
        # The defining equation, with another route to the pseudoinverse.
        weights = actual.weights
        coefficient = torch.where(weights > 0, weights.clamp_min(1e-300) ** (1 - 2 / power), 0.0)
        inverse = torch.linalg.pinv((k * coefficient.unsqueeze(-1)).mT @ k, hermitian=True, rtol=1e-13)
        again = ((k @ inverse) * k).sum(-1).clamp_min(0) ** (power / 2)
        heavy = weights > 1e-3
        torch.testing.assert_close(again[heavy], weights[heavy], rtol=0.02, atol=0)


@given(seed=st.integers(0, 1000), d=st.integers(1, 4), degree=st.integers(1, 4))
def test_features_turn_powers_into_dot_products(seed, d, degree):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 7, d, generator=g, dtype=torch.float64)
    features = tensor_features(a, degree)
    assert features.shape == (7, width(d, degree))
    torch.testing.assert_close(features @ tensor_features(b, degree).T, (a @ b.T) ** degree)


def test_tensor_powers_are_tighter_and_sum_to_the_number_of_monomials():
    k = keys("plain", d=4)
    for degree in (2, 3):
        scores = tensor_bounds(k, degree)
        torch.testing.assert_close(scores.sum(-1), torch.full((1, 2), float(width(4, degree)), dtype=k.dtype))
        assert (leverage_scores(k, 2.0 * degree) <= scores).all()
    # In one dimension the sensitivity is |k_j|^p / sum |k_l|^p.
    k = keys("heavy tail", n=9, d=1)
    for power in (0.7, 1.0, 3.0, 4.0, 5.0):
        expected = (k.abs() ** power / (k.abs() ** power).sum(-2, keepdim=True)).squeeze(-1)
        torch.testing.assert_close(leverage_scores(k, power), expected, rtol=1e-5, atol=1e-12)


def test_dependent_features_do_not_understate():
    """Ten distinct keys cannot span the monomials: the tensor bound is void, and the Lewis bound stands in."""
    k = keys("duplicates")
    assert torch.equal(tensor_bounds(k, 2), torch.ones(1, 2, 120, dtype=k.dtype))
    torch.testing.assert_close(leverage_scores(k, 4.0), lewis_weights(k, 4.0).bounds)


def huber(s):
    return torch.where(s.abs() <= 1, s.square() / 2, s.abs() - 0.5)


def tukey(s):
    return 1 - (1 - s.square().clamp_max(1.0)) ** 3


@pytest.mark.parametrize("f", [huber, tukey], ids=["huber", "tukey"])
@pytest.mark.parametrize("kind", KINDS)
def test_bounded_growth_has_no_entry_outside_at_any_scale(kind, f):
    k = keys(kind, n=60, d=4)
    for size in (0.03, 1.0, 30.0):
        share = adversaries(size * k, f, steps=15)
        for eps in (0.08, 0.3):
            chosen = universal_set(k, eps, bounded_growth=True)
            assert not ((share >= eps) & ~chosen).any()
            assert (chosen.sum(-1) <= torch.linalg.matrix_rank(k) / eps**2).all()


def test_bounded_growth_needs_its_rounds():
    """Behind keys so large that Tukey's weights treat them alike, the l_2 universal set misses a key."""
    k = torch.tensor([[1e4], [1.0], *[[1e-3]] * 20], dtype=torch.float64)[None, None]
    entries = tukey(10 * k.squeeze(-1))
    assert (entries / entries.sum())[0, 0, 1] > 0.4
    assert not universal_set(k, 0.4)[0, 0, 1]
    assert universal_set(k, 0.4, bounded_growth=True)[0, 0, 1]
    assert universal_set(k, 0.4, bounded_growth=True).sum() == 2


@pytest.mark.parametrize("kind", KINDS)
def test_float32_keeps_the_guarantee(kind):
    k = keys(kind).float()
    exact = leverage_scores(k.double())
    for eps in (0.02, 0.1):
        missed = (exact >= eps * (1 + 1e-4)) & ~universal_set(k, eps)
        assert not missed.any()
    torch.testing.assert_close(leverage_scores(k).double(), exact, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("n", [300, 5000])
def test_rounding_is_no_direction_of_its_own(n):
    g = torch.Generator().manual_seed(8)
    k = torch.randn(24, 2, n, 1, generator=g, dtype=torch.float64) * torch.randn(24, 2, 1, 2, generator=g).double()
    torch.testing.assert_close(leverage_scores(k).sum(-1), torch.ones(24, 2, dtype=k.dtype))


@pytest.mark.parametrize("size", [1, 2**-6, 2**-12])
def test_a_large_offset_hides_no_key_in_float32(size):
    """The spread of the keys is 1/1000 of their mean: float32 alone would take it for rounding."""
    k = (keys("plain") + 1000).float()
    k[..., 0] *= size  # which changes no score
    torch.testing.assert_close(leverage_scores(k).double(), leverage_scores(k.double()), rtol=1e-4, atol=1e-5)


def test_a_power_that_is_not_positive_is_refused():
    k = keys("scales")
    with pytest.raises(ValueError, match=r"^power: expected a finite number in \(0.0, inf\)"):
        leverage_scores(k, 0.0)


@pytest.mark.parametrize("power", [1.0, 3.0, 4.0])
def test_zero_keys_and_single_keys(power):
    assert torch.equal(leverage_scores(torch.zeros(1, 1, 5, 3), power), torch.zeros(1, 1, 5))
    torch.testing.assert_close(leverage_scores(torch.ones(1, 1, 1, 3), power), torch.ones(1, 1, 1))
    # A head of zeros next to one of full rank.
    k = torch.cat([torch.zeros(1, 1, 20, 3), keys("plain", n=20, d=3)[:, :1].float()], 1)
    scores = leverage_scores(k, power)
    assert torch.equal(scores[:, 0], torch.zeros(1, 20))
    torch.testing.assert_close(scores[:, 1:], leverage_scores(k[:, 1:], power))
