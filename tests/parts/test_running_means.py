"""Summaries of the past: every key that left is in exactly one stand-in, and nothing is lost in merging."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fewkeys as fk
from cases import CAUSAL_SHAPES, RUNNING_PLANS
from fewkeys.core.validation import check_inputs
from fewkeys.sketch.summary import Summary, moments

SHAPE = CAUSAL_SHAPES["causal padded"]


def moments_of(query):
    """Of queries (B, Hkv, N, D)."""
    rows = torch.nn.functional.pad(query, (0, 1), value=1.0)
    return moments(rows.mT @ rows)


@pytest.mark.parametrize("plan", RUNNING_PLANS.values(), ids=RUNNING_PLANS)
def test_sizes_count_the_keys_that_no_list_holds(plan):
    q, k, v = SHAPE.draw()
    inputs = check_inputs(q, k, v, is_causal=True, lengths=torch.tensor(SHAPE.lengths))
    graph = plan.keep.select(inputs)
    actual = plan.rest.prepare(inputs, graph, plan.weights)
    kept, block = graph.to_mask(), graph.columns.block(inputs, 0, 150)
    visible = torch.ones(150, 150).tril().bool() & (
        torch.arange(150) < torch.tensor(SHAPE.lengths)[:, None, None, None]
    )
    # The first query of each block: later ones see more keys, which are all on the list.
    first = torch.tensor([int((block == b).nonzero()[0]) for b in range(graph.columns.blocks)])
    torch.testing.assert_close(actual.size.sum(-1), (visible & ~kept).sum(-1)[:, :, first].to(k.dtype))
    assert torch.equal(actual.size == 0, actual.bias == -torch.inf)


def test_with_room_for_all_the_plan_is_exact():
    q, k, v = CAUSAL_SHAPES["causal grouped"].draw()
    plan = fk.Plan(fk.select.RecentBlocks(16) | fk.Sinks(1), fk.rest.RunningMeans(150))
    for impl in ("torch", "reference"):
        actual = fk.attention(q, k, v, plan=plan, is_causal=True, impl=impl)
        torch.testing.assert_close(actual, fk.attention(q, k, v, is_causal=True), rtol=1e-9, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), places=st.integers(1, 9), tilted=st.booleans(), spread=st.sampled_from([0.0, 0.3, 2.0])
)
def test_absorbing_conserves_what_the_means_promise(seed, places, tilted, spread):
    """Sizes add up; untilted, so do size-weighted keys and values; heads do not interact."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    key, value = draw(2, 3, 24, 4) * spread, draw(2, 3, 24, 5)
    real = torch.rand(2, 3, 24, generator=g) < 0.8
    key, value = key * real[..., None], value * real[..., None]
    queries, rows = moments_of(draw(2, 3, 80, 4)), torch.cat([key, value], -1)
    summary = Summary.empty(places, rows)
    for part in range(3):
        part = slice(8 * part, 8 * part + 8)
        summary = summary.absorb(rows[:, :, part], real[:, :, part], queries, tilted=tilted)
    torch.testing.assert_close(summary.size.sum(-1), real.sum(-1).double())
    assert ((summary.size > 0).sum(-1) == real.sum(-1).clamp_max(places)).all()
    if not tilted:
        torch.testing.assert_close((summary.rows * summary.size[..., None]).sum(-2), rows.sum(-2))
    singles = summary.size == 1
    assert (summary.excess[singles] == 0).all()
    alone = Summary.empty(places, rows[:1, 1:2])
    of_head = type(queries)(queries.mean[:1, 1:2], queries.second[:1, 1:2])
    for part in range(3):
        part = (slice(0, 1), slice(1, 2), slice(8 * part, 8 * part + 8))
        alone = alone.absorb(rows[part], real[part], of_head, tilted=tilted)
    torch.testing.assert_close(alone.rows, summary.rows[:1, 1:2])
    torch.testing.assert_close(alone.excess, summary.excess[:1, 1:2])


