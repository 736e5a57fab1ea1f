"""Keys and values in int8: read back to half a quantum; whatever is done to a stream, the same bits."""

import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fewkeys as fk
from fewkeys.core.fields import Buffer
from fewkeys.execute import dispatch
from fewkeys.memory import Stream
from fewkeys.memory.rows import LARGEST, HeldRows
from tiny_models import llama, tokens

PLAN = fk.Plan(fk.KeyScan(25), fk.BlockMeans(4))
TYPES = ["model", "int8"]
COUNT = 420


def draw(dtype=torch.float32, count=COUNT):
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 4, count, 8), (2, 2, count, 8), (2, 2, count, 5))
    q, k, v = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)
    return 3 * q, k, v


def feed(stream, rows, sizes, start=0):
    """The outputs of a stream for pieces of the tokens from `start` on."""
    actual = []
    for size in sizes:
        query, key, value = (part[:, :, start : start + size] for part in rows)
        stream.append(key, value)
        actual.append(stream.attend(query))
        start += size
    return torch.cat(actual, 2)


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    leaves=st.sampled_from(TYPES),
    power=st.sampled_from([-400, -121, -30, -3, 0, 4, 14, 400]),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_rows_are_read_back_to_half_a_quantum(dtype, leaves, power, dims, seed):
    g = torch.Generator().manual_seed(seed)
    size = 2.0 ** (power if dtype == torch.float64 else max(-121, min(power, 14)))
    key, value = (torch.randn(2, 1, 7, dim, generator=g).double().mul(size).to(dtype) for dim in dims)
    key[0, 0, 0], value[1, 0, 3] = 0, 0
    rows = HeldRows.empty(leaves, key, value)
    rows.append(key[:, :, :3], value[:, :, :3])
    rows.append(key[:, :, 3:], value[:, :, 3:])
    for part, read in zip((key, value), rows.read(0, 7), strict=True):
        part = part.double()
        largest = part.abs().amax(-1, keepdim=True)
        quantum = {"model": 0 * largest, "int8": largest / LARGEST}[leaves]
        assert ((read.double() - part).abs() <= quantum / 2 * (1 + 1e-5) + size * 1e-8).all()


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("leaves", TYPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_the_plan_over_keys_as_they_are_read(leaves, dtype, impl, monkeypatch):
    """By the kernel, where it reads that dtype, and by torch's operations."""
    if impl == "torch":
        monkeypatch.setattr(dispatch.native, "unsupported", lambda problem: "expected none")
    q, k, v = draw(dtype)
    actual = feed(fk.stream(PLAN, leaves=leaves), (q, k, v), [300, 1, 100, 18, 1])
    rows = HeldRows.empty(leaves, k, v)
    rows.append(k, v)
    k, v = rows.read(0, COUNT)
    want = fk.attention(q.to(k.dtype), k, v, plan=PLAN, is_causal=True)
    error = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(actual, want.to(dtype), rtol=error, atol=error)


@pytest.mark.parametrize("leaves", TYPES)
def test_pieces_files_and_copies_give_the_same_bits(leaves, tmp_path):
    """After a step back, a copy, another order and a file."""
    rows = draw()
    want = feed(fk.stream(PLAN, leaves=leaves), rows, [COUNT])
    stream = fk.stream(PLAN, leaves=leaves)
    before = feed(stream, rows, [150, 1, 129])
    stream.crop(190)
    stream = copy.deepcopy(stream)
    stream.select(torch.tensor([1, 0]))
    stream.save(tmp_path / "stream")
    stream = Stream.load(tmp_path / "stream")
    stream.select(torch.tensor([1, 0]))
    after = feed(stream, rows, [1, 88, 1, 140], 190)
    assert stream.leaves == leaves
    assert torch.equal(torch.cat([before[:, :, :190], after], 2), want)


@pytest.mark.parametrize("leaves", TYPES)
def test_every_token_can_be_taken_back(leaves):
    rows = draw()
    whole = fk.stream(PLAN, leaves=leaves)
    feed(whole, rows, [COUNT])
    for left in (0, 1, 31, 32, 33, 200, COUNT - 40):
        stream, other = copy.deepcopy(whole), fk.stream(PLAN, leaves=leaves)
        stream.crop(left)
        if left:
            feed(other, rows, [left])
        assert torch.equal(feed(stream, rows, [1, 39], left), feed(other, rows, [1, 39], left))


@torch.no_grad()
def test_caches_hold_leaves_as_they_are_told(tmp_path):
    model, ids = llama(), tokens(2, 150)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": 2}
    caches = [fk.cache(model, PLAN, leaves="int8") for _ in range(2)]
    assert torch.equal(*(model.generate(ids, **options, past_key_values=cache) for cache in caches))
    caches[1].save(tmp_path / "cache")
    caches[0].load(tmp_path / "cache")
    again = [copy.deepcopy(cache) for cache in caches]
    ids = tokens(4, 3)
    assert torch.equal(*(model(ids, past_key_values=cache).logits for cache in again))
    with pytest.raises(ValueError, match=r"leaves='model', got the plan .* leaves='int8'"):
        fk.cache(model, PLAN, leaves="model").load(tmp_path / "cache")


@pytest.mark.parametrize(
    "make",
    [
        lambda: fk.stream(PLAN, leaves="int4"),
        lambda: fk.stream(fk.budget(16, is_causal=True), leaves="int8"),
        lambda: fk.cache(llama(), fk.budget(16, is_causal=True), leaves="int8"),
    ],
)
def test_what_cannot_be_held_is_refused(make):
    with pytest.raises(ValueError, match=r"^leaves: expected"):
        make()


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_without_room_leave_the_stream_as_it_was(padded, monkeypatch):
    rows, real = draw(), torch.ones(2, COUNT, dtype=torch.bool)
    real[1, :9] = not padded
    streams = [fk.stream(PLAN, leaves="int8") for _ in range(2)]
    for stream in streams:
        stream.append(*(part[:, :, :200] for part in rows[1:]), real[:, :200])
        stream.attend(rows[0][:, :, :200])
    later = [part[:, :, 200:] for part in rows]
    moved, left = Buffer._moved, 3 * padded  # of two groups of sequences, the first finds room

    def full(*arguments):
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError("no room")
        return moved(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Buffer, "_moved", staticmethod(full))
        with pytest.raises(MemoryError, match="no room"):  # noqa: PT012 - tokens are taken by either
            streams[0].append(*later[1:], real[:, 200:])
            streams[0].attend(later[0])
    assert streams[0].length == 200
    outputs = []
    for stream in streams:
        stream.append(*later[1:], real[:, 200:])
        outputs.append(stream.attend(later[0]))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(("name", "number"), [("key", -128), ("value", -128), ("scale", -1.0)])
def test_numbers_that_rounding_never_gives_are_refused(name, number):
    empty = HeldRows.empty("int8", torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, 4))
    rows = torch.full((1, 2, 3, 4), -127, dtype=torch.int8)
    tensors = {"key": rows, "value": rows.clone(), "scale": torch.zeros(1, 2, 3, 2)}
    assert empty.filled(3, tensors, "").count == 3
    tensors[name][0, 1, 2, 0] = number
    with pytest.raises(ValueError, match=f"expected numbers of at least .* in {name}"):
        empty.filled(3, tensors, "")
