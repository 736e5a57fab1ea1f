"""Streams of numbers whose squares have no float: finite where exact attention is, and as exact as others."""

import copy

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_PLANS
from executors import rotated
from fewkeys.memory import Stream
from odd_keys import EXTREME

PLANS = {
    name: plan.never_exact()
    for name, plan in CAUSAL_PLANS.items()
    if all(part.remembered for part in plan.keep.parts)
    and not (any(part.remembered.scan for part in plan.keep.parts) and len(plan.keep.parts) > 1)
}
SCANS = {name: plan for name, plan in PLANS.items() if plan.keep.parts[0].remembered.scan}
FIXED = {name: plan for name, plan in PLANS.items() if name not in SCANS}
MEANS = fk.Plan(fk.select.RecentBlocks(16, 2) | fk.Sinks(2), fk.rest.RunningMeans(7))
KINDS = EXTREME | {"scores without a float": (3e19, 3e18, 1, None)}
PIECES = ([150], [40, 1, 70, 39], [64, *[1] * 20, 66])


def draw(kind, begin=0, dtype=torch.float32):
    """Tokens that are of a kind of `KINDS` from `begin` on, and their scale."""
    g = torch.Generator().manual_seed(0)
    *factors, scale = KINDS[kind]
    rows = [torch.randn(2, heads, 150, dim, generator=g) for heads, dim in ((4, 8), (2, 8), (2, 5))]
    for part, by in zip(rows, factors, strict=True):
        part[:, :, begin:] *= by
    return *(part.to(dtype) for part in rows), scale


def feed(stream, q, k, v, sizes):
    outputs = []
    for query, key, value in zip(*(part.split(sizes, 2) for part in (q, k, v)), strict=True):
        stream.append(key, value)
        outputs.append(stream.attend(query))
    return torch.cat(outputs, 2)


COMING = [*zip(PIECES, (0, 60, 70), (torch.float32, torch.bfloat16, torch.float32), strict=True)]


@pytest.mark.parametrize(("name", "kind", "coming"), rotated(PLANS, KINDS, COMING))
def test_finite_where_exact_attention_is(name, kind, coming):
    plan, (sizes, begin, dtype) = PLANS[name], coming
    q, k, v, scale = draw(kind, begin, dtype)
    exact = fk.attention(q, k, v, weights=plan.weights, is_causal=True, scale=scale)
    actual = feed(fk.stream(plan, scale=scale), q, k, v, sizes)
    assert actual.dtype == dtype
    seen = exact.isfinite().all(-1)
    assert actual[seen].isfinite().all()
    assert (actual[seen].abs() <= 1.01 * v.abs().max()).all()


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("kind", ["largest values", "all", "small scale of large keys"])
def test_from_the_first_on_they_are_as_in_float64(name, kind):
    q, k, v, scale = draw(kind)
    want = feed(fk.stream(FIXED[name], scale=scale), q.double(), k.double(), v.double(), PIECES[1])
    actual = feed(fk.stream(FIXED[name], scale=scale), q, k, v, PIECES[1])
    torch.testing.assert_close(actual, want.float(), rtol=1e-5, atol=1e-6 * v.abs().max().item())


@pytest.mark.parametrize("name", [name for name, plan in FIXED.items() if plan.rest.running])
@pytest.mark.parametrize("by", [20, 30, 36, 39])
def test_small_queries_of_large_keys_become_large_queries_of_small_keys(name, by):
    """Their scores are small, but the summary also multiplies the later queries by the earlier keys."""
    q, k, v, _ = draw("small", 150)
    large, small, sizes = 2.0**by, 2.0**-by, [40, 35, 1, 74]
    q, k = (torch.cat([part[:, :, :75] / by, part[:, :, 75:] * by], 2) / 4 for part, by in ((q, large), (k, small)))
    want = feed(fk.stream(FIXED[name]), q.double(), k.double(), v.double(), sizes)
    actual = feed(fk.stream(FIXED[name]), q, k, v, sizes)
    torch.testing.assert_close(actual, want.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("kind", KINDS)
def test_scans_find_the_keys_that_the_whole_finds(name, kind):
    """Scores far above others decide alone, so units do not matter; entries of a kind that all tokens share."""
    q, k, v, scale = draw(kind)
    want = fk.attention(q, k, v, plan=SCANS[name], is_causal=True, scale=scale)
    for sizes in PIECES[:2]:
        actual = feed(fk.stream(SCANS[name], scale=scale), q, k, v, sizes)
        torch.testing.assert_close(actual, want, rtol=1e-4, atol=1e-4 * v.abs().max().item())


@pytest.mark.parametrize("plan", [MEANS, fk.Plan(fk.KeyScan(9), fk.BlockMeans(3))], ids=["means", "scan"])
def test_whatever_is_done_to_them(plan, tmp_path):
    q, k, v, _ = draw("all", 60)
    stream = Stream(plan, undo=40)
    feed(stream, q[:, :, :90], k[:, :, :90], v[:, :, :90], [64, 26])
    stream.save(tmp_path / "stream")
    loaded = Stream.load(tmp_path / "stream")
    assert 0 < loaded.memory() <= stream.memory()
    more = [part[:, :, :30] for part in draw("small", 150)[:3]]
    assert torch.equal(feed(copy.deepcopy(loaded), *more, [30]), feed(copy.deepcopy(stream), *more, [30]))
    rest = [part[:, :, 90:] for part in (q, k, v)]
    want = feed(stream, *rest, [60])
    assert want.isfinite().all()
    assert torch.equal(feed(loaded, *rest, [60]), want)
    wanted = feed(copy.deepcopy(loaded), *more, [30])
    for one in (stream, loaded):
        one.select(torch.tensor([1, 0, 1]))
    assert torch.equal(feed(loaded, *(part[[1, 0, 1]] for part in more), [30]), wanted[[1, 0, 1]])
    stream.crop(150 - 30)
    again = feed(stream, *(part[[1, 0, 1]][:, :, 120:] for part in (q, k, v)), [30])
    torch.testing.assert_close(again, want[[1, 0, 1]][:, :, 30:], rtol=1e-4, atol=1e-4 * v.abs().max().item())
    with pytest.raises(ValueError, match="like the tokens before"):
        stream.append(k.double()[[0, 0, 0]], v.double()[[0, 0, 0]])


def test_later_keys_that_are_hidden_cost_no_number():
    """Scores of hidden keys have no float here, and a mask would make them none."""
    query, key, value = (torch.randn(1, 2, 31, 8, generator=torch.Generator().manual_seed(0)) for _ in range(3))
    query, key[:, :, 20:] = 1e27 * query, 1e20 * key[:, :, 20:]
    whole = fk.attention(query, key, value, is_causal=True)
    later = fk.attention(query[:, :, 1:], key, value, is_causal=True, query_offset=1)
    assert whole[:, :, 1:20].isfinite().all()
    torch.testing.assert_close(later[:, :, :19], whole[:, :, 1:20])
