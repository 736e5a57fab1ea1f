"""Law 3: padding changes nothing: a padded sequence gives what the sequence alone would."""

import pytest
import torch

import fewkeys as fk
from cases import CASES, CAUSAL_PLANS, CAUSAL_SHAPES, PLANS, SHAPES, Shape

PLANS = {name: plan for name, plan in PLANS.items() if not CASES[name].draws}
"""Draws of different length differ; that draws ignore the data is law 6."""


def check(plan, shape, impl):
    q, k, v = shape.draw()
    n = shape.lengths[1]
    queries = n if shape.queries == shape.keys else shape.queries
    # Whatever stands in the padding must not matter.
    k[1, :, n:], v[1, :, n:] = 1e4, -1e4
    options = {**shape.options, "lengths": None}
    padded = fk.attention(q, k, v, plan=plan, impl=impl, **shape.options)[1:, :, :queries]
    alone = fk.attention(q[1:, :, :queries], k[1:, :, :n], v[1:, :, :n], plan=plan, impl=impl, **options)
    torch.testing.assert_close(padded, alone, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("shape", ["padded", "cross padded"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_bidirectional(plan, shape, impl):
    check(plan, SHAPES[shape], impl)


@pytest.mark.parametrize("plan", [p for n, p in CAUSAL_PLANS.items() if not CASES[n].draws], ids=str)
def test_causal(plan):
    check(plan, CAUSAL_SHAPES["causal padded"], "torch")


@pytest.mark.parametrize("keep", [None, fk.Sinks(3), fk.Leverage(5), fk.TopK(4), fk.Outliers(4, 6)], ids=str)
def test_left_padding_by_key_mask(keep):
    """Selectors that do not look at positions give on left-padded keys what they give on the real ones alone."""
    q, k, v = SHAPES["cross"].draw()
    mask = torch.ones(2, 90, dtype=torch.bool)
    mask[0, :41] = False
    found = fk.attention(q, k, v, keep=keep, key_mask=mask, impl="torch")
    alone = fk.attention(q[:1], k[:1, :, 41:], v[:1, :, 41:], keep=keep, impl="torch")
    torch.testing.assert_close(found[:1], alone, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("rank", [0, 3])
def test_long_padding_does_not_change_which_keys_are_sampled(rank, monkeypatch):
    """Lloyd's steps and the query moments read every s-th token once there are many: s may not count the padding."""
    from fewkeys.sketch import clusters

    monkeypatch.setattr(clusters, "QUERY_SAMPLE", 50)
    plan = fk.Plan(fk.Outliers(4, 4) | fk.Window(5), fk.ClusterMeans(4, rank))
    check(plan, Shape(queries=700, keys=700, lengths=(700, 290)), "torch")
    check(plan, Shape(queries=700, keys=700, lengths=(650, 90)), "torch")


def test_lengths_and_the_same_key_mask_agree():
    q, k, v = SHAPES["padded"].draw()
    lengths = torch.tensor([70, 33])
    mask = torch.arange(70) < lengths[:, None]
    plan = fk.budget(16)
    by_lengths = fk.attention(q, k, v, plan=plan, lengths=lengths, impl="torch")
    assert torch.equal(by_lengths, fk.attention(q, k, v, plan=plan, key_mask=mask, impl="torch"))
