"""Law 7: the weights of kept keys and stand-ins sum to one, and every real key is represented exactly once."""

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_PLANS, CAUSAL_SHAPES, PLANS, RESTS, RUNNING_PLANS, SHAPES
from executors import FORMS, WAYS, runs, ways

SUMMING = [name for name, plan in CAUSAL_PLANS.items() if plan.weights != fk.weights.Relu(2.0)]
EVENLY = [way for way in WAYS if way.impl in ("reference", "torch", "native")]
COUNTING = [name for name, plan in RUNNING_PLANS.items() if plan.weights == fk.Softmax()]


@pytest.mark.parametrize(("name", "form", "way"), runs(PLANS, ["plain", "padded", "grouped"]))
def test_weights_sum_to_one(name, form, way):
    """Constant values come back unchanged."""
    shape = FORMS[form]
    q, k, v = shape.draw(dtype=way.dtype)
    constant = torch.arange(1.0, v.shape[-1] + 1, dtype=v.dtype).expand_as(v)
    actual = way.attend(q, k, constant, plan=PLANS[name], **shape.options)
    if shape.lengths is not None:
        actual[1, :, shape.lengths[1] :] = constant[1, :, shape.lengths[1] :]  # queries of padding
    empty = (actual == 0).all(-1)  # a row on which relu vanishes has no weights
    way.assert_close(actual[~empty], constant[:1, :1, :1].expand_as(actual)[~empty])
    assert empty.float().mean() < 0.2


@pytest.mark.parametrize(("name", "form", "way"), runs(SUMMING, ["causal", "causal grouped", "causal with offset"]))
def test_weights_sum_to_one_causal(name, form, way):
    q, k, v = FORMS[form].draw(dtype=way.dtype)
    actual = way.attend(q, k, torch.ones_like(v), plan=CAUSAL_PLANS[name], **FORMS[form].options)
    way.assert_close(actual, torch.ones_like(actual))


@pytest.mark.parametrize("form", ["causal", "causal grouped", "causal padded"])
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in COUNTING for way in ways(name, True) if way in EVENLY], ids=str
)
def test_the_past_counts_every_key_once(name, form, way):
    """With all scores equal and no tilt, query i answers with the mean of values 0 .. i."""
    shape, plan = CAUSAL_SHAPES[form], CAUSAL_PLANS[name]
    _, k, v = shape.draw(dtype=way.dtype)
    k = k * 1e-6  # else keys that random queries would look at count for more in their mean
    q = torch.zeros(shape.batch, shape.query_heads, shape.queries, shape.head_dim, dtype=way.dtype)
    actual = way.attend(q, k, v, plan=plan, **shape.options)
    mean = v.double().cumsum(2) / torch.arange(1, shape.keys + 1)[:, None]
    mean = mean.repeat_interleave(shape.query_heads // shape.kv_heads, 1)
    for b, n in enumerate((shape.keys,) * 2 if shape.lengths is None else shape.lengths):
        way.assert_close(actual[b, :, :n], mean[b, :, :n])


@pytest.mark.parametrize("way", EVENLY, ids=str)
@pytest.mark.parametrize("rest", ["means", "first-order means", "sample"])
@pytest.mark.parametrize("window", [1, 6, 11, 41])
@pytest.mark.parametrize("lengths", [None, (70, 33)], ids=["full", "padded"])
def test_kept_keys_and_stand_ins_count_every_key_once(rest, window, lengths, way):
    """With all scores equal each of n keys weighs 1 / n: so the 7 keys that no stand-in speaks for weigh 7 / n.

    That fails as soon as the multiplicities miss a key, or count one that the query's own window keeps.
    """
    _, k, v = SHAPES["plain"].draw(dtype=way.dtype)
    q, lengths = torch.zeros_like(k), None if lengths is None else torch.tensor(lengths)
    listed = fk.select.Leverage(7).graph(q, k, lengths=lengths).to_mask()[:, :, 0]
    marked = listed[..., None].to(v.dtype).expand_as(v).contiguous()
    keep = fk.select.Leverage(7) | fk.Window(window)
    actual = way.attend(q, k, marked, keep=keep, rest=RESTS[rest], lengths=lengths)
    for b, n in enumerate((70, 70) if lengths is None else lengths.tolist()):
        way.assert_close(actual[b, :, :n], torch.full_like(actual[b, :, :n].double(), 7 / n))


@pytest.mark.parametrize("way", EVENLY, ids=str)
def test_means_without_window_are_exact_for_indifferent_queries(way):
    _, k, v = SHAPES["plain"].draw(dtype=way.dtype)
    q = torch.zeros_like(k)
    for rest in (fk.ClusterMeans(8), fk.ClusterMeans(8, rank=3)):
        actual = way.attend(q, k, v, keep=fk.select.Leverage(7), rest=rest)
        way.assert_close(actual, v.double().mean(-2, keepdim=True).expand_as(actual))


def test_members_partition_the_keys_not_kept():
    from fewkeys.core.validation import check_inputs
    from fewkeys.rest.base import unkept

    q, k, v = SHAPES["padded"].draw()
    q = torch.zeros_like(q)  # no tilt: every member weighs 1
    inputs = check_inputs(q, k, v, lengths=torch.tensor([70, 33]))
    graph = fk.select.Leverage(7).select(inputs)
    kept = graph.to_mask()[:, :, 0]
    for name, rest in RESTS.items():
        stand_ins = rest.prepare(inputs, graph, fk.Softmax())
        if stand_ins is None:
            assert name == "drop"
            continue
        held = stand_ins.member(unkept(inputs, graph)).sum(-1)
        real = torch.arange(70) < torch.tensor([70, 33])[:, None, None]
        torch.testing.assert_close(held, (real & ~kept).to(held.dtype))
