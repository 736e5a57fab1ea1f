"""Law 1: keeping every key is exact attention, whatever else the plan says, and exact attention is torch's own."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import fewkeys as fk
from cases import CAUSAL_SHAPES, SHAPES, WEIGHTS
from executors import FORMS, WAYS, rotated, support
from fewkeys.core.validation import check_inputs
from fewkeys.execute.dispatch import EXECUTORS
from fewkeys.execute.problem import prepare

EVERY_KEY = {
    "window": fk.Window(1000),
    "sinks": fk.Sinks(1000),
    "leverage": fk.select.Leverage(1000),
    "key norm": fk.select.KeyNorm(1000),
    "random": fk.RandomKeys(1000),
    "top-k": fk.TopK(1000),
    "leverage + window": fk.select.Leverage(1000) | fk.Window(3),
    "key scan": fk.KeyScan(1000),
}


def by_definition(query, key, value, shape, weights):
    """Attention by its formula, one query head at a time."""
    heads = []
    for h in range(shape.query_heads):
        kv = h // (shape.query_heads // shape.kv_heads)
        scores = query[:, h] @ key[:, kv].mT / shape.head_dim**0.5
        seen = torch.ones(shape.batch, shape.queries, shape.keys, dtype=torch.bool)
        if shape.is_causal:
            place = torch.arange(shape.queries)[:, None] + shape.query_offset
            seen &= torch.arange(shape.keys) <= place
        if shape.lengths is not None:
            seen &= torch.arange(shape.keys) < torch.tensor(shape.lengths)[:, None, None]
        heads.append(weights.normalised(scores.masked_fill(~seen, -torch.inf)) @ value[:, kv])
    return torch.stack(heads, 1)


@pytest.mark.parametrize(("form", "name", "impl"), rotated(FORMS, WEIGHTS, ["auto", "torch", "reference"]))
def test_no_plan_is_the_definition(form, name, impl):
    shape, weights = FORMS[form], WEIGHTS[name]
    q, k, v = shape.draw()
    actual = fk.attention(q, k, v, weights=weights, impl=impl, **shape.options)
    torch.testing.assert_close(actual, by_definition(q, k, v, shape, weights), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
def test_entmax_is_the_definition(shape, alpha):
    """Weights add up to one, and are `max(0, (alpha - 1) s - tau)^(1 / (alpha - 1))`, one tau for every query."""
    q, k, _ = shape.draw()
    one_each = torch.eye(shape.keys, dtype=q.dtype).expand(shape.batch, shape.kv_heads, -1, -1)
    weight = fk.attention(q, k, one_each, weights=fk.weights.Entmax(alpha), **shape.options)
    scores = q @ k.repeat_interleave(shape.query_heads // shape.kv_heads, 1).mT / shape.head_dim**0.5
    seen = torch.ones(shape.batch, 1, shape.queries, shape.keys, dtype=torch.bool)
    if shape.is_causal:
        seen &= torch.arange(shape.keys) <= torch.arange(shape.queries)[:, None] + shape.query_offset
    if shape.lengths is not None:
        seen &= torch.arange(shape.keys) < torch.tensor(shape.lengths)[:, None, None, None]
    torch.testing.assert_close(weight.sum(-1), seen.any(-1).to(q.dtype).expand(weight.shape[:-1]))
    height = (alpha - 1) * scores
    tau = (height - weight ** (alpha - 1)).masked_fill(weight <= 1e-4, -torch.inf).amax(-1, keepdim=True)
    expected = (height - tau).clamp_min(0) ** (1 / (alpha - 1))
    torch.testing.assert_close(weight, expected.masked_fill(~seen, 0.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("form", "name", "impl"), rotated(FORMS, EVERY_KEY, ["auto", "reference"]))
def test_full_budget(form, name, impl):
    """Stand-ins, where the shape allows them, have nothing left to stand in for."""
    shape, keep = FORMS[form], EVERY_KEY[name]
    rest = fk.Drop() if shape.is_causal else fk.ClusterMeans(4, rank=2)
    rest = fk.BlockMeans(3) if isinstance(keep, fk.KeyScan) else rest
    q, k, v = shape.draw()
    actual = fk.attention(q, k, v, keep=keep, rest=rest, impl=impl, **shape.options)
    torch.testing.assert_close(actual, by_definition(q, k, v, shape, fk.Softmax()), rtol=1e-9, atol=1e-10)


ONE_WAY = {**EVERY_KEY, "recent blocks": fk.select.RecentBlocks(8, 100), "wide window": fk.Window(901)}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_executor_is_exact_on_a_full_budget(form, way):
    """The executors themselves: plans that cover everything never reach them through the front door."""
    shape, tried = FORMS[form], 0
    q, k, v = shape.draw(dtype=way.dtype)
    inputs = check_inputs(q, k, v, impl=way.impl, **shape.options)
    expected = by_definition(q.double(), k.double(), v.double(), shape, fk.Softmax())
    for keep in ONE_WAY.values():
        # A budget far beyond the keys there are is exact without and with stand-ins, which have nobody to speak for.
        means = fk.BlockMeans(3) if isinstance(keep, fk.KeyScan) else fk.ClusterMeans(4, rank=2)
        for rest in (fk.Drop(), means) if means.causal or not shape.is_causal else (fk.Drop(),):
            problem = prepare(inputs, fk.Plan(keep, rest))
            if support(problem, way) is None:
                way.assert_close(EXECUTORS[way.impl].attend(problem), expected)
                tried += 1
    assert tried >= 4


@pytest.mark.parametrize(
    "keep", [fk.select.Leverage(69), fk.select.KeyNorm(69) | fk.Sinks(5), fk.RandomKeys(69)], ids=str
)
def test_almost_full_budget_is_almost_exact(keep):
    """The selected path, not the shortcut for covering plans: one key of 70 is missing."""
    shape = SHAPES["plain"]
    q, k, v = shape.draw()
    graph = keep.graph(q, k)
    scores = (q @ k.mT / 8**0.5).masked_fill(~graph.to_mask(), -torch.inf)
    torch.testing.assert_close(fk.attention(q, k, v, keep=keep, impl="torch"), scores.softmax(-1) @ v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_torch_sdpa(dtype):
    for shape in (SHAPES["plain"], SHAPES["grouped"], SHAPES["cross"], CAUSAL_SHAPES["causal upper-left"]):
        q, k, v = shape.draw(dtype=dtype)
        expected = scaled_dot_product_attention(
            q, k, v, is_causal=shape.is_causal, enable_gqa=shape.query_heads != shape.kv_heads
        )
        torch.testing.assert_close(fk.attention(q, k, v, is_causal=shape.is_causal), expected)


def test_scale_is_honoured():
    q, k, v = SHAPES["plain"].draw()
    expected = scaled_dot_product_attention(q, k, v, scale=0.7)
    torch.testing.assert_close(fk.attention(q, k, v, scale=0.7), expected)
    kept = fk.attention(q, k, v, keep=fk.Window(9), scale=0.7, impl="torch")
    torch.testing.assert_close(kept, fk.attention(2 * q, k, v, keep=fk.Window(9), scale=0.35, impl="torch"))
    assert (kept - fk.attention(q, k, v, keep=fk.Window(9), impl="torch")).abs().max() > 1e-3


def test_causal_queries_before_the_first_real_key_give_zero():
    q, k, v = SHAPES["plain"].draw()
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0, :9] = False
    for keep in (None, fk.Window(5), fk.Sinks(4), fk.select.KeyNorm(3), fk.TopK(3)):
        for impl in ("torch", "reference"):
            actual = fk.attention(q, k, v, keep=keep, key_mask=mask, is_causal=True, impl=impl)
            assert torch.equal(actual[0, :, :9], torch.zeros_like(actual[0, :, :9]))
            assert (actual[0, :, 9].abs().sum(-1) > 0).all()


def test_queries_that_see_nothing_give_zero():
    q, k, v = SHAPES["plain"].draw()
    lengths = torch.tensor([0, 70])
    for keep in (None, fk.Window(5), fk.select.Leverage(5), fk.TopK(3)):
        for impl in ("torch", "reference"):
            actual = fk.attention(q, k, v, keep=keep, lengths=lengths, impl=impl)
            assert torch.equal(actual[0], torch.zeros_like(actual[0]))
            assert actual[1].abs().min() > 0
