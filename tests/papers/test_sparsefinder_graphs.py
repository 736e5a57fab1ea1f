"""Predicted graphs: each grouping by its definition, written out naively, and the laws that hold for every selector."""

import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st

import fewkeys as fk
from cases import CAUSAL_SHAPES, SHAPES, Shape
from executors import rotated
from fewkeys.captures.capture import AttentionInputs
from fewkeys.captures.writer import CaptureWriter
from fewkeys.core.validation import check_inputs
from fewkeys.papers import sparsefinder
from fewkeys.papers.sparsefinder import Joined
from fewkeys.papers.sparsefinder.evaluate import score_graphs
from fewkeys.papers.sparsefinder.groups import Groups
from predictors import GROUPINGS, for_shape, planted, predicted

ALL = {**SHAPES, **CAUSAL_SHAPES}
SMALL = Shape(batch=2, query_heads=4, kv_heads=2, queries=13, keys=17, head_dim=5)
SELF = Shape(batch=2, query_heads=4, kv_heads=2, queries=17, keys=17, head_dim=5)


def projected(selector, q, k):
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, 1)
    return q @ selector.project.query.to(q), k @ selector.project.key.to(k)


def naive(selector, q, k, joined, of=lambda row, head: row):
    """The mask of the pairs that `joined(query, key, head)` accepts, by what `of` says of each projected row."""
    q, k = projected(selector, q, k)
    mask = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    for b, h in itertools.product(*map(range, q.shape[:2])):
        queries, keys = ([of(row, h) for row in rows[b, h]] for rows in (q, k))
        mask[b, h] = torch.tensor([[bool(joined(query, key, h)) for key in keys] for query in queries])
    return mask


@pytest.mark.long
@given(t=st.floats(0.1, 5.0), seed=st.integers(0, 99))
def test_distance(t, seed):
    q, k, _ = SMALL.draw(seed)
    selector = predicted(sparsefinder.Distance(t), 4, 5)
    near = naive(selector, q, k, lambda a, b, _: (a - b).norm() <= t)
    assert torch.equal(selector.graph(q, k).to_mask(), near)
    # Lists are as long as the longest list of visible keys, and no longer.
    graph = selector.graph(q, k, is_causal=True)
    assert graph.rows.shape[-1] == graph.to_mask().sum(-1).max()


@pytest.mark.long
@given(beta=st.integers(1, 20), seed=st.integers(0, 99))
def test_uniform_buckets(beta, seed):
    q, k, _ = SMALL.draw(seed)
    q[:, :, ::3], k[:, :, ::4] = 1e3 * q[:, :, ::3], 1e3 * k[:, :, ::4]  # tanh rounds to -1 and 1
    selector = predicted(sparsefinder.Buckets(beta, "uniform"), 4, 5)

    def bins(row, _):
        return ((row.tanh() + 1) / 2 * beta).floor().clamp(max=beta - 1)

    assert torch.equal(selector.graph(q, k).to_mask(), naive(selector, q, k, lambda a, b, _: (a == b).any(), bins))


@given(beta=st.integers(1, 20), seed=st.integers(0, 99), lengths=st.lists(st.integers(1, 17), min_size=2, max_size=2))
def test_equal_buckets_by_rank(beta, seed, lengths):
    q, k, _ = SELF.draw(seed)
    selector = predicted(sparsefinder.Buckets(beta), 4, 5)
    actual = selector.graph(q, k, lengths=torch.tensor(lengths))
    q, k = projected(selector, q, k)
    for b, n in enumerate(lengths):
        size = math.ceil(n / beta)
        ids = []
        for rows in (q, k):
            place = torch.empty(4, n, 3, dtype=torch.int64)
            for h in range(4):
                for d in range(3):
                    for rank, token in enumerate(rows[b, h, :n, d].argsort().tolist()):
                        place[h, token, d] = rank // size
            ids.append(place)
        expected = (ids[0][:, :, None] == ids[1][:, None]).any(-1)
        assert torch.equal(actual.to_mask()[b, :, :n, :n], expected)
        assert not actual.to_mask()[b, :, :, n:].any()
    # No bucket of a dimension holds more than its share.
    full = selector.graph(*(x for x in SELF.draw(seed)[:2]))
    sizes = torch.zeros(2, 4, full.extra.count, dtype=torch.int64)
    sizes.scatter_add_(-1, full.extra.key.flatten(2), torch.ones_like(full.extra.key).flatten(2))
    assert sizes.max() <= math.ceil(17 / beta)


