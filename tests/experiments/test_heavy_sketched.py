"""Heavy entries from sketches keep the errors they state: for the given queries, and, where they say so, for the
queries that are worst for the keys or for the sketch itself."""

import math

import pytest
import torch
from experiments.levattention import sketched
from experiments.levattention.projections import PROJECTIONS
from experiments.levattention.sketched import Estimated, Sketched, sketched_entries

from fewkeys.papers.levattention import gram, heavy_entries, search
from fewkeys.papers.levattention.gram import exact_form
from fewkeys.papers.levattention.keys import ScaledKeys
from odd_keys import KINDS, keys

PROJECTION = pytest.mark.parametrize("projection", PROJECTIONS)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def entries(query, key, power=2.0):
    """All entries (B, H, Nq, Nk)."""
    weights = (query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT).abs() ** power
    return torch.nan_to_num(weights / weights.sum(-1, keepdim=True))


def dense(actual):
    return actual.to_coo().to_dense()


def spy(monkeypatch, module, name):
    """The results of all calls of a function."""
    seen = []
    original = getattr(module, name)

    def watching(*arguments, **named):
        seen.append(original(*arguments, **named))
        return seen[-1]

    monkeypatch.setattr(module, name, watching)
    return seen


def worst(key):
    """For every key the query that gives it the largest entry possible, its leverage score."""
    return key @ torch.linalg.pinv(key.mT @ key, hermitian=True)


def assert_within(actual, exact, eps, error, rounding=1e-9):
    """The statement of `normalizers`."""
    got = dense(actual)
    assert (got[exact >= (1 + error) * eps * (1 + 1e-9)] > 0).all()
    assert (exact[got > 0] >= (1 - error) * eps * (1 - 1e-9)).all()
    factor = (got / exact)[got > 0]
    assert ((factor >= 1 / (1 + error) - rounding) & (factor <= 1 / (1 - error) + rounding)).all()
    # One factor per query.
    ratio = torch.where(got > 0, got / exact, torch.nan)
    spread = ratio.nan_to_num(nan=-1.0).amax(-1) - ratio.nan_to_num(nan=1e9).amin(-1)
    assert (spread[(got > 0).any(-1)] < rounding).all()


@PROJECTION
@pytest.mark.parametrize("tail", [0.0, 1.0])
def test_normalizers_are_within_the_error(projection, tail, monkeypatch):
    forms = spy(monkeypatch, sketched, "sketched_form")
    sketch = Sketched(normalizers=0.5, failure=0.1, projection=projection)
    k = normal(1, 2, 8_000, 4) * torch.rand(1, 2, 8_000, 1, generator=generator(1)).double() ** -tail
    q = torch.cat([normal(1, 4, 60, 4, seed=2), worst(k)[:, :, :30].repeat_interleave(2, 1)], 2)
    eps = 0.01 if tail else 4e-4
    exact = entries(q, k)
    assert (exact >= eps).sum() > 100
    for seed in range(3):
        assert_within(sketched_entries(q, k, eps, sketch=sketch, generator=generator(seed)), exact, eps, 0.5)
    assert len(forms) == 6


def test_errors_are_used_not_only_bounded():
    """A sketch that is asked for less gives less: the rows follow the error."""
    k, q = normal(1, 1, 8_000, 4), normal(1, 1, 50, 4, seed=2)
    exact = entries(q, k)
    errors = []
    for error in (0.2, 0.9):
        got = dense(sketched_entries(q, k, 6e-4, sketch=Sketched(normalizers=error)))
        errors.append(float(((got / exact)[got > 0] - 1).abs().max()))
    assert 0 < errors[0] < 0.2 < errors[1]


def test_fewer_rows_than_dimensions(monkeypatch):
    forms = spy(monkeypatch, sketched, "sketched_form")
    k, q = normal(1, 1, 500, 128), normal(1, 1, 5, 128, seed=2)
    q[:, :, 2:] = 4 * worst(k)[:, :, :3] + 0.01 * q[:, :, 2:]
    assert sketched.sketch_rows(Sketched(0.9), 5, 500, 128, 0.01) < 128
    exact = entries(q, k)
    for seed in range(3):
        assert_within(sketched_entries(q, k, 0.02, sketch=Sketched(0.9), generator=generator(seed)), exact, 0.02, 0.9)
    assert len(forms) == 3


