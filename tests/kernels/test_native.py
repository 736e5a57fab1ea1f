"""Law 2 for the compiled kernels: they equal the reference and the torch path, or are not taken."""

import ctypes
import math
import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

import fewkeys as fk
from cases import PLANS, SHAPES
from fewkeys.core.graph import Graph
from fewkeys.core.validation import check_inputs, largest_entries
from fewkeys.cost import crossover
from fewkeys.execute import dispatch, native as native_plans, reference
from fewkeys.execute.native import forward
from fewkeys.execute.problem import Problem, prepare
from fewkeys.memory.rows import HeldRows
from fewkeys.memory.stream import Stream
from fewkeys.native import build, kernels, sets, tensors
from fewkeys.rest import StandIns
from fewkeys.sketch import clusters
from native_cases import CASES, CLOSE, FORMS, MEANS, has_kernel, needs_compiler, spy, without

pytestmark = needs_compiler


@pytest.fixture
def taken(monkeypatch):
    """How often the kernel was taken."""
    return spy(monkeypatch, forward)


@pytest.mark.parametrize(("plan", "form", "dtype"), CASES, ids=str)
def test_it_is_the_reference(plan, form, dtype, taken):
    shape = FORMS[form]
    tensors = shape.draw(dtype=dtype)
    actual = fk.attention(*tensors, plan=plan, impl="auto", **shape.options)
    want = fk.attention(*tensors, plan=plan, impl="reference", **shape.options)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, want, **CLOSE[dtype])
    assert bool(taken) == has_kernel(plan, check_inputs(*tensors, **shape.options))


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("plan", MEANS[:4], ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (5, 33), (64, 64), (80, 96), (128, 16), (256, 130)])
def test_head_sizes(plan, dim, value_dim, dtype):
    """Of the same stand-ins: keys of one dimension in bfloat16 are as near to one centre as to another."""
    shape = replace(SHAPES["cross padded"], head_dim=dim, value_dim=value_dim)
    problem = prepare(check_inputs(*shape.draw(dtype=dtype), **shape.options), plan)
    assert native_plans.unsupported(problem) is None
    torch.testing.assert_close(native_plans.attend(problem), reference.attend(problem), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(5, 33), (64, 21)])
def test_head_sizes_of_rows_in_int8(dim, value_dim, dtype):
    """The stream attends to its keys and values as they are read back."""
    g, plan = torch.Generator().manual_seed(0), fk.Plan(fk.KeyScan(25), fk.BlockMeans(4))
    shapes = (1, 4, 200, dim), (1, 2, 200, dim), (1, 2, 200, value_dim)
    q, k, v = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    stream, rows = fk.stream(plan, leaves="int8"), HeldRows.empty("int8", k, v)
    stream.append(k, v)
    rows.append(k, v)
    actual, want = stream.attend(q), fk.attention(q.float(), *rows.read(0, 200), plan=plan, is_causal=True)
    torch.testing.assert_close(actual, want.to(dtype), **CLOSE[dtype])


@pytest.mark.parametrize("plan", MEANS[:1], ids=str)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_layouts(plan, dtype):
    """Heads beside tokens as models have them, every other dimension, one head for all."""
    q, k, v = SHAPES["plain"].draw(dtype=dtype)
    usual = fk.attention(q, k, v, plan=plan, impl="auto")
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    sparse = [x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v)]
    for changed in (turned, sparse):
        actual = fk.attention(*changed, plan=plan, impl="auto")
        torch.testing.assert_close(actual, usual, **CLOSE[dtype])  # torch adds up the moments in another order
    one = [x[:, :1].expand(-1, 2, -1, -1) for x in (q, k, v)]
    actual = fk.attention(*one, plan=plan, impl="auto")
    assert torch.equal(actual[:, 0], actual[:, 1])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("plan", MEANS[:5], ids=str)
