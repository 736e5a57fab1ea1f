"""`heavy_entries` equals brute force: the same indices, ties at eps included, and the same values."""

import math

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from executors import rotated
from fewkeys.papers.levattention import gram, heavy_entries, search
from fewkeys.papers.levattention.keys import ScaledKeys
from odd_keys import KINDS, keys


def brute(query, key, eps, power, lengths=None):
    """Indices (4, M), values, and the entries' distance to eps, from all scores."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).double()
    weights = (query.double() @ key.mT).abs() ** power
    if lengths is not None:
        weights = weights.masked_fill(torch.arange(key.shape[2]) >= lengths[:, None, None, None], 0.0)
    total = weights.sum(-1, keepdim=True)
    entries = torch.where(total > 0, weights / total, 0.0)
    index = (entries >= eps).nonzero().T
    return index, entries[tuple(index)], entries


def check(query, key, eps, power, lengths=None, exact=True):
    actual = heavy_entries(query, key, eps, power, lengths=lengths)
    index, values, entries = brute(query, key, eps, power, lengths)
    if not exact:
        # Sums in another order may put an entry that is eps up to rounding on either side.
        open_ = (entries / eps - 1).abs() < 1e-12
        seen = torch.zeros_like(entries, dtype=torch.bool)
        seen[tuple(actual.indices)] = True
        assert torch.equal(seen & ~open_, (entries >= eps) & ~open_)
        values = entries[tuple(actual.indices)]
    else:
        assert torch.equal(actual.indices, index)
    torch.testing.assert_close(actual.values.double(), values, rtol=1e-6, atol=0)
    return actual


def queries(key, kind, count, heads, generator):
    """Random queries, queries at keys, and the worst query (K^T K)^+ k_j of some keys."""
    b, h, n, d = key.shape
    if kind == "random":
        return torch.randn(b, heads, count, d, generator=generator, dtype=key.dtype)
    pick = torch.randint(0, n, (count,), generator=generator)
    rows = key[:, :, pick]
    if kind == "worst":
        rows = rows @ torch.linalg.pinv(key.mT @ key, hermitian=True)
    return rows.repeat_interleave(heads // h, 1)


@pytest.mark.parametrize(
    ("kind", "power", "aim"), rotated(KINDS, [2.0, 4.0, 6.0, 1.0, 2.5], ["random", "at keys", "worst"])
)
def test_equals_brute_force(kind, power, aim):
    g = torch.Generator().manual_seed(3)
    k = keys(kind, d=4)
    q = queries(k, aim, 260, 4, g)
    for eps in (0.013, 0.11, 0.43):
        # "duplicates" are ties by construction wherever eps happens to be met.
        check(q, k, eps, power, exact=kind != "duplicates")


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 300),
    d=st.integers(1, 9),
    rank=st.integers(0, 9),
    power=st.sampled_from([2.0, 2.0, 4.0, 6.0, 0.5, 3.0]),
    eps=st.floats(0.003, 0.9),
    groups=st.integers(1, 3),
    tail=st.floats(0.0, 3.0),
)
def test_equals_brute_force_on_drawn_problems(seed, n, d, rank, power, eps, groups, tail):
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(2, 2, n, d, generator=g, dtype=torch.float64)
    if rank < d:
        # Small integers keep the deficiency exact, so that orthogonal queries are exactly orthogonal.
        mix = torch.randint(-2, 3, (rank, d), generator=g).double()
        k = torch.randint(-2, 3, (2, 2, n, rank), generator=g).double() @ mix
    k = k * torch.rand(2, 2, n, 1, generator=g, dtype=k.dtype).clamp_min(1e-3) ** -tail
    q = torch.randn(2, 2 * groups, 90, d, generator=g, dtype=torch.float64)
    q[:, :, ::7] = 0
    lengths = torch.tensor([n, seed % (n + 1)])
    check(q, k, eps, power, lengths, exact=False)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), copies=st.integers(1, 12), d=st.integers(1, 5), power=st.sampled_from([2.0, 4.0]))
@example(seed=0, copies=4, d=1, power=2.0)
def test_ties_at_eps_are_entries(seed, copies, d, power):
    """Integer keys, each `copies` times, each along its own axis: entries are exactly eps = 1 / copies."""
    g = torch.Generator().manual_seed(seed)
    k = torch.diag(torch.randint(1, 9, (d,), generator=g).double()).repeat(copies, 1)
    k = k[torch.randperm(len(k), generator=g)][None, None]
    q = torch.diag(torch.randint(1, 9, (d,), generator=g).double()).repeat(30, 1)[None, None]
    eps = 1 / copies if copies > 1 else 0.5
    actual = check(q, k, eps, power)
    assert len(actual) == 30 * d * copies


@pytest.mark.parametrize("power", [60.0, 62.0, 500.0, 1000.0])
def test_high_powers_do_not_underflow(power):
    """`q^p G` would be subnormal, and few bits of it right."""
    g = torch.Generator().manual_seed(2)
    q, k = (0.6 + torch.rand(1, 1, n, 1, generator=g, dtype=torch.float64) / 9 for n in (300, 60))
    entries = (power * (q @ k.mT).log()).softmax(-1)
    expected = entries.where(entries >= 0.01, 0.0)
    torch.testing.assert_close(heavy_entries(q, k, 0.01, power).to_coo().to_dense(), expected)


@pytest.mark.parametrize("copies", [2, 4])
def test_ties_are_not_left_to_the_rounding_of_the_gram_matrix(copies):
    """The formula gives exactly 1 / copies here; `q^2 G` rounds to either side of `q^2 k^2 copies`."""
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 1, 1, generator=g, dtype=torch.float64).expand(1, 1, copies, 1)
    q = torch.randn(1, 1, 500, 1, generator=g, dtype=torch.float64)
    assert len(check(q, k, 1 / copies, 2.0)) == 500 * copies


STRUCTURES = [
    "random",
    "heavy tail",
    "rank deficient",
    "heavy ties",
    "one key each",
    "few directions",
    "offset",
    "sizes",
]


def case(number):
    """Problem `number` of 200: 25 of every structure, n from 1 to 2000. Integers keep ties and ranks exact."""
    g = torch.Generator().manual_seed(number)
    structure, turn = STRUCTURES[number % 8], number // 8
    n = 2000 if turn == 0 else int(2 ** (11 * float(torch.rand((), generator=g))) * 0.97) + 1
    d = int(torch.randint(1, 33, (), generator=g))
    k = torch.randn(n, d, generator=g, dtype=torch.float64)
    eps = float(torch.rand((), generator=g)) ** 3 * 0.6 + 0.003
    if structure == "heavy tail":
        k = k * torch.rand(n, 1, generator=g, dtype=k.dtype).clamp_min(1e-3) ** -1.5
    elif structure == "rank deficient":
        rank = (d + 1) // 2
        mix = torch.randint(-2, 3, (rank, d), generator=g).double()
        k = torch.randint(-2, 3, (n, rank), generator=g).double() @ mix
    elif structure == "heavy ties":  # every entry of an axis' queries is exactly eps
        copies = max(2, min(2 + turn, n // d))
        k = torch.eye(d, dtype=k.dtype).repeat(copies, 1) * torch.randint(1, 5, (d,), generator=g)
        eps = 1 / copies
    elif structure == "one key each":  # random signs
        k = torch.randint(0, 2, (n, d), generator=g).double() * 2 - 1
    elif structure == "few directions":
        k = torch.randint(-3, 4, (3, d), generator=g).double()[torch.randint(0, 3, (n,), generator=g)]
    elif structure == "offset":
        k = k + 10
    elif structure == "sizes":
        k = k * 10 ** torch.linspace(-3, 3, d, dtype=k.dtype)
    pick = torch.randint(0, len(k), (40,), generator=g)
    q = torch.cat([k[pick], torch.randint(-3, 4, (40, d), generator=g).double()])
    if turn % 2 and structure in ("random", "heavy tail", "offset"):
        q, k = q.float(), k.float()
    return q[None, None], k[None, None], eps, (2.0, 4.0, 2.0, 1.0, 6.0)[turn % 5]


@pytest.mark.parametrize("number", range(200))
def test_two_hundred_cases(number):
    check(*case(number))


def test_the_two_hundred_cases_are_what_they_say():
    problems = [case(number) for number in range(200)]
    assert sum(k.shape[2] == 2000 for _, k, *_ in problems) >= 6
    assert sum(int(torch.linalg.matrix_rank(k)) < min(k.shape[2:]) for _, k, *_ in problems) > 30
    ties = [(brute(*problem)[2] == problem[2]).sum() for problem in problems[3::8]]
    assert min(ties) >= 40


@pytest.mark.parametrize("n", [1500, 2000])
def test_equals_brute_force_on_many_keys(n):
    g = torch.Generator().manual_seed(n)
    k = torch.randn(1, 1, n, 16, generator=g, dtype=torch.float64) * torch.rand(1, 1, n, 1, generator=g).double() ** -1
    q = torch.cat([torch.randn(1, 1, 400, 16, generator=g, dtype=torch.float64), k[:, :, :400]], 2)
    for eps in (0.003, 0.02, 0.3):
        actual = check(q, k, eps, 2.0)
        assert len(actual) > 100


def test_several_blocks_of_keys_and_queries(monkeypatch):
    for module, name, size in (
        (gram, "BLOCK", 64),
        (gram, "BLOCK_FEATURES", 2048),
        (search, "SCORES", 2048),
        (search, "BLOCK", 64),
    ):
        monkeypatch.setattr(module, name, size)
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 2, 333, 5, generator=g, dtype=torch.float64).cumsum(2)
    q = torch.randn(1, 4, 150, 5, generator=g, dtype=torch.float64)
    for power in (1.0, 2.0, 4.0, 41.0):
        check(q, k, 0.004, power)


@pytest.mark.parametrize("power", [1001.0, 2000.0, 1e5])
def test_the_highest_powers_keep_the_largest_scores(power):
    """Under them scores near a half of the largest power of two vanish."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, n, 3, generator=g, dtype=torch.float64) for n in (20, 2000))
    actual = heavy_entries(q, k, 0.3, power)
    entries = ((q @ k.mT).abs().log() * power).softmax(-1)
    assert torch.equal(actual.indices, torch.stack((entries >= 0.3).nonzero(as_tuple=True)))
    torch.testing.assert_close(actual.values, entries[tuple(actual.indices)], rtol=1e-9, atol=0)


