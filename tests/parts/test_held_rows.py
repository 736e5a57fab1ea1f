"""Keys and values in int8 and in files: read back to half a quantum; whatever is done to a stream, the same bits."""

import copy
import errno
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fewkeys as fk
from fewkeys.core import buffer
from fewkeys.execute import dispatch
from fewkeys.memory import Stream
from fewkeys.memory.base import Held
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
    power=st.sampled_from([-30, -3, 0, 4, 14]),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_rows_are_read_back_to_half_a_quantum(dtype, leaves, power, dims, seed):
    g = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(2, 1, 7, dim, generator=g).mul(2.0**power).to(dtype) for dim in dims)
    key[0, 0, 0], value[1, 0, 3] = 0, 0
    rows = HeldRows.empty(Held(leaves), key, value)
    rows.append(key[:, :, :3], value[:, :, :3])
    rows.append(key[:, :, 3:], value[:, :, 3:])
    for part, read in zip((key, value), rows.read(0, 7), strict=True):
        part = part.double()
        largest = part.abs().amax(-1, keepdim=True)
        quantum = {"model": 0 * largest, "int8": largest / LARGEST}[leaves]
        assert ((read.double() - part).abs() <= quantum / 2 * (1 + 1e-5) + 1e-45).all()


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("leaves", TYPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_the_plan_over_keys_as_they_are_read(leaves, dtype, impl, monkeypatch):
    """By the kernel, where it reads that dtype, and by torch's operations."""
    if impl == "torch":
        monkeypatch.setattr(dispatch.native, "unsupported", lambda problem: "expected none")
    q, k, v = draw(dtype)
    actual = feed(fk.stream(PLAN, leaves=leaves), (q, k, v), [300, 1, 100, 18, 1])
    rows = HeldRows.empty(Held(leaves), k, v)
    rows.append(k, v)
    k, v = rows.read(0, COUNT)
    want = fk.attention(q.to(k.dtype), k, v, plan=PLAN, is_causal=True)
    error = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(actual, want.to(dtype), rtol=error, atol=error)


@pytest.mark.parametrize("leaves", TYPES)
def test_pieces_files_and_copies_give_the_same_bits(leaves, tmp_path):
    """After a step back, a copy, another order and a file, in memory or in a folder, which stays empty."""
    rows, actual = draw(), []
    want = feed(fk.stream(PLAN, leaves=leaves), rows, [COUNT])
    for folder in (None, tmp_path):
        stream = fk.stream(PLAN, leaves=leaves, folder=folder)
        outputs = [feed(stream, rows, [150, 1, 129])]
        stream.crop(190)
        stream = copy.deepcopy(stream)
        stream.select(torch.tensor([1, 0]))
        stream.save(tmp_path / "stream")
        stream = Stream.load(tmp_path / "stream", folder=folder)
        os.remove(tmp_path / "stream")
        stream.select(torch.tensor([1, 0]))
        outputs += [feed(stream, rows, [1, 88, 1, 140], 190)]
        assert not os.listdir(tmp_path)
        assert stream.leaves == leaves
        actual.append((torch.cat([outputs[0][:, :, :190], outputs[1]], 2), stream.memory()))
    assert torch.equal(actual[0][0], actual[1][0])
    assert torch.equal(actual[0][0], want)
    assert actual[1][1] < actual[0][1]


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


@pytest.mark.parametrize("padded", [False, True])
def test_a_full_disk_is_an_error_and_the_stream_is_as_before(padded, tmp_path, monkeypatch):
    rows, real = draw(), torch.ones(2, COUNT, dtype=torch.bool)
    real[1, :9] = not padded
    streams = [fk.stream(PLAN, leaves="int8", folder=folder) for folder in (tmp_path, None)]
    for stream in streams:
        stream.append(*(part[:, :, :200] for part in rows[1:]), real[:, :200])
        stream.attend(rows[0][:, :, :200])
    make, left = buffer.tempfile.TemporaryFile, 3 * padded  # of two groups, the first finds room

    def full(**options):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(**options)

    with monkeypatch.context() as patched:
        patched.setattr(buffer.tempfile, "TemporaryFile", full)
        streams[0].append(*(part[:, :, 200:] for part in rows[1:]), real[:, 200:])
        with pytest.raises(OSError, match=r"^\[Errno 28\] folder: expected room for .* got No space left"):
            streams[0].attend(rows[0][:, :, 200:])
    assert streams[0].length == 200
    actual = []
    for stream in streams:
        stream.append(*(part[:, :, 200:] for part in rows[1:]), real[:, 200:])
        actual.append(stream.attend(rows[0][:, :, 200:]))
    assert torch.equal(*actual)
    assert not os.listdir(tmp_path)


@torch.no_grad()
def test_caches_hold_leaves_as_they_are_told(tmp_path):
    model, ids = llama(), tokens(2, 150)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": 2}
    caches = [fk.cache(model, PLAN, leaves="int8", folder=folder) for folder in (None, tmp_path)]
    assert torch.equal(*(model.generate(ids, **options, past_key_values=cache) for cache in caches))
    caches[1].save(tmp_path / "cache")
    caches[0].load(tmp_path / "cache")
    again = [copy.deepcopy(cache) for cache in caches]
    ids = tokens(4, 3)
    assert torch.equal(*(model(ids, past_key_values=cache).logits for cache in again))
    with pytest.raises(ValueError, match="of the 3 layers of this cache"):
        fk.cache(model, PLAN, leaves="model").load(tmp_path / "cache")


@pytest.mark.parametrize(
    "make",
    [
        lambda: fk.stream(PLAN, leaves="int4"),
        lambda: fk.stream(PLAN, folder="/no/such/folder"),
        lambda: fk.stream(fk.budget(16, is_causal=True), leaves="int8"),
        lambda: fk.cache(llama(), fk.budget(16, is_causal=True), folder="."),
    ],
)
def test_what_cannot_be_held_is_refused(make):
    with pytest.raises(ValueError, match=r"^(leaves|folder)\b.*: expected"):
        make()


FORK = """
import copy, os, sys, torch
import fewkeys as fk
sys.path.insert(0, "tests")
from parts.test_held_rows import PLAN, draw, feed

torch.set_num_threads(1)
rows, crops = draw(), (int(sys.argv[2]), 0)  # what the parent takes back, and the child
stream = fk.stream(PLAN, folder=sys.argv[1])
feed(stream, rows, [150])
halves = [tuple(part[:, :, at : at + 110] for part in rows) for at in (150, 290)]
expected = []
for half, crop in zip(halves, crops):
    alone = copy.deepcopy(stream)
    alone.crop(150 - crop)
    expected.append([feed(alone, half, [70]), feed(alone, half, [40], 70)])

(their_turn, my_turn), (from_child, to_parent) = os.pipe(), os.pipe()
child = os.fork()
wait, go = (from_child, my_turn) if child else (their_turn, to_parent)
me = 0 if child else 1
half, wanted = halves[me], expected[me]
first = int(sys.argv[3])  # who writes first: the parent (1) or the child (0)
if bool(child) != bool(first):
    os.read(wait, 1)
stream.crop(150 - crops[me])
same = torch.equal(feed(stream, half, [70]), wanted[0])
os.write(go, b".")
os.read(wait, 1)
same &= torch.equal(feed(stream, half, [40], 70), wanted[1])
os.write(go, b".")
if not child:
    os._exit(0 if same else 1)
print(same, os.waitpid(child, 0)[1] == 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("crop", [0, 60])
@pytest.mark.parametrize("first", ["child", "parent"])
def test_after_a_fork_parent_and_child_go_on_alone(crop, first, tmp_path):
    """Both write other tokens in turns, the parent also over those that it took back: each as if it were alone."""
    command = [sys.executable, "-c", FORK, str(tmp_path), str(crop), str(int(first == "parent"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr
