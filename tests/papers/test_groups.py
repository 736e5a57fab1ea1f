"""Groups: ids that meet are edges, each once, whatever else holds them; the fast way equals the reference."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fewkeys as fk
from cases import WEIGHTS
from fewkeys.core.entmax import entmax
from fewkeys.core.graph import Graph
from fewkeys.core.validation import check_inputs
from fewkeys.core.work import Work
from fewkeys.cost.operations import exact_operations, plan_operations
from fewkeys.execute import reference
from fewkeys.execute.problem import Problem
from fewkeys.execute.torch import by_block
from fewkeys.papers import sparsefinder
from fewkeys.select import Selector
from largest import Largest

entmax_package = pytest.importorskip("entmax")

ALL_WEIGHTS = {
    **WEIGHTS,
    "sparsemax": fk.weights.Entmax(2.0),
    "entmax 1.3": fk.weights.Entmax(1.3),
}
BESIDE = {
    "nothing": None,
    "window": fk.Window(3),
    "window + sinks": fk.Window(4) | fk.Sinks(2),
    "leverage": fk.select.Leverage(2),
    "recent blocks + window": fk.select.RecentBlocks(4, 1) | fk.Window(7),
    "top-k": fk.TopK(2),
}
RESTS = {
    "means": fk.ClusterMeans(3),
    "first-order means": fk.ClusterMeans(3, rank=2),
    "sample": fk.rest.UniformSample(4),
}


@dataclass(frozen=True, eq=False)
class Held(Selector):
    """Keeps given groups."""

    causal = True

    groups: sparsefinder.Groups

    def select(self, inputs):
        return Graph(inputs, extra=self.groups)

    def covers(self, inputs):
        return False

    def work(self, inputs):
        return Work(inputs.keys / self.groups.count, 2.0 * self.groups.count * inputs.head_dim)


def draw_ids(g, shape, count, skew):
    """Ids from -1 (none) to count - 1; `skew` puts most of them in the first group."""
    ids = torch.randint(-1, count, shape, generator=g)
    return torch.where(torch.rand(shape, generator=g) < skew, torch.zeros_like(ids), ids)


@dataclass(frozen=True)
class Case:
    batch: int
    kv_heads: int
    per_key_head: int
    queries: int
    keys: int
    count: int
    query_groups: int
    key_groups: int
    skew: float
    offset: int
    is_causal: bool
    padded: bool
    seed: int

    def draw(self, dtype=torch.float64):
        g = torch.Generator().manual_seed(self.seed)
        heads = self.kv_heads * self.per_key_head
        q = torch.randn(self.batch, heads, self.queries, 4, generator=g, dtype=torch.float64) * 2
        k, v = torch.randn(2, self.batch, self.kv_heads, self.keys, 4, generator=g, dtype=torch.float64)
        groups = sparsefinder.Groups(
            draw_ids(g, (self.batch, heads, self.queries, self.query_groups), self.count, self.skew),
            draw_ids(g, (self.batch, heads, self.keys, self.key_groups), self.count, self.skew),
            self.count,
        )
        lengths = torch.randint(1, self.keys + 1, (self.batch,), generator=g) if self.padded else None
        options = {"is_causal": self.is_causal, "query_offset": self.offset, "lengths": lengths}
        return [x.to(dtype) for x in (q, k, v[..., :3])], groups, options


cases = st.builds(
    Case,
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    per_key_head=st.sampled_from([1, 1, 3]),
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    count=st.integers(1, 9),
    query_groups=st.integers(1, 3),
    key_groups=st.integers(1, 3),
    skew=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    offset=st.sampled_from([0, 0, 5]),
    is_causal=st.booleans(),
    padded=st.booleans(),
    seed=st.integers(0, 10_000),
)
PLAIN = Case(2, 2, 1, 50, 60, 6, 1, 1, 0.2, 0, False, False, 0)
TANGLED = Case(2, 2, 3, 50, 50, 7, 3, 2, 0.2, 0, False, True, 1)


def outputs(case, keep, rest, weights, dtype=torch.float64):
    """(output, gradients) of both ways."""
    tensors, groups, options = case.draw(dtype)
    keep = Held(groups) if keep is None else keep | Held(groups)
    for impl in ("torch", "reference"):
        inputs = [x.clone().requires_grad_() for x in tensors]
        output = fk.attention(*inputs, keep=keep, rest=rest, weights=weights, impl=impl, **options)
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        with torch.no_grad():
            again = fk.attention(*inputs, keep=keep, rest=rest, weights=weights, impl=impl, **options)
        yield [output.detach(), again, *torch.autograd.grad(output, inputs, direction)]


def assert_agree(case, keep, rest, weights):
    for fast, slow in zip(*outputs(case, keep, rest, weights), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-9)


# --- the graph -------------------------------------------------------------------------------------------------------


@given(case=cases)
def test_edges_are_the_pairs_that_share_a_group(case):
    (q, k, v), groups, options = case.draw()
    inputs = check_inputs(q, k, v, **{**options, "lengths": None, "is_causal": False})
    mask = Graph(inputs, extra=groups).to_mask()
    for index in torch.randint(0, mask.numel(), (20,), generator=torch.Generator().manual_seed(0)):
        b, h, i, j = (int(x) for x in torch.unravel_index(index, mask.shape))
        expected = set(groups.query[b, h, i].tolist()) & set(groups.key[b, h, j].tolist()) - {-1}
        assert bool(mask[b, h, i, j]) == bool(expected)
    other = replace(case, seed=case.seed + 1, count=case.count + 2, query_groups=1).draw()[1]
    both = Graph(inputs, extra=groups) | Graph(inputs, extra=other, band=(1, 1))
    expected = mask | Graph(inputs, extra=other).to_mask() | Graph(inputs, band=(1, 1)).to_mask()
    assert torch.equal(both.to_mask(), expected)


@pytest.mark.parametrize(
    ("query", "key", "count", "error", "words"),
    [
        (
            torch.zeros(1, 1, 3, 1),
            torch.zeros(1, 1, 3, 1).long(),
            2,
            TypeError,
            r"query: expected int64 ids, got torch\.float32",
        ),
        (torch.zeros(1, 3, 1).long(), torch.zeros(1, 1, 3, 1).long(), 2, ValueError, "query: expected shape"),
        (torch.zeros(1, 1, 3, 1).long(), torch.full((1, 1, 3, 1), 2), 2, ValueError, "key: expected ids in 0 .. 1"),
        (torch.arange(-2, 1).view(1, 1, 3, 1), torch.zeros(1, 1, 3, 1).long(), 2, ValueError, "query: expected ids in"),
        (torch.zeros(1, 2, 3, 1).long(), torch.zeros(1, 1, 3, 1).long(), 2, ValueError, "key: expected the batch"),
        (torch.zeros(1, 1, 3, 1).long(), torch.zeros(1, 1, 3, 1).long(), 0, ValueError, "count: expected at least 1"),
    ],
)
def test_malformed_groups_are_refused(query, key, count, error, words):
    with pytest.raises(error, match=words):
        sparsefinder.Groups(query, key, count)


def test_tokens_without_groups_have_no_edge():
    x = check_inputs(*(torch.zeros(1, 1, 3, 2) for _ in range(3)))
    none = torch.zeros(1, 1, 3, 0, dtype=torch.int64)
    assert not Graph(x, extra=sparsefinder.Groups(none, none, 2)).to_mask().any()
    assert (Graph(x, extra=sparsefinder.Groups(none, none, 2)) | Graph.full(x)).to_mask().all()


@pytest.mark.parametrize("part", ["query", "key"])
def test_groups_of_another_problem_are_refused(part):
    (q, k, v), groups, _ = PLAIN.draw()
    wrong = replace(groups, **{part: getattr(groups, part)[:, :, 1:]})
    with pytest.raises(ValueError, match=f"groups: expected {part} ids of shape"):
        Graph(check_inputs(q, k, v), extra=wrong)


# --- the execution ---------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(case=cases, beside=st.sampled_from(list(BESIDE)), weights=st.sampled_from(list(ALL_WEIGHTS)))
def test_ragged_groups_agree_with_the_reference(case, beside, weights):
    if BESIDE[beside] is not None and "blocks" in beside and not case.is_causal:
        beside = "window"
    assert_agree(case, BESIDE[beside], fk.Drop(), ALL_WEIGHTS[weights])


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("weights", ["softmax", "entmax"])
def test_every_pattern_beside_groups(weights, beside):
    assert_agree(replace(TANGLED, per_key_head=2, query_groups=2), beside, fk.Drop(), WEIGHTS[weights])
    causal = replace(TANGLED, per_key_head=1, query_groups=2, is_causal=True, queries=20, offset=27)
    assert_agree(causal, beside, fk.Drop(), WEIGHTS[weights])


@settings(max_examples=20)
@given(
    case=cases,
    beside=st.sampled_from(["nothing", "window", "window + sinks", "leverage"]),
    rest=st.sampled_from(list(RESTS)),
)
def test_stand_ins_beside_ragged_groups(case, beside, rest):
    assert_agree(replace(case, is_causal=False), BESIDE[beside], RESTS[rest], fk.Softmax())


@pytest.mark.parametrize("weights", ["power", "elu", "relu"])
def test_stand_ins_under_every_kernel(weights):
    assert_agree(TANGLED, BESIDE["window + sinks"], RESTS["means"], WEIGHTS[weights])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", ["softmax", "entmax", "relu"])
def test_every_dtype(weights, dtype):
    for fast, slow in zip(*outputs(TANGLED, fk.Window(3), fk.Drop(), WEIGHTS[weights], dtype), strict=True):
        assert fast.dtype == dtype
        limit = max(2 * torch.finfo(dtype).eps, 2e-5) * slow.double().abs().max().item()
        assert (fast.double() - slow.double()).abs().max().item() <= limit


@pytest.mark.parametrize("size", [1, 40])
def test_cutting_into_pieces_does_not_matter(size, monkeypatch):
    monkeypatch.setattr(by_block, "CACHED_SCORES", size)
    case = replace(TANGLED, batch=1, kv_heads=1, per_key_head=2, queries=17, keys=17, query_groups=2)
    assert_agree(case, fk.Window(3), fk.Drop(), fk.weights.Entmax(1.5))
    assert_agree(replace(case, queries=70, key_groups=1), None, fk.ClusterMeans(3), fk.Softmax())


def test_queries_without_edges_give_zeros_and_no_gradient():
    (q, k, v), groups, _ = PLAIN.draw()
    lonely = groups.query.clone()
    lonely[:, :, ::2] = -1
    lonely[:, :, 1] = 5
    key = groups.key.masked_fill(groups.key == 5, -1)  # a group with queries but no keys
    for query in (lonely, torch.full_like(lonely, -1)):
        empty = ~(query.unsqueeze(3) == key.masked_fill(key < 0, -2).unsqueeze(2)).any(-1).any(-1)
        for weights in ALL_WEIGHTS.values():
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            actual = fk.attention(*inputs, keep=Held(sparsefinder.Groups(query, key, 6)), weights=weights, impl="torch")
            assert torch.equal(actual[empty], torch.zeros_like(actual[empty]))
            grads = torch.autograd.grad(actual.square().sum(), inputs)
            assert all(torch.isfinite(grad).all() for grad in grads)
            assert torch.equal(grads[0][empty], torch.zeros_like(grads[0][empty]))


@pytest.mark.long
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_gradients_of_the_joined_rows(alpha):
    case = Case(1, 1, 2, 4, 5, 3, 2, 2, 0.2, 0, False, False, 3)
    tensors, groups, _ = case.draw()

    def run(q, k, v):
        x = check_inputs(q, k, v)
        return by_block.attend(Problem(x, Graph(x, extra=groups, band=(1, 0)), None, fk.weights.Entmax(alpha)))

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in tensors])


@pytest.mark.parametrize("weights", ["softmax", "entmax", "relu"])
def test_the_future_does_not_matter(weights):
    """Later keys, and the groups they are put in, change nothing before them, up to the rounding of other tiles."""
    case = replace(TANGLED, padded=False, is_causal=True)
    (q, k, v), groups, options = case.draw()
    before = fk.attention(q, k, v, keep=Held(groups) | fk.Window(2), weights=WEIGHTS[weights], **options)
    for token in (1, 17, 49):
        changed = sparsefinder.Groups(groups.query.clone(), groups.key.clone(), 7)
        changed.query[:, :, token:], changed.key[:, :, token:] = 3, 3
        later_k, later_v = k.clone(), v.clone()
        later_k[:, :, token:], later_v[:, :, token:] = 50.0, -1e4
        after = fk.attention(
            q, later_k, later_v, keep=Held(changed) | fk.Window(2), weights=WEIGHTS[weights], **options
        )
        torch.testing.assert_close(before[:, :, :token], after[:, :, :token], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(before[:, :, token:], after[:, :, token:])


# --- entmax ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.1, 1.0, 10.0, 1000.0]),
    alpha=st.sampled_from([1.05, 1.3, 1.5, 1.9, 2.0]),
)
def test_entmax_is_that_of_the_package(seed, scale, alpha):
    g = torch.Generator().manual_seed(seed)
    whole = (scale * torch.randn(5, 12, dtype=torch.float64, generator=g)).requires_grad_()
    hidden = torch.rand(5, 12, generator=g) < 0.3
    scores = whole.masked_fill(hidden, -torch.inf)
    actual = entmax(scores, alpha)
    seen = ~hidden.all(-1)
    filled = scores[seen].clamp_min(-1e9)
    special = {1.5: entmax_package.entmax15, 2.0: entmax_package.sparsemax}
    expected = torch.zeros_like(actual)
    if alpha in special:
        expected[seen] = special[alpha](filled, dim=-1)
    else:
        expected[seen] = entmax_package.entmax_bisect(filled, alpha, dim=-1, n_iter=100)
    tolerance = {"rtol": 1e-7, "atol": 1e-9} if alpha in special else {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(actual, expected, **tolerance)
    direction = torch.randn(actual.shape, generator=g, dtype=torch.float64)
    grads = [torch.autograd.grad(x, whole, direction, retain_graph=True)[0] for x in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gold_inside_predicted_gives_exact_attention(alpha, is_causal):
    """Sparse consistency: whatever else is predicted, entmax over a superset of its support is entmax over all keys."""
    case = Case(2, 2, 1, 60, 60, 20, 1, 2, 0.1, 0, is_causal, False, 5)
    (q, k, v), others, _ = case.draw()
    q, k, v = (x.requires_grad_() for x in (2 * q, k, v))
    scores = q @ k.mT / 2
    if is_causal:
        scores = scores.masked_fill(torch.ones(60, 60, dtype=torch.bool).triu(1), -1e9)
    dense = (entmax_package.entmax15 if alpha == 1.5 else entmax_package.sparsemax)(scores, dim=-1)
    gold = dense > 0
    # Query i is group i; a key is in the groups of the queries that use it: at most `most` of them.
    most = int(gold.sum(-2).max())
    used, query = gold.mT.to(torch.int8).topk(most, -1)
    predicted = sparsefinder.Groups(
        torch.arange(60).expand(2, 2, -1).unsqueeze(-1).clone(), query.masked_fill(used == 0, -1), 60
    )
    actual = fk.attention(q, k, v, keep=Held(predicted | others), weights=fk.weights.Entmax(alpha), is_causal=is_causal)
    kept = Held(predicted | others).graph(q, k, is_causal=is_causal)
    assert (kept.to_mask() >= gold).all()
    assert kept.to_mask().sum() < 0.7 * 4 * torch.ones(60, 60).tril(0 if is_causal else 60).sum()
    torch.testing.assert_close(actual, dense @ v, rtol=1e-6, atol=1e-6)
    direction = torch.randn(actual.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grads = [torch.autograd.grad(x, (q, k, v), direction, retain_graph=True) for x in (actual, dense @ v)]
    for fast, slow in zip(*grads, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-6)


# --- nothing counts twice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ALL_WEIGHTS.values(), ids=ALL_WEIGHTS)
def test_an_edge_that_many_hold_counts_once(weights):
    (q, k, v), groups, options = replace(TANGLED, per_key_head=1).draw()
    once = fk.attention(q, k, v, keep=Held(groups) | fk.Window(9), weights=weights, **options)
    often = Held(groups | groups) | fk.Window(9) | Held(replace(groups, query=groups.query.flip(-1)))
    torch.testing.assert_close(fk.attention(q, k, v, keep=often, weights=weights, **options), once)
    everything = sparsefinder.Groups(torch.zeros_like(groups.query), torch.zeros_like(groups.key), 1)
    keep = Held(everything | groups) | fk.Window(9) | fk.Sinks(3)
    actual = fk.attention(q, k, v, keep=keep, weights=weights, **options)
    torch.testing.assert_close(actual, fk.attention(q, k, v, weights=weights, **options))


@pytest.mark.parametrize("rest", RESTS.values(), ids=RESTS)
@pytest.mark.parametrize("case", [replace(PLAIN, queries=60), replace(TANGLED, kv_heads=1)], ids=["plain", "tangled"])
def test_kept_keys_and_stand_ins_count_every_key_once(case, rest):
    """With all scores equal each of n keys weighs 1 / n: so the 7 keys that no stand-in speaks for weigh 7 / n."""
    (q, k, v), groups, options = case.draw()
    q = torch.zeros_like(q)
    listed = fk.select.Leverage(7).graph(q, k, **options).to_mask()[:, :: case.per_key_head, 0]
    marked = listed[..., None].to(v.dtype).expand(*listed.shape, 3).contiguous()
    keep = fk.select.Leverage(7) | fk.Window(5) | Held(groups)
    actual = fk.attention(q, k, marked, keep=keep, rest=rest, impl="torch", **options)
    for b in range(case.batch):
        n = case.keys if options["lengths"] is None else int(options["lengths"][b])
        queries = min(n, case.queries)
        expected = torch.full_like(actual[b, :, :queries], min(7, n) / n)
        torch.testing.assert_close(actual[b, :, :queries], expected, rtol=1e-6, atol=1e-9)


def test_a_stand_in_for_nobody_decides_nothing():
    """Its score may exceed all others by hundreds: as the row's largest it would leave them no weight."""
    (q, k, v), groups, _ = PLAIN.draw(torch.float32)
    everything = Held(sparsefinder.Groups(torch.zeros_like(groups.query), torch.zeros_like(groups.key), 1))
    actual = fk.attention(30 * q, k, v, keep=everything, rest=fk.ClusterMeans(3), impl="torch")
    torch.testing.assert_close(actual, fk.attention(30 * q, k, v), rtol=1e-4, atol=1e-4)