@pytest.mark.parametrize("power", [2.0, 4.0, 3.0])
@pytest.mark.parametrize("size", [1e-200, 1e-45, 1e-18, 1e18, 1e30, 1e200])
def test_sizes_of_keys_and_queries_do_not_matter(size, power):
    """A power of two over all keys, or over one column against the queries', changes no bit of the answer."""
    g = torch.Generator().manual_seed(0)
    dtype = torch.float32 if 1e-19 < size < 1e38 else torch.float64
    k = torch.randn(1, 1, 300, 5, generator=g).to(dtype) * torch.rand(1, 1, 300, 1, generator=g).to(dtype) ** -2
    q = torch.randn(1, 1, 90, 5, generator=g).to(dtype)
    plain = heavy_entries(q, k, 0.03, power)
    two = 2.0 ** round(math.log2(size))  # float32 keys stay normal numbers
    column = torch.tensor([1, 1, two, 1, 1], dtype=dtype)
    assert len(plain) > 50
    for moved in (heavy_entries(q * two, k / two, 0.03, power), heavy_entries(q / column, k * column, 0.03, power)):
        assert torch.equal(moved.indices, plain.indices)
        torch.testing.assert_close(moved.values, plain.values, rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_answered_in_float64(dtype):
    g = torch.Generator().manual_seed(0)
    k = (torch.randn(1, 1, 200, 6, generator=g) + 30).to(dtype)
    q = torch.randn(1, 1, 100, 6, generator=g).to(dtype)
    actual = check(q, k, 0.02, 2.0, exact=dtype == torch.float32)
    assert actual.values.dtype == torch.float32


def spy(monkeypatch):
    rows = []
    original = search.directly

    def counting(query, *rest):
        rows.append(query.shape[0])
        return original(query, *rest)

    monkeypatch.setattr(search, "directly", counting)
    return rows


def test_ordinary_queries_are_answered_by_the_gram_matrix(monkeypatch):
    rows = spy(monkeypatch)
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 5000, 8, generator=g)
    q = torch.randn(1, 1, 3000, 8, generator=g)
    for power in (2.0, 4.0):
        heavy_entries(q, k, 0.002, power)
    assert sum(rows) == 0


