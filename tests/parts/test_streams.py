"""Streams: whole, in pieces or token by token, the same outputs as attention on the whole sequence."""

import copy
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fewkeys as fk
from cases import CASES, CAUSAL_PLANS, CAUSAL_SHAPES, RUNNING_PLANS
from fewkeys.memory import Stream, coded
from fewkeys.memory.constant import parts_of

PLANS = {
    name: plan
    for name, plan in CAUSAL_PLANS.items()
    if all((held := part.remembered) and not held.scan for part in plan.keep.parts)
}
"""Plans whose memory has a fixed size."""
NAMES = {plan: name for name, plan in PLANS.items()}
SHAPES = [CAUSAL_SHAPES[name] for name in ("causal", "causal grouped", "causal padded")]
SCAN = fk.budget(64, is_causal=True)
FULL = RUNNING_PLANS["recent + sinks, running means"]


def real(shape):
    return torch.arange(shape.keys) < torch.tensor(shape.lengths or (shape.keys,) * shape.batch)[:, None]


def feed(stream, q, k, v, mask, sizes):
    """The outputs of a stream that gets the tokens in pieces."""
    outputs, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        stream.append(k[:, :, part], v[:, :, part], mask[:, part])
        outputs.append(stream.attend(q[:, :, part]))
        start += size
    return torch.cat(outputs, 2)


