"""Law 2 for the Triton kernels of groups, run by Triton's interpreter where no GPU is."""

from dataclasses import replace

import pytest
import torch
from test_triton import DEVICE, DTYPES, assert_equal, cast, made_inputs, made_list, shorter

import fewkeys as fk
from cases import CAUSAL_SHAPES, SHAPES, Shape
from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.execute import reference
from fewkeys.execute import triton as kernels
from fewkeys.execute.problem import Problem
from fewkeys.execute.triton import launch_grouped

WEIGHTS = {
    "softmax": fk.Softmax(),
    "entmax": fk.Entmax(1.5),
    "sparsemax": fk.Entmax(2.0),
    "entmax 1.25": fk.Entmax(1.25),
}
SMALL = Shape(batch=1, query_heads=2, kv_heads=1, queries=26, keys=38, head_dim=16, value_dim=16, query_offset=5)
CAUSAL = Shape(2, 1, 1, 23, 38, 16, 6, lengths=(38, 25), is_causal=True, query_offset=11)


def made_groups(x, count=3, seed=0, used=None):
    """Groups for every query head, the last at times empty, and some tokens in none; `used` of them hold anything."""
    g = torch.Generator().manual_seed(seed)
    query, key = (
        torch.randint(-1, used or count, (x.batch, x.query_heads, tokens, 1), generator=g).to(DEVICE)
        for tokens in (x.queries, x.keys)
    )
    return fk.Groups(query, key, count)


def errors(x, graph, weights, dtype=torch.float32):
    """Errors of the output and of the gradients, each relative to the largest entry."""
    parts = {"q": x.query, "k": x.key, "v": x.value}
    g = torch.Generator().manual_seed(1)
    direction = torch.randn(*x.query.shape[:3], x.value_dim, generator=g).to(dtype).float().to(DEVICE)
    results = []
    for executor, inputs in ((kernels, cast(x, dtype)), (reference, x)):
        problem = Problem(inputs, graph, None, weights)
        assert executor.unsupported(problem) is None
        output = executor.attend(problem)
        assert output.dtype == inputs.query.dtype
        wanted = torch.autograd.grad(output, list(parts.values()), direction.to(output.dtype), retain_graph=True)
        results.append([output.detach().float(), *wanted])
    found = {}
    for name, fast, slow in zip(["output", *parts], *results, strict=True):
        assert fast.shape == slow.shape
        assert fast.isfinite().all()
        found[name] = ((fast - slow).abs().max() / slow.abs().max().clamp_min(1e-3)).item()
    return found


def beside(x, band=None, listed=0, **options):
    """Groups with a band and a list beside them; every two share some edges."""
    return Graph(x, band, made_list(x, listed) if listed else None, groups=made_groups(x, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "weights"),
    [(32, "entmax"), (64, "softmax"), (80, "entmax"), (128, "sparsemax"), (256, "softmax")],
)
def test_head_sizes_and_dtypes(size, weights, dtype):
    x = made_inputs(replace(SMALL, query_heads=1, queries=21, keys=37, head_dim=size, value_dim=size), dtype)
    assert_equal(errors(x, beside(x, (1, 0), 4, count=2), WEIGHTS[weights], dtype), dtype)


BESIDE = [(None, 0), (None, 36), ((2, 1), 5)]
TOGETHER = [
    *((SMALL, *beside, weights) for beside in BESIDE for weights in ("softmax", "entmax")),
    *((SMALL, *BESIDE[2], weights) for weights in ("sparsemax", "entmax 1.25")),
    *((CAUSAL, *beside, "softmax") for beside in BESIDE[1:]),
    (CAUSAL, *BESIDE[2], "entmax"),
]


@pytest.mark.parametrize(("shape", "band", "listed", "weights"), TOGETHER, ids=str)
def test_every_part_beside_groups(band, listed, weights, shape):
    """Keys are in the group, in the list, in the band, in several and in none; all count once."""
    x = made_inputs(replace(shape, value_dim=6))
    assert_equal(errors(x, beside(x, band, listed), WEIGHTS[weights]))


@pytest.mark.parametrize(("shape", "weights"), [(SMALL, "softmax"), (CAUSAL, "entmax")])
def test_a_band_of_everything(shape, weights):
    x = made_inputs(replace(shape, queries=6, keys=5, lengths=None))
    assert_equal(errors(x, beside(x, (50, 40), count=2), WEIGHTS[weights]))


