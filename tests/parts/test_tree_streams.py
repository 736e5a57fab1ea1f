"""Streams that hold every key in a tree: whatever is done to them, they answer as attention on the whole sequence."""

import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fewkeys as fk
from fewkeys.execute.native import descent
from fewkeys.streaming import Stream
from fewkeys.tree.growing import UNDO
from fewkeys.tree.rule import block_of
from fewkeys.tree.sequences import steps_after, steps_of
from native_cases import needs_compiler
from stream_tokens import SIZES, TOKENS, Tokens, same, whole

PLANS = {
    "blocks of 16": fk.budget(64, is_causal=True).never_exact(),
    "blocks of 32": fk.budget(160, is_causal=True).never_exact(),
    "until a share": fk.budget(64, is_causal=True, mass=0.7).never_exact(),
    "without stand-ins": fk.Plan(fk.select.KeyTree(70)),
    "entmax": fk.Plan(fk.select.KeyTree(66), weights=fk.weights.Entmax(1.5)),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@settings(max_examples=6, deadline=None)
@given(sizes=SIZES, padding=st.sampled_from([0.0, 0.0, 0.1]), seed=st.integers(0, 99))
def test_pieces_give_what_the_whole_gives(plan, sizes, padding, seed):
    tokens = Tokens.draw(seed, padding)
    sizes = [size for size in sizes if size]
    stream, outputs, start = fk.stream(plan), [], 0
    for size in (*sizes, TOKENS):
        part = slice(start, min(TOKENS, start + size))
        if part.start < part.stop:
            outputs.append(tokens[part].feed(stream))
        start = part.stop
    same(torch.cat(outputs, 2), whole(plan, tokens))
    assert stream.length == TOKENS


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(list(PLANS)),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.one_of(st.integers(1, 40), st.integers(41, 200))),
            st.tuples(st.just("crop"), st.one_of(st.integers(1, 40), st.integers(41, 300))),
            st.tuples(st.just("select"), st.sampled_from([(0, 1), (1, 0), (1, 1)])),
            st.tuples(st.just("copy"), st.none()),
            st.tuples(st.just("file"), st.none()),
        ),
        min_size=2,
        max_size=14,
    ),
    padding=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 99),
)
def test_in_any_order_it_equals_the_whole_or_is_refused(name, steps, padding, seed):
    plan, stream = PLANS[name], fk.stream(PLANS[name])
    so_far = Tokens.draw(seed, padding, 0)
    for number, (step, size) in enumerate([*steps, ("append", 60)]):
        if step == "append":
            new = Tokens.draw(100 * seed + number, padding, size)
            found, so_far = new.feed(stream), so_far + new
            same(found, whole(plan, so_far)[:, :, -size:])
        elif step == "crop":
            left = max(0, stream.length - size)
            refused = None
            try:
                stream.crop(left)
            except ValueError as error:
                refused = str(error)
            if refused is None:
                so_far = so_far[:left]
            else:
                assert size > 16 * UNDO
                assert refused.startswith("length: expected at most 8 sealed blocks")
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


@pytest.mark.parametrize("back", [1, 100, 128])
def test_at_least_128_tokens_can_be_taken_back(back):
    plan, tokens = PLANS["blocks of 16"], Tokens.draw(0)
    stream = fk.stream(plan)
    tokens.feed(stream)
    stream.crop(TOKENS - back)
    other = Tokens.draw(1)[:60]
    same(other.feed(stream), whole(plan, tokens[: TOKENS - back] + other)[:, :, -60:])


def test_saved_and_restored_it_goes_on_bit_identically(tmp_path):
    plan, tokens = PLANS["blocks of 32"], Tokens.draw(3, 0.05)
    stream = fk.stream(plan, scale=0.4)
    tokens[:300].feed(stream)
    stream.save(tmp_path / "stream.safetensors")
    restored = Stream.load(tmp_path / "stream.safetensors")
    assert torch.equal(tokens[300:].feed(stream), tokens[300:].feed(restored))


def test_queries_that_never_came_shape_no_tree():
    """A tree is shaped by the queries that asked; where none did, by the keys alone."""
    plan, tokens = PLANS["blocks of 16"], Tokens.draw(5)
    stream = fk.stream(plan)
    stream.append(tokens.key[:, :, :250], tokens.value[:, :, :250])
    stream.append(tokens.key[:, :, 250:-1], tokens.value[:, :, 250:-1])
    stream.append(tokens.key[:, :, -1:], tokens.value[:, :, -1:])
    found = stream.attend(tokens.query[:, :, -1:])
    want = fk.attention(
        tokens.query[:, :, -1:], tokens.key, tokens.value, plan=plan, is_causal=True, query_offset=TOKENS - 1
    )
    same(found, want)


