"""Hashes, clusters and spaces against their papers' definitions, written out naively; what is special to each."""

import itertools
import math

import pytest
import torch
from experiments.sparsefinder import baselines
from experiments.sparsefinder.baselines.routing import spherical_means
from experiments.sparsefinder.baselines.sorted_lsh import gray_rank
from hypothesis import given, strategies as st

import fewkeys as fk
from baseline_forms import (
    BOTH_WAYS,
    FORMS,
    SELF,
    by_definition,
    centroids,
    inputs_of,
    mask_of,
    projection,
    raw,
    real_counts,
)
from cases import SHAPES
from fewkeys.core.graph import visible
from fewkeys.core.validation import check_inputs
from fewkeys.papers import sparsefinder
from fewkeys.papers.sparsefinder.groups import member_ids

# --- hashes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("buckets", "rounds"), [(2, 1), (8, 1), (6, 3)])
def test_reformer(form, buckets, rounds):
    """Edges are collisions of `argmax [x R, -x R]` in any round."""
    q, k = raw(form)
    rotations = torch.randn(rounds, 5, buckets // 2, generator=torch.Generator().manual_seed(4)).double()
    seen = by_definition(form, lambda b, i, j: True)
    mask = mask_of(baselines.Reformer(buckets, rounds), form, generator=torch.Generator().manual_seed(4))

    def buckets_of(x):
        hashes = ([*(x @ rotation).tolist(), *(-x @ rotation).tolist()] for rotation in rotations)
        return [one.index(max(one)) for one in hashes]

    for b, (queries, _) in enumerate(real_counts(form)):
        for h in range(form.query_heads):
            ours, theirs = ([buckets_of(row) for row in rows[b, h]] for rows in (q[:, :, :queries], k))
            for i, j in itertools.product(range(queries), range(form.keys)):
                same = any(one == other for one, other in zip(ours[i], theirs[j], strict=True))
                assert mask[b, h, i, j] == (same and seen[b, h, i, j])


def test_reformer_collides_as_often_as_the_angle_says():
    """Two buckets are a random hyperplane: vectors at angle t collide with probability 1 - t / pi, at any length."""
    for angle in (0.3, 1.2, 2.5):
        q = torch.tensor([1.0, 0.0, 0.0]).view(1, 1, 1, 3) * 7
        k = torch.tensor([math.cos(angle), math.sin(angle), 0.0]).view(1, 1, 1, 3) * 0.2
        groups = baselines.Reformer(2, 4000).graph(q, k).extra
        share = (groups.query == groups.key).double().mean().item()
        expected = 1 - angle / math.pi
        assert abs(share - expected) < 4.5 * (expected * (1 - expected) / 4000) ** 0.5


def test_more_rounds_only_add_edges_and_buckets_only_take_them():
    form = FORMS["self"]
    counts = [mask_of(baselines.Reformer(8, rounds), form).sum() for rounds in (1, 2, 4, 8)]
    assert counts == sorted(counts)
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 400, 8, generator=g) for _ in range(2))
    shares = [baselines.Reformer(buckets, 1).graph(q, k).to_mask().float().mean() for buckets in (2, 8, 32)]
    # No fewer than if buckets were even, up to the draw.
    assert all(share > 0.8 / buckets for share, buckets in zip(shares, (2, 8, 32), strict=True))
    assert shares == sorted(shares, reverse=True)


def test_gray_order_changes_one_sign_at_a_time():
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=5)))
    rank = gray_rank(signs, torch.eye(5))
    assert sorted(rank.tolist()) == list(range(32))
    ordered = signs[rank.argsort()]
    assert ((ordered[1:] != ordered[:-1]).sum(-1) == 1).all()


@pytest.mark.parametrize("form", BOTH_WAYS.values(), ids=BOTH_WAYS)
@pytest.mark.parametrize("size", [1, 4, 9, 50])
def test_sorted_hash(form, size):
    """Blocks are equal cuts of the two orders by hash."""
    q, k = raw(form)
    planes = torch.randn(5, 7, generator=torch.Generator().manual_seed(4)).double()
    mask = mask_of(baselines.SortedLSH(size), form, generator=torch.Generator().manual_seed(4))
    for b, (queries, keys) in enumerate(real_counts(form)):
        blocks = math.ceil(keys / size)
        for h in range(form.query_heads):
            expected = torch.zeros(form.queries, form.keys, dtype=torch.bool)
            orders = [
                sorted(range(n), key=lambda i, rows=rows: gray_rank(rows[b, h, i], planes).item())
                for rows, n in ((q, queries), (k, keys))
            ]
            for (r, i), (s, j) in itertools.product(enumerate(orders[0]), enumerate(orders[1])):
                expected[i, j] = r * blocks // queries == s * blocks // keys
            assert torch.equal(mask[b, h], expected)
            assert mask[b, h].sum(-1).max() <= size