@pytest.mark.parametrize("band", [(2, 1), (0, 0)], ids=str)
def test_a_band_across_tiles(band):
    """Keys at the edges of a tile have queries of the next tile, and of the one before."""
    x = made_inputs(Shape(1, 1, 1, 40, 40, 16, 16))
    assert_equal(errors(x, beside(x, band, count=2), fk.Softmax()))


@pytest.mark.parametrize(("count", "weights"), [(1, "softmax"), (1, "entmax 1.25"), (25, "softmax")])
def test_groups_of_many_tiles_and_groups_of_few_tokens(count, weights):
    x = made_inputs(replace(SMALL, queries=75, keys=83))
    assert_equal(errors(x, beside(x, count=count), WEIGHTS[weights]))


@pytest.mark.parametrize("weights", ["softmax", "sparsemax"])
def test_causal_groups_of_many_tiles(weights):
    """Where tiles end early, and keys have queries before and after them."""
    for offset in (0, 13):
        x = made_inputs(Shape(1, 1, 1, 75, 83, 16, 16, is_causal=True, query_offset=offset))
        assert_equal(errors(x, beside(x, count=1), WEIGHTS[weights]))


@pytest.mark.parametrize("weights", ["softmax", "entmax"])
def test_groups_of_one_side_only(weights):
    """Groups without keys, without queries, tokens of no group: with nothing beside them, they see nothing."""
    x = made_inputs(SMALL)
    groups = made_groups(x, 9, used=5)
    groups = replace(groups, query=groups.query.masked_fill(groups.query == 2, 7))
    groups = replace(groups, key=groups.key.masked_fill(groups.key == 3, 8))
    assert_equal(errors(x, Graph(x, groups=groups), WEIGHTS[weights]))
    alone = replace(groups, query=torch.where(groups.query == 1, 6, groups.query))
    output = kernels.attend(Problem(x, Graph(x, groups=alone), None, WEIGHTS[weights]))
    lost = (alone.query.squeeze(-1) < 0) | (alone.query.squeeze(-1) > 5) | (alone.query.squeeze(-1) == 3)
    assert 10 < lost.sum() < 40
    assert output[lost].eq(0).all()
    assert output[~lost].ne(0).any(-1).all()
    for name in ("query", "key"):
        nobody = replace(groups, **{name: torch.full_like(getattr(groups, name), -1)})
        output = kernels.attend(Problem(x, Graph(x, groups=nobody), None, WEIGHTS[weights]))
        assert torch.equal(output, torch.zeros_like(output))
        assert_equal(errors(x, Graph(x, (1, 0), groups=nobody), WEIGHTS[weights]))


@pytest.mark.parametrize(
    ("shape", "weights"),
    [("grouped", "softmax"), ("cross padded", "entmax"), ("one query", "entmax"), ("few keys", "softmax")],
)
def test_shapes_of_the_table(shape, weights):
    x = made_inputs(shorter(SHAPES[shape]))
    assert_equal(errors(x, beside(x), WEIGHTS[weights]))


@pytest.mark.parametrize("shape", ["causal with offset", "causal decode", "causal upper-left"])
def test_causal_shapes_of_the_table(shape):
    x = made_inputs(shorter(CAUSAL_SHAPES[shape]))
    graph = Graph(x, groups=made_groups(x)) | fk.Sinks(3).select(x)
    assert_equal(errors(x, graph, fk.Softmax()))


@pytest.mark.parametrize("alpha", [1.05, 1.9, 2.0])
@pytest.mark.parametrize("size", [0.0, 0.3, 30.0])
def test_the_threshold_is_found_for_all_scores(size, alpha):
    """Equal scores, nearly equal ones and such that one key takes all."""
    x = made_inputs(replace(SMALL, query_heads=1, queries=12, keys=70))
    x = replace(x, query=size * x.query.detach(), value=torch.ones_like(x.value))
    graph = Graph(x, groups=made_groups(x, 1, seed=2))
    x.value.requires_grad_()
    fast, slow = (run.attend(Problem(x, graph, None, fk.Entmax(alpha))) for run in (kernels, reference))
    torch.testing.assert_close(fast, slow, rtol=2e-6, atol=2e-6)
    direction = torch.randn(fast.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    fast, slow = (torch.autograd.grad(output, x.value, direction)[0] for output in (fast, slow))
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5 * float(slow.abs().max()))