@pytest.mark.parametrize("factored", [False, True])
def test_normalizers_of_even_powers(factored, monkeypatch):
    forms = spy(monkeypatch, sketched, "sketched_form")
    d, error = (12, 0.9) if factored else (4, 0.4)
    k, q = normal(1, 1, 1500, d), normal(1, 1, 20, d, seed=2)
    k[:, :, :9] *= 3
    exact = entries(q, k, 4.0)
    assert (exact >= 0.02).sum() > 30
    for seed in range(3):
        sketch = Sketched(normalizers=error)
        actual = sketched_entries(q, k, 0.02, 4.0, sketch=sketch, generator=generator(seed))
        assert_within(actual, exact, 0.02, error)
    assert [len(form.matrix) < len(form.size) for form in forms] == [factored] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_estimated_scores_alone_change_nothing(kind, seed, monkeypatch):
    """With queries that make every key as heavy as it can be."""
    looks = spy(monkeypatch, sketched, "normal")
    k = keys(kind, n=400, d=24, seed=seed)
    q = torch.cat([worst(k), k, normal(1, 2, 100, 24, seed=seed)], 2)
    sketch = Sketched(scores=0.9)
    for eps in (0.05, 0.3):
        actual = sketched_entries(q, k, eps, sketch=sketch, generator=generator(seed))
        exact = heavy_entries(q, k, eps)
        assert torch.equal(actual.indices, exact.indices)
        torch.testing.assert_close(actual.values, exact.values, rtol=1e-9, atol=0)
    assert len(looks) == 4
    assert all(look.shape[-1] < 24 for look in looks)


@pytest.mark.long
@PROJECTION
def test_no_key_is_lost_for_any_query(projection):
    """Keys whose score is eps or more hold every entry >= eps of any query, also of one that knows the sketch: where
    the sketch errs by at most half of `scores` on the queries that are worst for it, and it does so often enough."""
    error, failure, turns, failed = 0.9, 0.2, 40, 0
    sketch = Sketched(normalizers=0.9, scores=error, failure=failure, projection=projection)
    for seed in range(turns):
        k = normal(8000, 3, seed=seed) * torch.rand(8000, 1, generator=generator(seed)).double() ** -1
        scores, eps = (worst(k) * k).sum(-1), (0.002, 0.01, 0.1)[seed % 3]
        form, chosen, _ = sketched.sketched_parts(sketch, 10, 1, ScaledKeys(k, 2.0), eps, 2.0, generator(seed))
        assert isinstance(form, Estimated)
        change = torch.linalg.inv(torch.linalg.cholesky(k.mT @ k)).mT
        sizes = torch.linalg.eigvalsh(change.mT @ form.matrix @ change)
        if sizes.amin() < 1 - error / 2 or sizes.amax() > 1 + error / 2:
            failed += 1
            continue
        assert set((scores >= eps).nonzero().squeeze(-1).tolist()) <= set(chosen.tolist())
        assert (scores[chosen] >= 0.9 * eps * (1 - error) / (1 + error)).all()
    assert failed <= failure / 2 * turns + 3 * math.sqrt(turns * failure / 2)


def test_the_worst_sketch_allowed_loses_no_key(monkeypatch):
    """All lengths 45 % too large, at `scores = 0.9`: the factor for which the threshold is lowered."""

    def inflated(sketch, total, degree):
        form = exact_form(scaled, degree)
        return Estimated(1.45 * form.matrix, 1.45**0.5 * form.size, form.gamma, degree)

    monkeypatch.setattr(sketched, "sketched_form", inflated)
    k = normal(6000, 4) * torch.rand(6000, 1, generator=generator(1)).double() ** -1
    scaled, scores = ScaledKeys(k, 2.0), (worst(k) * k).sum(-1)
    for eps in (0.001, 0.01, 0.1):
        sketch = Sketched(normalizers=0.9, scores=0.9, failure=0.3)
        chosen = sketched.sketched_parts(sketch, 10, 1, scaled, eps, 2.0, generator())[1]
        assert set((scores >= eps).nonzero().squeeze(-1).tolist()) <= set(chosen.tolist())


@pytest.mark.parametrize("scores", [None, 0.9])
def test_no_estimated_entry_is_missing_whatever_the_sketch(scores, monkeypatch):
    """Lengths wrong by a factor of nine along one axis and right along another: entries are those of the wrong ones."""
    wrong = torch.diag(torch.tensor([9.0, 1.0, 1 / 9, 2.0], dtype=torch.float64))

    def distorted(sketch, total, degree):
        form = exact_form(ScaledKeys(k[0, 0], 2.0), degree)
        matrix = wrong @ form.matrix @ wrong
        return Estimated(matrix, matrix.diagonal().sqrt(), form.gamma, degree)

    monkeypatch.setattr(sketched, "sketched_form", distorted)
    k = normal(1, 1, 6000, 4) * torch.rand(1, 1, 6000, 1, generator=generator(1)).double() ** -1
    q = torch.cat([worst(k)[:, :, :200], normal(1, 1, 50, 4, seed=3), worst(k)[:, :, :200] @ wrong.inverse() ** 2], 2)
    norm = (q @ wrong @ k.mT @ k * (q @ wrong)).sum(-1, keepdim=True)
    estimates = (q @ k.mT).square() / norm
    assert (estimates > 1).any()
    for eps in (0.003, 0.1):
        actual = sketched_entries(q, k, eps, sketch=Sketched(normalizers=0.9, scores=scores, failure=0.3))
        torch.testing.assert_close(dense(actual), torch.where(estimates >= eps, estimates, 0.0))


