"""Compiled kernels of key trees: they grow what torch grows, and attend as the reference does to what is opened."""

from dataclasses import replace

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_SHAPES, SHAPES, Shape
from fewkeys.core.validation import check_inputs
from fewkeys.execute import native as native_plans
from fewkeys.execute import reference
from fewkeys.execute import torch as torch_plans
from fewkeys.execute.dispatch import EXECUTORS
from fewkeys.execute.native import descent
from fewkeys.execute.problem import Problem
from fewkeys.flow import prepare
from fewkeys.native import build, counters
from fewkeys.streaming.whole import Whole
from fewkeys.tree import native
from fewkeys.tree.descent import Descent
from fewkeys.tree.forest import grow, summarise
from fewkeys.tree.leaves import Held
from fewkeys.tree.metric import roots
from fewkeys.tree.split import split
from native_cases import CLOSE, needs_compiler

pytestmark = needs_compiler
LONG = Shape(query_heads=4, kv_heads=2, queries=1100, keys=1100, value_dim=5, is_causal=True)
FORMS = {
    **SHAPES,
    **CAUSAL_SHAPES,
    "long": LONG,
    "long, odd": replace(LONG, queries=701, keys=701, head_dim=19, value_dim=70),
    "long, whole": replace(LONG, is_causal=False, queries=40),
    "one query": replace(LONG, queries=1, query_offset=1099),
    "some queries": replace(LONG, queries=37, query_offset=1063),
}


def problem_of(x, slots, rest=True):
    graph = fk.select.KeyTree(slots).select(x)
    return Problem(x, graph, fk.rest.TreeMeans().prepare(x, graph, fk.Softmax()) if rest else None, fk.Softmax())


def problem(shape, slots=64, dtype=torch.float32, rest=True, move=None):
    q, k, v = shape.draw(dtype=dtype)
    if move is not None:
        k, v = move(k, v)
    return problem_of(check_inputs(q, k, v, **shape.options), slots, rest)


def sets(order, size):
    """The sets of `size` rows that stand together, each sorted, in their order."""
    return order.unflatten(-1, (-1, size)).sort(-1).values


def threads(count, call):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 512])
@pytest.mark.parametrize("dim", [3, 16, 41])
def test_splits_are_those_of_torch(size, dim):
    rows = torch.randn(5, size, dim, generator=torch.Generator().manual_seed(size)) ** 3
    found, want = native.split(rows), split(rows.double())
    half = size
    while half >= 8:
        assert torch.equal(sets(found, half), sets(want, half))
        half //= 2


@pytest.mark.parametrize("size", [16, 64, 256])
def test_equal_rows_keep_their_order(size):
    assert torch.equal(native.split(torch.zeros(2, size, 5)), torch.arange(size).expand(2, -1))
    assert torch.equal(native.split(torch.full((2, size, 5), 0.3)), torch.arange(size).expand(2, -1))
    # Of two kinds, those come together, each in its order.
    rows = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))[torch.arange(size) % 2]
    found = native.split(rows[None])[0].unflatten(0, (2, -1))
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, torch.arange(size).view(-1, 2).mT.tolist()))


def test_a_set_does_not_depend_on_those_beside_it():
    rows = torch.randn(9, 256, 24, generator=torch.Generator().manual_seed(0))
    rows[4] *= 1e6
    found = native.split(rows)
    for index in range(9):
        assert torch.equal(native.split(rows[index : index + 1])[0], found[index])
    assert torch.equal(threads(3, lambda: native.split(rows)), found)