@pytest.mark.long
@given(beta=st.integers(1, 9), seed=st.integers(0, 99))
def test_equal_buckets_by_edges(beta, seed):
    q, k, _ = SMALL.draw(seed)
    selector = predicted(sparsefinder.Buckets(beta), 4, 5, edges=True)
    begin = selector.fitted

    def bins(row, h):
        return [(row[:, None] > edges[h]).sum(-1) for edges in (begin.query, begin.key)]

    assert torch.equal(
        selector.graph(q, k).to_mask(), naive(selector, q, k, lambda a, b, _: (a[0] == b[1]).any(), bins)
    )


@pytest.mark.long
@given(count=st.integers(1, 8), data=st.data(), rounds=st.integers(1, 3), seed=st.integers(0, 99))
def test_clusters(count, data, rounds, seed):
    top = data.draw(st.integers(1, count))
    q, k, _ = SMALL.draw(seed)
    selector = predicted(sparsefinder.Clusters(count, top, rounds), 4, 5, seed=seed)
    place = selector.fitted.place.double()

    def nearest(row, h):
        sets = place[h].split(count)
        return [set((row - centres).norm(dim=-1).topk(top, largest=False).indices.tolist()) for centres in sets]

    def joined(a, b, _):
        return any(one & two for one, two in zip(a, b, strict=True))

    assert torch.equal(selector.graph(q, k).to_mask(), naive(selector, q, k, joined, nearest))


@pytest.mark.parametrize("offset", [0, 100, 5000])
def test_an_offset_of_all_tokens_does_not_matter(offset):
    """In float32, where it is far larger than the distances."""
    tokens = torch.randn(1, 2, 64, 4, generator=torch.Generator().manual_seed(0)) + offset
    places, exact = tokens[0, :, :8], tokens.double()
    label = torch.cdist(exact, places.double()).argmin(-1)
    clusters = sparsefinder.Clusters(8, fitted=sparsefinder.Centroids(places))
    assert torch.equal(clusters.graph(tokens, tokens).to_mask(), label.unsqueeze(-1) == label.unsqueeze(-2))
    blocks = sparsefinder.BlockClusters(2, 1, sparsefinder.Centroids(places)).graph(tokens, tokens).to_mask()
    wanted = sparsefinder.BlockClusters(2, 1, sparsefinder.Centroids(places.double())).graph(exact, exact).to_mask()
    assert torch.equal(blocks, wanted)
    near = sparsefinder.Distance(1.0).graph(tokens, tokens).to_mask()
    assert torch.equal(near, torch.cdist(exact, exact) <= 1)


@pytest.mark.long
@given(count=st.integers(1, 8), seed=st.integers(0, 99))
def test_pairs_of_clusters(count, seed):
    q, k, _ = SMALL.draw(seed)
    selector = predicted(sparsefinder.ClusterPairs(count, 1.0), 4, 5, seed=seed)
    fitted = selector.fitted

    def nearest(row, h):
        return [(row - place[h]).norm(dim=-1).argmin() for place in (fitted.query, fitted.key)]

    def joined(a, b, h):
        return fitted.pairs[h, a[0], b[1]]

    assert torch.equal(selector.graph(q, k).to_mask(), naive(selector, q, k, joined, nearest))


@given(alpha=st.floats(1.1, 2.0), seed=st.integers(0, 99))
def test_the_gold_graph_is_the_support(alpha, seed):
    q, k, _ = SELF.draw(seed)
    k = k.repeat_interleave(2, 1)
    seen = torch.ones(17, 17, dtype=torch.bool).tril() & (torch.arange(17) < 14)
    for shown, options in ((None, {}), (seen, {"is_causal": True, "lengths": torch.tensor([14, 14])})):
        scores = q @ k.mT * 0.7
        scores = scores if shown is None else scores.masked_fill(~shown, -torch.inf)
        actual = sparsefinder.EntmaxSupport(alpha).graph(q, k, scale=0.7, **options).to_mask()
        assert torch.equal(actual, fk.weights.Entmax(alpha).kernel([scores])[0] > 0)