# --- clusters ------------------------------------------------------------------------------------------------------


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("form", BOTH_WAYS.values(), ids=BOTH_WAYS)
@pytest.mark.parametrize("given_ones", [True, False])
@pytest.mark.parametrize("balanced", [True, False])
def test_routing(form, given_ones, balanced):
    places = centroids(form.query_heads)
    keep = baselines.Routing(4, balanced, places if given_ones else None)
    mask, x = mask_of(keep, form), inputs_of(form)
    q, k = (unit(rows) for rows in raw(form))
    for b, counts in enumerate(real_counts(form)):
        for h in range(form.query_heads):
            centres = unit(places.place[h])
            if not given_ones:
                centres = spherical_means(q, k, x.valid_queries, x.valid, 4)[b, h]
            held = []
            for rows, n in zip((q, k), counts, strict=True):
                cosine = rows[b, h, :n] @ centres.mT
                if balanced:
                    order = cosine.argsort(dim=0, descending=True)[: math.ceil(n / 4)].mT
                    held.append([set(chosen.tolist()) for chosen in order])
                else:
                    nearest = cosine.argmax(-1).tolist()
                    held.append([{i for i in range(n) if nearest[i] == c} for c in range(4)])
            expected = torch.zeros(form.queries, form.keys, dtype=torch.bool)
            for queries, keys in zip(*held, strict=True):
                for i, j in itertools.product(queries, keys):
                    expected[i, j] = True
            assert torch.equal(mask[b, h], expected)


def test_spherical_means_find_clusters_and_never_do_worse():
    g = torch.Generator().manual_seed(0)
    middles = unit(torch.randn(6, 8, generator=g, dtype=torch.float64))
    label = torch.randint(0, 6, (1, 1, 300), generator=g)
    rows = unit(middles[label] + 0.02 * torch.randn(1, 1, 300, 8, generator=g, dtype=torch.float64))
    query, key = rows[:, :, :100], rows[:, :, 100:]
    actual = spherical_means(query, key, None, None, 24)
    torch.testing.assert_close(actual.norm(dim=-1), torch.ones(1, 1, 24, dtype=torch.float64))
    # Every middle has a centroid: 24 evenly spaced seeds miss one of six with probability 6 (5 / 6)^24 = 0.08.
    assert (middles @ actual[0, 0].mT).amax(-1).min() > 0.99
    noise = unit(torch.randn(2, 2, 300, 8, generator=g, dtype=torch.float64))
    seeds = noise[:, :, torch.linspace(0, 1, 10, dtype=torch.float64).mul(299).round().long()]
    after = spherical_means(noise[:, :, :100], noise[:, :, 100:], None, None, 10)
    assert ((noise @ after.mT).amax(-1).mean(-1) > (noise @ seeds.mT).amax(-1).mean(-1)).all()


def test_a_centroid_without_rows_stays_where_it_is():
    row = unit(torch.ones(1, 1, 8, 3, dtype=torch.float64))
    torch.testing.assert_close(spherical_means(row, row, None, None, 4), row[:, :, :4])


def test_routing_by_given_nearest_centroids_is_causal():
    form, keep = FORMS["causal"], baselines.Routing(4, False, centroids())
    assert keep.causal
    both = mask_of(keep, FORMS["self"]).tril()
    assert torch.equal(mask_of(keep, form), both)
    for refused in (
        baselines.Routing(4),
        baselines.Routing(4, False),
        baselines.Routing(4, True, centroids()),
        baselines.SortedLSH(4),
    ):
        with pytest.raises(ValueError, match=r"^is_causal: .* looks at the future"):
            fk.attention(*form.draw(), keep=refused, is_causal=True)