# --- cost ------------------------------------------------------------------------------------------------------------


def cost(n, count, giant, rest, weights):
    """(edges, largest tensor, operations) with `count` groups, a quarter of all tokens in the first if `giant`."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=g) for _ in range(3))
    ids = [torch.randperm(n, generator=g) % count for _ in range(2)]
    if giant:
        ids = [torch.where(torch.rand(n, generator=g) < 0.25, 0, row) for row in ids]
    groups = sparsefinder.Groups(*(row.view(1, 1, n, 1) for row in ids), count)
    edges = int((torch.bincount(ids[0]) * torch.bincount(ids[1])).sum())
    with torch.no_grad(), Largest() as largest:
        fk.attention(q, k, v, keep=Held(groups) | fk.Window(5), rest=rest, weights=weights, impl="torch")
    return edges, largest.numel, largest.operations


@pytest.mark.parametrize("giant", [False, True], ids=["even", "giant"])
@pytest.mark.parametrize("weights", ["softmax", "entmax"])
def test_cost_follows_the_edges(weights, giant):
    n = 8192
    edges, largest, flops = cost(n, 90, giant, fk.Drop(), WEIGHTS[weights])
    band = n * (16 + 4)
    assert flops <= 1.3 * 2 * 16 * (edges + band)
    assert largest <= 2 * by_block.CACHED_SCORES + 64 * n
    assert largest < n * n / 60


def test_stand_ins_cost_edges_and_means():
    n, count = 8192, 90
    edges, largest, flops = cost(n, count, False, fk.ClusterMeans(count), fk.Softmax())
    assert largest <= n * (count + 1) + 2 * by_block.CACHED_SCORES
    clustering = 2 * n * count * 2 * 8 * 4  # Lloyd's steps on a sample, and the nearest centre of every key
    assert flops <= 2 * (edges * (20 + count) + n * (count + 1) * 64) + clustering


def test_the_model_of_costs_asks_the_selector():
    (q, k, v), groups, _ = replace(PLAIN, queries=60).draw()
    inputs, plan = check_inputs(q, k, v), fk.Plan(Held(groups), exact_if_faster=True)
    assert exact_operations(inputs) == 60 * (2 * 7 + 20)
    assert plan_operations(inputs, plan) == pytest.approx(10 * (2 * 7 + 20) + 2 * 6 * 4)


def test_reference_is_not_what_runs(monkeypatch):
    monkeypatch.setattr(reference, "_attend", None)
    (q, k, v), groups, options = TANGLED.draw()
    fk.attention(q, k, v, keep=Held(groups) | fk.Window(3) | fk.Sinks(2), weights=fk.weights.Entmax(1.5), **options)
