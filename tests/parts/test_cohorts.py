"""Cohorts: equal sets of similar queries, what each sees of the keys, and sums that have exact gradients."""

from dataclasses import replace

import pytest
import torch

import fewkeys as fk
import fewkeys.sketch.tilted as tilted
from cases import SHAPES
from fewkeys.core.totals import WHOLE
from fewkeys.core.validation import check_inputs
from fewkeys.native import kernels
from fewkeys.select.outliers import PAIR
from fewkeys.sketch.clusters import clusters, frame, half_variance
from fewkeys.sketch.cohorts import cohorts
from fewkeys.sketch.halves import (
    POWER,
    REFINE,
    SPLIT_SAMPLE,
    described,
    members,
    ordered,
    smallest,
    split,
    split_apart,
)
from fewkeys.sketch.sample import centre
from native_cases import needs_compiler


def metric(dim, seed=0):
    """One of every direction and one of almost none."""
    root = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed))
    root[0] *= 0.01
    return root @ root.mT


def sets(place):
    """Every cohort's places, as sets: (R, count)."""
    return [[frozenset(members[members >= 0].tolist()) for members in one] for one in place]


@pytest.mark.parametrize("many", [1, 3, 64, 70, 401])
@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_a_split_is_balanced_and_has_every_row_once(many, count):
    rows = torch.randn(3, many, 5, generator=torch.Generator().manual_seed(many))
    place = split(rows, metric(5).expand(3, -1, -1), count)
    most = -(-many // count)
    assert place.shape == (3, count, most)
    for one in sets(place):
        assert sorted(i for members in one for i in members) == list(range(many))
        assert [len(members) for members in one] == [min(most, max(0, many - most * i)) for i in range(count)]


@pytest.mark.parametrize("many", [1, 3, 70, 1401])
@pytest.mark.parametrize("count", [1, 2, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_stay_where_they_are_are_split_alike(many, count, dtype):
    """Of two runs, one behind the other."""
    rows = torch.randn(3, 2, many, 5, generator=torch.Generator().manual_seed(many), dtype=dtype)
    flat, by = rows.flatten(1, 2), metric(5).to(dtype).expand(3, -1, -1)
    place = split(flat, by, count)
    mine, sampled = members(split_apart(rows, by, count, WHOLE), count, 3, WHOLE)
    assert sets(mine) == sets(place)
    for one, other in zip(described(flat, sampled), described(flat, place[..., ::3]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_scores_of_equal_ones_come_first(dtype):
    g = torch.Generator().manual_seed(0)
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-30, 3.0, -3.0, 1e30, -1e30], dtype=dtype)
    score = odd[torch.randint(8, (2, 2, 300), generator=g)]
    assert torch.equal(ordered(score.flatten()).argsort(stable=True), score.flatten().argsort(stable=True))
    label = torch.randint(3, (2, 2, 300), generator=g)
    real = torch.stack([(label == h).sum((1, 2)) for h in range(3)], 1)
    for rank in (0, 1, 57, 150, 600):
        left = smallest(score, label, real, rank, WHOLE)
        for r in range(2):
            for h in range(3):
                inside = (label[r] == h).flatten()
                order = score[r].flatten()[inside].argsort(stable=True)
                assert torch.equal(left[r].flatten()[inside].nonzero().flatten(), order[:rank].sort().values)


def test_a_split_finds_far_sets_of_rows():
    g = torch.Generator().manual_seed(0)
    centre = 20 * torch.randn(4, 6, generator=g)
    whose = torch.arange(4).repeat_interleave(9)[torch.randperm(36, generator=g)]
    rows = centre[whose] + torch.randn(36, 6, generator=g)
    actual = split(rows[None], torch.eye(6)[None], 4)[0]
    assert all(len(set(whose[members].tolist())) == 1 for members in actual)


@needs_compiler
@pytest.mark.parametrize(("many", "count"), [(33, 4), (70, 32), (300, 8), (3000, 32)])
def test_the_kernel_splits_as_torch_does(many, count):
    """Rows on both sides of zero, on one, and equal ones, which stay in their order; in the metric of some keys."""
    rows, key = (torch.randn(4, 1, size, 11, generator=torch.Generator().manual_seed(1)) for size in (many, 90))
    rows[1] += 50
    rows[2] = 0
    rows[3, :, ::3] = 0
    key[..., 0] *= 0.01
    real = torch.rand(4, 90, generator=torch.Generator().manual_seed(2)) > 0.3
    key = key * real[:, None, :, None]
    steps = {"sample": SPLIT_SAMPLE, "power": POWER, "refine": REFINE}
    place, *actual = (part[:, 0] for part in kernels.halve(rows, key, real, count, scale=0.5, step=3, **steps))
    centred = centre(key, real)[:, 0]
    assert sets(place) == sets(split(rows[:, 0], centred.mT @ centred, count))
    mean, within = described(rows[:, 0], place[..., ::3])
    torch.testing.assert_close(actual, [0.5 * mean, 0.25 * within], rtol=1e-4, atol=1e-5)


def test_statistics_of_cohorts_are_those_of_their_queries():
    q, k, v = SHAPES["grouped"].draw()
    actual = cohorts(check_inputs(q, k, v, scale=0.7), 4)
    rows = 0.7 * q.unflatten(1, (2, 3)).flatten(2, 3)
    for b in range(2):
        for g in range(2):
            members = [rows[b, g][place[place >= 0]] for place in actual.place[b, g]]
            torch.testing.assert_close(actual.mean[b, g], torch.stack([part.mean(0) for part in members]))
            off = torch.cat([part - part.mean(0) for part in members])
            torch.testing.assert_close(actual.within[b, g], off.mT @ off / len(off))


@pytest.mark.parametrize("impl", ["torch", pytest.param("native", marks=needs_compiler)])
def test_half_the_variance_of_a_cohorts_scores(impl):
    q, k, v = (rows.float() for rows in SHAPES["grouped"].draw())
    x = check_inputs(q, k + 3, v, scale=0.7, impl=impl)
    actual = cohorts(x, 4)
    centred = k - k.mean(2, keepdim=True)
    want = 0.5 * (centred @ actual.within * centred).sum(-1)
    torch.testing.assert_close(half_variance(x, actual.within), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "count"), [(15, 1), (64, 4), (512, 32), (1024, 32), (1365, 32), (1366, 64), (9000, 64)]
)
def test_short_inputs_have_fewer_cohorts(queries, count):
    """Of 16 queries at least, and at most three times as many cohorts as a cohort has queries."""
    rows = torch.randn(3, 1, 1, queries, 4, generator=torch.Generator().manual_seed(0))
    assert cohorts(check_inputs(*rows), 64).count == count


def sum_arguments(x, h, clusters, kept):
    """Arguments of the sums where scores decide nothing: random shares of the keys."""
    g = torch.Generator().manual_seed(5)
    heads = (x.batch, x.kv_heads)
    index = torch.stack([torch.randperm(x.keys, generator=g)[:kept] for _ in range(4 * h)]).view(*heads, h, kept)
    real = torch.ones(x.batch, x.keys, dtype=torch.bool) if x.valid is None else x.valid
    is_real = real[:, None, None].expand(*index.shape[:3], -1).gather(-1, index)
    return {
        "label": torch.randint(clusters, (*heads, x.keys), generator=g),
        "half_variance": torch.rand(*heads, x.keys, generator=g, dtype=x.key.dtype),
        "filled": torch.randint(1, h + 1, heads, generator=g),
        "middle": torch.randn(*heads, 1, x.head_dim, generator=g, dtype=x.key.dtype),
        "mean": torch.zeros(*heads, h, x.head_dim, dtype=x.key.dtype),
        "index": index,
        "used": is_real & (torch.rand(*heads, h, kept, generator=g) > 0.2),
    }


def test_sums_have_exact_gradients():
    """With cohorts that are indifferent, weights do not move with the keys."""
    q, k, v = SHAPES["grouped"].draw()
    x = check_inputs(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    facts = sum_arguments(x, 2, 3, 2)
    key, value = x.key.clone().requires_grad_(), x.value.clone().requires_grad_()

    def actual(k, v):
        _, _, _, *sums, _, together = tilted._by_torch(k, v, facts | {"real": None}, 3, True, 0.8, WHOLE)
        return (*sums, together)

    assert torch.autograd.gradcheck(actual, (key, value))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("h", [2, 32, 40])
def test_the_kernel_adds_up_what_torch_does_and_passes_on_what_torch_does(h, dtype):
    """Of clusters of more than one chunk of keys, of less and of none; padded, kept by some, and centred elsewhere."""
    q, k, v = SHAPES["padded"].draw(dtype=torch.float32)
    x = check_inputs(q, k, v[..., :5], lengths=torch.tensor([70, 33]))
    g = torch.Generator().manual_seed(2)
    facts = sum_arguments(x, h, 5, 6) | {"mean": torch.randn(2, 2, h, 8, generator=g)}
    facts["label"] = facts["label"].where(torch.rand(facts["label"].shape, generator=g) < 0.4, 0)
    actual, coming = [], [torch.randn(2, 2, *sizes, generator=g) for sizes in ((h, 6, 8), (h, 6, 5), (8, 5))]
    for answer in (tilted._by_kernels, tilted._by_torch):
        leaves = [rows.to(dtype).requires_grad_() for rows in (x.key, x.value)]
        sums = answer(*leaves, facts | {"real": x.valid}, 6, True, 0.8, WHOLE)
        passed = torch.autograd.grad([sums[3], sums[4], sums[6]], leaves, coming)
        actual.append([*(part.detach() for part in sums), *passed])
    for one, other in zip(*actual, strict=True):
        exact = one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-5 if exact else 2e-2, atol=2e-5 * float(other.abs().max()))


def test_every_cohort_keeps_what_it_should():
    """The lists are those of the best keys by the scores that the docstring states."""
    q, k, v = replace(SHAPES["cross"], queries=70).draw()
    keep = fk.Outliers(4, 6, cohorts=4)
    x = check_inputs(q, k, v)
    mask, split = keep.select(x).to_mask(), cohorts(x, 4)
    key, distance = x.key - frame(x).mean, clusters(x, 6).distance
    for h in range(4):
        mean = split.mean[:, :, h].unsqueeze(2)
        score = (key * mean).sum(-1) + 0.5 * ((key @ split.within) * key).sum(-1) + PAIR * distance.log()
        best = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, score.topk(4).indices, True)
        for b in range(2):
            for head in range(2):
                members = split.place[b, head, h]
                assert torch.equal(mask[b, head, members[members >= 0]].all(0), best[b, head])


def test_rounding_does_not_choose_between_the_two_keys_of_a_cluster():
    """One mean query weighs both, and what one has more of importance it has less of distance."""
    g = torch.Generator().manual_seed(0)
    x = check_inputs(*torch.randn(3, 1, 8, 15, 37, generator=g, dtype=torch.float64))
    one, parts = cohorts(x, 1), clusters(x, 6)
    score = (one.mean @ x.key.mT)[:, :, 0] + fk.Outliers(9, 6, cohorts=8).common(x, one)
    pairs = [
        (head, places)
        for head, label in enumerate(parts.label[0])
        for number in range(6)
        if len(places := (label == number).nonzero().flatten()) == 2
    ]
    assert len(pairs) > 5
    for head, places in pairs:
        by_score, by_distance = (part[0, head, places].diff().abs() for part in (score, parts.distance.log()))
        torch.testing.assert_close(by_score, (1 - PAIR) * by_distance, rtol=0.1, atol=0)


def test_more_cohorts_are_nearer_to_exact_attention():
    g = torch.Generator().manual_seed(0)
    q, k, v = (2 * torch.randn(1, 2, 256, 16, generator=g) for _ in range(3))
    exact = fk.attention(q, k, v)
    off = [
        fk.metrics.output_error(
            fk.attention(q, k, v, keep=fk.Outliers(12, 8, cohorts=c), rest=fk.ClusterMeans(8, 4, cohorts=c)), exact
        )
        for c in (1, 4, 16)
    ]
    assert off[2] < 0.9 * off[1] < 0.8 * off[0]


@pytest.mark.parametrize(("queries", "ratio", "count"), [(511, 1, 16), (512, 1, 32), (16, 2, 2), (15, 2, 1), (1, 1, 1)])
def test_a_cohort_has_at_least_sixteen_queries(queries, ratio, count):
    """Of all query heads that read its key head."""
    x = check_inputs(torch.randn(1, 2 * ratio, queries, 4), *torch.randn(2, 1, 2, 9, 4))
    assert cohorts(x, 32).count == count


def test_refusals():
    with pytest.raises(ValueError, match="Outliers cohorts: expected a power of two, got 3"):
        fk.Outliers(4, 4, cohorts=3)
    with pytest.raises(ValueError, match=r"expected Window and Sinks alone beside Outliers.* got Leverage"):
        fk.Outliers(4, 4, cohorts=2) | fk.Window(3) | fk.select.Leverage(1)
    with pytest.raises(ValueError, match=r"keep: ClusterMeans needs rules for cohorts=4, got"):
        fk.Plan(fk.Outliers(4, 4, cohorts=2), fk.ClusterMeans(4, cohorts=4))
    with pytest.raises(ValueError, match=r"cohorts=1, got Outliers"):
        fk.Plan(fk.Outliers(4, 4, cohorts=2), fk.ClusterMeans(4))
    with pytest.raises(ValueError, match=r"^keep: UniformSample has no stand-ins for cohorts of queries"):
        fk.Plan(fk.Outliers(4, 4, cohorts=2) | fk.Window(3), fk.rest.UniformSample(4))
    with pytest.raises(ValueError, match=r"rest: ClusterMeans with cohorts or a rank is defined for Softmax"):
        fk.Plan(fk.Outliers(4, 4, cohorts=2), fk.ClusterMeans(4, cohorts=2), fk.weights.Power(2.0))


def test_budget_with_cohorts_has_their_lists_and_means():
    plan = fk.budget(64, cohorts=64)
    keep = fk.Outliers(33, 11, cohorts=64) | fk.Window(11)
    assert plan == fk.Plan(keep, fk.ClusterMeans(11, 8, 64), exact_if_faster=True)
    assert fk.budget(64) == plan
    with pytest.raises(ValueError, match=r"^budget cohorts: expected a power of two, got 3"):
        fk.budget(64, cohorts=3)
    with pytest.raises(ValueError, match=r"^cohorts: expected 1 with is_causal=True, got 2"):
        fk.budget(64, is_causal=True, cohorts=2)


def test_budget_has_cohorts_that_halve_as_slots_double():
    slots = (1, 2, 64, 65, 128, 129, 256, 512, 1024, 2048, 50_000)
    assert [fk.budget(count).keep.cohort_lists for count in slots] == [1, 64, 64, 32, 32, 16, 16, 8, 4, 2, 1]


@pytest.mark.parametrize("offset", [0, 3, 45, 60, 10**6])
@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_a_band_may_lie_beyond_all_keys(offset, impl):
    g = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(1, heads, tokens, 8, generator=g).requires_grad_() for heads, tokens in ((4, 40), (2, 50), (2, 50))
    ]
    plan = fk.Plan(fk.Outliers(5, 6, cohorts=2) | fk.Window(9), fk.ClusterMeans(6, 2, cohorts=2))
    outputs = [fk.attention(*rows, plan=plan, query_offset=offset, impl=way) for way in (impl, "reference")]
    torch.testing.assert_close(*outputs)
    gradients = [torch.autograd.grad(output.square().sum(), rows) for output in outputs]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