def test_the_first_look_discards_most_keys(monkeypatch):
    looks = spy(monkeypatch, sketched, "at_least")
    k = normal(20_000, 64)
    k[:40] *= 20
    scores = (worst(k) * k).sum(-1)
    chosen = sketched.sketched_parts(Sketched(scores=0.8), 10, 1, ScaledKeys(k, 2.0), 0.2, 2.0, generator())[1]
    assert torch.equal(chosen, (scores >= 0.9 * 0.2).nonzero().squeeze(-1))
    assert 5 < len(chosen) <= len(looks[0]) < 400


def test_keys_of_weak_directions_are_not_lost(monkeypatch):
    """Queries along a direction a billion times weaker than the others are answered from all scores."""
    direct_rows = spy(monkeypatch, search, "directly")
    k = normal(1, 1, 5000, 6)
    k[..., 5] = k[..., :5].sum(-1) + 1e-9 * k[..., 5]
    q = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, -1.0]], dtype=torch.float64).expand(1, 1, 5, 6)
    exact = heavy_entries(q, k, 1e-3)
    actual = sketched_entries(q, k, 1e-3, sketch=Sketched(normalizers=0.9, scores=0.9, numerators=0.9, failure=0.5))
    assert len(exact) > 50
    assert torch.equal(actual.indices, exact.indices)
    assert torch.equal(actual.values, exact.values)
    assert len(direct_rows) == 2


def test_numerators_err_as_rarely_as_promised():
    """Over queries, candidates and draws: `sqrt(A~)` is within a times the root of the score, with 1 - failure."""
    error, failure = 0.5, 0.4
    sketch = Sketched(numerators=error, failure=failure)
    k = normal(300, 64) * torch.rand(300, 1, generator=generator(1)).double() ** -1
    q = torch.cat([normal(100, 64, seed=2), worst(k)[:100], k[:100]])
    scale = ScaledKeys(k, 2.0)
    norm = exact_form(scale, 1).of(q).sqrt()[:, None]
    misses, bias = [], 0.0
    for seed in range(30):
        _, chosen, parts = sketched.sketched_parts(sketch, 300, 1, scale, 0.05, 2.0, generator(seed))
        assert parts.key.shape[1] == 22
        exact = (q @ k[chosen].mT) / norm
        estimate = ((q @ parts.query) @ parts.key.mT) / norm
        score = (worst(k)[chosen] * k[chosen]).sum(-1).sqrt()
        misses.append((estimate.abs() - exact.abs()).abs() > error * score)
        bias = bias + (estimate - exact) / 30
    rate = torch.stack([miss.double().mean() for miss in misses]).mean()
    assert 0 < rate < failure
    # Also for each pair on its own: 30 draws, binomial, of 300 x 100 pairs.
    worst_pair = torch.stack(misses).double().mean(0).amax()
    assert worst_pair < failure + 5.5 * math.sqrt(failure * (1 - failure) / 30)
    # Unbiased: the mean of 30 draws has a deviation of at most sqrt(2 / 22 / 30), over 30,000 pairs.
    assert bias.abs().max() < 6 * math.sqrt(2 / 22 / 30)


def test_entries_from_estimated_numerators():
    sketch = Sketched(numerators=0.5, failure=0.2)
    k = normal(1, 1, 500, 64) * torch.rand(1, 1, 500, 1, generator=generator(1)).double() ** -1
    q = worst(k)
    exact, actual = entries(q, k), dense(sketched_entries(q, k, 0.1, sketch=sketch))
    score = (worst(k) * k).sum(-1).sqrt()[:, :, None]
    off = (actual.sqrt() - exact.sqrt()).abs() > 0.5 * score
    assert (off & (actual > 0)).sum() <= 0.2 * (actual > 0).sum()
    sure = exact.sqrt() >= 0.1**0.5 + 0.5 * score
    assert sure.sum() > 20
    assert (actual[sure] > 0).double().mean() >= 0.8