@pytest.mark.long
def test_the_gold_graph_of_a_long_sequence_comes_in_blocks():
    from largest import Largest

    q, k = (torch.randn(1, 1, 4500, 2, generator=torch.Generator().manual_seed(s)) * 8 for s in range(2))
    with Largest() as largest:
        graph = sparsefinder.EntmaxSupport(2.0).graph(q, k)
    assert largest.numel <= 2**24 < 4500**2
    part = sparsefinder.EntmaxSupport(2.0).graph(q[:, :, 4400:], k)
    assert torch.equal(graph.mask(4400, 4500), part.to_mask())


# --- laws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape", "weights"), rotated(GROUPINGS, ALL, [fk.Softmax(), fk.weights.Entmax(1.5)]))
def test_the_fast_executor_agrees_with_the_reference(name, shape, weights):
    shape = ALL[shape]
    keep = for_shape(name, shape) | fk.Window(3) | fk.Sinks(2)
    fast, slow = (
        fk.attention(*shape.draw(), keep=keep, weights=weights, impl=impl, **shape.options)
        for impl in ("torch", "reference")
    )
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", ["padded", "cross padded", "causal padded"])
@pytest.mark.parametrize("name", GROUPINGS)
def test_masked_is_deleted(name, shape):
    shape = ALL[shape]
    q, k, _ = shape.draw()
    n = shape.lengths[1]
    queries = n if shape.queries == shape.keys else shape.queries
    k[1, :, n:] = 1e4
    if queries == n:
        q[1, :, n:] = 1e4
    keep = for_shape(name, shape)
    graph = keep.graph(q, k, lengths=torch.tensor(shape.lengths), is_causal=shape.is_causal)
    padded = graph.to_mask()
    if graph.extra is not None:  # the padding is in no group, so that nobody runs it
        assert (graph.extra.key[1, :, n:] == -1).all()
        assert (graph.extra.query[1, :, queries:] == -1).all()
    alone = keep.graph(q[1:, :, :queries], k[1:, :, :n], is_causal=shape.is_causal).to_mask()
    assert torch.equal(padded[1:, :, :queries, :n], alone)
    assert not padded[1, :, :, n:].any()


@pytest.mark.parametrize("name", GROUPINGS)
def test_the_future_changes_no_edge(name):
    shape = CAUSAL_SHAPES["causal grouped"]
    q, k, _ = shape.draw(dtype=torch.float32)
    keep = for_shape(name, shape)
    assert keep.causal
    before = keep.graph(q, k, is_causal=True).to_mask()
    q[:, :, 64:], k[:, :, 64:] = q[:, :, 64:] * -3, k[:, :, 64:] + 2
    after = keep.graph(q, k, is_causal=True).to_mask()
    assert torch.equal(before[:, :, :64], after[:, :, :64])
    assert not torch.equal(before, after)
    assert not before.triu(1).any()


@pytest.mark.parametrize("name", GROUPINGS)
def test_one_query_at_a_time_is_all_at_once(name):
    """What is fitted for causal attention says of a decoded token what it says of it in the whole sequence."""
    shape = CAUSAL_SHAPES["causal"]
    q, k, _ = shape.draw()
    keep = for_shape(name, shape)
    whole = keep.graph(q, k, is_causal=True).to_mask()
    for i in (0, 77, 149):
        one = keep.graph(q[:, :, i : i + 1], k[:, :, : i + 1], is_causal=True, query_offset=i).to_mask()
        assert torch.equal(one, whole[:, :, i : i + 1, : i + 1])