def pieces(total, cuts):
    """The sizes of the pieces between the cuts."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < total}), total]
    return [b - a for a, b in pairwise(edges)]


def storages(part, seen=None):
    """Bytes of all memory that tensors in it keep alive, by address."""
    seen = set() if seen is None else seen
    if id(part) in seen:
        return {}
    seen.add(id(part))
    if isinstance(part, torch.Tensor):
        memory = part.untyped_storage()
        return {memory.data_ptr(): memory.nbytes()}
    inside = vars(part).values() if type(part).__module__.startswith("fewkeys") and hasattr(part, "__dict__") else ()
    inside = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else inside
    return {address: size for one in inside for address, size in storages(one, seen).items()}


@pytest.mark.parametrize("leaves", [None, "int8"])
@pytest.mark.parametrize("plan", [FULL, fk.budget(64, is_causal=True, memory="constant"), SCAN], ids=str)
def test_memory_is_all_that_is_held(plan, leaves):
    """Sums over queries count, and no token is held by a view of nothing."""
    if leaves is not None and plan is not SCAN:
        return  # they hold no leaves
    q, k, v = torch.randn(3, 1, 2, 400, 64, generator=torch.Generator().manual_seed(0))
    stream = fk.stream(plan, leaves=leaves)
    feed(stream, q, k, v, torch.ones(1, 400, dtype=torch.bool), [300, 50, 50])
    held = sum(storages(stream).values())
    assert stream.memory() <= held <= 1.02 * stream.memory() + 200


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@settings(max_examples=5, deadline=None)
@example(cuts=range(150), shape=SHAPES[1], dtype=torch.float64)
@example(cuts=range(150), shape=SHAPES[2], dtype=torch.float32)
@given(
    cuts=st.lists(st.integers(1, 149), max_size=8),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_pieces_give_what_the_whole_gives(plan, cuts, shape, dtype):
    if CASES[NAMES[plan]].draws and shape.lengths:
        return  # sequences that are padded unlike draw numbers of their own
    q, k, v = shape.draw(dtype=dtype)
    close_to = {"rtol": 1e-8, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    want = fk.attention(q, k, v, plan=plan.never_exact(), **shape.options)
    mask = real(shape)
    actual = feed(fk.stream(plan), q, k, v, mask, pieces(150, cuts))
    torch.testing.assert_close(torch.where(mask[:, None, :, None], actual, want), want, **close_to)


@pytest.mark.parametrize("plan", [PLANS[name] for name in PLANS if not CASES[name].draws], ids=str)
def test_padding_anywhere_is_as_if_it_never_came(plan, tmp_path):
    """Through pieces, a step back, a file and another order, each sequence answers as it would alone."""
    q, k, v = SHAPES[1].draw()
    mask = torch.arange(150) >= torch.tensor([[0], [37]])
    mask[1, 60:63], mask[0, 139:] = False, False
    stream = fk.stream(plan)
    actual = [feed(stream, *(rows[:, :, :90] for rows in (q, k, v)), mask[:, :90], [20, 1, 69])]
    stream.crop(89)
    stream.save(tmp_path / "stream")
    stream = Stream.load(tmp_path / "stream")
    stream.select(torch.tensor([1, 0]))
    rest = feed(stream, *(rows.flip(0)[:, :, 89:] for rows in (q, k, v)), mask.flip(0)[:, 89:], [30, 31])
    actual = torch.cat([actual[0][:, :, :89], rest.flip(0)], 2)
    for row, real in enumerate(mask):
        alone = (rows[row : row + 1, :, real] for rows in (q, k, v))
        want = fk.attention(*alone, plan=plan.never_exact(), is_causal=True)
        torch.testing.assert_close(actual[row : row + 1, :, real], want, rtol=1e-8, atol=1e-9)
        assert not actual[row, :, ~real].any()


@pytest.mark.parametrize("plan", RUNNING_PLANS.values(), ids=RUNNING_PLANS)
@pytest.mark.parametrize("cut", [64, 75])
def test_saved_and_restored_it_goes_on_bit_identically(plan, cut, tmp_path):
    q, k, v = SHAPES[1].draw(dtype=torch.float32)
    mask = real(SHAPES[1])
    stream = fk.stream(plan, scale=0.4)
    before = (slice(None), slice(None), slice(cut))
    feed(stream, q[before], k[before], v[before], mask[:, :cut], [cut])
    stream.save(tmp_path / "stream.safetensors")
    restored = Stream.load(tmp_path / "stream.safetensors")
    assert (restored.length, restored.plan, restored.memory()) == (cut, plan, stream.memory())
    after = (slice(None), slice(None), slice(cut, None))
    sizes = pieces(150 - cut, [20, 21, 50])
    one, other = (feed(s, q[after], k[after], v[after], mask[:, cut:], sizes) for s in (stream, restored))
    assert torch.equal(one, other)


def test_an_empty_stream_saves_and_restores(tmp_path):
    fk.stream(FULL).save(tmp_path / "stream.safetensors")
    assert Stream.load(tmp_path / "stream.safetensors").length == 0


def test_files_that_are_no_streams_are_refused(tmp_path):
    stream = fk.stream(FULL)
    q, k, v = SHAPES[0].draw()
    feed(stream, q, k, v, real(SHAPES[0]), [150])
    path = tmp_path / "stream.safetensors"
    stream.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        Stream.load(path)
    from safetensors.torch import save_file

    save_file({"near": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="not a stream"):
        Stream.load(path)
    with pytest.raises(FileNotFoundError, match="missing"):
        Stream.load(tmp_path / "missing")


@pytest.mark.parametrize("plan", RUNNING_PLANS.values(), ids=RUNNING_PLANS)
def test_memory_does_not_grow(plan):
    stream, sizes = fk.stream(plan), set()
    g = torch.Generator().manual_seed(0)
    for step in range(12):
        q, k, v = torch.randn(3, 1, 2, 64, 8, generator=g)
        stream.append(k, v)
        stream.attend(q)
        if step > 3:
            sizes.add(stream.memory())
    assert len(sizes) == 1


@pytest.mark.parametrize(
    "index", [[1, 1, 0], torch.tensor([-1, -1, 0]), torch.tensor([False, True]), [True, True], [-2, 1]], ids=str
)
def test_sequences_can_be_selected_repeated_and_reordered(index):
    """By any index of torch."""
    q, k, v = SHAPES[2].draw()
    mask = real(SHAPES[2])
    one, many = fk.stream(FULL), fk.stream(FULL)
    feed(many, q[:, :, :75], k[:, :, :75], v[:, :, :75], mask[:, :75], [75])
    many.select(index)
    actual = feed(many, *(t[index][:, :, 75:] for t in (q, k, v)), mask[index][:, 75:], [30, 45])
    want = feed(one, q, k, v, mask, [75, 30, 45])[index][:, :, 75:]
    torch.testing.assert_close(actual, want)


@pytest.mark.parametrize("plan", [p for n, p in PLANS.items() if not CASES[n].draws], ids=str)
@pytest.mark.parametrize("back", [64, 70, 90])
def test_cropping_forgets_what_came_later(plan, back):
    q, k, v = SHAPES[0].draw()
    mask = real(SHAPES[0])
    stream, other = fk.stream(plan), fk.stream(plan)
    feed(stream, q[:, :, :90], k[:, :, :90], v[:, :, :90], mask[:, :90], [70, 20])
    least = 89 // parts_of(plan).unit * parts_of(plan).unit
    if back < least:
        with pytest.raises(ValueError, match="length"):
            stream.crop(back)
        return
    stream.crop(back)
    assert stream.length == back
    rest = (slice(None), slice(None), slice(back, None))
    actual = feed(stream, q[rest], -k[rest], v[rest], mask[:, back:], [150 - back])
    k = torch.cat([k[:, :, :back], -k[:, :, back:]], 2)
    torch.testing.assert_close(actual, feed(other, q, k, v, mask, [150])[rest], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("seen", [8, 130])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_stream_cropped_to_nothing_is_saved_and_goes_on(plan, seen, tmp_path):
    """Also where tokens have been summarised."""
    q, k, v = SHAPES[0].draw()
    mask = real(SHAPES[0])
    stream, other = fk.stream(plan), fk.stream(plan)
    feed(stream, q[:, :, :seen], k[:, :, :seen], v[:, :, :seen], mask[:, :seen], [seen])
    stream.crop(0)
    stream.save(tmp_path / "stream")
    stream = Stream.load(tmp_path / "stream")
    assert stream.length == 0
    torch.testing.assert_close(feed(stream, q, k, v, mask, [150]), feed(other, q, k, v, mask, [150]))


@pytest.mark.parametrize("lengths", [(8, 6), (8, 8, 5), (11, 9, 6), (16, 15)])
@pytest.mark.parametrize("tokens", [12, 16])
def test_cropping_again_is_right_or_refused(tokens, lengths):
    """What moved when a unit began stays moved, however much of the unit is taken back."""
    plan = fk.Plan(fk.select.RecentBlocks(8, 1) | fk.Sinks(1), fk.rest.RunningMeans(3))
    q, k, v = SHAPES[0].draw()
    mask = real(SHAPES[0])
    stream, other = fk.stream(plan), fk.stream(plan)
    feed(stream, q[:, :, :tokens], k[:, :, :tokens], v[:, :, :tokens], mask[:, :tokens], [tokens])
    for length in lengths:
        if length < (tokens - 1) // 8 * 8 or length > stream.length:
            with pytest.raises(ValueError, match="length"):
                stream.crop(length)
        else:
            stream.crop(length)
    left = stream.length
    rest = (slice(None), slice(None), slice(left, None))
    want = feed(other, q, k, v, mask, [150])[rest]
    actual = feed(stream, q[rest], k[rest], v[rest], mask[:, left:], [150 - left])
    torch.testing.assert_close(actual, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("plan", [FULL, fk.budget(64, is_causal=True).never_exact()], ids=str)
@pytest.mark.parametrize("left", [86, 93, 100, 104])
def test_cropping_inside_padding(plan, left):
    """Of padding that stands across the new end, what is behind it is forgotten, too."""
    q, k, v = SHAPES[0].draw()
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[0, 88:100] = False
    stream, other = Stream(plan, undo=64), fk.stream(plan)
    feed(stream, q[:, :, :104], k[:, :, :104], v[:, :, :104], mask[:, :104], [104])
    stream.crop(left)
    mask[0, left:] = True
    want = feed(other, q, k, v, mask, [left, 150 - left])[:, :, left:]
    actual = feed(stream, q[:, :, left:], k[:, :, left:], v[:, :, left:], mask[:, left:], [150 - left])
    torch.testing.assert_close(actual, want, rtol=1e-8, atol=1e-9)


def test_tokens_without_queries_are_remembered_too():
    q, k, v = SHAPES[0].draw()
    stream = fk.stream(FULL)
    stream.append(k[:, :, :100], v[:, :, :100])
    stream.append(k[:, :, 100:], v[:, :, 100:])
    actual = stream.attend(q[:, :, -1:])
    want = fk.attention(q[:, :, -1:], k, v, plan=FULL.never_exact(), is_causal=True, query_offset=149)
    torch.testing.assert_close(actual, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("plan", [FULL, SCAN.never_exact()], ids=str)
def test_tokens_wait_for_their_queries_while_the_stream_is_read(plan, tmp_path):
    """Without their graph; the file has them without queries."""
    (q, k, v), mask = SHAPES[0].draw(), torch.ones(2, 150, dtype=torch.bool)
    k.requires_grad_()
    mask[0, :7] = False
    stream, other = fk.stream(plan), fk.stream(plan)
    for one in (stream, other):
        one.append(k[:, :, :100], v[:, :, :100], mask[:, :100])
    want = copy.deepcopy(stream).attend(q[:, :, :100])
    assert stream.is_padded
    assert torch.equal(stream.key_mask(), mask[:, :100])
    stream.save(tmp_path / "stream")
    stream.crop(100)
    with pytest.raises(ValueError, match=r"^length: expected 0 to 100"):
        stream.crop(101)
    assert torch.equal(stream.attend(q[:, :, :100]), want)
    for one in (other, loaded := Stream.load(tmp_path / "stream")):
        one.append(k[:, :, 100:], v[:, :, 100:])
    assert torch.equal(loaded.attend(q[:, :, 100:]), other.attend(q[:, :, 100:]))


def test_a_save_right_after_an_append_copies_no_memory():
    """The file has the tokens that wait; the stream does not, and answers them afterwards."""
    (q, k, v), mask = SHAPES[0].draw(), torch.ones(2, 150, dtype=torch.bool)
    stream, other = fk.stream(SCAN.never_exact()), fk.stream(SCAN.never_exact())
    for one in (stream, other):
        feed(one, q, k, v, mask, [40])
        one.append(k[:, :, 40:], v[:, :, 40:])
    _, tensors = stream.contents()
    held = stream._groups[0].memory.rows
    assert tensors["0.rows.key"].shape[2] == 150
    assert tensors["0.rows.key"].data_ptr() == held.key.storage.data_ptr()
    assert held.count == 40
    assert torch.equal(stream.attend(q[:, :, 40:]), other.attend(q[:, :, 40:]))


class StopAt(TorchDispatchMode):
    """Counts the operations of torch, and interrupts one of them."""

    def __init__(self, place=None):
        super().__init__()
        self.place, self.count = place, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.place:
            raise KeyboardInterrupt
        return func(*args, **kwargs or {})


HELD = {
    **{name: (plan, None) for name, plan in RUNNING_PLANS.items()},
    "scan": (SCAN.never_exact(), None),
    "scan that turns to int8": (SCAN, "int8"),
    "plans of heads": ([SCAN.never_exact(), FULL], "int8"),
}


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(("plan", "leaves"), HELD.values(), ids=HELD)
def test_a_call_that_is_interrupted_anywhere_changes_nothing(plan, leaves, is_padded, monkeypatch, tmp_path):
    """The call again, of this stream and of its file, is as if it had never begun."""
    monkeypatch.setattr(coded, "exact_length", lambda plan, *_: 90 if plan.exact_if_faster else 0)
    (q, k, v), mask = SHAPES[1].draw(dtype=torch.float32), torch.ones(2, 150, dtype=torch.bool)
    mask[0, 72:80] = not is_padded
    stream = Stream(plan, leaves=leaves)
    feed(stream, q, k, v, mask, [70, 1])

    def go_on(stream, mode=None):
        stream.append(k[:, :, 71:110], v[:, :, 71:110], mask[:, 71:110])
        with mode or nullcontext():
            return stream.attend(q[:, :, 90:110])

    counter = StopAt()
    want = go_on(copy.deepcopy(stream), counter)
    for place in range(counter.count, 9, -counter.count // 5):  # the first few check the queries
        other = copy.deepcopy(stream)
        with pytest.raises(KeyboardInterrupt):
            go_on(other, StopAt(place))
        assert other.length == 71
        other.save(tmp_path / "stream")
        for again in (Stream.load(tmp_path / "stream"), other):
            assert torch.equal(go_on(again), want)


@pytest.mark.parametrize(("plan", "leaves"), HELD.values(), ids=HELD)
def test_a_selection_that_is_interrupted_anywhere_changes_nothing(plan, leaves):
    """Also where tokens wait for their queries."""
    q, k, v = SHAPES[1].draw(dtype=torch.float32)
    first, rest = slice(0, 70), slice(70, 150)
    stream, counter = Stream(plan, leaves=leaves), StopAt()
    stream.answer(q[:, :, first], k[:, :, first], v[:, :, first])
    stream.append(k[:, :, rest], v[:, :, rest])
    want, other = copy.deepcopy(stream).attend(q[:, :, rest]), copy.deepcopy(stream)
    with counter:
        other.select([0, 0, 1])
    for place in range(counter.count, 0, -1 - counter.count // 5):
        other = copy.deepcopy(stream)
        with pytest.raises(KeyboardInterrupt), StopAt(place):
            other.select([0, 0, 1])
        assert torch.equal(other.attend(q[:, :, rest]), want)


def test_tokens_without_queries_stay_where_an_interrupt_came_before_they_were_added():
    q, k, v = SHAPES[0].draw()
    stream = fk.stream(FULL)
    stream.append(k[:, :, :100], v[:, :, :100])
    with pytest.raises(KeyboardInterrupt), StopAt(20):
        stream.save("nowhere")
    assert stream.length == 100
    stream.append(k[:, :, 100:], v[:, :, 100:])
    want = fk.attention(q[:, :, -1:], k, v, plan=FULL.never_exact(), is_causal=True, query_offset=149)
    torch.testing.assert_close(stream.attend(q[:, :, -1:]), want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("exact_until", [0, 60, 90])
@pytest.mark.parametrize(("plan", "leaves"), HELD.values(), ids=HELD)
def test_a_stream_of_inference_mode_goes_on_outside_it(plan, leaves, exact_until, monkeypatch):
    monkeypatch.setattr(coded, "exact_length", lambda *_: exact_until)
    (q, k, v), mask = SHAPES[1].draw(dtype=torch.float32), torch.ones(2, 150, dtype=torch.bool)
    mask[0, :71] = False
    outputs = []
    for mode in (nullcontext(), torch.inference_mode()):
        stream = Stream(plan, leaves=leaves, undo=24)
        with mode:
            feed(stream, q, k, v, mask, [70, 1, 9])
        one = copy.deepcopy(stream)
        one.select([1, 0])
        rest = [part.flip(0) for part in (q[:, :, 80:], k[:, :, 80:], v[:, :, 80:], mask[:, 80:])]
        after = [feed(one, *rest, [1, 1, 68])]
        stream.crop(79)
        outputs.append([*after, feed(stream, q[:, :, 79:], k[:, :, 79:], v[:, :, 79:], mask[:, 79:], [1, 70])])
    for without, within in zip(*outputs, strict=True):
        assert torch.equal(without, within)


@pytest.mark.parametrize("plan", [FULL, SCAN.never_exact()], ids=str)
@pytest.mark.parametrize("shape", SHAPES[::2], ids=["all real", "padded"])
def test_a_caller_may_write_into_its_tensors_at_once(plan, shape):
    q, k, v = shape.draw()
    want = feed(fk.stream(plan), q, k, v, real(shape), [150])
    stream, rows = fk.stream(plan), (k.clone(), v.clone(), real(shape))
    stream.append(*rows)
    for tensor in rows:
        tensor.zero_()
    assert torch.equal(stream.attend(q), want)


REFUSED = {
    "a plan for the whole sequence": lambda s, q, k, v: fk.stream(fk.budget(64)),
    "exact attention": lambda s, q, k, v: fk.stream(fk.Plan()),
    "no plan": lambda s, q, k, v: fk.stream(fk.Window(3)),
    "an oracle": lambda s, q, k, v: fk.stream(fk.Plan(fk.TopK(4))),
    "queries twice": lambda s, q, k, v: (s.append(k, v), s.attend(q), s.attend(q)),
    "queries first": lambda s, q, k, v: s.attend(q),
    "more queries than tokens": lambda s, q, k, v: (s.append(k[:, :, 1:], v[:, :, 1:]), s.attend(q)),
    "other heads": lambda s, q, k, v: (s.append(k, v), s.append(k[:, :1], v[:, :1])),
    "more query heads": lambda s, q, k, v: (s.answer(q, k, v), s.answer(q.repeat(1, 2, 1, 1), k, v)),
    "values that do not match": lambda s, q, k, v: s.append(k, v[:, :, 1:]),
    "a mask of numbers": lambda s, q, k, v: s.append(k, v, torch.ones(2, 150)),
    "not a number": lambda s, q, k, v: s.append(k * float("nan"), v),
    "no such sequence": lambda s, q, k, v: (s.append(k, v), s.select(torch.tensor([0, 2]))),
    "a mask of another batch": lambda s, q, k, v: (s.append(k, v), s.select(torch.tensor([True]))),
    "no sequences": lambda s, q, k, v: (s.append(k, v), s.select([])),
    "sequences in a table": lambda s, q, k, v: (s.append(k, v), s.select(torch.tensor([[0]]))),
    "half a sequence": lambda s, q, k, v: (s.append(k, v), s.select(torch.tensor([0.5]))),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_argument(case):
    q, k, v = SHAPES[0].draw()
    with pytest.raises((TypeError, ValueError), match=r"^\w+: "):
        case(fk.stream(FULL), q, k, v)