@pytest.mark.parametrize("form", ["long", "long, odd", "cross padded", "causal padded", "one query", "long, whole"])
def test_forests_are_those_of_torch(form):
    x = check_inputs(*FORMS[form].draw(dtype=torch.float32), **FORMS[form].options)
    exact = check_inputs(*(rows.double() for rows in (x.query, x.key, x.value)), **FORMS[form].options)
    for own, other in zip(Descent.of(x, 64).walks, Descent.of(exact, 64).walks, strict=True):
        sequences = own.sequences
        key, value, query = sequences.rows(x.key), sequences.rows(x.value), sequences.queries(x)
        if not own.forest.stands:
            continue
        turns = torch.tensor([0, 1, 3, 4]) if x.is_causal else torch.tensor([0])
        metric = roots(other.sequences, other.sequences.queries(exact), turns)
        torch.testing.assert_close(roots(sequences, query, turns, True), metric.float(), rtol=1e-4, atol=1e-5)
        assert torch.equal(sets(own.forest.order, 8), sets(other.forest.order, 8))
        again = threads(3, lambda: grow(sequences, query, key, value))  # noqa: B023 - called at once
        assert torch.equal(again.order, own.forest.order)
        assert set(own.nodes) == set(other.nodes)
        for size, table in summarise(own.forest, key, value, "torch").items():
            for name in ("key", "value", "variance"):
                torch.testing.assert_close(getattr(own.nodes[size], name), getattr(table, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slots", [64, 67, 200])
@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_queries_find_what_torch_finds(form, rest, slots):
    told = problem(FORMS[form], slots, rest=rest)
    assert native_plans.unsupported(told) is None
    found = native_plans.attend(told)
    torch.testing.assert_close(found, torch_plans.attend(told), **CLOSE[torch.float32])
    if told.inputs.queries < 100:
        torch.testing.assert_close(found, reference.attend(told).float(), **CLOSE[torch.float32])


@pytest.mark.parametrize("form", ["long", "causal grouped", "some queries"])
def test_bfloat16(form):
    told = problem(FORMS[form], dtype=torch.bfloat16)
    found = native_plans.attend(told)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, torch_plans.attend(told), **CLOSE[torch.bfloat16])


MOVES = {
    "zeros": lambda k, v: (torch.zeros_like(k), v),
    "duplicates": lambda k, v: (k[:, :, torch.arange(k.shape[2]) // 3], v[:, :, torch.arange(k.shape[2]) // 3]),
    "two kinds": lambda k, v: (k[:, :, torch.arange(k.shape[2]) % 2].round(), v),
    "one value": lambda k, v: (k, torch.ones_like(v)),
    "far": lambda k, v: (4 * k, v),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("form", ["long", "long, whole"])
def test_ties_go_to_whoever_comes_first(form, move):
    # Nodes of equal keys are equal, and ranked alike whether they enter a level or are children in it, where no sum
    # is rounded: whole numbers, and products of one term.
    shape = replace(FORMS[form], head_dim=1) if move == "two kinds" else FORMS[form]
    told = problem(shape, move=MOVES[move])
    torch.testing.assert_close(native_plans.attend(told), torch_plans.attend(told), **CLOSE[torch.float32])


def test_of_equal_nodes_the_first_are_opened():
    """Keys that are all alike: what is opened shows in their values, which are not."""
    shape = replace(LONG, is_causal=False, queries=3)
    q, k, v = shape.draw(dtype=torch.float32)
    told = problem_of(check_inputs(q, torch.zeros_like(k), v), 64, rest=False)
    near = told.graph.mask(0, 3)
    weight = near.float() / near.sum(-1, keepdim=True)
    expected = weight @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(native_plans.attend(told), expected, **CLOSE[torch.float32])


def test_nodes_whose_rank_is_nan_are_opened_last():
    told = problem(replace(LONG, is_causal=False, queries=3), rest=False)
    for walk in told.graph.descent.walks:
        walk.nodes[min(walk.nodes)].key[:, ::2] = torch.nan
    output = native_plans.attend(told)
    assert output.isfinite().all()
    torch.testing.assert_close(output, torch_plans.attend(told), **CLOSE[torch.float32])


@pytest.mark.parametrize("keys", [1, 3, 4, 5, 36, 37, 68, 100])
def test_few_keys_are_all_kept(keys):
    shape = Shape(query_heads=2, kv_heads=1, queries=keys, keys=keys, is_causal=True)
    q, k, v = shape.draw(dtype=torch.float32)
    x = check_inputs(q, k, v, is_causal=True)
    expected = fk.attention(q, k, v, plan=fk.Plan(), is_causal=True)
    torch.testing.assert_close(native_plans.attend(problem_of(x, 300)), expected, **CLOSE[torch.float32])


def test_a_budget_for_all_keys_is_exact():
    q, k, v = LONG.draw(dtype=torch.float32)
    expected = fk.attention(q, k, v, plan=fk.Plan(), is_causal=True)
    found = native_plans.attend(problem_of(check_inputs(q, k, v, is_causal=True), 1200))
    torch.testing.assert_close(found, expected, **CLOSE[torch.float32])


@pytest.mark.parametrize("slots", [64, 1900])
def test_many_candidates_are_chosen_alike(slots):
    """Beyond 128 candidates they are sorted in another way."""
    shape = replace(LONG, queries=20, keys=20000, head_dim=4, value_dim=3, is_causal=False)
    told = problem(shape, slots)
    torch.testing.assert_close(native_plans.attend(told), torch_plans.attend(told), **CLOSE[torch.float32])


@pytest.mark.parametrize("form", ["long", "causal padded", "cross padded", "some queries"])
def test_threads_change_no_bit(form):
    told = problem(FORMS[form], 96)
    one, three = (threads(count, lambda: native_plans.attend(told)) for count in (1, 3))
    assert torch.equal(one, three)


@pytest.mark.parametrize("cut", [300, 741, 1028, 1099])
def test_what_comes_later_changes_no_bit(cut):
    q, k, v = LONG.draw(dtype=torch.float32)
    plan = fk.Plan(fk.select.KeyTree(80), fk.rest.TreeMeans())
    whole = fk.attention(q, k, v, plan=plan, is_causal=True, impl="native")
    other = [torch.cat([rows[:, :, :cut], 7 - 3 * rows[:, :, cut:]], 2) for rows in (q, k, v)]
    changed = fk.attention(*other, plan=plan, is_causal=True, impl="native")
    assert torch.equal(changed[:, :, :cut], whole[:, :, :cut])
    assert not torch.equal(changed[:, :, cut:], whole[:, :, cut:])
    begun = fk.attention(*(rows[:, :, :cut] for rows in (q, k, v)), plan=plan, is_causal=True, impl="native")
    assert torch.equal(begun, whole[:, :, :cut])


def gradients(shape, dtype, impl, rest=True, by=1.0):
    """Of queries, keys and values, through choices and nodes of float32 inputs."""
    q, k, v = (rows.to(dtype) for rows in shape.draw(dtype=torch.float32))
    tensors = [rows.requires_grad_() for rows in (by * q, k, v)]
    x = check_inputs(*tensors, **shape.options, impl=impl)
    output = EXECUTORS[impl].attend(problem_of(x, 64, rest))
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return torch.autograd.grad(output, tensors, direction)


@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize("form", ["long, odd", "long, whole", "cross padded", "causal padded", "some queries"])
def test_gradients_are_those_of_torch(form, rest):
    """Of trees, nodes and answers that torch makes in float64. Longer queries: spreads count up to some size."""
    for by in (1.0, 3.0):
        found = gradients(FORMS[form], torch.float32, "native", rest, by)
        for fast, slow in zip(found, gradients(FORMS[form], torch.float64, "torch", rest, by), strict=True):
            assert (fast - slow).abs().max() <= 1e-5 * slow.abs().max()


@pytest.mark.parametrize("enough", [(0.8, False), (0.99, False), (0.3, True), (0.7, True)], ids=str)
@pytest.mark.parametrize("form", ["some queries", "long, whole", "cross padded", "causal grouped"])
def test_queries_stop_where_those_of_torch_stop(form, enough):
    """At other places for other scores; forward and backward."""
    for by in (1.0, 2.0):
        q, k, v = FORMS[form].draw(dtype=torch.float32)
        k[..., ::7, :] *= 3
        tensors = [rows.requires_grad_() for rows in (by * q, k, v)]
        x = check_inputs(*tensors, **FORMS[form].options)
        plan = fk.Plan(fk.select.KeyTree(200, *enough), fk.rest.TreeMeans())
        told, found = prepare(x, plan), []
        for way in (native_plans, torch_plans):
            output = way.attend(told)
            found.append((output, *torch.autograd.grad(output.square().sum(), tensors, retain_graph=True)))
        for fast, slow in zip(*found, strict=True):
            assert (fast - slow).abs().max() <= 3e-5 * slow.abs().max()


def test_gradients_in_bfloat16():
    found = gradients(LONG, torch.bfloat16, "native")
    for fast, slow in zip(found, gradients(LONG, torch.bfloat16, "torch"), strict=True):
        assert fast.dtype == torch.bfloat16
        assert (fast - slow).abs().max() <= 2**-6 * slow.abs().max()


@pytest.mark.parametrize("form", ["long", "cross padded"])
def test_threads_change_no_bit_of_gradients(form):
    one, three = (threads(count, lambda: gradients(FORMS[form], torch.float32, "native")) for count in (1, 3))
    assert all(map(torch.equal, one, three))


def test_weights_of_zero_carry_no_gradient():
    """Queries so long that all but one key's weight is nothing: finite, and as torch has them."""
    found = gradients(LONG, torch.float32, "native", by=1e4)
    assert all(bool(part.isfinite().all()) for part in found)
    assert 0 < int((found[2] != 0).any(-1).sum()) < found[2][..., 0].numel()


def test_derivatives_of_gradients():
    """Through the operations of torch."""
    shape, found = replace(LONG, batch=1, queries=150, keys=150, head_dim=3), []
    for impl in ("native", "torch"):
        tensors = [rows.requires_grad_() for rows in shape.draw(dtype=torch.float32)]
        told = problem_of(check_inputs(*tensors, is_causal=True, impl=impl), 64)
        first = torch.autograd.grad(EXECUTORS[impl].attend(told).square().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), tensors))
    for fast, slow in zip(*found, strict=True):
        assert (fast - slow).abs().max() <= 1e-5 * slow.abs().max()


def test_a_window_beside_the_tree_is_left_to_torch():
    x = check_inputs(*LONG.draw(dtype=torch.float32), is_causal=True)
    told = Problem(x, (fk.select.KeyTree(64) | fk.Window(25)).select(x), None, fk.Softmax())
    assert "expected keys that each query finds in a tree alone" in str(native_plans.unsupported(told))


def test_leaves_that_are_held_apart_are_without_gradient():
    q, k, v = LONG.draw(dtype=torch.float32)
    memory = Whole(fk.Plan(fk.select.KeyTree(64), fk.rest.TreeMeans()), Held("int8")).begin(k, v)
    told = next(memory.take(q, k, v, 1.0))
    assert native_plans.unsupported(told) is None
    told.inputs.query.requires_grad_()
    assert "expected no gradient where leaves are held apart" in str(native_plans.unsupported(told))


def test_arithmetic_grows_linearly_and_memory_hardly(monkeypatch):
    """Of attending alone: four times the queries, each for as many slots; what a thread holds is as for one query."""
    monkeypatch.setenv(build.COUNT, "1")
    found = []
    for tokens in (2048, 8192):
        g = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, 1, tokens, 16, generator=g)
        told = problem_of(check_inputs(q, k, v, is_causal=True), 64)
        counters()
        output = threads(1, lambda: native_plans.attend(told))  # noqa: B023 - called at once
        forward = counters()
        threads(1, lambda: descent.gradients(told, output))  # noqa: B023 - called at once
        found.append((forward, counters()))
    for few, many in zip(*found, strict=True):
        assert 3.5 * few["multiply_adds"] < many["multiply_adds"] < 4.5 * few["multiply_adds"], found
        assert 0 < many["bytes"] < 2 * few["bytes"], found
    assert 1.5 < found[0][1]["multiply_adds"] / found[0][0]["multiply_adds"] < 5
