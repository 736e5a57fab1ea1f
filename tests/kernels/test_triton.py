"""Law 2 for the Triton kernels, run by Triton's interpreter where no GPU is."""

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
pytest.importorskip("triton")

import fewkeys as fk
from cases import CAUSAL_SHAPES, PLANS, SHAPES, Shape
from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_inputs
from fewkeys.execute import reference
from fewkeys.execute import triton as kernels
from fewkeys.execute.problem import Problem
from fewkeys.execute.triton import launch
from fewkeys.rest import StandIns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = (32, 64, 80, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The interpreter cuts bfloat16 off where the machine rounds, which doubles the unit of every rounding.
UNIT = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}


def made_inputs(shape, dtype=torch.float32):
    """Inputs whose numbers are exact in `dtype`, in float32, so that the reference reads the same ones."""
    rows = [x.to(dtype).float().to(DEVICE).requires_grad_() for x in shape.draw(seed=3)]
    lengths = shape.options["lengths"]
    options = shape.options | {"lengths": None if lengths is None else lengths.to(DEVICE)}
    return check_inputs(*rows, scale=None, key_mask=None, generator=None, **options)


def made_list(x, count=7):
    """A shared list of real keys, with fillings that repeat a used key and that name one not in the list."""
    g = torch.Generator().manual_seed(5)
    index = torch.rand(x.batch, x.kv_heads, x.keys, generator=g).argsort(-1)[..., :count].to(DEVICE)
    used = torch.ones_like(index, dtype=torch.bool)
    if x.valid is not None:
        used = x.valid[:, None].expand(-1, x.kv_heads, -1).gather(-1, index)
    used[..., -2:] = False
    index[..., -1] = index[..., 0]
    return Columns.shared(index, used, x.queries)


def made_means(x, columns, count=21, rank=0):
    """Stand-ins with every part free, and the parts that have gradients."""
    g = torch.Generator().manual_seed(6)

    def normal(*size):
        return torch.randn(x.batch, x.kv_heads, *size, generator=g).to(DEVICE)

    label, share = normal(x.keys, count).argmax(-1), normal(x.keys).exp()
    free = torch.ones(x.batch, x.kv_heads, x.keys, device=DEVICE)
    if x.valid is not None:
        free = free * x.valid[:, None]
    if columns is not None:
        index, used = columns.index.squeeze(2), columns.used.squeeze(2)
        free = free.scatter_reduce(-1, index, (~used).float(), "amin")
    parts = {"key": normal(count, x.head_dim), "value": normal(count, x.value_dim), "bias": normal(count)}
    if rank:
        parts |= {"left": normal(x.head_dim, rank) * 0.3, "right": normal(rank, x.value_dim), "factor": normal(count)}
    parts = {name: part.requires_grad_() for name, part in parts.items()}
    bounds = between((x.grouped_query().flatten(2, 3).float() * x.scale @ parts["left"]).detach()) if rank else None
    return StandIns(label=label, share=share * free, bounds=bounds, **parts), parts