def test_memory_grows_with_the_tokens_alone():
    """Keys, values, half as much again for growing, nodes of n / 8 (1 + 1/4 + ...) rows, orders."""
    stream, plan = fk.stream(PLANS["blocks of 16"]), PLANS["blocks of 16"]
    g = torch.Generator().manual_seed(0)
    for count in (1024, 1024, 2048, 4096):
        key, query = torch.randn(2, 1, 1, count, 16, generator=g)
        stream.append(key, key)
        stream.attend(query)
        assert stream.memory() < 1.5 * stream.length * (2 * 16 * 4 + 3 * 16 * 4 / 6 + 8) + 300_000
    assert stream.plan == plan


@pytest.mark.parametrize(
    "plan", [fk.Plan(fk.select.KeyTree(64) | fk.Window(9)), fk.Plan(fk.select.KeyTree(64) | fk.select.KeyTree(65))]
)
def test_rules_beside_the_tree_are_refused(plan):
    with pytest.raises(ValueError, match=r"^plan: a stream keeps KeyTree alone"):
        fk.stream(plan)


def test_trees_do_not_merge():
    plan, tokens = PLANS["blocks of 16"], Tokens.draw(0)
    one, other, empty = (fk.stream(plan) for _ in range(3))
    tokens[:100].feed(one)
    tokens[100:].feed(other)
    with pytest.raises(ValueError, match=r"^other: expected a stream whose memory has a fixed size"):
        one.merge(other)
    empty.merge(one)
    same(tokens[100:].feed(empty), whole(plan, tokens)[:, :, 100:])


def test_float32_and_bfloat16_are_held_as_they_come():
    plan = PLANS["blocks of 32"]
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        tokens = Tokens.draw(7)
        rows = [part.to(dtype) for part in (tokens.query, tokens.key, tokens.value)]
        tokens = replace(tokens, query=rows[0], key=rows[1], value=rows[2])
        stream = fk.stream(plan)
        found = torch.cat([tokens[:200].feed(stream), tokens[200:201].feed(stream), tokens[201:].feed(stream)], 2)
        want = fk.attention(*rows, plan=plan, is_causal=True)
        assert found.dtype == dtype
        torch.testing.assert_close(found, want, rtol=error, atol=error)


@needs_compiler
def test_sequences_padded_unlike_give_the_bits_of_each_alone(monkeypatch):
    """However many they are, one call of the kernel answers a token of all."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 260, 8, generator=g) for heads in (4, 2, 2))
    starts = [0, 3, 19, 66, 120]
    real = torch.arange(260) >= torch.tensor(starts)[:, None]
    calls, call = [], descent.call
    monkeypatch.setattr(descent, "call", lambda *told: calls.append(told) or call(*told))

    def feed(rows, start):
        stream, found = fk.stream(PLANS["blocks of 32"]), []
        for part in (slice(start, 200), *(slice(place, place + 1) for place in range(200, 260))):
            stream.append(k[rows, :, part], v[rows, :, part], real[rows, part])
            found.append(stream.attend(q[rows, :, part]))
        return torch.cat(found, 2)

    together = feed(slice(None), 0)
    assert len(calls) == 61
    for row, start in enumerate(starts):
        one = slice(row, row + 1)
        assert torch.equal(together[one, :, start:], feed(one, start))


@given(past=st.integers(0, 700), count=st.integers(1, 300), slots=st.sampled_from([64, 128, 130, 256]))
def test_steps_after_some_keys_are_those_of_the_whole(past, count, slots):
    block = block_of(slots)
    seen = torch.arange(past, past + count) + 1
    assert steps_after(past, count, slots, block) == steps_of(seen, True, slots, block)


@pytest.mark.parametrize("size", [1e30, 1e38])
def test_a_query_beyond_all_bounds_is_answered(size):
    """Products with it are no numbers; halves of what they are asked to part must be halves still."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 270, 8, generator=draw) for heads in (4, 2, 2))
    query[0, 0, 60, 0] = size
    stream, found = fk.stream(fk.Plan(fk.select.KeyTree(64), fk.rest.TreeMeans())), []
    for part in (slice(0, 200), slice(200, 270)):
        stream.append(key[:, :, part], value[:, :, part])
        found.append(stream.attend(query[:, :, part]))
    assert torch.cat(found, 2).isfinite().all()
