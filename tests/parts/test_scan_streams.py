"""Streams that hold every key with its code: whatever is done to them, they answer as attention on the whole does."""

import copy
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fewkeys as fk
from fewkeys.memory import Stream, coded, files
from fewkeys.sketch.codes import BLOCK
from native_cases import needs_compiler
from stream_tokens import SIZES, TOKENS, Tokens, same, whole

PLANS = {
    "means": fk.Plan(fk.KeyScan(25), fk.BlockMeans(4)),
    "without stand-ins": fk.Plan(fk.KeyScan(9)),
    "entmax": fk.Plan(fk.KeyScan(30), weights=fk.weights.Entmax(1.5)),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@settings(max_examples=5, deadline=None)
@given(sizes=SIZES, padding=st.sampled_from([0.0, 0.0, 0.1]), seed=st.integers(0, 99))
def test_pieces_give_what_the_whole_gives(plan, sizes, padding, seed):
    tokens = Tokens.draw(seed, padding)
    stream, outputs, start = fk.stream(plan), [], 0
    for size in (*sizes, TOKENS):
        part = slice(start, min(TOKENS, start + size))
        if part.start < part.stop:
            outputs.append(tokens[part].feed(stream))
        start = part.stop
    same(torch.cat(outputs, 2), whole(plan, tokens))


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 150)),
            st.tuples(st.just("crop"), st.integers(1, 300)),
            st.tuples(st.just("select"), st.sampled_from([(0, 1), (1, 0), (1, 1)])),
            st.tuples(st.just("copy"), st.none()),
            st.tuples(st.just("file"), st.none()),
        ),
        min_size=2,
        max_size=12,
    ),
    padding=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 99),
)
def test_in_any_order_it_equals_the_whole(steps, padding, seed):
    """Any token can be taken back: nothing that came later has changed what is held of those before."""
    plan = PLANS["means"]
    stream, so_far = fk.stream(plan), Tokens.draw(seed, padding, 0)
    for number, (step, size) in enumerate([*steps, ("append", 60)]):
        if step == "append":
            new = Tokens.draw(100 * seed + number, padding, size)
            actual, so_far = new.feed(stream), so_far + new
            same(actual, whole(plan, so_far)[:, :, -size:])
        elif step == "crop":
            left = max(0, stream.length - size)
            stream.crop(left)
            so_far = so_far[:left]
        elif step == "select":
            if stream.batch:
                stream.select(torch.tensor(size))
            so_far = so_far.select(list(size))
        elif step == "copy":
            stream = copy.deepcopy(stream)
        else:
            with tempfile.TemporaryDirectory() as folder:
                stream.save(Path(folder) / "stream.safetensors")
                stream = Stream.load(Path(folder) / "stream.safetensors")
        assert stream.length == so_far.key.shape[2]


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_of_their_own_give_what_they_give_together(heads):
    """As where each head has a plan of its own: room between sequences is that of the buffer, whatever a view says."""
    plan, tokens = PLANS["means"], Tokens.draw(3)
    query = tokens.query.unflatten(1, (tokens.key.shape[1], -1))[:, :heads].flatten(1, 2)
    rows = (query.float(), tokens.key[:, :heads].float(), tokens.value[:, :heads].float())  # as kernels read
    few_heads = replace(tokens, query=rows[0], key=rows[1], value=rows[2])
    stream = fk.stream(plan)
    actual = [few_heads[part].feed(stream) for part in (slice(0, 40), slice(40, 41), slice(41, TOKENS))]
    torch.testing.assert_close(torch.cat(actual, 2), whole(plan, few_heads), rtol=1e-4, atol=1e-5)


FIRST = 100


@pytest.fixture
def giving_way(monkeypatch):
    """The plan, with leave to give way for the first tokens."""
    monkeypatch.setattr(coded, "exact_length", lambda plan, *_: FIRST if plan.exact_if_faster else 0)
    return replace(PLANS["means"], exact_if_faster=True)


