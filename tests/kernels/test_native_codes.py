"""The compiled scan of codes: the keys that it finds are torch's, to the last one; gradients go through torch."""

import pytest
import torch

import fewkeys as fk
from fewkeys.core.validation import check_inputs
from fewkeys.native import kernels
from fewkeys.sketch.codes import BLOCK, Frame, best, encode, rounded, signs
from native_cases import needs_compiler

pytestmark = needs_compiler


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same(key, query, seen, real, count):
    frame, sign = Frame.of(key), signs(key.shape[3], key.device)
    held = encode(key, frame)
    by_kernel = kernels.code_keys(key, sign, frame.middle, frame.spread)
    assert torch.equal(by_kernel[0], held.packed)
    assert torch.equal(by_kernel[1], held.sigma)
    count = min(count, int(seen[-1]))
    actual = kernels.best_codes(held.packed, held.sigma, query, sign, seen, real, count)
    assert torch.equal(actual, best(held, rounded(query), seen, real, count))


@pytest.mark.parametrize(("dim", "groups"), [(1, 1), (8, 3), (33, 2), (64, 5), (130, 1), (256, 1)])
@pytest.mark.parametrize("count", [1, 30, 300])
def test_the_keys_are_those_of_torch(dim, groups, count):
    """For every number of queries abreast, dimensions of every filling, and queries with few and many keys before."""
    key, query = drawn(2, 2, 700, dim), drawn(2, 2 * groups, 90, dim, seed=1)
    seen = torch.arange(90).mul(8) // BLOCK * BLOCK
    assert_same(key, query, seen.clamp_max(700), None, count)
    real = torch.rand(2, 700, generator=torch.Generator().manual_seed(2)) < 0.7
    assert_same(key, query, seen.clamp_max(700), real, count)


@pytest.mark.parametrize(
    "kind", ["equal keys", "few kinds of keys", "zero keys", "equal first keys", "zero queries", "one giant"]
)
def test_equal_scores_are_cut_at_the_first(kind):
    key, query = drawn(1, 1, 900, 16), drawn(1, 3, 40, 16, seed=1)
    if kind == "equal keys":
        key = key[:, :, :1].expand_as(key).contiguous()
    elif kind == "few kinds of keys":
        key = key[:, :, torch.arange(900) % 7]
    elif kind == "zero keys":
        key[:, :, 100:] = 0
    elif kind == "equal first keys":
        key[:, :, :BLOCK] = 0.5
    elif kind == "zero queries":
        query = torch.zeros_like(query)
    else:
        key[:, :, 400] *= 1e12
    assert_same(key, query, torch.full((40,), 900), None, 25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_torch(dtype):
    plan = fk.Plan(fk.KeyScan(20), fk.BlockMeans(3))
    actual = []
    for impl in ("native", "torch"):
        rows = [drawn(1, heads, 150, 8, seed=heads).to(dtype).requires_grad_() for heads in (4, 2, 2)]
        output = fk.attention(*rows, plan=plan, is_causal=True, impl=impl)
        actual.append(torch.autograd.grad(output.float().square().sum(), rows))
    for ours, theirs in zip(*actual, strict=True):
        limit = (2e-5 if dtype == torch.float32 else 2**-6) * theirs.float().abs().max()
        assert (ours.float() - theirs.float()).abs().max() <= limit


def test_long_past():
    """More keys than a first guess of the threshold is made for, in few and in many queries."""
    key = drawn(1, 1, 20_000, 64)
    key[:, :, 5_000] *= 8
    for queries in (1, 5):
        query = drawn(1, 2, queries, 64, seed=queries)
        assert_same(key, query, torch.full((queries,), 20_000), None, 227)


@pytest.mark.parametrize("queries", [1, 5])
def test_threads_share_a_long_past(queries):
    """The bits are those of one thread, which scans the past of a head alone."""
    plan, threads = fk.Plan(fk.KeyScan(80), fk.BlockMeans(3)), torch.get_num_threads()
    query, key, value = (drawn(1, *shape, 64, seed=1) for shape in ((6, queries), (2, 9000), (2, 9000)))
    key[:, :, 4_500] *= 8

    def run(impl):
        return fk.attention(query, key, value, plan=plan, is_causal=True, query_offset=9000 - queries, impl=impl)

    outputs = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            outputs.append(run("native"))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    torch.testing.assert_close(outputs[0], run("torch"), rtol=0, atol=1e-5)


def test_samples_that_mislead():
    """A few large scores in one block: the bound that its sample gives leaves too few, so all keys are scored."""
    query = drawn(1, 1, 1, 64, seed=1)
    for block in range(16):
        key = drawn(1, 1, 800, 64)
        key[:, :, 32 * block : 32 * block + 14] += 4 * query
        assert_same(key, query, torch.tensor([800]), None, 20)
    few = torch.rand(1, 800, generator=torch.Generator().manual_seed(3)) < 0.06
    assert_same(drawn(1, 1, 800, 64), query, torch.tensor([800]), few, 20)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_pass_by_chunks(dtype):
    """More keys than a chunk has, and more bytes than a cache holds, in heads and sequences of their own."""
    plan, size = fk.Plan(fk.KeyScan(80), fk.BlockMeans(3)), 8 // dtype.itemsize
    query = drawn(2, 4, 512, 250 * size, seed=1).to(dtype)
    key, value = drawn(2, 2, 2100, 250 * size).to(dtype), drawn(2, 2, 2100, 40, seed=2).to(dtype)
    ours, theirs = (
        fk.attention(query, key, value, plan=plan, is_causal=True, query_offset=2100 - 512, impl=impl).float()
        for impl in ("native", "torch")
    )
    assert (ours - theirs).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-7) * theirs.abs().max()


def test_heads_too_large_for_sums_of_16_bits_are_left_to_torch():
    rows = drawn(1, 1, 70, 1100)
    plan = fk.Plan(fk.KeyScan(5))
    with pytest.raises(ValueError, match="expected heads of at most 1024 dimensions, got 1100"):
        fk.attention(rows, rows, rows, plan=plan, is_causal=True, impl="native")
    index = plan.keep.select(check_inputs(rows, rows, rows, is_causal=True)).scan.index
    assert (index[..., 64:, :] >= 0).all()
