"""What each selector keeps, held against its definition written out naively."""

import pytest
import torch
from hypothesis import given, strategies as st

import fewkeys as fk
from cases import CAUSAL_SHAPES, KEEPS, SHAPES
from executors import FORMS, rotated
from fewkeys.core.graph import visible
from fewkeys.core.validation import check_inputs
from fewkeys.sketch.clusters import clusters, frame, query_moments


@given(size=st.integers(1, 80), queries=st.integers(1, 40), keys=st.integers(1, 60), offset=st.integers(0, 30))
def test_window(size, queries, keys, offset):
    q, k = torch.zeros(1, 1, queries, 2), torch.zeros(1, 1, keys, 2)
    for causal in (False, True):
        mask = fk.Window(size).graph(q, k, is_causal=causal, query_offset=offset).to_mask()[0, 0]
        for i in range(queries):
            place = i + offset
            seen = range(place - size + 1, place + 1) if causal else range(place - size // 2, place + (size + 1) // 2)
            assert mask[i].nonzero().flatten().tolist() == [j for j in seen if 0 <= j < keys]


@given(count=st.integers(1, 12), lengths=st.lists(st.integers(0, 9), min_size=2, max_size=2))
def test_sinks_are_the_first_real_keys(count, lengths):
    x = torch.zeros(2, 1, 9, 2)
    mask = fk.Sinks(count).graph(x, x, lengths=torch.tensor(lengths)).to_mask()
    for b, n in enumerate(lengths):
        assert mask[b, 0, 0].nonzero().flatten().tolist() == list(range(min(count, n)))


@pytest.mark.parametrize("shape", ["plain", "grouped", "padded", "cross"])
def test_shared_keys_are_those_of_largest_score(shape):
    shape = SHAPES[shape]
    q, k, _ = shape.draw()
    lengths = shape.lengths or (shape.keys,) * shape.batch
    for keep in (fk.select.KeyNorm(5), fk.select.Leverage(7), fk.select.Leverage(7, centre=True)):
        mask = keep.graph(q, k, lengths=torch.tensor(lengths)).to_mask()
        for b, n in enumerate(lengths):
            for h in range(shape.query_heads):
                rows = k[b, h * shape.kv_heads // shape.query_heads, :n]
                if isinstance(keep, fk.select.KeyNorm):
                    score = rows.norm(dim=-1)
                else:
                    rows = rows - rows.mean(0) if keep.centre else rows
                    score = torch.einsum("nd,de,ne->n", rows, torch.linalg.pinv(rows.mT @ rows), rows)
                expected = score.topk(keep.count).indices.sort().values.tolist()
                assert (mask[b, h] == mask[b, h, :1]).all()
                assert mask[b, h, 0].nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("lengths", [None, (70, 33)])
def test_outliers_are_the_keys_of_largest_score(lengths):
    """g_j / 2 + log |x_j - centre of its cluster|."""
    x = check_inputs(*SHAPES["grouped"].draw(), lengths=lengths and torch.tensor(lengths))
    importance = query_moments(x).log_mean_exp(x.key - frame(x).mean)
    score = importance / 2 + clusters(x, 6).distance.log() / 2
    if lengths:
        score = score.masked_fill(~x.valid[:, None], -torch.inf)
    chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, score.topk(7).indices, True)
    mask = fk.Outliers(7, 6).select(x).to_mask()
    assert torch.equal(mask, chosen.repeat_interleave(3, 1).unsqueeze(2).expand_as(mask))


@pytest.mark.parametrize("cohorts", [1, 4])
@pytest.mark.parametrize("far", [4.0, 20.0])
def test_a_key_that_is_its_own_cluster_ranks_alike_in_every_precision(far, cohorts):
    """Its distance from the centre is nothing, of which rounding leaves something, or not."""
    keep = fk.Outliers(5, 8, cohorts=cohorts)
    for seed in range(12):
        draw = torch.Generator().manual_seed(seed)
        rows = [torch.randn(1, 2, 100, 8, generator=draw) for _ in range(3)]
        rows[1][:, :, 7] *= far
        want = keep.select(check_inputs(*(part.double() for part in rows), impl="reference")).to_mask()
        for impl in ("torch", "auto"):
            assert torch.equal(keep.select(check_inputs(*rows, impl=impl)).to_mask(), want)


@pytest.mark.parametrize("centre", [False, True])
def test_running_leverage_scores_all_keys_so_far(centre):
    """As a block of 32 is complete, its keys compete with those held, by scores against all keys before."""
    keys, count = 32 * 5, 40
    k = torch.randn(1, 1, keys, 6, generator=torch.Generator().manual_seed(0)).double() + 2.0
    held = []
    for stop in range(32, keys, 32):
        held += range(stop - 32, stop)
        rows = k[0, 0, :stop] - centre * k[0, 0, :stop].mean(0)
        score = torch.einsum("nd,de,ne->n", rows, torch.linalg.pinv(rows.mT @ rows), rows)
        held = sorted(held, key=lambda j, score=score: -score[j])[:count]
    mask = fk.select.Leverage(count, centre=centre).graph(k, k, is_causal=True).to_mask()
    assert mask[0, 0, -1].nonzero().flatten().tolist() == sorted(held)


@given(
    keep=st.sampled_from(
        [fk.Window(7), fk.Window(30), fk.select.RecentBlocks(8), fk.select.RecentBlocks(4, 3), fk.Sinks(9)]
    ),
    queries=st.integers(1, 20),
    keys=st.integers(1, 30),
    offset=st.integers(0, 30),
    causal=st.booleans(),
)
def test_who_covers_all_keeps_all(keep, queries, keys, offset, causal):
    x = (torch.zeros(1, 1, count, 2) for count in (queries, keys, keys))
    inputs = check_inputs(*x, is_causal=causal, query_offset=offset)
    if keep.covers(inputs):
        mask = keep.select(inputs).to_mask()
        assert torch.equal(mask, visible(inputs, 0, queries).expand_as(mask))


def test_top_k_and_best_columns_hold_the_most_mass():
    q, k, _ = SHAPES["grouped"].draw()
    weights = (q @ k.repeat_interleave(3, 1).mT / 8**0.5).softmax(-1)
    top = fk.TopK(5).graph(q, k).to_mask()
    assert (top.sum(-1) == 5).all()
    torch.testing.assert_close(fk.metrics.mass(weights, top), weights.topk(5).values.sum(-1))
    best = fk.select.BestColumns(5).graph(q, k).to_mask()
    columns = weights.unflatten(1, (2, 3)).sum((2, 3)).topk(5).indices
    expected = torch.zeros(2, 2, 70, dtype=torch.bool).scatter_(-1, columns, True).repeat_interleave(3, 1)
    assert torch.equal(best, expected.unsqueeze(2).expand_as(best))


def test_random_keys_are_uniform():
    x = torch.zeros(1, 1, 20, 2)
    drawn = torch.zeros(20)
    for seed in range(300):
        mask = fk.RandomKeys(5).graph(x, x, generator=torch.Generator().manual_seed(seed)).to_mask()[0, 0]
        assert mask[0].sum() == 5
        drawn += mask[0]
    # 300 draws of 5 from 20: mean 75 per key, standard deviation 7.5.
    assert (drawn - 75).abs().max() < 4.5 * 7.5


def test_importance_is_the_gaussian_integral():
    """g_j = log E exp(q . k_j), against a large sample of Gaussian queries with the same moments."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 200_000, 3, generator=g, dtype=torch.float64) * torch.tensor([1.0, 0.5, 0.2]) + 0.6
    k = torch.randn(1, 1, 6, 3, generator=g, dtype=torch.float64)
    inputs = check_inputs(q, k, k, scale=1.0)
    k = k - k.mean(2, keepdim=True)
    actual = query_moments(inputs).log_mean_exp(k)
    torch.testing.assert_close(actual, (q @ k.mT).exp().mean(2).log(), atol=0.02, rtol=0)


OTHERS = (fk.Window(3) | fk.Sinks(2), fk.TopK(2), fk.select.RecentBlocks(32, 1))
KNOWN = [c for c in rotated(KEEPS, FORMS, OTHERS) if KEEPS[c.values[0]].causal or not FORMS[c.values[1]].is_causal]


@pytest.mark.parametrize(("name", "form", "other"), KNOWN)
def test_graphs_are_consistent(name, form, other):
    """Slots tell what the mask tells; nothing hidden is kept; unions are unions."""
    keep, shape = KEEPS[name], FORMS[form]
    q, k, v = shape.draw()
    inputs = check_inputs(q, k, v, **shape.options)
    graph = keep.select(inputs)
    mask, seen = graph.to_mask(), visible(inputs, 0, shape.queries).expand(shape.batch, shape.query_heads, -1, -1)
    assert mask.shape == (shape.batch, shape.query_heads, shape.queries, shape.keys)
    assert not (mask & ~seen).any()
    real = torch.ones(shape.batch, shape.queries, dtype=torch.bool)
    if shape.lengths is not None and shape.queries == shape.keys:
        real = torch.arange(shape.queries) < torch.tensor(shape.lengths)[:, None]
    rows = real[:, None].expand(-1, shape.query_heads, -1)
    assert graph.slots() == pytest.approx(mask.sum(-1)[rows].double().mean().item())
    half = shape.queries // 2
    assert torch.equal(graph.mask(half, shape.queries), mask[:, :, half:])
    assert torch.equal(graph.mask(0, half), mask[:, :, :half])
    beside = other.select(inputs).to_mask()
    for united in (keep | other, other | keep):
        assert torch.equal(united.select(inputs).to_mask(), mask | beside)


@pytest.mark.parametrize("keep", [fk.select.KeyNorm(5), fk.select.Leverage(5), fk.RandomKeys(5)], ids=str)
def test_causal_lists_use_their_places(keep):
    """Once enough keys are complete every query keeps `count` of them; before, all that it may see up to `count`."""
    shape = CAUSAL_SHAPES["causal"]
    q, k, _ = shape.draw()
    kept = keep.graph(q, k, is_causal=True).to_mask().sum(-1)
    assert (kept[:, :, 64:] == 5).all()
    assert torch.equal(kept[0, 0, :64], torch.arange(1, 65).clamp_max(5))


def test_sizes_of_recent_blocks_are_powers_of_two():
    """Others are refused, and the error names the next ones."""
    for size in range(1, 34):
        lower = 1
        while 2 * lower <= size:
            lower *= 2
        if size == lower:
            assert fk.select.RecentBlocks(size).size == size
        else:
            with pytest.raises(ValueError, match=f"got {size}; take {lower} or {2 * lower}$"):
                fk.select.RecentBlocks(size)
