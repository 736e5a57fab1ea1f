"""A bias of the scores by distance: exact on kept keys, the mean of its exponential on stand-ins."""

import pytest
import torch
from torch.nn.functional import one_hot

import fewkeys as fk
import fewkeys.execute.exact
from fewkeys.core.distances import DistanceBias
from fewkeys.core.validation import check_inputs
from fewkeys.execute.dispatch import EXECUTORS
from fewkeys.execute.problem import prepare
from fewkeys.sketch.cohort_bias import BLOCK, bias_importance
from fewkeys.sketch.cohorts import cohorts

EXACT, WINDOW = fk.Plan(), fk.Plan(fk.Window(2000))
FEW = {
    "window": fk.Plan(fk.Window(7)),
    "window + means": fk.Plan(fk.Window(7), fk.ClusterMeans(5)),
    "even window + means": fk.Plan(fk.Window(8), fk.ClusterMeans(5)),
    "wide window + means": fk.Plan(fk.Window(41), fk.ClusterMeans(5)),
    "outliers + window + first-order means": fk.Plan(fk.Outliers(4, 6) | fk.Window(7), fk.ClusterMeans(6, rank=2)),
    "means beside one list": fk.Plan(fk.Outliers(4, 6), fk.ClusterMeans(6)),
    "a list for every query": fk.Plan(fk.TopK(5)),
    "cohorts, a window and first-order means": fk.Plan(
        fk.Outliers(4, 6, cohorts=8) | fk.Window(7), fk.ClusterMeans(6, rank=2, cohorts=8)
    ),
    "cohorts without a window, sinks": fk.Plan(fk.Outliers(4, 6, cohorts=4) | fk.Sinks(2), fk.ClusterMeans(6, 0, 4)),
    "lists of cohorts": fk.Plan(fk.Outliers(4, 6, cohorts=4) | fk.Window(7)),
}

COHORTS = fk.budget(8).never_exact()


def problem(queries=150, keys=150, reach=20, dtype=torch.float64, **more):
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, 8, generator=draw, dtype=dtype)
    key, value = torch.randn(2, 2, 2, keys, 8, generator=draw, dtype=dtype)
    table = 2 * torch.randn(4, 2 * reach + 1, generator=draw, dtype=dtype)
    real = torch.ones(2, keys, dtype=torch.bool)
    real[0, keys - 9 :] = False
    return query, key, value, {"distance_bias": table, "key_mask": real, **more}


def spread(table, first, queries, keys):
    """(Hq, queries, keys), by its definition."""
    reach = table.shape[1] // 2
    distance = torch.arange(keys) - torch.arange(first, first + queries)[:, None]
    return table[:, distance.clamp(-reach, reach) + reach]


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("plan", [EXACT, WINDOW], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"is_causal": True},
        {"queries": 40, "query_offset": 50},
        {"queries": 40, "is_causal": True, "query_offset": 110},
    ],
)
def test_keeping_every_key_is_the_definition(plan, shape, impl):
    query, key, value, options = problem(**shape)
    actual = fk.attention(query, key, value, plan=plan, impl=impl, **options | {"key_mask": None})
    scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5
    first = shape.get("query_offset", 0)
    scores = scores + spread(options["distance_bias"], first, query.shape[2], 150)
    if "is_causal" in shape:
        scores = scores.masked_fill(~torch.ones(query.shape[2], 150).tril(first).bool(), -torch.inf)
    torch.testing.assert_close(actual, scores.softmax(-1) @ value.repeat_interleave(2, 1))


@pytest.mark.parametrize("is_causal", [True, False])
def test_exact_attention_makes_masks_piece_by_piece(is_causal, monkeypatch):
    query, key, value, options = problem(is_causal=is_causal)
    whole = fk.attention(query, key, value, plan=EXACT, **options)
    monkeypatch.setattr(fewkeys.execute.exact, "ROWS", 32)
    torch.testing.assert_close(fk.attention(query, key, value, plan=EXACT, **options), whole)
    bias = DistanceBias(options["distance_bias"]).from_last(0, 150, 150)
    assert bias.untyped_storage().nbytes() == 4 * 299 * 8