def test_queries_where_hardly_any_keys_are_are_answered_directly(monkeypatch):
    """The Gram matrix's normaliser is rounding noise for them."""
    rows = spy(monkeypatch)
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 400, 4, generator=g, dtype=torch.float64)
    k[..., 3] = k[..., :3].sum(-1) + 1e-9 * k[..., 3]
    q = torch.tensor([[1.0, 1.0, 1.0, -1.0]], dtype=torch.float64).expand(1, 1, 50, 4)
    actual = check(q, k, 0.01, 2.0)
    assert sum(rows) == 50
    assert len(actual) > 50


def test_candidates_are_read_in_float32_only_where_that_is_safe(monkeypatch):
    dtypes = []
    original = ScaledKeys.blocks

    def watching(keys, size, dtype=torch.float64):
        dtypes.append(dtype)
        return original(keys, size, dtype)

    monkeypatch.setattr(ScaledKeys, "blocks", watching)
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 500, 32, generator=g)
    q = torch.randn(1, 1, 90, 32, generator=g)
    heavy_entries(q, k, 0.01)
    k[..., :20] = 0  # columns that are absent are no weak directions
    heavy_entries(q, k, 0.01)
    assert dtypes == 2 * [torch.float64, torch.float32]
    check(q, k[..., 31:] + 1e-5 * torch.randn(1, 1, 500, 32, generator=g), 0.01, 2.0)
    assert dtypes[4:6] == [torch.float64, torch.float64]


