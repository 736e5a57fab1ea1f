"""The forest of key trees: permutations, statistics of nodes, what is opened, what it costs, what never changes."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fewkeys as fk
from captures import captured
from cases import CAUSAL_SHAPES, SHAPES, Shape
from fewkeys.core.graph import visible
from fewkeys.core.validation import check_inputs
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem
from fewkeys.tree import rule
from fewkeys.tree.descent import CURVE, HIGHEST, Descent, descend
from fewkeys.tree.metric import RIDGE, roots
from fewkeys.tree.split import split
from largest import Largest

LONG = Shape(query_heads=4, kv_heads=2, queries=1100, keys=1100, value_dim=5, is_causal=True)
PLAN = fk.budget(64, is_causal=True, memory="all").never_exact()


def descent(shape, slots=64, dtype=torch.float64):
    return Descent.of(check_inputs(*shape.draw(dtype=dtype), **shape.options), slots)


@pytest.mark.parametrize("shape", [LONG, SHAPES["cross padded"], CAUSAL_SHAPES["causal padded"]], ids=str)
def test_trees_are_permutations_of_their_keys(shape):
    for walk in descent(shape).walks:
        for stand in walk.forest.stands.values():
            own = walk.forest.order[:, stand.base : stand.base + stand.count * stand.size].unflatten(
                1, (-1, stand.size)
            )
            expected = (
                torch.tensor([start for start, _ in stand.trees()])[:, None] + torch.arange(stand.size) + rule.SINKS
            )
            assert torch.equal(own.sort(-1).values, expected.expand_as(own))
            assert not torch.equal(own, expected.expand_as(own))


@pytest.mark.parametrize("slots", [64, 200])
def test_the_trees_of_a_step_cover_its_sealed_keys(slots):
    (walk,) = descent(LONG, slots).walks
    for step in walk.sequences.steps:
        assert step.sealed == max(0, (step.start - rule.SINKS) // walk.sequences.block * walk.sequences.block)
        found = []
        for level in step.levels:
            for start, size in level.trees:
                first = walk.forest.row(start, size, level.size)
                found.append(walk.forest.order[:, first * level.size : first * level.size + size])
        if found:
            expected = torch.arange(step.sealed) + rule.SINKS
            assert torch.equal(torch.cat(found, 1).sort(-1).values, expected.expand(walk.forest.order.shape[0], -1))


def test_nodes_are_statistics_of_their_keys():
    shape = LONG
    _, k, v = shape.draw()
    (walk,) = descent(shape).walks
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    assert set(walk.nodes) == {8, 32, 128, 512}
    for size, table in walk.nodes.items():
        count = table.key.shape[1]
        assert count == sum(s.count * s.size for s in walk.forest.stands.values() if s.size >= size) // size
        for head in range(4):
            for node in range(0, count, 3):
                keys = walk.forest.order[head, node * size : (node + 1) * size]
                torch.testing.assert_close(table.key[head, node], k[head, keys].mean(0))
                torch.testing.assert_close(table.value[head, node], v[head, keys].mean(0))
                torch.testing.assert_close(table.variance[head, node], k[head, keys].var(0, correction=0))


def test_halves_are_better_than_halves_by_chance():
    """Rows in two clouds are told apart, and every split lowers the spread inside."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 64, 6, generator=g, dtype=torch.float64)
    cloud = torch.rand(5, 64, generator=g).argsort(-1) % 2
    found = split(rows + 9 * cloud.unsqueeze(-1))
    sides = cloud.gather(1, found).unflatten(1, (2, 32))
    assert (sides == sides[..., :1]).all()
    inside = [rows.gather(1, found.unsqueeze(-1).expand_as(rows)).unflatten(1, (-1, z)).var(2).mean() for z in (32, 8)]
    assert inside[1] < 0.8 * inside[0]