@pytest.mark.parametrize("place", range(13))
def test_a_key_unlike_all_others_keeps_a_stand_in_of_its_own(place):
    """12 keys lie near two centres, and one is far away: after merging to 3 it is still the key itself."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(1, 1, *shape, generator=g, dtype=torch.float64)

    queries = moments_of(draw(500, 4))
    alike = draw(2, 4).repeat_interleave(6, 2)[:, :, torch.randperm(12, generator=g)] + 0.01 * draw(12, 4)
    alone = alike.new_tensor([3.0, -3.0, 3.0, -3.0]).expand(1, 1, 1, 4)
    rows = torch.cat([alike[:, :, :place], alone, alike[:, :, place:]], 2)
    real = torch.ones(1, 1, 13, dtype=torch.bool)
    both = torch.cat([rows, rows], -1)
    summary = Summary.empty(3, both).absorb(both, real, queries, tilted=True)
    assert (summary.rows[..., :4] == alone).all(-1).any()


def test_the_excess_makes_the_mass_right_halfway():
    """At the query t (m + C k), k the mean key, members and stand-in weigh the same, to first order in their spread."""
    g = torch.Generator().manual_seed(0)
    queries = moments_of(torch.randn(1, 1, 500, 6, generator=g, dtype=torch.float64) + 0.5)
    errors = []
    for spread in (0.1, 0.05):
        centre = torch.randn(1, 1, 1, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        key = centre + spread * torch.randn(1, 1, 8, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        rows, real = torch.cat([key, key], -1), torch.ones(1, 1, 8, dtype=torch.bool)
        summary = Summary.empty(1, rows).absorb(rows, real, queries, tilted=True)
        # The importance is that of keys less the mean of all, which here is the cluster's own mean.
        query = 0.5 * queries.mean
        truth = (key @ query.mT).logsumexp(-2)
        guess = summary.rows[..., :6] @ query.mT + summary.excess.unsqueeze(-1)
        errors.append(float((guess.squeeze(-2) - truth).abs()))
    assert errors[1] < 0.35 * errors[0] < 0.02


@pytest.mark.parametrize(
    "keep",
    [
        fk.Window(8),
        fk.Sinks(2),
        fk.select.RecentBlocks(8) | fk.Window(4),
        fk.select.RecentBlocks(8) | fk.TopK(3),
        fk.select.RecentBlocks(8) | fk.select.KeyNorm(3),
    ],
    ids=str,
)
def test_what_keeps_no_whole_blocks_is_refused(keep):
    with pytest.raises(ValueError, match=r"^keep: "):
        fk.Plan(keep, fk.rest.RunningMeans(4))


def test_stand_ins_of_the_past_need_a_past():
    q, k, v = CAUSAL_SHAPES["causal"].draw()
    with pytest.raises(ValueError, match=r"^is_causal: RunningMeans"):
        fk.attention(q, k, v, plan=RUNNING_PLANS["recent, running means"])


@pytest.mark.parametrize("size", [0, 3, 12])
def test_blocks_of_odd_sizes_are_refused(size):
    with pytest.raises(ValueError, match=r"^RecentBlocks size: "):
        fk.select.RecentBlocks(size)


@pytest.mark.parametrize("blocks", [2, 5])
@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_queries_far_behind_the_last_key_cost_no_more_than_near_ones(impl, blocks):
    """Nothing but the blocks of recent keys depends on a query's place, and far behind the keys these are empty."""
    plan = fk.Plan(fk.select.RecentBlocks(16, blocks) | fk.Sinks(4), fk.rest.RunningMeans(4))
    query, key, value = torch.randn(3, 1, 2, 70, 8, generator=torch.Generator().manual_seed(0))
    far = [
        fk.attention(query[:, :, :20], key, value, plan=plan, is_causal=True, query_offset=offset, impl=impl)
        for offset in (150, 500, 10**9 + 7, 10**18)
    ]
    for output in far[1:]:
        torch.testing.assert_close(output, far[0], rtol=1e-5, atol=1e-6)