def test_no_normaliser_no_entries():
    k = torch.zeros(2, 1, 5, 3)
    assert len(heavy_entries(torch.ones(2, 1, 40, 3), k, 0.1)) == 0
    k[1, 0, 2, 0] = 2.0
    q = torch.zeros(2, 1, 40, 3)
    q[:, :, 1, 1] = 1.0
    q[:, :, 2, 0] = -3.0
    for power in (0.5, 2.0, 4.0):
        actual = heavy_entries(q, k, 0.5, power)
        assert actual.indices.T.tolist() == [[1, 0, 2, 2]]
        assert actual.values.tolist() == [1.0]
    # Orthogonal but for rounding.
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 50, 3, generator=g, dtype=torch.float64) @ torch.randn(3, 6, generator=g, dtype=torch.float64)
    null = torch.linalg.svd(k[0, 0]).Vh[3:]
    assert len(heavy_entries(null[None, None].repeat(1, 1, 30, 1), k, 0.01)) == 0


def test_lengths_delete_keys():
    g = torch.Generator().manual_seed(0)
    k = torch.randn(2, 2, 50, 4, generator=g)
    q = torch.randn(2, 4, 60, 4, generator=g)
    actual = check(q, k, 0.05, 2.0, torch.tensor([50, 20]))
    short = heavy_entries(q[1:], k[1:, :, :20], 0.05)
    of_head = actual.indices[0] == 1
    assert torch.equal(actual.indices[1:, of_head], short.indices[1:])
    assert len(heavy_entries(q, k, 0.05, lengths=torch.tensor([0, 0]))) == 0


def test_the_sparse_form():
    g = torch.Generator().manual_seed(0)
    k = torch.randn(2, 2, 30, 4, generator=g, dtype=torch.float64)
    q = torch.randn(2, 4, 20, 4, generator=g, dtype=torch.float64)
    actual = heavy_entries(q, k, 0.1)
    _, _, entries = brute(q, k, 0.1, 2.0)
    expected = torch.where(entries >= 0.1, entries, 0.0)
    torch.testing.assert_close(actual.to_coo().to_dense(), expected)


def test_bad_input_is_named():
    k = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"^eps: expected a finite number in \(0.0, 1.0\)"):
        heavy_entries(k, k, 1.0)
    with pytest.raises(ValueError, match=r"^power: expected a finite number"):
        heavy_entries(k, k, 0.1, 0.0)
    with pytest.raises(ValueError, match=r"^query: expected a number of heads that is a multiple"):
        heavy_entries(k[:, :1], k, 0.1)