@pytest.mark.parametrize("shape", ["grouped", "padded", "cross", "causal"])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_sparse_consistency(alpha, shape):
    """Where the gold graph is inside the predicted one, sparse attention is exact; where it is not, it is not."""
    shape = ALL[shape]
    q, k, v = shape.draw()
    q = q * 3
    weights = fk.weights.Entmax(alpha)
    exact = fk.attention(q, k, v, weights=weights, **shape.options)
    gold = sparsefinder.EntmaxSupport(alpha)
    for keep in (gold, gold | for_shape("clusters", shape) | fk.Window(3)):
        for impl in ("torch", "reference"):
            sparse = fk.attention(q, k, v, keep=keep, weights=weights, impl=impl, **shape.options)
            torch.testing.assert_close(sparse, exact, rtol=1e-9, atol=1e-10)
    keep = for_shape("clusters", shape) | fk.Window(3)
    inputs = check_inputs(q, k, v, **shape.options)
    whole = (keep.select(inputs).to_mask() | ~gold.select(inputs).to_mask()).all(-1)
    sparse = fk.attention(q, k, v, keep=keep, weights=weights, **shape.options)
    assert whole.any()
    assert not whole.all()
    torch.testing.assert_close(sparse[whole], exact[whole], rtol=1e-9, atol=1e-10)
    assert ((sparse - exact).norm(dim=-1)[~whole] > 1e-6).double().mean() > 0.9


def test_what_is_a_whole_graph_is_answered_exactly():
    q, k, v = SHAPES["plain"].draw()
    for grouping in (sparsefinder.Buckets(1), sparsefinder.Clusters(1), sparsefinder.Clusters(3, top=3)):
        keep = predicted(grouping, 2, 8)
        assert keep.covers(check_inputs(q, k, v))
        assert keep.graph(q, k).to_mask().all()
    assert not predicted(sparsefinder.Clusters(3, top=2), 2, 8).covers(check_inputs(q, k, v))


def test_which_rules_score_every_pair():
    assert predicted(sparsefinder.Distance(1.0), 2, 8).is_oracle
    assert sparsefinder.EntmaxSupport().is_oracle
    for grouping in (sparsefinder.Buckets(4), sparsefinder.Clusters(4)):
        assert not predicted(grouping, 2, 8).is_oracle
        work = predicted(grouping, 2, 8).work(check_inputs(*SHAPES["plain"].draw()))
        assert 0 < work.scores < 70


@pytest.mark.parametrize("name", GROUPINGS)
def test_refusals(name):
    q, k, _ = SHAPES["plain"].draw()
    keep = predicted(GROUPINGS[name], 3, 8, edges=True)
    with pytest.raises(ValueError, match=r"expected .* query heads"):
        keep.graph(q, k)
    with pytest.raises(ValueError, match=r"expected .* 2 query heads of dimension 8"):
        predicted(GROUPINGS[name], 2, 5).graph(q, k)
    raw = predicted(GROUPINGS[name], 3, 8, edges=True, raw=True)
    if raw.fitted is not None:
        with pytest.raises(ValueError, match=r"expected .* 2 query heads"):
            raw.graph(q, k)


def predicted_pairs(clusters):
    places = torch.randn(2, clusters, 8)
    return sparsefinder.ClusterPairs(3, 0.5, fitted=Joined(places, places, torch.ones(2, 4, 4).bool()))


