"""Patterns and draws against their papers' definitions, written out naively; what is special to each."""

import itertools
import math

import pytest
import torch
from experiments.sparsefinder import baselines

import fewkeys as fk
from baseline_forms import (
    FORMS,
    SELF,
    assert_same,
    by_definition,
    mask_of,
    real_counts,
)
from fewkeys.papers import sparsefinder
from fewkeys.papers.sparsefinder import patterns

# --- patterns of positions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("window", "count"), [(1, 1), (5, 3), (3, 30)])
def test_longformer(form, window, count):
    def edge(b, i, j):
        near = i - window < j <= i if form.is_causal else abs(i - j) <= window // 2
        return near or i < count or j < count

    assert_same(mask_of(baselines.Longformer(window, count), form), form, edge)
    union = fk.Window(window) | sparsefinder.GlobalTokens(count)
    assert torch.equal(mask_of(baselines.Longformer(window, count), form), mask_of(union, form))


def test_global_tokens_are_the_first_real_ones():
    q, k, _ = SELF.draw()
    padding = torch.arange(23) < 4
    mask = (
        sparsefinder.GlobalTokens(2)
        .graph(q, k, key_mask=torch.stack([~padding, torch.ones(23, dtype=torch.bool)]))
        .to_mask()
    )
    for b, first in ((0, 4), (1, 0)):
        chosen = [first, first + 1]
        assert mask[b, 0, :, chosen].all()
        assert mask[b, 0, chosen, first:].all()
        assert not mask[b, 0, first + 2 :, first + 2 :].any()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("stride", [1, 4, 7, 40])
def test_strided(form, stride):
    assert_same(
        mask_of(baselines.Strided(stride), form), form, lambda b, i, j: abs(i - j) <= stride or (i - j) % stride == 0
    )


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("stride", "summary"), [(1, 1), (4, 1), (7, 3), (40, 2)])
def test_fixed(form, stride, summary):
    def edge(b, i, j):
        return i // stride == j // stride or j % stride >= stride - summary

    assert_same(mask_of(baselines.Fixed(stride, summary), form), form, edge)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("size", "window", "count"), [(1, 3, 2), (4, 1, 0), (4, 3, 1), (2, 5, 1)])
def test_bigbird_without_random_blocks(form, size, window, count):
    def edge(b, i, j):
        return abs(i // size - j // size) <= window // 2 or i < size * count or j < size * count

    assert_same(mask_of(baselines.BigBird(size, window, 0, count), form), form, edge)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("random", [1, 3, 9])
def test_bigbird_draws_blocks_of_the_others(form, random):
    """As many whole blocks as were asked for, or all there are, none of the window or the globals or the future."""
    size = 2
    without, drawn = (
        mask_of(baselines.BigBird(size, 3, 0, 1), form),
        mask_of(baselines.BigBird(size, 3, random, 1), form),
    )
    seen = by_definition(form, lambda b, i, j: True)
    for b, (queries, keys) in enumerate(real_counts(form)):
        for h, i in itertools.product(range(form.query_heads), range(queries)):
            place = i + form.query_offset
            blocks = range(1, math.ceil(keys / size))
            others = [c for c in blocks if (c < place // size - 1 if form.is_causal else abs(c - place // size) > 1)]
            if place < size:
                continue  # global itself
            actual = {j // size for j in (drawn & ~without)[b, h, i].nonzero().flatten().tolist()}
            assert actual <= set(others)
            assert len(actual) == min(random, len(others))
            whole = [j for c in actual for j in range(c * size, (c + 1) * size) if j < keys]
            assert drawn[b, h, i, whole].all()
    assert not (drawn & ~seen).any()
    assert (without <= drawn).all()


def test_bigbird_draws_evenly_and_anew_for_every_block_and_head():
    drawn = torch.zeros(10)
    x = torch.zeros(1, 2, 40, 2)
    for seed in range(200):
        mask = baselines.BigBird(4, 3, 2, 1).graph(x, x, generator=torch.Generator().manual_seed(seed)).to_mask()[0]
        assert not torch.equal(mask[0], mask[1])
        drawn += mask[0, 24, ::4]  # block 6: window 5, 6, 7 and global 0 always, two of the six others
    fair = torch.tensor([200.0, *[200 / 3] * 4, 200, 200, 200, *[200 / 3] * 2])
    # 200 draws with probability 1/3: standard deviation 6.7.
    assert (drawn - fair).abs().max() < 4.5 * 6.7


# --- draws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("count", [1, 6, 40])
def test_random_edges_are_as_many_as_there_are_visible_keys(form, count):
    mask = mask_of(sparsefinder.RandomEdges(count), form)
    seen = by_definition(form, lambda b, i, j: True)
    for b, (queries, _) in enumerate(real_counts(form)):
        assert torch.equal(mask[b, :, :queries].sum(-1), seen[b, :, :queries].sum(-1).clamp_max(count))
    assert not (mask & ~seen).any()


def test_random_edges_are_uniform_and_each_querys_own():
    drawn = torch.zeros(20, 20)
    x = torch.zeros(1, 1, 20, 2)
    for seed in range(300):
        mask = sparsefinder.RandomEdges(5).graph(x, x, generator=torch.Generator().manual_seed(seed)).to_mask()[0, 0]
        assert not (mask == mask[:1]).all()
        drawn += mask
    # Mean 75 and standard deviation 7.5 for every pair; the largest of 400.
    assert (drawn - 75).abs().max() < 5 * 7.5


def test_blocks_of_queries_draw_random_edges_of_their_own(monkeypatch):
    """Without a generator, too."""
    monkeypatch.setattr(patterns, "query_blocks", lambda inputs: [(0, 10), (10, 20)])
    x = torch.zeros(1, 1, 20, 2)
    mask = sparsefinder.RandomEdges(5).graph(x, x).to_mask()[0, 0]
    assert not torch.equal(mask[:10], mask[10:])