@pytest.mark.parametrize("sizes", [(TOKENS,), (40, 1, 200), (99, 1, 1, 319), (1,) * 130 + (290,)], ids=str)
def test_first_tokens_are_answered_exactly_and_others_by_the_plan(giving_way, sizes):
    """Whatever comes later, and in whatever pieces."""
    tokens = Tokens.draw(3)
    rows = (tokens.query, tokens.key, tokens.value)
    exact = fk.attention(*rows, plan=fk.Plan(), is_causal=True)
    want = torch.cat([exact[:, :, :FIRST], whole(PLANS["means"], tokens)[:, :, FIRST:]], 2)
    for how in (giving_way, giving_way.never_exact()):
        stream, actual, start = fk.stream(how), [], 0
        for size in sizes:
            actual.append(tokens[start : start + size].feed(stream))
            start += size
        same(torch.cat(actual, 2)[:, :, : want.shape[2]], want[:, :, :start])
        want = whole(PLANS["means"], tokens)


def test_first_tokens_are_held_as_they_come_until_they_are_rounded(giving_way, tmp_path):
    """Then by the plan over rounded keys; saved before and after."""
    tokens = Tokens.draw(4)
    exact = fk.attention(tokens.query, tokens.key, tokens.value, plan=fk.Plan(), is_causal=True)
    want = tokens.feed(fk.stream(PLANS["means"], leaves="int8"))
    stream, outputs = fk.stream(giving_way, leaves="int8"), []
    for part in (slice(0, 60), slice(60, 130), slice(130, TOKENS)):
        outputs.append(tokens[part].feed(stream))
        stream.save(tmp_path / "stream")
        stream = copy.deepcopy(Stream.load(tmp_path / "stream"))
    same(torch.cat(outputs, 2), torch.cat([exact[:, :, :FIRST], want[:, :, FIRST:]], 2))
    stream.crop(200)
    same(tokens[200:].feed(stream), want[:, :, 200:])


def test_padded_first_tokens_are_counted_without_padding(giving_way):
    tokens = Tokens.draw(5, 0.2)
    stream = fk.stream(giving_way)
    actual = torch.cat([tokens[:70].feed(stream), tokens[70:].feed(stream)], 2)
    for row, real in enumerate(tokens.real):
        alone = Tokens(
            *(part[row : row + 1, :, real] for part in (tokens.query, tokens.key, tokens.value)), real[real][None]
        )
        same(actual[row : row + 1, :, real], alone.feed(fk.stream(giving_way)))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_float32_and_bfloat16_are_held_as_they_come(dtype, error):
    plan, tokens = PLANS["means"], Tokens.draw(7)
    rows = [part.to(dtype) for part in (tokens.query, tokens.key, tokens.value)]
    tokens = replace(tokens, query=rows[0], key=rows[1], value=rows[2])
    stream = fk.stream(plan)
    actual = torch.cat([tokens[:200].feed(stream), tokens[200:201].feed(stream), tokens[201:].feed(stream)], 2)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, fk.attention(*rows, plan=plan, is_causal=True), rtol=error, atol=error)


def test_memory_is_that_of_the_tokens_and_their_codes():
    """Half as much again for growing: keys and values of float32, codes, and two rows of float64 for every block."""
    stream, generator, dim = fk.stream(PLANS["means"]), torch.Generator().manual_seed(0), 16
    for count in (1024, 1024, 2048, 4096):
        key, query = torch.randn(2, 1, 1, count, dim, generator=generator)
        stream.append(key, key)
        stream.attend(query)
        assert stream.memory() < 1.5 * stream.length * (2 * dim * 4 + dim / 4 + 4 + 2 * dim * 8 / BLOCK) + 20_000


def test_rules_beside_the_scan_are_refused():
    with pytest.raises(ValueError, match=r"^plan: a stream keeps KeyScan alone"):
        fk.stream(fk.Plan(fk.KeyScan(9) | fk.Window(9)))