@pytest.mark.parametrize("form", BOTH_WAYS.values(), ids=BOTH_WAYS)
@pytest.mark.parametrize("inside", [False, True], ids=["version 1", "version 2"])
@pytest.mark.parametrize(("size", "top", "window"), [(1, 3, 5), (4, 2, 3), (4, 50, 1), (8, 1, 3)])
def test_block_clusters(form, inside, size, top, window):
    """Blocks are ranked by the squared distance of their mean, of their own cluster's only in version 2."""
    places, space = centroids(form.query_heads, 5, 3), projection(form.query_heads)
    keep = sparsefinder.BlockClusters(size, top, places, space, inside, window)
    mask = mask_of(keep, form)
    q, k = raw(form)
    for b, counts in enumerate(real_counts(form)):
        for h in range(form.query_heads):
            held = []
            sides = ((q[b, h] @ space.query[h], form.query_offset), (k[b, h] @ space.key[h], 0))
            for (rows, offset), n in zip(sides, counts, strict=True):
                block = [(i + offset) // size for i in range(n)]
                mean = {c: rows[[i for i in range(n) if block[i] == c]].mean(0) for c in set(block)}
                distance = {c: (places.place[h] - mean[c]).square().sum(-1) for c in mean}
                pairs = []
                for cluster in range(5):
                    blocks = [c for c in mean if not inside or distance[c].argmin() == cluster]
                    blocks = sorted(blocks, key=lambda c, d=distance, cluster=cluster: d[c][cluster].item())[:top]
                    pairs.append({i + offset for i in range(n) if block[i] in blocks})
                held.append(pairs)
            for i, j in itertools.product(range(counts[0]), range(counts[1])):
                place = i + form.query_offset
                near = abs(place // size - j // size) <= window // 2
                same = any(place in held[0][c] and j in held[1][c] for c in range(5))
                assert mask[b, h, i, j] == (near or same)


@given(rows=st.integers(1, 6), groups=st.integers(1, 5), seed=st.integers(0, 50))
def test_member_ids(rows, groups, seed):
    member = torch.rand(1, 2, rows, groups, generator=torch.Generator().manual_seed(seed)) < 0.4
    ids = member_ids(member)
    for members, marked in zip(ids.flatten(0, 2).tolist(), member.flatten(0, 2), strict=True):
        assert sorted(i for i in members if i >= 0) == marked.nonzero().flatten().tolist()
    assert ids.shape[-1] == member.sum(-1).max()


# --- low-dimensional entmax ----------------------------------------------------------------------------------------


def sparsemax_support(scores):
    """The largest k entries with `1 + k z_k > z_1 + .. + z_k` (Martins and Astudillo 2016)."""
    order = sorted(range(len(scores)), key=lambda j: -scores[j])
    kept = []
    for j in order:
        total = sum(scores[i] for i in kept) + scores[j]
        if 1 + (len(kept) + 1) * scores[j] <= total:
            break
        kept.append(j)
    return set(kept)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_low_dimensional_entmax(form):
    space = projection(form.query_heads)
    mask = mask_of(baselines.LowRankEntmax(project=space, alpha=2.0), form)
    q, k = raw(form)
    seen = by_definition(form, lambda b, i, j: True)
    for b, (queries, _) in enumerate(real_counts(form)):
        for h, i in itertools.product(range(form.query_heads), range(queries)):
            shown = seen[b, h, i].nonzero().flatten().tolist()
            row = (q[b, h, i] @ space.query[h]) @ (k[b, h] @ space.key[h]).mT / 3**0.5
            kept = sparsemax_support(row[shown].tolist())
            assert set(mask[b, h, i].nonzero().flatten().tolist()) == {shown[c] for c in kept}


def test_all_dimensions_give_the_true_support():
    form = FORMS["grouped"]
    q, k = raw(form)
    eye = torch.eye(5, dtype=torch.float64).expand(4, -1, -1)
    for alpha in (1.3, 1.5, 2.0):
        mask = mask_of(baselines.LowRankEntmax(project=sparsefinder.Projection(eye, eye), alpha=alpha), form)
        weights = fk.weights.Entmax(alpha).normalised(q @ k.mT / 5**0.5)
        assert torch.equal(mask, weights > 0)
        assert not mask.all()


def test_random_projections_come_closer_with_rank():
    """The call's scale is the right one for them: recall of the true support grows to nearly one."""
    q, k, _ = SHAPES["plain"].draw()
    truth = fk.weights.Entmax(1.5).normalised(q @ k.mT / 8**0.5) > 0
    recall = []
    for rank in (2, 16, 2000):
        actual = baselines.LowRankEntmax(rank).graph(q, k).to_mask()
        recall.append(((actual & truth).sum() / truth.sum()).item())
    assert recall == sorted(recall)
    assert recall[-1] > 0.95
    assert (actual & ~truth).sum() < 0.1 * truth.sum()


# --- spaces --------------------------------------------------------------------------------------------------------


def in_space(space):
    """Selectors in a space, and the same without, for tensors that are there already."""
    eye = torch.eye(space.rank, dtype=torch.float64).expand(space.query.shape[0], -1, -1)
    places = centroids(space.query.shape[0], 4, space.rank)
    return {
        "reformer": (baselines.Reformer(4, 2, space), baselines.Reformer(4, 2)),
        "sorted": (baselines.SortedLSH(5, project=space), baselines.SortedLSH(5)),
        "routing": (baselines.Routing(4, project=space), baselines.Routing(4)),
        "routing, given": (baselines.Routing(4, False, places, space), baselines.Routing(4, False, places)),
        "entmax": (
            baselines.LowRankEntmax(project=space),
            baselines.LowRankEntmax(project=sparsefinder.Projection(eye, eye)),
        ),
        "blocks": (sparsefinder.BlockClusters(2, 2, places, space), sparsefinder.BlockClusters(2, 2, places)),
    }


@pytest.mark.parametrize("form", ["grouped", "cross"])
@pytest.mark.parametrize("name", in_space(projection()))
def test_a_space_is_where_queries_and_keys_are_compared(form, name):
    form = FORMS[form]
    space = projection(form.query_heads)
    q, k, _ = form.draw()
    query = torch.einsum("bhnd,hdr->bhnr", q, space.query)
    key = torch.einsum("bhnd,hdr->bhnr", k.repeat_interleave(form.query_heads // 2, 1), space.key)
    inside, plain = in_space(space)[name]
    mask = inside.graph(q, k).to_mask()
    assert torch.equal(mask, plain.graph(query, key).to_mask())
    if form.query_heads > form.kv_heads:
        assert not torch.equal(mask[:, 0], mask[:, 1])  # heads that share keys have spaces of their own


@pytest.mark.parametrize("name", in_space(projection()))
def test_masked_is_deleted_in_a_space(name):
    keep = in_space(projection(2))[name][0]
    q, k, v = SELF.draw()
    k[1, :, 8:], v[1, :, 8:] = 1e4, -1e4
    padded = fk.attention(q, k, v, keep=keep, lengths=torch.tensor([23, 8]), impl="torch")
    alone = fk.attention(*(x[1:, :, :8] for x in (q, k, v)), keep=keep, impl="torch")
    torch.testing.assert_close(padded[1:, :, :8], alone, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["reformer", "routing, given", "entmax"])
def test_order_means_nothing_in_a_space(name):
    keep = in_space(projection(2))[name][0]
    q, k, _ = FORMS["cross"].draw()
    g = torch.Generator().manual_seed(3)
    keys, queries = torch.randperm(31, generator=g), torch.randperm(23, generator=g)
    shuffled = keep.graph(q[:, :, queries], k[:, :, keys]).to_mask()
    assert torch.equal(shuffled, keep.graph(q, k).to_mask()[:, :, queries][..., keys])


HASHES = [baselines.Reformer(8), baselines.SortedLSH(5), baselines.LowRankEntmax(3)]


@pytest.mark.parametrize("keep", HASHES, ids=str)
def test_hashes_are_drawn_from_the_generator(keep):
    q, k, _ = SELF.draw()

    def run(seed=None):
        g = None if seed is None else torch.Generator().manual_seed(seed)
        return keep.graph(q, k, generator=g).to_mask()

    torch.manual_seed(1)
    first = run(7)
    torch.manual_seed(2)
    assert torch.equal(first, run(7))
    assert torch.equal(run(), run(0))
    assert not torch.equal(first, run(8))


@pytest.mark.parametrize(
    "keep", [*HASHES, sparsefinder.BlockClusters(4, 2, centroids())], ids=lambda keep: type(keep).__name__
)
def test_sequences_stand_alone(keep):
    q, k, _ = SELF.draw()
    whole = keep.graph(q, k).to_mask()
    for b in range(2):
        assert torch.equal(whole[b], keep.graph(q[b : b + 1], k[b : b + 1]).to_mask()[0])


# --- the rest of the contract --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(6, 6, 0), (3, 6, 0), (6, 3, 0), (3, 6, 3), (3, 3, 2), (1, 6, 5)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_who_covers_keeps_every_visible_key(queries, keys, offset, causal):
    q, k = torch.zeros(1, 2, queries, 3), torch.zeros(1, 1, keys, 3)
    inputs = check_inputs(q, k, k, is_causal=causal, query_offset=offset)
    expected = visible(inputs, 0, queries).expand(1, 2, -1, -1)
    covering = 0
    for size, other in itertools.product(range(1, 10), (1, 2, 5)):
        power = 1 << (size.bit_length() - 1)
        for keep in (
            sparsefinder.GlobalTokens(size),
            baselines.Longformer(size, other),
            baselines.BigBird(power, 3, 0, other),
            baselines.Strided(size),
            baselines.Fixed(size, min(size, other)),
            sparsefinder.RandomEdges(size),
            baselines.SortedLSH(size),
            baselines.Routing(other),
            baselines.Reformer(2 * other),
            baselines.LowRankEntmax(other),
            sparsefinder.BlockClusters(power, other, centroids(2, 3, 3)),
        ):
            if keep.covers(inputs) and (keep.causal or not causal):
                covering += 1
                assert torch.equal(keep.select(inputs).to_mask(), expected)
    assert covering > 50


def test_the_work_stated_is_about_what_is_kept():
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 600, 8, generator=g) for _ in range(2))
    inputs = check_inputs(q, k, k)
    for keep in (
        baselines.Longformer(21, 5),
        baselines.BigBird(8, 3, 3, 1),
        baselines.Strided(24),
        baselines.Fixed(24, 2),
        baselines.Reformer(16, 1),
        baselines.SortedLSH(30),
        baselines.Routing(20),
        sparsefinder.BlockClusters(8, 4, centroids(1, 6, 8)),
    ):
        work = keep.work(inputs)
        assert work.scores == pytest.approx(keep.select(inputs).slots(), rel=0.5)
        assert work.choosing >= 0


def test_plans_with_tensors_come_back(tmp_path):
    q, k, _ = SELF.draw()
    for name, (keep, _) in in_space(projection(2)).items():
        plan = fk.Plan(keep | fk.Window(3))
        plan.save_pretrained(tmp_path / name)
        loaded = fk.Plan.from_pretrained(tmp_path / name)
        assert loaded == plan
        assert torch.equal(loaded.keep.graph(q, k).to_mask(), plan.keep.graph(q, k).to_mask())


SPOILED = torch.full((2, 5, 3), float("nan"))
REFUSED = {
    "GlobalTokens count: expected at least 1, got 0": lambda: sparsefinder.GlobalTokens(0),
    "Longformer window: expected an integer, got float": lambda: baselines.Longformer(2.0, 1),
    "BigBird window: expected an odd number of blocks, got 2": lambda: baselines.BigBird(4, 2),
    "RecentBlocks size: expected a power of two, got 12": lambda: baselines.BigBird(12),
    "BigBird random: expected at least 0, got -1": lambda: baselines.BigBird(4, 3, -1),
    "Strided stride: expected at least 1": lambda: baselines.Strided(0),
    "Fixed summary: expected at most the stride, 4, got 5": lambda: baselines.Fixed(4, 5),
    "Reformer buckets: expected an even number, got 7": lambda: baselines.Reformer(7),
    "Reformer buckets: expected at least 2": lambda: baselines.Reformer(1),
    "SortedLSH planes: expected at most 62": lambda: baselines.SortedLSH(4, 63),
    "LowRankEntmax: expected exactly one of rank and project": lambda: baselines.LowRankEntmax(),
    "LowRankEntmax alpha: expected a finite number": lambda: baselines.LowRankEntmax(2, alpha=1.0),
    "Routing clusters: expected the number of centroids given, 4, got 5": lambda: baselines.Routing(
        5, True, centroids()
    ),
    "project: expected a Projection or None, got Tensor": lambda: baselines.Reformer(4, 1, torch.zeros(2, 5, 3)),
    "fitted: expected Centroids or None, got Tensor": lambda: baselines.Routing(4, True, torch.zeros(2, 4, 5)),
    "fitted: expected values of 2 query heads in 3 dimensions like the projection's": lambda: baselines.Routing(
        4, True, centroids(), projection(2)
    ),
    "centroids: expected Centroids, got None": lambda: sparsefinder.BlockClusters(4, 2, None),
    "BlockClusters window: expected an odd number": lambda: sparsefinder.BlockClusters(4, 2, centroids(), window=2),
    "Projection query: expected a floating tensor": lambda: sparsefinder.Projection(torch.zeros(2, 5, 3).long(), None),
    "Projection query: expected shape": lambda: sparsefinder.Projection(torch.zeros(5, 3), torch.zeros(5, 3)),
    "Projection key: expected .* like query": lambda: sparsefinder.Projection(
        torch.zeros(2, 5, 3), torch.zeros(2, 5, 4)
    ),
    "Projection query: expected finite numbers, got 30 NaN": lambda: sparsefinder.Projection(SPOILED, SPOILED),
    "Centroids place: expected a floating tensor .*, got list": lambda: sparsefinder.Centroids([1.0]),
    "project: expected a projection of 2 query heads of dimension 5, got 4 of 5": lambda: baselines.Reformer(
        4, 1, projection()
    ).graph(*SELF.draw()[:2]),
    "fitted: expected values of 2 query heads in 5 dimensions": lambda: baselines.Routing(
        4, True, centroids(2, 4, 3)
    ).graph(*SELF.draw()[:2]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        REFUSED[message]()