@pytest.mark.parametrize("weights", ["softmax", "entmax"])
@pytest.mark.parametrize("shift", [-3000.0, 3000.0])
def test_large_scores_neither_overflow_nor_vanish(shift, weights):
    """A number added to all scores of a row changes nothing."""
    x = made_inputs(replace(SMALL, query_heads=1))
    graph = beside(x, (1, 1), 4)
    usual = kernels.attend(Problem(x, graph, None, WEIGHTS[weights]))

    def longer(rows, last):
        return torch.cat([rows, torch.full_like(rows[..., :1], last)], -1)

    moved = replace(x, query=longer(x.query, shift / x.scale), key=longer(x.key, 1.0))
    output = kernels.attend(Problem(moved, graph, None, WEIGHTS[weights]))
    torch.testing.assert_close(output, usual, rtol=2e-2, atol=2e-2)  # scores of 3000 are told to 2e-4


@pytest.mark.parametrize("weights", ["softmax", "entmax"])
def test_weights_sum_to_one_in_both_directions(weights):
    """Scores are exact, and so large that the threshold is not: it misses the sum by a thousandth."""
    x = made_inputs(replace(SMALL, query_heads=1))
    g = torch.Generator().manual_seed(0)
    key = torch.zeros_like(x.key)
    key[..., 0] = (8192 + torch.randint(64, (x.keys,), generator=g) / 64).to(DEVICE)
    query = torch.zeros_like(x.query)
    query[..., 0] = 1.0
    moved = Inputs(query, key, torch.ones_like(x.value).requires_grad_(), scale=1.0)
    output = kernels.attend(Problem(moved, Graph(moved, groups=made_groups(moved, 1)), None, WEIGHTS[weights]))
    (grad,) = torch.autograd.grad(output.sum(), moved.value)
    torch.testing.assert_close(output.sum(2), grad.sum(2), rtol=1e-5, atol=0.0)


def test_any_layout():
    """Rows may lie anywhere, as transformers lay them out, and gradients may be expanded numbers."""
    x = made_inputs(Shape(2, 2, 2, queries=9, keys=9, value_dim=5))
    graph = beside(x, (1, 0), 3, count=2)
    results = []
    for lay in (torch.clone, lambda r: r.transpose(1, 2).contiguous().transpose(1, 2), lambda r: r.mT.contiguous().mT):
        rows = [lay(row.detach()).requires_grad_() for row in (x.query, x.key, x.value)]
        ids = fk.Groups(lay(graph.groups.query), lay(graph.groups.key), graph.groups.count)
        laid = Inputs(*rows, scale=x.scale)
        output = kernels.attend(Problem(laid, Graph(laid, graph.band, graph.columns, groups=ids), None, fk.Softmax()))
        results.append([output, *torch.autograd.grad(output.sum(), rows)])
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("programs", [1, 5])
def test_the_split_of_sums_does_not_matter(programs, monkeypatch):
    from fewkeys.execute.triton import op

    monkeypatch.setattr(op, "PROGRAMS", programs)
    x = made_inputs(replace(SMALL, queries=75))  # six tiles: by one program, or by two and two and two
    assert_equal(errors(x, beside(x, None, 40), fk.Softmax()))


def test_results_are_the_same_every_time():
    x = made_inputs(replace(SMALL, query_heads=1))
    graph, leaves, runs = beside(x, (1, 0), 4, count=2), [x.query, x.key, x.value], []
    for _ in range(2):
        output = kernels.attend(Problem(x, graph, None, fk.Entmax(1.5)))
        runs.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_tiles_hold_every_token_once_and_meet_whom_they_may_see(count, is_causal):
    from fewkeys.execute.triton.grouped_tiles import Order, key_tiles, query_tiles

    g, offset, block = torch.Generator().manual_seed(count), 4, 8
    sides, orders = [], []
    for tokens in (61, 70):
        ids = torch.randint(-1, count, (2, 1, tokens, 1), generator=g)
        group, order = (part.flatten(0, 1) for part in launch_grouped._sorted(ids, None, count))
        sides.append((group, order))
        orders.append(Order(group, order, count))
    tables = [tiles(*orders, block, offset, is_causal) for tiles in (query_tiles, key_tiles)]
    for head in range(2):
        for side, table in enumerate(tables):
            (own, order), (theirs, their_order) = ((ids[head], at[head]) for ids, at in (sides[side], sides[1 - side]))
            seen = []
            for group, first, last, begin, end in table[head].tolist():
                if first >= last:
                    continue
                tokens, met = order[first:last], their_order[begin:end]
                seen += tokens.tolist()
                expected = (theirs == group) & (group < count)
                if is_causal:
                    place = torch.arange(theirs.numel())
                    # As a query sees the keys up to its own place, a key is seen by the queries from its place on.
                    visible = place <= int(tokens.max()) + offset if side == 0 else place >= int(tokens.min()) - offset
                    expected &= visible
                assert len(tokens) <= block
                assert (own[tokens] == (group if group < count else -1)).all()
                assert met.tolist() == expected.nonzero().flatten().tolist()
            assert sorted(seen) == list(range(own.numel()))