@pytest.mark.long
def test_everything_together_and_in_half_the_precision():
    k = normal(2, 2, 30_000, 6).float()
    k[:, :, 5] *= 120
    k[:, :, 77] *= 250
    q = (k[:, :, [5, 77, 9]] * 1e-3 + 0.01 * normal(2, 2, 3, 6, seed=4).float()).repeat_interleave(2, 1)
    exact = entries(q.double(), k.double())
    lengths = torch.tensor([30_000, 29_000])
    for projection in PROJECTIONS:
        sketch = Sketched(0.6, 0.9, failure=0.1, projection=projection)
        actual = sketched_entries(q, k, 0.05, sketch=sketch)
        assert_within(actual, exact.float(), 0.05, 0.6, 1e-6)
        short = sketched_entries(q, k, 0.05, sketch=sketch, lengths=lengths)
        assert torch.equal(short.indices[:, short.indices[0] == 0], actual.indices[:, actual.indices[0] == 0])


@PROJECTION
def test_same_seed_same_answer(projection):
    k, q = normal(1, 2, 9000, 3), normal(1, 2, 50, 3, seed=1)
    sketch = Sketched(0.9, 0.9, failure=0.4, projection=projection)
    first = sketched_entries(q, k, 5e-4, sketch=sketch)
    second = sketched_entries(q, k, 5e-4, sketch=sketch, generator=generator(0))
    other = sketched_entries(q, k, 5e-4, sketch=sketch, generator=generator(1))
    assert torch.equal(first.values, second.values)
    assert not torch.equal(first.values[:50], other.values[:50])
    state = torch.get_rng_state()
    sketched_entries(q, k, 5e-4, sketch=sketch)
    assert torch.equal(state, torch.get_rng_state())


@PROJECTION
def test_sketches_as_large_as_the_keys_are_not_made(projection):
    k, q = normal(1, 1, 200, 4), normal(1, 1, 50, 4, seed=1)
    actual = sketched_entries(q, k, 0.02, sketch=Sketched(0.1, 0.5, 0.1, projection=projection))
    exact = heavy_entries(q, k, 0.02)
    assert torch.equal(actual.indices, exact.indices)
    assert torch.equal(actual.values, exact.values)


def test_blocks_do_not_matter(monkeypatch):
    """The Gram matrix of a sketch, and the scores, come in blocks."""
    k, q = normal(1, 1, 3000, 5), normal(1, 1, 40, 5, seed=1)
    sketch = Sketched(0.8, 0.9, failure=0.3, projection="hadamard")
    whole = sketched_entries(q, k, 2e-3, sketch=sketch)
    for module in (gram, search, sketched):
        monkeypatch.setattr(module, "BLOCK", 70)
    for module in (search, sketched):
        monkeypatch.setattr(module, "SCORES", 500)
    parts = sketched_entries(q, k, 2e-3, sketch=sketch)
    assert torch.equal(whole.indices, parts.indices)
    torch.testing.assert_close(whole.values, parts.values)


def test_bad_input_is_named():
    k = normal(1, 1, 50, 4)
    refusals = {
        r"Sketched: expected an error for normalizers, scores or numerators, got none": lambda: Sketched(),
        r"Sketched normalizers: expected a finite number in \(0.0, 1.0\), got 1.0": lambda: Sketched(1.0),
        r"Sketched scores: expected a number, got str": lambda: Sketched(scores="0.5"),
        r"Sketched numerators: expected a finite number": lambda: Sketched(numerators=0.0),
        r"Sketched failure: expected a finite number": lambda: Sketched(0.5, failure=1),
        r"Sketched projection: expected one of \['countsketch', 'gaussian', 'hadamard'\], got 'sparse'": lambda: (
            Sketched(0.5, projection="sparse")
        ),
        r"sketch: expected power=2 for scores and numerators, got power=4.0": lambda: sketched_entries(
            k, k, 0.1, 4.0, sketch=Sketched(scores=0.5)
        ),
        r"sketch: expected an even power .* got power=3.0": lambda: sketched_entries(
            k, k, 0.1, 3.0, sketch=Sketched(0.5)
        ),
        r"sketch: expected an even power with at most 2500 monomials in 4 variables, got power=60": (
            lambda: sketched_entries(k, k, 0.1, 60.0, sketch=Sketched(0.5))
        ),
        r"generator: expected a torch.Generator or None, got int": lambda: sketched_entries(
            k, k, 0.1, sketch=Sketched(0.5), generator=3
        ),
    }
    for message, call in refusals.items():
        with pytest.raises((ValueError, TypeError), match=f"^{message}"):
            call()