def test_refused_arguments():
    for make, message in (
        (lambda: sparsefinder.Distance(0.0), "Distance t: expected a finite number"),
        (lambda: sparsefinder.Buckets(0), "Buckets beta: expected at least 1"),
        (lambda: sparsefinder.Buckets(3, "sorted"), "Buckets kind: expected 'equal_size' or 'uniform', got 'sorted'"),
        (lambda: sparsefinder.Clusters(3, top=4), "Clusters top: expected at most the count, 3, got 4"),
        (lambda: sparsefinder.Clusters(3, rounds=0), "Clusters rounds: expected at least 1"),
        (lambda: sparsefinder.ClusterPairs(3, 0.0), "ClusterPairs lift: expected a finite number"),
        (lambda: predicted_pairs(4), "fitted: expected 3 for each head for ClusterPairs"),
        (lambda: sparsefinder.EntmaxSupport(1.0), "EntmaxSupport alpha: expected a finite number in"),
        (
            lambda: sparsefinder.Clusters(3, fitted=sparsefinder.Centroids(torch.randn(2, 4, 8))),
            "fitted: expected 3 for each head for Clusters",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    for make, message in (
        (
            lambda: sparsefinder.Distance(1.0, fitted=sparsefinder.Centroids(torch.randn(2, 4, 8))),
            r"fitted: expected None for Distance\(",
        ),
        (
            lambda: sparsefinder.Buckets(5, fitted=sparsefinder.Centroids(torch.randn(2, 4, 8))),
            r"fitted: expected Edges for Buckets\(",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            make()
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match=r"is_causal: .* looks at the future"):
        fk.attention(q, q, q, keep=sparsefinder.Buckets(3), is_causal=True)
    with pytest.raises(ValueError, match=r"fitted: expected values for Clusters\(.*use Sparsefinder.selector"):
        fk.attention(q, q, q, keep=sparsefinder.Clusters(3))


# --- metrics -------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 999), count=st.integers(1, 6), width=st.integers(1, 3))
def test_metrics_of_groups(seed, count, width):
    g = torch.Generator().manual_seed(seed)
    query = torch.randint(-1, count, (2, 3, 7, width), generator=g)
    key = torch.randint(-1, count, (2, 3, 9, width), generator=g)
    saved, entropy = Groups(query, key, count).computation_sparsity(), Groups(query, key, count).entropy()
    for b in range(2):
        for h in range(3):
            members = [[sum(c in row.tolist() for row in ids[b, h]) for c in range(count)] for ids in (query, key)]
            run = sum(a * b for a, b in zip(*members, strict=True))
            assert saved[b, h] == pytest.approx(max(0, 1 - run / 63), abs=1e-6)
            total = max(1, sum(members[1]))
            expected = -sum(m / total * math.log(m / total) for m in members[1] if m)
            assert entropy[b, h] == pytest.approx(expected / math.log(count) if count > 1 else 0, abs=1e-6)


def test_even_groups_have_entropy_one_and_one_group_none():
    even = torch.arange(12).remainder(4).view(1, 1, 12, 1)
    assert Groups(even, even, 4).entropy() == pytest.approx(1)
    assert Groups(even, even * 0, 4).entropy() == 0
    assert Groups(even, even * 0 - 1, 4).entropy() == 0
    saved = Groups(even, even, 4).computation_sparsity()
    mask = Groups(even, even, 4).mask(0, 12)
    assert saved == fk.metrics.sparsity(mask) == 0.75


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_graphs_ignore_padding(causal):
    """The same sequences, each alone and padded together, score the same; against the definitions."""
    lengths = (24, 9, 17, 3)
    capture = planted(batches=2, kv_heads=1, causal=causal, lengths=lengths)
    keep = predicted(sparsefinder.Clusters(4), 2, 16)
    actual = score_graphs(capture, 0, {"mine": keep, "gold": sparsefinder.EntmaxSupport(1.5)})
    expected = []
    for call in capture.calls(0):
        for row, n in enumerate(lengths):
            q, k = call.query[row : row + 1, :, :n], call.key[row : row + 1, :, :n]
            options = {"scale": 1.0, "is_causal": causal}
            gold = sparsefinder.EntmaxSupport(1.5).graph(q, k, **options).to_mask()
            graph = keep.graph(q, k, **options)
            mask = graph.to_mask()
            seen = n * (n + 1) / 2 if causal else n * n
            expected.append(
                torch.stack(
                    [
                        fk.metrics.recall(mask, gold)[0],
                        1 - mask.sum((-2, -1))[0] / seen,
                        fk.metrics.exact_fraction(mask, gold)[0],
                        mask.sum((-2, -1))[0] / n,
                        graph.extra.computation_sparsity()[0],
                        graph.extra.entropy()[0],
                    ]
                )
            )
    expected = torch.stack(expected).double().mean(0)
    mine = actual["mine"]
    got = torch.stack([mine.recall, mine.sparsity, mine.exact, mine.slots, mine.computation, mine.entropy])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    gold = actual["gold"].means()
    assert (gold["recall"], gold["exact"]) == (1, 1)
    assert math.isnan(gold["computation"])


def test_padding_in_a_cached_past_changes_no_score():
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 2, 4, 8, generator=g), torch.randn(1, 2, 10, 8, generator=g)
    real, scores = torch.arange(10)[None] >= 3, []
    for keys, mask in ((key, real), (key[:, :, 3:], None)):
        writer = CaptureWriter(None, "cached")
        writer.write(AttentionInputs(query, keys, keys, 1.0, True, mask))
        writer.end_batch()
        scores.append(score_graphs(writer.finish(), 0, {"window": fk.Window(2)})["window"].means())
    assert scores[0] == pytest.approx(scores[1], nan_ok=True)