@pytest.mark.parametrize("plan", FEW.values(), ids=FEW)
@pytest.mark.parametrize("reach", [3, 200])
def test_torch_is_the_reference_also_in_gradients(plan, reach):
    tensors = problem(reach=reach)
    query, key, value, options = tensors
    leaves = [part.requires_grad_() for part in (query, key, value, options["distance_bias"])]
    actual = {}
    for impl in ("torch", "reference"):
        output = fk.attention(query, key, value, plan=plan, impl=impl, **options)
        actual[impl] = output, *torch.autograd.grad(output.square().sum(), leaves)
    for one, other in zip(*actual.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    assert actual["torch"][4].abs().max() > 1e-3


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("window", [1, 9, 61])
@pytest.mark.parametrize("cohorts", [1, 4])
def test_a_stand_in_has_the_mean_of_the_exponential(cohorts, window, impl):
    """Keys and values of two kinds, so that scores know nothing of distances: then it is exact."""
    query, key, value, options = problem()
    kind = torch.rand(150, generator=torch.Generator().manual_seed(1)) < 0.3
    key, value = (torch.where(kind[:, None], rows[:, :, :1], rows[:, :, 1:2]) for rows in (key, value))
    kept = fk.Window(window) if cohorts == 1 else fk.Outliers(1, 2, cohorts) | fk.Window(window)
    plan = fk.Plan(kept, fk.ClusterMeans(2, 0, cohorts))
    few = fk.attention(query, key, value, plan=plan, impl=impl, **options)
    exact, real = fk.attention(query, key, value, plan=EXACT, **options), options["key_mask"][:, None, :, None]
    torch.testing.assert_close(few * real, exact * real, rtol=1e-4, atol=1e-5)  # clusters' statistics are in float32


def test_oracles_know_it():
    query, key, value, options = problem()
    options["key_mask"] = None
    scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5 + spread(options["distance_bias"], 0, 150, 150)
    least = scores.topk(5, -1).values[..., -1:]
    want = scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(fk.attention(query, key, value, keep=fk.TopK(5), **options), want)


def test_heads_above_max_error_are_exact():
    query, key, value, options = problem()
    plan = FEW["window + means"]
    few, exact = (fk.attention(query, key, value, plan=one, **options) for one in (plan, EXACT))
    relative = (few - exact).norm(dim=-1) / exact.norm(dim=-1)
    error = torch.stack([relative[0, :, :141].mean(-1), relative[1].mean(-1)])
    limit = float(error.flatten().sort().values[3:5].mean())
    guard = fk.Guard(limit, queries=140)
    actual = fk.attention(query, key, value, plan=plan, max_error=guard, **options)
    torch.testing.assert_close(actual, torch.where((error > limit)[..., None, None], exact, few))
    assert guard.fallbacks.fallbacks == 4


@pytest.mark.parametrize("number", [-70.0, 1000.0])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_one_number_for_all_distances_changes_nothing(impl, number):
    """However large."""
    query, key, value, options = problem()
    even = options | {"distance_bias": torch.full((4, 5), number)}
    for plan in FEW.values():
        actual = fk.attention(query, key, value, plan=plan, impl=impl, **even)
        want = fk.attention(query, key, value, plan=plan, impl=impl, key_mask=options["key_mask"])
        torch.testing.assert_close(actual, want)


@pytest.mark.parametrize("cohorts", [1, 16])
def test_few_keys_cost_no_more_than_without(cohorts):
    """The bias of T5's kind: falling with the distance, constant beyond."""
    query, key, value, _ = problem(queries=400, keys=400)
    far = torch.arange(-64, 65).abs().double().clamp(1)
    table, plan = -far.log() * torch.tensor([0.2, 0.5, 1.0, 2.0])[:, None], fk.budget(48, cohorts=cohorts).never_exact()
    error = {}
    for name, bias in (("with", table), ("without", None)):
        biased = {"distance_bias": bias}
        exact = fk.attention(query, key, value, plan=EXACT, **biased)
        few = fk.attention(query, key, value, plan=plan, **biased)
        error[name] = float(((few - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())
    assert error["with"] < 1.1 * error["without"]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (fk.Plan(fk.KeyScan(64)), "whose queries keep a window and lists, got extra edges or a scan"),
        (
            fk.Plan(fk.Window(3), fk.ClusterMeans(4), fk.weights.Power(2.0)),
            r"expected Softmax\(\) with stand-ins, got Power",
        ),
    ],
)
def test_plans_that_do_not_fit(plan, said):
    query, key, value, options = problem()
    with pytest.raises(ValueError, match=f"^distance_bias: .*{said}"):
        fk.attention(query, key, value, plan=plan, **options)


def test_refusals():
    query, key, value, options = problem()
    for table in (torch.zeros(4, 6), torch.zeros(3, 5), torch.zeros(4, 5, dtype=torch.int64), [0.0]):
        with pytest.raises(ValueError, match=r"^distance_bias: expected a floating tensor \(4, 2 R \+ 1\)"):
            fk.attention(query, key, value, distance_bias=table)
    with pytest.raises(ValueError, match=r"^distance_bias: expected finite"):
        fk.attention(query, key, value, distance_bias=torch.full((4, 5), torch.inf))
    with pytest.raises(ValueError, match=r"^impl='native': expected no distance_bias"):
        fk.attention(query, key, value, plan=FEW["window"], impl="native", **options)
    blocks = fk.Plan(fk.select.RecentBlocks(8), fk.rest.RunningMeans(4))
    with pytest.raises(
        ValueError, match=r"^distance_bias: expected stand-ins that serve all .*; use Window, Sinks and Lev"
    ):
        fk.attention(query, key, value, plan=blocks, is_causal=True, **options | {"key_mask": None})
    torn = torch.ones(2, 150, dtype=torch.bool)
    torn[:, 20] = False
    padded, blocks = options | {"key_mask": torn}, fk.Plan(fk.select.RecentBlocks(8))
    with pytest.raises(ValueError, match=r"^key_mask: expected contiguous real keys"):
        fk.attention(query, key, value, plan=blocks, is_causal=True, **padded)


def test_kernels_know_of_it():
    """They leave such problems to torch."""
    query, key, value, options = problem(dtype=torch.float32)
    x = check_inputs(query, key, value, **options)
    stand_ins = prepare(x, FEW["window + means"])
    assert EXECUTORS["native"].unsupported(stand_ins) == "expected no distance_bias, got one"


def test_padding_is_deleted_keys_beside_cohorts():
    query, key, value, options = problem()
    real, plan = options.pop("key_mask")[0], FEW["cohorts, a window and first-order means"]
    padded = fk.attention(query, key, value, plan=plan, key_mask=real.expand(2, -1), **options)
    cut = (rows[:, :, real] for rows in (query, key, value))
    torch.testing.assert_close(padded[:, :, real], fk.attention(*cut, plan=plan, **options))


@pytest.mark.parametrize("band", [None, (4, 3), (300, 300)])
@pytest.mark.parametrize("left", [0, 13])
@pytest.mark.parametrize("more", [{}, {"queries": 40, "query_offset": 50}, {"reach": 200, "key_mask": None}])
def test_keys_gain_what_the_bias_means_to_a_cohort(more, band, left):
    """By its definition, from block to block, up to a number for each key head. Padding before all changes nothing."""
    query, key, value, options = problem(**more)
    if options["key_mask"] is not None:
        options["key_mask"][:, :left] = False
    x = check_inputs(query, key, value, **options)
    split = cohorts(x, 8)
    lead, reach = (-left % BLOCK if options["key_mask"] is not None else 0), options["distance_bias"].shape[1] // 2
    # Every pair of tokens of every block, also those beyond the ends, as if no further apart than those within.
    distance = torch.arange(200) - torch.arange(200)[:, None] - x.offset
    seen = torch.ones(200, 200).double() if band is None else ((distance < -band[0]) | (distance > band[1])).double()
    far = min(reach, 149)
    weight = options["distance_bias"][:, distance.clamp(-far, far) + reach].exp() * seen

    def by_block(rows):
        """(..., Nq, Nk), each the mean over its blocks."""
        mean = rows.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).mean((-1, -3))
        mean = mean.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
        return mean[..., lead : lead + x.queries, lead : lead + 150]

    member = one_hot(split.place.clamp_min(0), 2 * x.queries) * (split.place >= 0).unsqueeze(-1)
    member = member.sum(3).double().unflatten(-1, (2, -1))  # (B, Hkv, H, R, Nq)
    mass = torch.einsum("bghrq,grqk->bghk", member, by_block(weight).unflatten(0, (2, 2)))
    count = torch.einsum("bghrq,qk->bghk", member, by_block(seen))
    beyond = bias_importance(x, split, x.bias, band) - (mass / count.clamp_min(1e-9)).log()
    for head in range(2):
        free = beyond[:, head][count[:, head] > 0]
        torch.testing.assert_close(free, free.mean().expand_as(free), rtol=1e-6, atol=1e-6)
    assert (band == (300, 300)) == (not bool((count > 0).any()))


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_a_table_says_beyond_all_distances_changes_nothing(side):
    """A model's table is as long as the longest sequence of a batch, with its padding."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 8, 4, 40, 8, generator=draw, dtype=torch.float64)
    table = 2 * torch.randn(4, 79, generator=draw, dtype=torch.float64)
    for count in (9, 14, 21, 27):
        real = slice(count) if side == "right" else slice(40 - count, 40)
        mask = torch.zeros(8, 40, dtype=torch.bool)
        mask[:, real] = True
        rows = [part[:, :, real] for part in (query, key, value)]
        alone = fk.attention(*rows, plan=COHORTS, distance_bias=table[:, 40 - count : 39 + count])
        for padding in (mask, None):
            parts = (query, key, value) if padding is not None else rows
            whole = fk.attention(*parts, plan=COHORTS, distance_bias=table, key_mask=padding)
            torch.testing.assert_close(whole[:, :, real] if padding is not None else whole, alone)


def test_lists_of_cohorts_hold_keys_that_the_bias_favours():
    """Every key is alike but for its distance; far keys ahead matter most."""
    query, _, value, _ = problem(dtype=torch.float32)
    table = torch.zeros(4, 299)
    table[:, 149 + 60 : 149 + 64] = 9.0
    plan = fk.Plan(fk.Outliers(8, 2, cohorts=4) | fk.Window(5), fk.ClusterMeans(2, 0, 4))
    x = check_inputs(query, torch.zeros(2, 2, 150, 8), value, distance_bias=table)
    columns = prepare(x, plan).graph.columns
    place = columns.place % 150
    ahead = columns.index.unsqueeze(3) - place.unsqueeze(4)
    assert ((ahead >= 60) & (ahead < 64)).any(-1)[(columns.place >= 0) & (place < 80)].float().mean() > 0.3