def test_the_number_of_threads_changes_nothing(plan, dtype):
    tensors = SHAPES["grouped"].draw(dtype=dtype)
    threads, actual = torch.get_num_threads(), []
    for number in (1, 3):
        torch.set_num_threads(number)
        actual.append(fk.attention(*tensors, plan=plan, impl="auto"))
    torch.set_num_threads(threads)
    assert torch.equal(*actual)


@pytest.mark.parametrize("size", [30.0, 300.0])
@pytest.mark.parametrize("plan", [plan for plan in MEANS if not plan.rest.needs_causal], ids=str)
def test_far_scores_neither_overflow_nor_vanish_wrongly(plan, size):
    """One key decides every row, and with it often one part of the row alone: list, band or stand-in."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 80, 8, generator=g)
    actual = fk.attention(size * q, k, v, plan=plan, impl="auto")
    want = fk.attention(size * q, k, v, plan=plan, impl="reference")
    torch.testing.assert_close(actual, want, atol=2e-3, rtol=1e-3)


def test_a_stand_in_whose_keys_are_all_kept_vanishes():
    """However large its score and its mass are."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 90, 8, generator=g)
    label = torch.full((1, 1, 90), 2)
    label[..., 40:55], label[..., 55:] = 0, 1
    value = torch.tensor([1e4, 0.0, 0.0])[:, None].expand(1, 1, 1, -1, 8)
    mass, size = torch.tensor([[[[0.7, 9000.0, 3000.0]]]]), torch.tensor([[[[15.0, 35.0, 40.0]]]])
    bias = torch.tensor([[[[80.0, 0.0, 0.0]]]])
    means = StandIns(30 * q[:, :, None, 40:43], value, mass, size, label, bias)
    x = check_inputs(q, k, v)
    graph = Graph(x, (9, 9))
    problem = Problem(x, graph, means, fk.Softmax())
    fast, slow = native_plans.attend(problem), reference.attend(problem)
    whole = slice(46, 49)  # the queries whose band holds keys 40 .. 54, and no others
    assert fast[:, :, whole].abs().max() < 100
    assert fast.abs().amax(-1).gt(100).sum() > 10
    torch.testing.assert_close(fast[:, :, whole], slow[:, :, whole], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", [fk.Window(5), fk.select.KeyNorm(90)], ids=str)
def test_weights_are_exact_up_to_the_rounding_of_the_dtype(keep):
    """Against float64. In bfloat16 every weight may be rounded, and then the output: each by 2^-8 of itself at most."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 16, generator=g).bfloat16() for _ in range(3))
    options = {"keep": keep, "impl": "torch"}
    actual = fk.attention(q.float(), k.float(), v.float(), **options)
    want = fk.attention(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(actual.double(), want, rtol=1e-6, atol=1e-6)
    rounding = fk.attention(q.double(), k.double(), v.double().abs(), **options) * 2**-7
    off = fk.attention(q, k, v, **options).double() - want
    assert (off.abs() <= 1.01 * rounding).all()


def test_rounding_of_weights_has_no_side():
    """Neither of keys at even places nor of the others: what it does to many queries averages out."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 3000, 16, generator=g).bfloat16() for _ in range(2))
    kept = k.float().norm(dim=-1).topk(100).indices.sort().values
    side = torch.where(torch.arange(100) % 2 == 0, 1.0, -1.0).bfloat16().view(1, 1, -1, 1)
    for sign in (1, -1):
        v = torch.zeros(1, 1, 3000, 1).bfloat16().scatter(2, kept.unsqueeze(-1), sign * side)
        actual, want = (
            fk.attention(*tensors, keep=fk.select.KeyNorm(100), impl="auto").double()
            for tensors in ((q, k, v), (q.double(), k.double(), v.double()))
        )
        assert (actual - want).mean().abs() < 2e-4


@given(shift=st.floats(-1e3, 1e3))
def test_a_number_added_to_all_scores_changes_little(shift):
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 80, 8, generator=g)
    usual = fk.attention(q, k, v, keep=fk.Window(9), impl="auto")
    ones = torch.ones(1, 1, 80, 1)
    q, k = torch.cat([q, ones], -1), torch.cat([k, shift * ones * 8**0.5], -1)
    actual = fk.attention(q, k, v, keep=fk.Window(9), impl="auto", scale=8**-0.5)
    torch.testing.assert_close(actual, usual, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_scores_that_would_overflow_take_all_and_touch_no_other_row(dtype):
    q, k, v = (x.clone() for x in SHAPES["plain"].draw(dtype=dtype))
    q[0, 0, 35, 0], k[0, 0, 36, 0] = 1e30, 1e30
    actual = fk.attention(q, k, v, keep=fk.Window(9), impl="auto")
    torch.testing.assert_close(actual[0, 0, 35], v[0, 0, 36])
    assert actual[0, 0, :30].isfinite().all()
    assert actual[1].isfinite().all()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_rows_that_see_nothing_give_zeros(dtype, taken):
    q, k, v = torch.randn(3, 2, 1, 30, 4, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    lengths = torch.tensor([30, 0])
    for plan in (fk.Plan(fk.Window(5)), fk.Plan(fk.select.KeyNorm(3)), fk.Plan(fk.select.KeyNorm(3) | fk.Window(5))):
        actual = fk.attention(q, k, v, plan=plan, lengths=lengths, impl="auto")
        assert not actual[1].any()
        assert actual[0].any(-1).all()
    assert len(taken) == 3


OTHERS = [name for name, plan in PLANS.items() if not isinstance(plan.weights, fk.Softmax)]


@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_go_another_way(name, taken):
    tensors = SHAPES["plain"].draw(dtype=torch.float32)
    fk.attention(*tensors, plan=PLANS[name], impl="auto")
    assert not taken
    with pytest.raises(ValueError, match=r"impl='native': expected .*, got .*; use impl='torch'"):
        fk.attention(*tensors, plan=PLANS[name], impl="native")


class Trap(ctypes.CDLL):
    """A library all of whose kernels fail, of any instruction set, counting or not."""

    def __init__(self, *environment):
        self._name = "trap"

    def __getattr__(self, name):
        if name == "library":  # of `build.Kernels`
            return self
        raise AssertionError(name)


@pytest.mark.parametrize("plan", [MEANS[0], MEANS[4], fk.budget(16, is_causal=True).never_exact()], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_torch_never_runs_a_compiled_kernel(plan, grad, monkeypatch):
    """Neither to attend nor for statistics, clusters, sums and the past, with gradients or without."""
    monkeypatch.setattr(build, "_load", Trap)
    tensors = [x.requires_grad_(grad) for x in SHAPES["grouped"].draw(dtype=torch.float32)]
    for impl in ("torch", "reference"):
        output = fk.attention(*tensors, plan=plan, is_causal=plan.rest.needs_causal, impl=impl)
        if grad:
            output.sum().backward()
    for impl in ("native", "auto"):
        with pytest.raises(AssertionError, match="fewkeys_"):
            fk.attention(*tensors, plan=plan, is_causal=plan.rest.needs_causal, impl=impl)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch.func itself
def test_forward_derivatives_and_doubles_go_another_way(taken):
    tensors = SHAPES["plain"].draw(dtype=torch.float32)

    def call(*tensors):
        return fk.attention(*tensors, plan=MEANS[5], impl="auto")

    _, forward = torch.func.jvp(call, tuple(tensors), tuple(tensors))
    with torch.autograd.forward_ad.dual_level():
        dual = [torch.autograd.forward_ad.make_dual(x, x) for x in tensors]
        tangent = torch.autograd.forward_ad.unpack_dual(call(*dual)).tangent
    torch.testing.assert_close(tangent, forward)
    assert tangent.abs().max() > 0.1
    call(*(x.double() for x in tensors))
    assert not taken
    call(*tensors)
    with torch.no_grad():
        call(*(x.clone().requires_grad_() for x in tensors))
    assert len(taken) == 2


@pytest.mark.parametrize("form", ["plain", "grouped", "padded"])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_clusters(form, dtype):
    """Of the same keys: those of torch's operations but for ties, at the same distances up to rounding."""
    shape = replace(SHAPES[form], keys=200, queries=200, lengths=None)
    q, k, v = shape.draw(dtype=dtype)
    assert tensors.suits(k, v)
    k[:, :, 7], v[:, :, 7] = k[:, :, 3], v[:, :, 3]
    actual, want = (check_inputs(q, k, v) for _ in range(2))
    parts, others = clusters.clusters(actual, 13), without(lambda: clusters.clusters(want, 13))
    assert (parts.label == others.label).float().mean() > 0.98
    assert torch.equal(parts.label[:, :, 7], parts.label[:, :, 3])
    torch.testing.assert_close(parts.distance, others.distance, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("form", ["plain", "grouped", "padded", "cross padded"])
@pytest.mark.parametrize("tokens", [300, 9000])
def test_how_queries_measure_keys(tokens, form, dtype):
    """Fewer and more than are added up at once, in rows that are no multiple of a vector, far from zero."""
    shape = replace(SHAPES[form], keys=tokens, queries=tokens + 7 * (form == "cross padded"), head_dim=33, value_dim=19)
    shape = replace(shape, lengths=None if shape.lengths is None else (tokens, 40))
    query, key, value = shape.draw(dtype=dtype)
    actual, want = (check_inputs(query + 1, key + 3, value, **shape.options) for _ in range(2))
    pairs = [(clusters.frame(actual), without(lambda: clusters.frame(want)))]
    pairs.append((clusters.query_moments(actual), without(lambda: clusters.query_moments(want))))
    for one, other in pairs:
        for name, part in vars(one).items():
            torch.testing.assert_close(part, getattr(other, name), rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("plan", [fk.budget(24), fk.budget(24, is_causal=True)], ids=str)
def test_float16_is_read_as_float32(plan, monkeypatch):
    """As transformers stores many models. torch takes several times as long for it on a CPU."""
    causal = plan.is_causal
    shape = replace(SHAPES["grouped"], queries=300, keys=300)
    rows = [part.half().transpose(1, 2).contiguous().transpose(1, 2) for part in shape.draw(dtype=torch.float32)]
    plan, options = plan.never_exact(), {"is_causal": causal, "impl": "native"}
    expected = fk.attention(*(part.float() for part in rows), plan=plan, **options).half()
    assert torch.equal(fk.attention(*rows, plan=plan, **options), expected)
    assert crossover.Setting.of(*rows, is_causal=causal).kernels == build.identity()
    if causal:
        streams = fk.stream(plan), fk.stream(plan)
        for start, stop in ((0, 200), (200, 298), (298, 299), (299, 300)):
            if start == 299:  # the kernel call of the token before serves this one
                monkeypatch.setattr(Stream, "append", None)
            query, key, value = (part[:, :, start:stop] for part in rows)
            by_half = streams[0].answer(query, key, value)
            by_float = streams[1].answer(query.float(), key.float(), value.float())
            assert torch.equal(by_half, by_float.half())


def test_no_root_is_told():
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    lengths = torch.full((q.shape[0],), float(q.shape[2]))
    kernels.frame(q, k, v, lengths, lengths, scale=1.0, ridge=1e-6)
    with pytest.raises(build.IndefiniteError):
        kernels.frame(q, k, v, lengths, lengths, scale=1.0, ridge=-2.0)


def test_mixed_precision_is_read_as_it_is(taken):
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    k, v = k.bfloat16(), v.bfloat16()
    x = replace(check_inputs(q, k.float(), v.float()), key=k)
    graph = fk.Window(9).select(x)
    torch.testing.assert_close(
        *(dispatch.attend(Problem(inputs, graph, None, fk.Softmax())) for inputs in (x, replace(x, key=k.float())))
    )
    assert len(taken) == 1


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("form", ["plain", "grouped", "padded", "cross padded"])
@pytest.mark.parametrize(
    ("count", "size", "mean"), [(1, 1, 0), (3, 1, 0), (9, 1, 0), (50, 1, 0), (3, 6, 0), (3, 1, 10)]
)
def test_lloyds_steps(form, count, size, mean, dtype):
    """From some of the keys or all, with clusters that nobody joins, keys of hardly any weight, and far padding."""
    shape = replace(SHAPES[form], keys=300, head_dim=33, value_dim=19)
    shape = replace(shape, lengths=None if shape.lengths is None else (300, 40))
    query, key, value = shape.draw(dtype=dtype)
    actual, want = (check_inputs(query, size * key + mean, value, **shape.options) for _ in range(2))
    actual, want = clusters.clusters(actual, count), without(lambda: clusters.clusters(want, count))
    real = torch.ones(value.shape[0], 1, value.shape[2], dtype=torch.bool)
    for row, length in zip(real, shape.lengths or (), strict=False):
        row[:, length:] = False
    # A key as near to one centre as to another may change its cluster by rounding, but not its distance.
    one, other = (part.distance.masked_fill(~real, 0.0) for part in (actual, want))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert ((actual.label == want.label) | ~real).float().mean() > 0.98


@pytest.mark.parametrize("tokens", [300, 5000])
@pytest.mark.parametrize(
    "plan",
    [
        fk.budget(64).never_exact(),
        fk.budget(64, cohorts=1).never_exact(),
        fk.Plan(fk.select.KeyNorm(4), fk.ClusterMeans(8), fk.weights.Power(2.0)),
    ],
    ids=str,
)
def test_threads_change_no_bit(plan, tokens):
    """Heads that one thread does from beginning to end, and heads that all share."""
    q, k, v = (torch.randn(1, 2, tokens, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    before, actual = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        actual.append(fk.attention(q, k, v, plan=plan, impl="auto"))
    torch.set_num_threads(before)
    assert all(torch.equal(actual[0], other) for other in actual[1:])


@pytest.mark.long
@pytest.mark.parametrize(
    ("slots", "cohorts", "sizes", "dtype", "seed"),
    [
        (192, 4, (2, 1, 2, 333, 80), torch.float32, 3),
        (192, 8, (1, 3, 2, 333, 128), torch.float32, 46),
        (192, 8, (1, 2, 1, 200, 128), torch.bfloat16, 98),
        (8, 32, (1, 1, 2, 200, 128), torch.bfloat16, 116),
        (192, 1, (2, 1, 2, 333, 80), torch.float32, 3),
    ],
)
def test_threads_change_no_bit_of_gradients(slots, cohorts, sizes, dtype, seed):
    """Small products are torch's own where gradients are wanted, and threads share their sums."""
    plan, (batch, heads, group, tokens, dim) = fk.budget(slots, cohorts=cohorts).never_exact(), sizes
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads * group, tokens, dim, generator=g).to(dtype)
    key = torch.randn(batch, heads, tokens, dim, generator=g)
    key = (key * (0.5 + 2 * torch.rand(batch, heads, tokens, 1, generator=g))).to(dtype)
    value = torch.randn(batch, heads, tokens, dim, generator=g).to(dtype)
    before, actual = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        rows = [x.clone().requires_grad_() for x in (query, key, value)]
        output = fk.attention(*rows, plan=plan)
        actual.append([output.detach(), *torch.autograd.grad(output.float().square().sum(), rows)])
    torch.set_num_threads(before)
    for other in actual[1:]:
        assert all(torch.equal(*pair) for pair in zip(actual[0], other, strict=True))


@pytest.fixture
def late():
    """The calls of all threads, whose others come a fifth of a second late."""
    library, calls = build._library(), []
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def come_late(function, data, count, flags):
        other = threading.Timer(0.2, work(function), (data,))
        other.start()
        calls.append(count)
        other.join()
        work(function)(data)

    held = entry(come_late)
    library.fewkeys_lend(held)
    yield calls
    library.fewkeys_lend(build._threads())


@pytest.mark.long
def test_threads_that_come_late_twice_are_not_waited_for_again(late, monkeypatch):
    """What the caller alone has done in less time than they were late is done, and to the same bits. Late once is no
    reason, nor is late after a pause.
    """
    q, k, v = (torch.randn(1, 2, 600, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    time.sleep(3)  # until it is forgotten how late a busy machine's own threads were
    largest = [float(rows.abs().max()) for rows in (q, k, v)]
    for _ in range(20):  # on a busy machine, there may be pauses between calls
        calls = len(late)
        assert kernels.largest_and_rows(q, k, v)[0] == largest
        if len(late) == calls:
            break
    assert 3 <= calls < 20  # the first one came after a pause


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_the_largest_entries(bad, dtype):
    q, k, v = SHAPES["grouped"].draw(dtype=dtype)
    k, v = k.repeat(1, 1, 9, 1).mT.contiguous().mT, v.repeat(1, 1, 9, 1).transpose(0, 1).contiguous().transpose(0, 1)
    if bad is not None:
        v[-1, -1, -1, -1] = bad
    actual, want = kernels.largest_and_rows(q, k, v)[0], largest_entries(q, k, v)
    assert all(math.isfinite(each) for each in actual) == (bad is None)
    torch.testing.assert_close(actual, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_the_rows_of_every_head_side_by_side(dtype):
    rows = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in SHAPES["grouped"].draw(dtype=dtype)]
    sizes, copies = kernels.largest_and_rows(*rows, by_head=True)
    assert sizes == kernels.largest_and_rows(*rows)[0]
    for copy, part in zip(copies, rows, strict=True):
        assert copy.is_contiguous()
        assert not part.is_contiguous()
        assert torch.equal(copy, part)
    rows = [part.requires_grad_() for part in rows]
    assert all(part.requires_grad for part in kernels.largest_and_rows(*rows, by_head=True)[1])


def test_memory_of_copies_is_taken_again_where_no_tensor_uses_it():
    rows = [torch.randn(1, 90, 2, 16).transpose(1, 2) for _ in range(3)]

    def copies():
        return kernels.largest_and_rows(*rows, by_head=True)[1]

    first = copies()
    view, place = first[2][:, 1:], first[0].data_ptr()
    del first
    assert copies()[0].data_ptr() != place
    assert torch.equal(view, rows[2][:, 1:])
    place = copies()[0].data_ptr()
    assert copies()[0].data_ptr() == place


@pytest.mark.parametrize("offset", [2**31 - 3, 2**31, 2**33])
def test_positions_beyond_32_bits(offset):
    tensors, plan = SHAPES["plain"].draw(dtype=torch.float32), fk.Plan(fk.Sinks(4) | fk.Window(3))
    options = {"plan": plan, "is_causal": True, "query_offset": offset}
    actual, want = (fk.attention(*tensors, impl=impl, **options) for impl in ("native", "torch"))
    torch.testing.assert_close(actual, want, **CLOSE[torch.float32])


def test_whole_plans_with_and_without():
    q, k, v = (torch.randn(2, 4, 600, 32, generator=torch.Generator().manual_seed(i)) for i in range(3))
    for plan in (fk.budget(64), fk.budget(64, is_causal=True)):
        causal = plan == fk.budget(64, is_causal=True)

        def call(plan=plan, causal=causal):
            return fk.attention(q, k, v, plan=plan.never_exact(), is_causal=causal)

        # A key as near to one centre as to another may change its cluster by rounding.
        torch.testing.assert_close(call(), without(call), rtol=1e-3, atol=1e-3)


def test_the_library_is_of_the_instruction_set_in_use():
    """`make sets` runs this file by every set of the machine."""
    assert build.instruction_set() == (os.environ.get(sets.FORCED) or str(sets.possible()[-1]))