def test_other_means_beside_the_scan_are_refused():
    class Own(fk.ClusterMeans, listed=False):
        def check_beside(self, keep):
            pass

    with pytest.raises(ValueError, match=r"^plan: a stream of a KeyScan .* BlockMeans\(count\) or drops it, got "):
        fk.stream(fk.Plan(fk.KeyScan(9), Own(4)))


def test_a_damaged_file_is_refused(tmp_path):
    tokens, path = Tokens.draw(1), tmp_path / "stream.safetensors"
    stream = fk.stream(PLANS["means"])
    tokens.feed(stream)
    facts, tensors = stream.contents()
    short = {name: rows[:, :, 1:] if name.endswith("key") else rows for name, rows in tensors.items()}
    files.write(path, "stream", [(facts, short)])
    with pytest.raises(ValueError, match=r"^path: expected a file that Stream.save wrote"):
        Stream.load(path)


@pytest.mark.parametrize("size", [1e30, 1e38])
def test_a_query_beyond_all_bounds_is_answered(size):
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 270, 8, generator=draw) for heads in (4, 2, 2))
    query[0, 0, 60, 0] = size
    stream, actual = fk.stream(PLANS["means"]), []
    for part in (slice(0, 200), slice(200, 270)):
        stream.append(key[:, :, part], value[:, :, part])
        actual.append(stream.attend(query[:, :, part]))
    assert torch.cat(actual, 2).isfinite().all()


@pytest.mark.parametrize("leaves", ["model", "int8"])
def test_tokens_of_one_block_follow_whatever_was_done_to_the_stream(leaves):
    """What a kernel is told of a block serves all of its tokens: not those of another order, copy, block or length."""
    plan, tokens, order = PLANS["means"], Tokens.draw(2), torch.tensor([1, 0])
    tokens = Tokens(*(rows.float() for rows in (tokens.query, tokens.key, tokens.value)), tokens.real)
    want = tokens.feed(fk.stream(plan, leaves=leaves))

    def follow(stream, start, stop, index=slice(None)):
        for place in range(start, stop):
            one = tokens.select(index)[place : place + 1]
            actual = one.feed(stream)
            torch.testing.assert_close(actual, want[index][:, :, place : place + 1], rtol=1e-5, atol=1e-5)

    stream = fk.stream(plan, leaves=leaves)
    tokens[:195].feed(stream)
    follow(stream, 195, 203)
    copied, pickled = copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))
    stream.select(order)
    follow(stream, 203, 210, order)
    stream.crop(198)
    follow(stream, 198, 330, order)  # beyond 324, rows move to a larger buffer
    follow(copied, 203, 206)
    follow(pickled, 203, 206)


def one_by_one(dtype, count):
    """Tokens as kernels read them: (1, 4, 1, D) queries, (1, 2, 1, D) keys, (1, 2, 1, Dv) values."""
    tokens = Tokens.draw(7, count=count).select([0])
    return [
        tuple(rows[:, :, n : n + 1].to(dtype) for rows in (tokens.query, tokens.key, tokens.value))
        for n in range(count)
    ]


def fed(stream, query, key, value):
    stream.append(key, value)
    return stream.attend(query)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gives_way", [False, True])