def between(along):
    """Bounds (B, H, 2, R) that some of the rows (B, H, M, R) are beyond, and none so near that rounding decides."""
    along = along.sort(2).values
    some = max(1, 2 * along.shape[2] // 5)
    ends = []
    for part in (along[:, :, : some + 1], along[:, :, -some - 1 :]):
        if part.shape[2] == 1:
            part = torch.cat([part - 1, part + 1], 2)
        gap = part.diff(dim=2).argmax(2, keepdim=True)
        ends.append((part.gather(2, gap) + part.gather(2, gap + 1)) / 2)
    return torch.cat(ends, 2)


def cast(x, dtype):
    return replace(x, query=x.query.to(dtype), key=x.key.to(dtype), value=x.value.to(dtype))


def errors(x, graph, stand_ins, parts=None, dtype=torch.float32):
    """Errors of the output and of the gradients of every part, each relative to the largest entry."""
    parts = {"q": x.query, "k": x.key, "v": x.value} | (parts or {})
    g = torch.Generator().manual_seed(1)
    direction = torch.randn(*x.query.shape[:3], x.value_dim, generator=g).to(dtype).float().to(DEVICE)
    results = []
    for executor, inputs in ((kernels, cast(x, dtype)), (reference, x)):
        problem = Problem(inputs, graph, stand_ins, fk.Softmax())
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


def assert_equal(found, dtype=torch.float32):
    """Within six roundings of the largest entry: stand-ins, weights, scores, gradients and results are rounded."""
    assert max(found.values()) <= 6 * UNIT[dtype], found


SMALL = Shape(batch=1, query_heads=2, kv_heads=1, queries=75, keys=83, head_dim=16, value_dim=16, query_offset=5)
CROSS = Shape(1, 2, 1, 20, 43, value_dim=12)
CAUSAL = Shape(2, 1, 1, 40, 61, lengths=(61, 31), is_causal=True, query_offset=11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", HEADS)
def test_head_sizes_and_dtypes(size, dtype):
    x = made_inputs(replace(SMALL, queries=35, keys=43, head_dim=size, value_dim=size), dtype)
    columns = made_list(x)
    stand_ins, parts = made_means(x, columns, rank=3)
    assert_equal(errors(x, Graph(x, (9, 6), columns), stand_ins, parts, dtype), dtype)


EDGES = [(None, 0), (None, 40), ((1, 0), 0), ((1, 0), 40), ((20, 33), 40), ((500, 400), 0)]
TOGETHER = [
    *((SMALL, *edges, rest) for edges in EDGES for rest in ("", "first-order means")),
    *((SMALL, *edges, "means") for edges in (EDGES[0], EDGES[4])),
    # Causality and padding hide keys of each part by itself.
    *((CAUSAL, *edges, "") for edges in EDGES[1:3]),
    *((CAUSAL, *edges, "first-order means") for edges in (EDGES[0], EDGES[4])),
    (CAUSAL, *EDGES[5], "means"),
]


@pytest.mark.parametrize(("shape", "band", "listed", "rest"), TOGETHER, ids=str)
def test_every_part_alone_and_together(band, listed, rest, shape):
    """Parts are nothing, less than a tile and more than one; keys are hidden and listed."""
    x = made_inputs(replace(shape, queries=40, keys=61, value_dim=6))
    columns = made_list(x, listed) if listed else None
    if band is not None and x.is_causal:
        band = (band[0], 0)
    stand_ins, parts = None, {}
    if rest:
        rank = 2 if rest == "first-order means" else 0
        stand_ins, parts = made_means(x, columns, 5 if listed else 37, rank)
    if not (band or listed or rest):
        output = kernels.attend(Problem(x, Graph(x), None, fk.Softmax()))
        assert torch.equal(output, torch.zeros_like(output))
        return
    assert_equal(errors(x, Graph(x, band, columns), stand_ins, parts))


def shorter(shape):
    """The same with a tile of 32 and a part of one, for the interpreter."""
    keys = min(shape.keys, 37)
    queries = keys if shape.queries == shape.keys else min(shape.queries, 35)
    lengths, offset = shape.lengths and (keys, keys // 2), shape.query_offset and keys - queries
    return replace(shape, queries=queries, keys=keys, lengths=lengths, query_offset=offset)


@pytest.mark.parametrize("shape", ["grouped", "padded", "cross padded", "one query", "few keys"])
def test_plans_of_the_table(shape):
    """Plans as users make them, with gradients through everything that the rest computes."""
    x, plan = made_inputs(shorter(SHAPES[shape])), PLANS["leverage + window, first-order means, softmax"]
    with torch.no_grad():
        graph = plan.keep.select(x)
    assert_equal(errors(x, graph, plan.rest.prepare(x, graph, plan.weights)))


@pytest.mark.parametrize("shape", [name for name in CAUSAL_SHAPES if name != "causal"])
def test_causal_plans_of_the_table(shape):
    x = made_inputs(shorter(CAUSAL_SHAPES[shape]))
    with torch.no_grad():
        graph = (fk.Sinks(3) | fk.Window(11)).select(x)
    assert_equal(errors(x, graph, None))


def test_a_stand_in_whose_keys_are_all_kept_vanishes():
    """However large its score is, and whatever its members weigh."""
    x = made_inputs(SMALL)
    g = torch.Generator().manual_seed(0)
    share = torch.rand(1, 1, x.keys, generator=g).to(DEVICE) * 300 + 1e-3
    share[..., 40:55] /= 1e7
    label = torch.full((1, 1, x.keys), 2, device=DEVICE)
    label[..., 40:55], label[..., 55:] = 0, 1
    key = 30 * x.query[:, :1, 40:43].detach()
    value = torch.tensor([1e4, 0.0, 0.0], device=DEVICE)[:, None].expand(1, 1, -1, x.value_dim)
    means = StandIns(key, value, label, share, torch.tensor([[[80.0, 0.0, 0.0]]], device=DEVICE))
    graph = Graph(x, (9, 9))
    fast, slow = (run.attend(Problem(x, graph, means, fk.Softmax())) for run in (kernels, reference))
    whole = slice(46 - x.offset, 49 - x.offset)  # the queries whose band holds keys 40 .. 54, and no others
    assert fast[:, :, whole].abs().max() < 100
    assert fast.abs().amax(-1).gt(100).sum() > 10
    torch.testing.assert_close(fast[:, :, whole], slow[:, :, whole], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_unit_of_members_does_not_matter(size):
    """Counts are taken in float16, which neither tiny nor huge shares may overflow."""
    x = made_inputs(SMALL)
    stand_ins, _ = made_means(x, None, rank=2)
    scaled = replace(stand_ins, share=stand_ins.share * size, bias=stand_ins.bias - torch.tensor(size).log())
    usual, other = (kernels.attend(Problem(x, Graph(x, (9, 6)), means, fk.Softmax())) for means in (stand_ins, scaled))
    torch.testing.assert_close(other, usual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shift", [-3000.0, 3000.0])
def test_large_scores_neither_overflow_nor_vanish(shift):
    """A number added to all scores of a row changes nothing."""
    x = made_inputs(replace(SMALL, query_heads=1))
    columns = made_list(x)
    stand_ins, _ = made_means(x, columns)
    graph = Graph(x, (9, 6), columns)
    usual = kernels.attend(Problem(x, graph, stand_ins, fk.Softmax()))

    def longer(rows, last):
        return torch.cat([rows, torch.full_like(rows[..., :1], last)], -1)

    moved = replace(x, query=longer(x.query, shift / x.scale), key=longer(x.key, 1.0))
    output = kernels.attend(Problem(moved, graph, replace(stand_ins, key=longer(stand_ins.key, 1.0)), fk.Softmax()))
    torch.testing.assert_close(output, usual, rtol=2e-2, atol=2e-2)  # scores of 3000 are told to 2e-4


def test_any_layout():
    """Rows may lie anywhere, as transformers lay them out, and gradients may be expanded numbers."""
    x = made_inputs(Shape(2, 2, 2, queries=30, keys=30, value_dim=5))
    columns = made_list(x)
    stand_ins, _ = made_means(x, columns, rank=2)
    results = []
    for lay in (torch.clone, lambda r: r.transpose(1, 2).contiguous().transpose(1, 2), lambda r: r.mT.contiguous().mT):
        rows = [lay(row.detach()).requires_grad_() for row in (x.query, x.key, x.value)]
        laid = Inputs(*rows, scale=x.scale)
        output = kernels.attend(Problem(laid, Graph(laid, (9, 6), columns), stand_ins, fk.Softmax()))
        results.append([output, *torch.autograd.grad(output.sum(), rows)])
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("programs", [1, 5])
def test_the_split_of_sums_does_not_matter(programs, monkeypatch):
    from fewkeys.execute.triton import op

    monkeypatch.setattr(op, "PROGRAMS", programs)
    x = made_inputs(replace(SMALL, query_heads=3))  # nine tiles: by two programs, five and four
    columns = made_list(x, 40)
    stand_ins, parts = made_means(x, columns, 37, rank=2)
    assert_equal(errors(x, Graph(x, (9, 6), columns), stand_ins, parts))


def test_results_are_the_same_every_time():
    x = made_inputs(SMALL)
    columns = made_list(x)
    stand_ins, parts = made_means(x, columns, rank=2)
    leaves = [x.query, x.key, x.value, *parts.values()]
    runs = []
    for _ in range(2):
        output = kernels.attend(Problem(x, Graph(x, (9, 6), columns), stand_ins, fk.Softmax()))
        runs.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("whole", [False, True], ids=["band", "everything"])
def test_operator_keeps_the_rules_of_torch(whole):
    """Schema, fake tensors, autograd registration, and tracing with symbolic sizes."""
    from fewkeys.execute.triton.op import near_heavy_means

    x = made_inputs(replace(SMALL, queries=20, keys=20))
    columns = made_list(x) if whole else None
    stand_ins = made_means(x, columns, 5, rank=2)[0] if whole else None
    graph = Graph(x, (4, 2), columns)
    arguments = [
        x.query,
        x.key,
        x.value,
        None if graph.band is None else graph.hidden,
        *launch._listed(x, graph),
        *launch._means(x, stand_ins),
    ]
    tensors = [a.detach().requires_grad_(a.is_floating_point()) if a is not None else None for a in arguments]
    torch.library.opcheck(near_heavy_means, (*tensors, x.scale, 4, 2, x.offset, False))


def test_attention_takes_the_kernels_by_request():
    """The whole way from the public function, with gradients; what the kernels cannot do is refused, never replaced."""
    rows = [row.float().to(DEVICE).requires_grad_() for row in CROSS.draw()]
    results = []
    for impl in ("triton", "reference"):
        output = fk.attention(*rows, keep=fk.Leverage(5) | fk.Window(7), rest=fk.ClusterMeans(6, rank=2), impl=impl)
        results.append([output, *torch.autograd.grad(output.square().sum(), rows)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="curvature"):
        fk.attention(*rows, keep=fk.Window(7), rest=fk.Moments(), impl="triton")


def test_same_seed_same_bits():
    """Law 6, statistics included; and another seed draws other keys."""
    rows = [row.float().to(DEVICE) for row in CROSS.draw()]
    for rest in (fk.ClusterMeans(6, rank=2), fk.UniformSample(6)):
        found = []
        for seed in (1, 1, 2):
            draw = torch.Generator().manual_seed(seed)
            found.append(fk.attention(*rows, keep=fk.Window(7), rest=rest, generator=draw, impl="triton"))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2]) == isinstance(rest, fk.ClusterMeans)


def test_what_the_kernels_cannot_do_is_told():
    x = made_inputs(SHAPES["plain"])
    band, columns = Graph(x, (2, 2)), made_list(x)
    stand_ins, _ = made_means(x, None, rank=3)
    blocks = Columns(columns.index.expand(-1, -1, 5, -1), columns.used.expand(-1, -1, 5, -1), 16)
    rows = torch.zeros((2, 2, 70, 1), dtype=torch.int64)
    moments = fk.Moments().prepare(x, band, fk.Softmax())
    wide = made_inputs(replace(SMALL, value_dim=257))
    for reason, inputs, graph, means, weights in (
        ("Softmax", x, band, None, fk.Power(2.0)),
        ("list of keys for every query", x, Graph(x, rows=rows), None, fk.Softmax()),
        ("list of keys for every query", x, Graph(x, full=True), None, fk.Softmax()),
        ("every block", x, Graph(x, columns=blocks), None, fk.Softmax()),
        ("curvature", x, band, moments, fk.Softmax()),
        ("low rank", x, band, replace(stand_ins, right=None), fk.Softmax()),
        ("rank 64", x, band, replace(stand_ins, left=torch.ones(2, 2, 8, 65)), fk.Softmax()),
        ("float64", cast(x, torch.float64), band, None, fk.Softmax()),
        ("256", wide, Graph(wide, (2, 2)), None, fk.Softmax()),
    ):
        told = kernels.unsupported(Problem(inputs, graph, means, weights))
        assert told is not None
        assert reason in told
    assert kernels.unsupported(Problem(x, band, stand_ins, fk.Softmax())) is None


def test_without_a_gpu_or_triton_the_kernels_say_so(monkeypatch):
    x = made_inputs(SHAPES["plain"])
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        assert "CUDA" in kernels.unsupported(Problem(x, Graph(x, (2, 2)), None, fk.Softmax()))
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    assert "not installed" in kernels.unsupported(Problem(x, Graph(x, (2, 2)), None, fk.Softmax()))