def by_definition(rows, index):
    """The order of `index` by the docstring of `fewkeys.tree.split`, one set of rows after the other."""
    if len(index) == 8:
        return index
    y = rows[index] - rows[index].mean(0)
    u = y[y.norm(dim=-1).argmax()]
    for _ in range(2):
        u = sum(row * (row @ u) for row in y)
    order = (y @ u).argsort(stable=True)
    for _ in range(2):
        order = (y @ -y[order[: len(index) // 2]].sum(0)).argsort(stable=True)
    half = len(index) // 2
    return torch.cat([by_definition(rows, index[order[:half]]), by_definition(rows, index[order[half:]])])


def test_splits_follow_their_definition():
    rows = torch.randn(3, 128, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    expected = torch.stack([by_definition(own, torch.arange(128)) for own in rows])
    assert torch.equal(split(rows), expected)


def test_equal_rows_keep_their_order():
    assert torch.equal(split(torch.ones(2, 32, 3)), torch.arange(32).expand(2, -1))


def test_the_metric_is_the_covariance_of_the_queries_so_far():
    x = check_inputs(*LONG.draw(), is_causal=True)
    (walk,) = Descent.of(x, 64).walks
    query = walk.sequences.queries(x)
    for blocks in (1, 5, 40):
        found = roots(walk.sequences, query, torch.tensor([blocks]))[:, 0]
        own = query[:, :, : rule.SINKS + 16 * blocks].flatten(1, 2)
        # One query more, imagined: its mean is zero and its covariance I / D.
        total, count = own.sum(1, keepdim=True), own.shape[1] + 1
        expected = (own.mT @ own + torch.eye(8) / 8) / count - total.mT @ total / count**2
        expected += RIDGE * expected.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(8)
        torch.testing.assert_close(found @ found.mT, expected)


@pytest.mark.parametrize("shape", [LONG, replace(LONG, is_causal=False)], ids=["causal", "all at once"])
def test_what_is_opened_has_the_largest_ranks(shape):
    """Level by level, node by node: no candidate left closed ranks above one that was opened, and logits are right."""
    x = check_inputs(*shape.draw(), **shape.options)
    (walk,) = Descent.of(x, 64).walks
    step = next(step for step in reversed(walk.sequences.steps) if len(step.levels) >= 3)
    query = walk.sequences.queries(x)[:, :, step.start : step.start + 9].flatten(1, 2)
    opened, closed = descend(walk.forest, walk.nodes, step, query)
    for head in range(4):
        for i in range(query.shape[1]):
            q, before = query[head, i], []
            for place, level in enumerate(step.levels):
                table = walk.nodes[level.size]
                candidates = {4 * node + child for node in before for child in range(4)}
                for start, size in level.trees:
                    first = walk.forest.row(start, size, level.size)
                    candidates |= set(range(first, first + size // level.size))
                assert len(candidates) == level.scored
                spread = {c: float(q.square() @ table.variance[head, c]) for c in candidates}
                score = {c: float(q @ table.key[head, c]) for c in candidates}
                rank = {c: score[c] + (1 + math.log2(level.size)) / 2 * spread[c] ** 0.5 for c in candidates}
                best = sorted(candidates, key=lambda c: -rank[c])
                own, rows = set(best[: level.opened]), closed[place].rows[head, i].tolist()
                assert set(rows) == candidates - own
                for row, logit in zip(rows, closed[place].logit[head, i].tolist(), strict=True):
                    told = score[row] + math.log(level.size) + min(CURVE * spread[row], HIGHEST)
                    assert logit == pytest.approx(told, rel=1e-9, abs=1e-9)
                before = own
            assert set(opened[head, i].tolist()) == before


@pytest.mark.parametrize("shape", [LONG, replace(LONG, is_causal=False), SHAPES["padded"], SHAPES["few keys"]], ids=str)
@pytest.mark.parametrize("slots", [64, 128, 200])
def test_every_key_is_kept_or_stands_in_once(shape, slots):
    """Law 7, key by key: a visible key is an edge, or inside one closed node, and never both."""
    x = check_inputs(*shape.draw(), **shape.options)
    graph = fk.select.KeyTree(slots).select(x)
    mask = graph.to_mask().unflatten(1, (x.kv_heads, x.gqa_ratio))
    for walk in graph.descent.walks:
        own = walk.sequences
        kept = own.rows(mask.flatten(2, 3).mT.to(torch.float64)).mT.unflatten(1, (x.gqa_ratio, -1)).long()
        query = own.queries(x)
        for step in own.steps:
            span = slice(step.start, step.stop)
            times = kept[:, :, span].clone()
            if step.levels:
                for closed in descend(walk.forest, walk.nodes, step, query[:, :, span].flatten(1, 2))[1]:
                    inside = walk.forest.order[:, : walk.nodes[closed.size].key.shape[1] * closed.size]
                    inside = inside.unflatten(1, (-1, closed.size))
                    head = torch.arange(inside.shape[0])[:, None, None]
                    keys = inside[head, closed.rows].flatten(2).unflatten(1, (x.gqa_ratio, -1))
                    times.scatter_add_(3, keys, torch.ones_like(keys))
            seen = torch.arange(times.shape[-1]) < own.seen[span, None]
            assert torch.equal(times, seen.long().expand_as(times))


@pytest.mark.parametrize("slots", [64, 65, 100, 128, 129, 256, 500])
@pytest.mark.parametrize("is_causal", [True, False])
def test_slots_are_those_counted_one_by_one(slots, is_causal):
    shape = Shape(batch=1, query_heads=2, kv_heads=1, queries=700, keys=700, is_causal=is_causal)
    q, k, v = shape.draw()
    graph = fk.select.KeyTree(slots).graph(q, k, v, is_causal=is_causal)
    kept = graph.to_mask().sum(-1).double()
    nodes = torch.zeros_like(kept)
    (walk,) = graph.descent.walks
    for step in walk.sequences.steps:
        if step.levels:
            query = walk.sequences.queries(graph.inputs)[:, :, step.start : step.stop].flatten(1, 2)
            opened, closed = descend(walk.forest, walk.nodes, step, query)
            met = sum(part.rows.shape[-1] for part in closed) + sum(level.opened for level in step.levels)
            assert opened.shape[-1] == step.levels[-1].opened
            nodes[:, :, step.start : step.stop] = met
    assert torch.equal(nodes, graph.descent.scored(0, 700).double())
    assert graph.slots() == pytest.approx(float((kept + nodes).mean()))
    assert graph.slots() <= slots
    assert (kept + nodes).max() <= slots + (walk.sequences.block // 2 if is_causal else 0)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("keys", [64, 65, 200])
def test_a_tree_covers_where_it_keeps_every_key(keys, is_causal):
    x = check_inputs(*Shape(queries=keys, keys=keys).draw(), is_causal=is_causal)
    mask, seen = fk.select.KeyTree(64).select(x).to_mask(), visible(x, 0, keys)
    assert fk.select.KeyTree(64).covers(x) == torch.equal(mask, seen.expand_as(mask))


@pytest.mark.parametrize("slots", [64, 96, 128, 256, 512])
def test_slots_hold_at_every_length_and_most_are_spent(slots):
    block = rule.block_of(slots)
    for sealed in [*range(block, 40 * slots, block), 2**15 - block, 2**17, 2**17 - block]:
        exact = rule.exact_keys(block)
        levels = rule.levels_of(slots, sealed, exact, block)
        paid = rule.price(levels) + exact if levels else sealed + exact
        assert paid <= slots or (slots == 64 and sealed > 2**16)
        assert not levels or paid > 0.8 * slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_first_tokens_alone_have_the_same_trees(dtype):
    """To the last bit, whatever the length at which one looks, and however many sequences there are beside."""
    q, k, v = LONG.draw(dtype=dtype)
    (whole,) = Descent.of(check_inputs(q, k, v, is_causal=True), 64).walks
    for m in (150, 333, 516, 517, 1029, 1099):
        (part,) = Descent.of(check_inputs(*(x[:1, :, :m] for x in (q, k, v)), is_causal=True), 64).walks
        for size, stand in part.forest.stands.items():
            for start, _ in stand.trees():
                here, there = part.forest.row(start, size, 8), whole.forest.row(start, size, 8)
                assert torch.equal(
                    part.forest.leaves()[:, here : here + size // 8],
                    whole.forest.leaves()[:2, there : there + size // 8],
                )
                for node in (8, 32, 128, 512):
                    if node > size:
                        continue
                    here, there = part.forest.row(start, size, node), whole.forest.row(start, size, node)
                    for name in ("key", "value", "variance"):
                        own, other = (getattr(w.nodes[node], name) for w in (part, whole))
                        assert torch.equal(own[:, here : here + size // node], other[:2, there : there + size // node])


def test_the_first_tokens_alone_have_the_same_output():
    q, k, v = LONG.draw(dtype=torch.float32)
    whole = fk.attention(q, k, v, plan=PLAN, is_causal=True, impl="torch")
    for m in (333, 1029):
        part = fk.attention(q[:, :, :m], k[:, :, :m], v[:, :, :m], plan=PLAN, is_causal=True, impl="torch")
        torch.testing.assert_close(part, whole[:, :, :m], rtol=1e-4, atol=1e-5)


def test_pieces_do_not_matter(monkeypatch):
    from fewkeys.tree import descent as module

    shape = replace(LONG, is_causal=False)
    both_ways = replace(PLAN, is_causal=False)
    whole = fk.attention(*shape.draw(), plan=both_ways, impl="torch")
    for piece in (1, 100_000):
        monkeypatch.setattr(module, "PIECE", piece)
        torch.testing.assert_close(
            fk.attention(*shape.draw(), plan=both_ways, impl="torch"), whole, rtol=1e-9, atol=1e-10
        )


@pytest.mark.parametrize("plan", [PLAN, fk.Plan(fk.select.KeyTree(64))], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_are_those_of_the_output_with_choices_held(plan, is_causal):
    shape = Shape(batch=1, kv_heads=1, queries=150, keys=150, head_dim=3, value_dim=2, is_causal=is_causal)
    q, k, v = (x.requires_grad_() for x in shape.draw())
    with torch.no_grad():
        graph = plan.keep.select(check_inputs(q, k, v, is_causal=is_causal))

    def run(query, key, value):
        x = check_inputs(query, key, value, is_causal=is_causal, impl="torch")
        own = replace(graph, inputs=x)
        return dispatch.attend(Problem(x, own, plan.rest.prepare(x, own, plan.weights), plan.weights))[:, :, ::13]

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("shape", ["causal grouped", "causal padded", "causal with offset"])
def test_causal_gradients_agree(shape):
    found = []
    for impl in ("torch", "reference"):
        tensors = [x.requires_grad_() for x in CAUSAL_SHAPES[shape].draw()]
        output = fk.attention(*tensors, plan=PLAN, impl=impl, **CAUSAL_SHAPES[shape].options)
        found.append(torch.autograd.grad(output.square().sum(), tensors))
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-9)


def test_left_padding_is_as_if_deleted():
    q, k, v = replace(LONG, queries=400, keys=400).draw()
    mask = torch.ones(2, 400, dtype=torch.bool)
    mask[0, :41], mask[0, 99] = False, False
    found = fk.attention(q, k, v, plan=PLAN, key_mask=mask, is_causal=True, impl="torch")[:1, :, mask[0]]
    alone = fk.attention(*(x[:1, :, mask[0]] for x in (q, k, v)), plan=PLAN, is_causal=True, impl="torch")
    torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-10)


def test_every_query_finds_a_needle_of_its_own():
    """One key in a thousand matters to each query, another one to each: a shared list could not hold them."""
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 1024, 32, generator=g)
    k = 6 * k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(1, 1, 1024, 8, generator=g)
    q = 3 * k[:, :, torch.randperm(1024, generator=g)]
    exact, found = (
        fk.attention(q, k, v, scale=1.0),
        fk.attention(q, k, v, plan=replace(PLAN, is_causal=False), scale=1.0, impl="torch"),
    )
    right = (found - exact).norm(dim=-1) < 0.1 * exact.norm(dim=-1)
    assert right.float().mean() > 0.4  # though values say nothing of keys here; 64 keys for all: 0.06
    shared = fk.attention(q, k, v, plan=fk.budget(64, cohorts=1).never_exact(), scale=1.0, impl="torch")
    assert ((shared - exact).norm(dim=-1) < 0.1 * exact.norm(dim=-1)).float().mean() < 0.2


def test_reports_count_the_nodes_scored():
    capture = captured(layers=1, batches=1, size=1, length=200, causal=True)
    (call,) = capture.calls(0)
    graph = PLAN.keep.graph(call.query, call.key, call.value, is_causal=True, scale=call.scale)
    (row,) = (row for row in fk.compare(capture, {"tree": PLAN}).rows if row.name == "tree")
    assert row.slots == pytest.approx(graph.slots(), rel=1e-4)
    assert row.slots > graph.to_mask().sum(-1).double().mean() + 1


def cost(n):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=g) for _ in range(3))
    largest, flops = Largest(), FlopCounterMode(display=False)
    with torch.no_grad(), flops, largest:
        fk.attention(q, k, v, plan=PLAN, is_causal=True, impl="torch")
    return largest.numel, flops.get_total_flops()


def test_memory_and_operations_grow_little_faster_than_the_length():
    """Four times the tokens: a tree more on every token's way, and a level more in it."""
    small, large = cost(1024), cost(4096)
    assert large[0] <= 4.2 * small[0] * 12 / 10
    assert large[1] <= 4.2 * small[1] * (12 / 10) ** 2
    assert large[0] < 4096 * 4096 / 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fk.select.KeyTree(63), "KeyTree slots: expected at least 64, got 63"),
        (lambda: fk.Plan(fk.Window(5), fk.rest.TreeMeans()), "keep: TreeMeans stands for the closed nodes of KeyTree"),
        (
            lambda: fk.Plan(fk.select.KeyTree(64) | fk.Window(5), fk.rest.TreeMeans()),
            "keep: TreeMeans stands for the closed nodes",
        ),
        (
            lambda: fk.Plan(fk.select.KeyTree(64), fk.rest.TreeMeans(), fk.weights.Power(2.0)),
            r"rest: TreeMeans is defined for Softmax\(\)",
        ),
        (
            lambda: fk.Plan(fk.select.KeyTree(64), fk.rest.TreeMeans(), fk.weights.Entmax(1.5)),
            "rest: TreeMeans needs weights that are",
        ),
        (lambda: fk.budget(64, memory="constant"), "memory: expected 'all' without is_causal=True, got 'constant'"),
        (lambda: fk.budget(64, is_causal=True, memory="some"), "memory: expected 'all' or 'constant', got 'some'"),
    ],
)
def test_what_is_no_plan_is_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_two_trees_do_not_join():
    q, k, v = SHAPES["plain"].draw()
    with pytest.raises(ValueError, match=r"^keep: expected one KeyTree or KeyScan, got two"):
        fk.attention(q, k, v, keep=fk.select.KeyTree(64) | fk.select.KeyTree(65), impl="torch")


def test_budget_takes_the_memory_that_is_asked_for():
    assert fk.budget(256, is_causal=True).keep == fk.select.KeyTree(256)
    assert fk.budget(256, is_causal=True) == fk.budget(256, is_causal=True, memory="all")
    assert isinstance(fk.budget(256, is_causal=True, memory="constant").keep, fk.select.RecentBlocks)
    assert fk.budget(63, is_causal=True, memory="constant") == fk.budget(63, is_causal=True)


def shares(keep, by, is_causal=True, dtype=torch.float64):
    """The graph of some queries, by times as long, and the share of their mass that is on the keys that they keep."""
    q, k, v = replace(LONG, batch=1, queries=400, keys=400, is_causal=is_causal).draw(dtype=dtype)
    x = check_inputs(by * q, k, v, is_causal=is_causal)
    graph = keep.select(x)
    score = x.query @ k.repeat_interleave(2, 1).mT * x.scale
    weight = score.masked_fill(~visible(x, 0, 400), -torch.inf).softmax(-1)
    return graph, (weight * graph.to_mask()).sum(-1)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("by", [0.1, 0.4, 1.0, 4.0])
def test_a_certified_share_is_never_more_than_there_is(by, is_causal):
    """Law 8: the bound holds for every query; where slots allow it, it reaches what was asked for."""
    graph, true = shares(fk.select.KeyTree(150, 0.1, certified=True), by, is_causal)
    told = graph.descent.share()
    assert (told <= true + 1e-9).all()
    assert told.min() > 0
    if by == 0.1:
        # Nodes are as narrow as bounds ask for: fewer slots than there are, and still what was promised.
        assert (told >= 0.1 - 1e-9).all()
        assert not is_causal or graph.slots() < 0.95 * fk.select.KeyTree(150).select(graph.inputs).slots()


def test_an_estimated_share_is_about_what_there_is():
    """On average: scores inside nodes are Gaussian here."""
    for by in (0.3, 1.0):
        graph, true = shares(fk.select.KeyTree(128, 0.8), by)
        assert abs(graph.descent.share().mean() - true.mean()) < 0.05


def test_more_mass_takes_more_slots():
    x = check_inputs(*replace(LONG, batch=1, queries=400, keys=400).draw(), is_causal=True)
    whole = fk.select.KeyTree(128).select(x)
    paid = [fk.select.KeyTree(128, mass).select(x).slots() for mass in (0.3, 0.6, 0.9, 1 - 1e-9)]
    assert paid == sorted(set(paid))
    assert paid[-1] == pytest.approx(whole.slots())
    assert torch.equal(fk.select.KeyTree(128, 1 - 1e-9).select(x).to_mask(), whole.to_mask())


@pytest.mark.parametrize("enough", [(0.7, False), (0.4, True)], ids=str)
def test_stopping_early_counts_every_key_once(enough):
    """Law 7: values of one give one, and torch agrees with the reference."""
    shape = replace(LONG, batch=1, queries=300, keys=300)
    q, k, v = shape.draw()
    plan = fk.Plan(fk.select.KeyTree(96, *enough), fk.rest.TreeMeans())
    ones = fk.attention(0.4 * q, k, torch.ones_like(v), plan=plan, is_causal=True, impl="torch")
    torch.testing.assert_close(ones, torch.ones_like(ones))
    fast, slow = (fk.attention(0.4 * q, k, v, plan=plan, is_causal=True, impl=impl) for impl in ("torch", "reference"))
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)
    # A later key that changes leaves what was before.
    k[:, :, 250:] += 5
    again = fk.attention(0.4 * q, k, v, plan=plan, is_causal=True, impl="torch")
    torch.testing.assert_close(again[:, :, :250], fast[:, :, :250], rtol=1e-9, atol=1e-10)


def test_explain_tells_what_a_share_took():
    q, k, v = replace(LONG, batch=1, queries=300, keys=300).draw(dtype=torch.float32)
    plan = fk.budget(96, is_causal=True, mass=0.5).never_exact()
    found = fk.explain(q, k, v, plan=plan, is_causal=True)
    assert found.slots == pytest.approx(plan.keep.graph(q, k, v, is_causal=True).slots())
    assert f"{found.slots:.1f} slots" in str(found)
    assert fk.explain(q, k, v, plan=PLAN, is_causal=True).slots is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fk.select.KeyTree(64, 1.0), "mass"),
        (lambda: fk.select.KeyTree(64, certified=True), "expected a mass"),
        (lambda: fk.budget(64, mass=0.9), "is_causal=True"),
        (lambda: fk.budget(32, is_causal=True, mass=0.9), "at least 64 slots"),
        (lambda: fk.stream(fk.budget(64, is_causal=True, mass=0.9, certified=True)), "no radii"),
    ],
)
def test_shares_that_cannot_be(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_guard_watches_trees():
    """Heads above the limit are answered exactly, the others as the plan does."""
    q, k, v = replace(LONG, batch=1, queries=300, keys=300).draw(dtype=torch.float32)
    exact, plan = (fk.attention(q, k, v, plan=one, is_causal=True) for one in (fk.Plan(), PLAN))
    found = []
    for limit in (0.0, 1e9):
        guard = fk.Guard(limit)
        found.append(fk.attention(q, k, v, plan=PLAN, is_causal=True, max_error=guard))
        assert guard.fallbacks.checked == 4
        assert guard.fallbacks.fallbacks == (4 if limit == 0 else 0)
    torch.testing.assert_close(found[0], exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[1], plan)