@pytest.mark.parametrize("leaves", ["model", "int8"])
def test_a_token_in_one_call_is_that_of_two(dtype, gives_way, leaves, giving_way, monkeypatch):
    """To the bit, whatever happens to the stream between tokens."""
    between = {
        45: lambda s: s.crop(40),  # the same block
        80: lambda s: s.crop(50),  # an earlier one
        90: lambda s: s.select(torch.tensor([0, 0])),
        100: lambda s: s.select(torch.tensor([1])),
        110: lambda s: s.append(*two),  # tokens without queries
        150: lambda s: s.crop(FIRST - 2),
    }
    two = [torch.ones(1, 2, 2, size, dtype=dtype) for size in (8, 5)]
    plan, appended, append = giving_way if gives_way else PLANS["means"], [], Stream.append
    one, other = fk.stream(plan, leaves=leaves), fk.stream(plan, leaves=leaves)
    monkeypatch.setattr(Stream, "append", lambda stream, *args: (appended.append(stream), append(stream, *args)))
    for number, (query, key, value) in enumerate(one_by_one(dtype, 200)):
        for stream in (one, other):
            between.get(number, lambda s: None)(stream)
        query, key, value = (rows.repeat(one.batch or 1, 1, 1, 1) for rows in (query, key, value))
        key = key.mT.contiguous().mT if number % 3 else key  # rows that are not dense
        assert torch.equal(other.answer(query, key, value), fed(one, query, key, value))
        assert other.length == one.length
    assert appended.count(other) < (150 if gives_way else 60) < 200 <= appended.count(one)
    assert all(torch.equal(*pair) for pair in zip(*(s.contents()[1].values() for s in (one, other)), strict=True))


@needs_compiler
@pytest.mark.parametrize("leaves", ["model", "int8"])
def test_a_token_in_one_call_reads_the_codes_of_what_replaced_cropped_tokens(leaves):
    """In the block of the last call, whose keys before it came again without queries."""
    tokens = one_by_one(torch.float32, 100)
    stream, other = (fk.stream(PLANS["means"], leaves=leaves) for _ in range(2))
    for token in tokens:
        stream.answer(*token)
    stream.crop(40)
    for number, (_, key, value) in enumerate(tokens[:99]):
        for one in (other,) if number < 40 else (stream, other):
            one.append(key * (1 if number < 40 else -3), value)
    assert torch.equal(stream.answer(*tokens[99]), fed(other, *tokens[99]))


def spoiled(rows, number):
    rows = rows.clone()
    rows[0, 0, 0, 3] = number
    return rows


ODD = {
    "not a number": lambda q, k, v: (q, spoiled(k, torch.nan), v),
    "infinite": lambda q, k, v: (spoiled(q, torch.inf), k, v),
    "another size": lambda q, k, v: (q, k, v[..., :4]),
    "another dtype": lambda q, k, v: (q.double(), k.double(), v.double()),
    "no tensor": lambda q, k, v: (q.tolist(), k, v),
    "other heads": lambda q, k, v: (q[:, :1], k, v),
}


@needs_compiler
@pytest.mark.parametrize("name", ODD)
def test_a_token_in_one_call_is_refused_as_in_two(name):
    first, (*tokens, last) = fk.stream(PLANS["means"]), one_by_one(torch.float32, 50)
    for token in tokens:
        first.answer(*token)
    second, odd = copy.deepcopy(first), ODD[name](*last)
    with pytest.raises((TypeError, ValueError)) as one:
        first.answer(*odd)
    with pytest.raises((TypeError, ValueError)) as two:
        fed(second, *odd)
    assert str(one.value) == str(two.value)
    assert first.length == 49  # the two calls may have added the token before they refuse its query
    if second.length == 49:
        assert torch.equal(first.answer(*last), fed(second, *last))


@pytest.mark.parametrize("gives_way", [False, True])
def test_a_refused_first_answer_leaves_the_stream_empty(gives_way):
    stream = fk.stream(fk.budget(64, is_causal=True) if gives_way else PLANS["means"])
    (query, key, value), *_ = one_by_one(torch.float32, 2)
    with pytest.raises(ValueError, match="query: expected"):
        stream.answer(query[..., :3], key, value)
    assert (stream.length, stream.batch) == (0, None)
    stream.answer(query.double(), key.double(), value.double())
    assert stream.length == 1


@needs_compiler
@pytest.mark.parametrize("size", [5e3, 1e25])
def test_a_large_token_in_one_call_is_that_of_two(size):
    first, second = fk.stream(PLANS["means"]), fk.stream(PLANS["means"])
    for number, (query, key, value) in enumerate(one_by_one(torch.float32, 60)):
        query, key = (size * query, size * key) if number == 45 else (query, key)
        assert torch.equal(first.answer(query, key, value), fed(second, query, key, value))