@pytest.mark.parametrize("whole", [False, True], ids=["groups", "everything"])
def test_operator_keeps_the_rules_of_torch(whole):
    """Schema, fake tensors, autograd registration, and tracing with symbolic sizes."""
    from fewkeys.execute.triton.grouped_op import grouped

    x = made_inputs(replace(SMALL, queries=4, keys=4))
    graph = beside(x, (1, 0), 3, count=2) if whole else beside(x, count=2)
    arguments = [
        x.query,
        x.key,
        x.value,
        graph.hidden if whole else None,
        launch_grouped._listed(x, graph.columns.index, graph.columns.used) if whole else None,
        *launch_grouped._sorted(graph.groups.query, None, 2),
        *launch_grouped._sorted(graph.groups.key, None, 2),
    ]
    tensors = [a.detach().requires_grad_(a.is_floating_point()) if a is not None else None for a in arguments]
    band = (1, 0) if whole else (0, -1)
    torch.library.opcheck(grouped, (*tensors, 2, 1.5 if whole else 1.0, x.scale, *band, x.offset, False))


@pytest.mark.parametrize(
    "plan",
    [
        fk.Plan(fk.Routing(3, balanced=False) | fk.Window(3) | fk.Sinks(2), weights=fk.Entmax(1.5)),
        fk.Plan(fk.Reformer(4)),
    ],
    ids=["routing", "reformer"],
)
def test_attention_takes_the_kernels_by_request(plan):
    """The whole way from the public function, with gradients; what the kernels cannot do is refused, never replaced."""
    rows = [row.float().to(DEVICE).requires_grad_() for row in Shape(queries=20, keys=30).draw()]
    results = []
    for impl in ("triton", "reference"):
        output = fk.attention(*rows, plan=plan, impl=impl)
        results.append([output, *torch.autograd.grad(output.square().sum(), rows)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="impl='triton': expected one group for each query and key"):
        fk.attention(*rows, keep=fk.Reformer(4, 2), impl="triton")


def test_what_the_kernels_cannot_do_is_told():
    x = made_inputs(SHAPES["plain"])
    groups, columns = made_groups(x), made_list(x)
    graph = Graph(x, (2, 2), columns, groups=groups)
    blocks = Columns(columns.index.expand(-1, -1, 5, -1), columns.used.expand(-1, -1, 5, -1), 16)
    rows = torch.zeros((2, 2, 70, 1), dtype=torch.int64)
    several = [replace(groups, **{name: getattr(groups, name).expand(-1, -1, -1, 2)}) for name in ("query", "key")]
    means = fk.ClusterMeans(3).prepare(x, graph, fk.Softmax())
    wide = made_inputs(replace(SMALL, value_dim=257))
    for reason, inputs, edges, stand_ins, weights in (
        ("several memberships", x, replace(graph, groups=several[0]), None, fk.Softmax()),
        ("several memberships", x, replace(graph, groups=several[1]), None, fk.Softmax()),
        ("Drop", x, graph, means, fk.Softmax()),
        ("at most 2", x, graph, None, fk.Entmax(2.5)),
        ("Softmax() or Entmax()", x, graph, None, fk.Power(2.0)),
        ("list of keys for every query", x, replace(graph, rows=rows), None, fk.Softmax()),
        ("list of keys for every query", x, replace(graph, full=True), None, fk.Softmax()),
        ("every block", x, replace(graph, columns=blocks), None, fk.Softmax()),
        ("float64", cast(x, torch.float64), graph, None, fk.Entmax(1.5)),
        ("256", wide, Graph(wide, groups=made_groups(wide)), None, fk.Softmax()),
    ):
        told = kernels.unsupported(Problem(inputs, edges, stand_ins, weights))
        assert told is not None
        assert reason in told
    for weights in WEIGHTS.values():
        assert kernels.unsupported(Problem(x, graph, None, weights)) is None
