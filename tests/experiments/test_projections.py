"""Random projections are what they say, and keep lengths as often as their row counts promise, also for the vectors
that are worst for them."""

import math

import pytest
import torch
from experiments.levattention.projections import PROJECTIONS, CountSketch, Gaussian, Hadamard, hadamard
from hypothesis import given, strategies as st

ALL = pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(projection, total, rows, seed, block=64):
    """S itself (rows, total): the sketch of the identity."""
    eye = torch.eye(total, dtype=torch.float64)
    return projection.apply(iter(eye.split(block)), rows, generator(seed))


@pytest.mark.parametrize("size", [1, 2, 8, 64, 128, 1024])
def test_hadamard_is_the_matrix_of_signs(size):
    index = torch.arange(size)
    parity = sum((index[:, None] & index) >> bit & 1 for bit in range(11)) % 2
    expected = 1.0 - 2 * parity.double()
    assert torch.equal(hadamard(torch.eye(size, dtype=torch.float64)), expected)
    assert torch.equal(expected @ expected, size * torch.eye(size, dtype=torch.float64))


@ALL
@given(seed=st.integers(0, 1000), n=st.integers(1, 300), rows=st.integers(1, 20), d=st.integers(1, 5))
def test_the_sketch_of_a_matrix_is_one_random_matrix_times_it(projection, seed, n, rows, d):
    k = torch.randn(n, d, generator=generator(seed), dtype=torch.float64)
    rows = min(rows, n)
    sketch = projection.apply(iter(k.split(64)), rows, generator(seed))
    assert sketch.shape == (rows, d)
    torch.testing.assert_close(sketch, draw(projection, n, rows, seed) @ k)
    again = projection.apply(iter(k.split(64)), rows, generator(seed))
    assert torch.equal(sketch, again)
    if n * rows > 50:
        assert not torch.equal(sketch, projection.apply(iter(k.split(64)), rows, generator(seed + 1)))


def test_shapes_of_the_matrices():
    count = draw(CountSketch(), 200, 30, 0)
    assert torch.equal(count.abs().sum(0), torch.ones(200, dtype=torch.float64))
    assert count.sum(1).abs().max() < 15
    assert (count.abs().sum(1) > 0).all()
    flat = draw(Hadamard(), 200, 30, 0) * math.sqrt(30)
    torch.testing.assert_close(flat.abs(), torch.ones_like(flat))
    assert len(torch.unique(flat.round(), dim=0)) == 30
    dense = draw(Gaussian(), 200, 30, 0) * math.sqrt(30)
    assert abs(float(dense.var()) - 1) < 0.1
    assert abs(float(dense.mean())) < 0.05


@ALL
def test_squared_lengths_are_unbiased(projection):
    x = torch.randn(70, 1, generator=generator(1), dtype=torch.float64)
    lengths = torch.stack([projection.apply(iter([x]), 8, generator(seed)).square().sum() for seed in range(3000)])
    expected = float(x.square().sum())
    assert abs(float(lengths.mean()) - expected) < 4 * float(lengths.std()) / math.sqrt(3000)


def subspaces(total, rank):
    """Orthonormal columns: a random subspace, and single keys, on which CountSketches collide."""
    yield torch.linalg.qr(torch.randn(total, rank, generator=generator(2), dtype=torch.float64)).Q
    yield torch.eye(total, rank, dtype=torch.float64)


@ALL
def test_subspaces_are_kept_as_often_as_promised(projection):
    """The extreme eigenvalues of `U^T S^T S U` are the errors of the worst vectors there are."""
    total, rank, error, failure, turns = 1500, 3, 0.9, 0.4, 300
    rows = projection.rows_for_subspace(rank, total, error, failure)
    assert rows < total
    for basis in subspaces(total, rank):
        failed = 0
        for seed in range(turns):
            values = torch.linalg.svdvals(projection.apply(iter(basis.split(500)), rows, generator(seed))) ** 2
            failed += bool(values.amax() > 1 + error or values.amin() < 1 - error)
        assert failed <= failure * turns + 3 * math.sqrt(turns * failure * (1 - failure))


@ALL
def test_given_vectors_are_kept_as_often_as_promised(projection):
    total, count, error, failure, turns = 1500, 5, 0.9, 0.4, 300
    rows = projection.rows_for_vectors(count, total, error, failure)
    assert rows < total
    vectors = torch.randn(total, count, generator=generator(3), dtype=torch.float64)
    # Two keys, two keys that few rows of H tell apart, and a row of H.
    vectors[:, 2:4] = 0
    vectors[[0, 1], 2] = 1
    vectors[[0, 1024], 3] = 1
    vectors[:, 4] = 1
    vectors = vectors / vectors.norm(dim=0)
    failed = 0
    for seed in range(turns):
        lengths = projection.apply(iter(vectors.split(500)), rows, generator(seed)).square().sum(0)
        failed += bool(((lengths - 1).abs() > error).any())
    assert failed <= failure * turns + 3 * math.sqrt(turns * failure * (1 - failure))


def test_rare_failures_are_rare():
    """The tail of chi-squared, where the bound is sharp enough to be tested."""
    x = torch.ones(60, 1, dtype=torch.float64) / math.sqrt(60)
    rows = Gaussian().rows_for_vectors(1, 60, 0.5, 0.02)
    lengths = torch.stack([Gaussian().apply(iter([x]), rows, generator(s)).square().sum() for s in range(1000)])
    assert int(((lengths - 1).abs() > 0.5).sum()) <= 0.02 * 1000 + 3 * math.sqrt(20)


def test_the_bounds_are_not_far_from_the_truth():
    """With a few times fewer rows the promise would be broken, so the constants mean something."""
    basis, turns = torch.eye(1500, 3, dtype=torch.float64), 300
    # Chebyshev loses a factor of two and the error's square against a collision of two keys.
    rows = CountSketch().rows_for_subspace(3, 1500, 0.9, 0.4)
    failed = sum(
        float(torch.linalg.svdvals(CountSketch().apply(iter([basis]), rows // 6, generator(seed))).amin()) < 0.3
        for seed in range(turns)
    )
    assert failed > 0.4 * turns
    x = torch.ones(50, 1, dtype=torch.float64) / math.sqrt(50)
    rows = Gaussian().rows_for_vectors(1, 50, 0.5, 0.05)
    lengths = torch.stack([Gaussian().apply(iter([x]), rows // 4, generator(s)).square().sum() for s in range(500)])
    assert float(((lengths - 1).abs() > 0.5).double().mean()) > 0.05


@ALL
@given(
    error=st.floats(0.01, 0.9),
    failure=st.floats(1e-6, 0.5),
    count=st.integers(1, 10**6),
    total=st.integers(2, 10**7),
)
def test_row_counts_grow_with_what_is_asked(projection, error, failure, count, total):
    asked = projection.rows_for_vectors(count, total, error, failure)
    assert asked >= 1
    assert asked <= projection.rows_for_vectors(count, total, error / 2, failure)
    assert asked <= projection.rows_for_vectors(count, total, error, failure / 2)
    assert asked <= projection.rows_for_vectors(2 * count, total, error, failure)
    rank = min(count, 500)
    whole = projection.rows_for_subspace(rank, total, error, failure)
    assert rank <= whole <= projection.rows_for_subspace(rank + 1, total, error / 2, failure)
