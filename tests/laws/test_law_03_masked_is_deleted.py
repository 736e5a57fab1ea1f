"""Law 3: padding changes nothing: a padded sequence gives what the sequence alone would."""

import pytest
import torch

import fewkeys as fk
from cases import CASES, CAUSAL_PLANS, PLANS, SHAPES, Shape
from executors import FORMS, WAYS, Way, runs

PLANS = {name: plan for name, plan in PLANS.items() if not CASES[name].draws}
"""Draws of different length differ; that draws ignore the data is law 6."""
CAUSAL = {name: plan for name, plan in CAUSAL_PLANS.items() if not CASES[name].draws}


def check(plan, shape, way):
    q, k, v = shape.draw(dtype=way.dtype)
    n = shape.lengths[1]
    queries = n if shape.queries == shape.keys else shape.queries
    # Whatever stands in the padding must not matter.
    k[1, :, n:], v[1, :, n:] = 1e4, -1e4
    q[1, :, queries:] = 100.0
    options = {**shape.options, "lengths": None}
    padded = way.attend(q, k, v, plan=plan, **shape.options)[1:, :, :queries]
    alone = way.attend(q[1:, :, :queries], k[1:, :, :n], v[1:, :, :n], plan=plan, **options)
    way.assert_close(padded, alone, times=2)


@pytest.mark.parametrize(("name", "form", "way"), runs(PLANS, ["padded", "cross padded"]))
def test_bidirectional(name, form, way):
    check(PLANS[name], FORMS[form], way)


@pytest.mark.parametrize(("name", "form", "way"), runs(CAUSAL, ["causal padded"]))
def test_causal(name, form, way):
    check(CAUSAL[name], FORMS[form], way)


@pytest.mark.parametrize(("name", "form", "way"), runs(CAUSAL, ["causal padded"]))
def test_causal_left_padding(name, form, way):
    """Positions count from the first real token on, for whole sequences and for the last queries of one."""
    shape, plan = FORMS[form], CAUSAL[name]
    q, k, v = shape.draw(dtype=way.dtype)
    mask = torch.arange(shape.keys) >= torch.tensor([[0], [shape.keys - shape.lengths[1]]])
    mask[1, -9:-6] = False
    k, v = (rows.masked_fill(~mask[:, None, :, None], 1e4) for rows in (k, v))
    for last in (shape.keys, 7):
        offset = {"is_causal": True, "query_offset": shape.keys - last}
        actual = way.attend(q[:, :, -last:], k, v, plan=plan, key_mask=mask, **offset)
        for row, real in enumerate(mask):
            one, asked = slice(row, row + 1), real[-last:]
            queries, keys, values = q[one, :, -last:][:, :, asked], k[one, :, real], v[one, :, real]
            offset["query_offset"] = keys.shape[2] - queries.shape[2]
            way.assert_close(actual[one, :, asked], way.attend(queries, keys, values, plan=plan, **offset), times=2)
            sees_none = real.cumsum(0)[-last:] == 0
            assert not actual[one, :, sees_none].any()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("keep", [None, fk.Sinks(3), fk.select.Leverage(5), fk.TopK(4), fk.Outliers(4, 6)], ids=str)
def test_left_padding_by_key_mask(keep, way):
    """Selectors that do not look at positions give on left-padded keys what they give on the real ones alone."""
    if way.impl == "native" and keep == fk.TopK(4):
        return  # refused: a list for every query
    q, k, v = SHAPES["cross"].draw(dtype=way.dtype)
    mask = torch.ones(2, 90, dtype=torch.bool)
    mask[0, :41] = False
    actual = way.attend(q, k, v, keep=keep, key_mask=mask)
    alone = way.attend(q[:1], k[:1, :, 41:], v[:1, :, 41:], keep=keep)
    way.assert_close(actual[:1], alone, times=2)


@pytest.mark.parametrize("rank", [0, 3])
def test_long_padding_does_not_change_which_keys_are_sampled(rank, monkeypatch):
    """Lloyd's steps and the query moments read every s-th token once there are many: s may not count the padding."""
    from fewkeys.sketch import clusters

    monkeypatch.setattr(clusters, "QUERY_SAMPLE", 50)
    plan = fk.Plan(fk.Outliers(4, 4) | fk.Window(5), fk.ClusterMeans(4, rank))
    for way in (Way("torch", torch.float64), *(way for way in WAYS if way.impl == "native")):
        check(plan, Shape(queries=700, keys=700, lengths=(700, 290)), way)
        check(plan, Shape(queries=700, keys=700, lengths=(650, 90)), way)


def test_lengths_and_the_same_key_mask_agree():
    q, k, v = SHAPES["padded"].draw()
    lengths = torch.tensor([70, 33])
    mask = torch.arange(70) < lengths[:, None]
    plan = fk.budget(16)
    by_lengths = fk.attention(q, k, v, plan=plan, lengths=lengths, impl="torch")
    assert torch.equal(by_lengths, fk.attention(q, k, v, plan=plan, key_mask=mask, impl="torch"))


@pytest.mark.parametrize("filler", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("keep", [None, fk.Sinks(90)], ids=str)
def test_padding_may_be_anything_where_the_answer_is_exact(keep, filler):
    """It is not zero there; scores beyond all floats would be no numbers under a mask."""
    q, k, v = SHAPES["cross"].draw(dtype=torch.float32)
    q = 100 * q
    alone = fk.attention(q, k[:, :, :41], v[:, :, :41], keep=keep)
    k[:, :, 41:], v[:, :, 41:] = filler, -filler
    torch.testing.assert_close(fk.attention(q, k, v, keep=keep, lengths=torch.tensor([41, 41])), alone)
