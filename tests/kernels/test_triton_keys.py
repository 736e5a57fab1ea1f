"""Triton's kernels for statistics, clusters and sums of keys, run by Triton's interpreter where no GPU is."""

import os
from dataclasses import fields, replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
pytest.importorskip("triton")

import fewkeys as fk
from cases import Shape
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Shard
from fewkeys.core.totals import WHOLE
from fewkeys.core.validation import check_inputs
from fewkeys.sketch import backend as choice
from fewkeys.sketch import clusters as sketch
from fewkeys.sketch.sums import label_sums
from fewkeys.sketch.triton import op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIMS = [(8, 8), (32, 5), (5, 64), (80, 80), (128, 32), (256, 16), (16, 256)]
# Of a product, relative to what its terms add up to: the sum's rounding; and what two parts of bfloat16 leave out,
# which the interpreter cuts off where the machine rounds, on either side of a product of float16.
UNIT = {torch.float32: 1e-6, torch.bfloat16: 2**-15, torch.float16: 2**-14}


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Triton's kernels serve this device, and the names of those that are launched."""
    calls = []

    def spied(name):
        call = getattr(op, name)

        def launch(*problem):
            calls.append(name)
            return call(*problem)

        return launch

    monkeypatch.setenv("FEWKEYS_NATIVE", "0")
    for name in ("statistics", "assign", "survey", "label_sums"):
        monkeypatch.setattr(op, name, spied(name))
    return calls


def made(dim, value_dim, dtype=torch.float32, keys=83, count=45, batch=1, heads=2, size=1.0):
    """Keys, values, form, shift, centres, constants, middle and shares; centres 3, 7, 20 and 40 coincide, near many."""
    g = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return torch.randn(batch, heads, *sizes, generator=g)

    key, value = normal(keys, dim).to(dtype), normal(keys, value_dim).to(dtype)
    form, shift = size * normal(dim + 1, dim), size * normal(dim + 1, 1)
    centre, constant = size * normal(count, dim + value_dim), size * normal(count, 1)
    constant[:, :, 3:4] = constant.amax(2, keepdim=True) + size * (dim + value_dim) ** 0.5
    for other in (7, 20, 40):
        centre[:, :, other], constant[:, :, other] = centre[:, :, 3], constant[:, :, 3]
    share = torch.rand(batch, heads, keys, generator=g) * (torch.rand(batch, heads, keys, generator=g) > 0.3)
    return [x.to(DEVICE) for x in (key, value, form, shift, centre, constant, normal(1, value_dim), share)]


def assert_within(found, wanted, error):
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    assert ((found - wanted).abs() <= error + 1e-6 * wanted.abs()).all(), ((found - wanted).abs() / error).max()


def assert_surveyed(found, key, value, form, shift, centre, constant, middle):
    """Within the rounding of the products; and a label is of a centre as near as any, the first of equals."""
    unit, key, both = UNIT[key.dtype], key.double(), torch.cat([key, value], -1).double()
    spread, importance, nearest, square, label = found
    x = form.double() @ key.mT - shift
    error = unit * (form.double().abs() @ key.mT.abs() + shift.abs())
    wanted, doubt = x[:, :, :-1].square().sum(2), (2 * x.abs() * error + error.square())
    assert_within(spread, wanted, doubt[:, :, :-1].sum(2))
    along = x[:, :, -1]
    doubt = error[:, :, -1] + 0.5 * (doubt[:, :, :-1].sum(2) + doubt[:, :, -1])
    assert_within(importance, along + 0.5 * (wanted - along.square()), doubt)

    closeness = both @ centre.double().mT + constant.mT
    error = unit * (both.abs() @ centre.double().abs().mT + constant.abs().mT)
    assert_within(nearest, closeness.amax(-1), error.amax(-1))
    wanted = (value.double() - middle).square().sum(-1)
    assert_within(square, wanted, 1e-6 * wanted)
    assert label.dtype == torch.int64
    own = closeness.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    assert (own >= closeness.amax(-1) - 2 * error.amax(-1)).all()
    assert torch.isin(label, torch.tensor([3, 7, 20, 40], device=DEVICE)).any()


def test_the_first_of_equal_centres():
    """Where products are exact, as those of small integers are: in others the place of a column decides rounding."""
    for dtype in UNIT:
        key, value, _, _, centre, constant, *_ = (x.mul(4).round() for x in made(16, 8))
        nearest, label = op.assign(key.to(dtype), value.to(dtype), centre, constant)
        closeness = torch.cat([key, value], -1) @ centre.mT + constant.mT
        assert torch.equal(nearest, closeness.amax(-1))
        assert torch.equal(label, (closeness == closeness.amax(-1, keepdim=True)).to(torch.int8).argmax(-1))
        assert (label == 3).any()
        assert not torch.isin(label, torch.tensor([7, 20, 40], device=DEVICE)).any()


def assert_summed(found, key, value, label, share):
    both = torch.cat([key, value], -1).double()
    member = torch.nn.functional.one_hot(label, found.shape[2]) * share.double().unsqueeze(-1)
    assert_within(found, member.mT @ both, UNIT[key.dtype] * (member.mT @ both.abs()) + 1e-30)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), DIMS, ids=str)
def test_head_sizes_and_dtypes(dim, value_dim, dtype):
    *problem, share = made(dim, value_dim, dtype, keys=67, heads=1)
    key, value, form, shift, centre, constant, _ = problem
    found = op.survey(*problem)
    assert_surveyed(found, *problem)
    nearest, label = op.assign(key, value, centre, constant)
    assert_surveyed((*op.statistics(key, form, shift), nearest, found[3], label), *problem)
    assert_summed(op.label_sums(key, value, found[4], share, 45), key, value, found[4], share)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("keys", [0, 1, 64, 130])
def test_numbers_of_keys(keys, dtype):
    """None and one, whole tiles, and several."""
    *problem, share = made(16, 8, dtype, keys, batch=2, heads=1)
    found = op.survey(*problem)
    if keys < 2:  # what else is true of the labels needs more
        assert found[4].shape == (2, 1, keys)
        found = [x.repeat(1, 1, 40) for x in found]
        problem = [x.repeat(1, 1, 40, 1) if i < 2 else x for i, x in enumerate(problem)]
        share = share.repeat(1, 1, 40)
    if keys:
        assert_surveyed(found, *problem)
    assert_summed(op.label_sums(*problem[:2], found[4], share, 45), *problem[:2], found[4], share)


@pytest.mark.parametrize("count", [1, 16, 131])
def test_numbers_of_clusters(count):
    """Less than a tile, whole ones, and more than a program of the sums takes."""
    key, value, *_, share = made(16, 8, keys=40)
    g = torch.Generator().manual_seed(1)
    centre, constant = (torch.randn(1, 2, count, size, generator=g).to(DEVICE) for size in (24, 1))
    nearest, label = op.assign(key, value, centre, constant)
    closeness = torch.cat([key, value], -1) @ centre.mT + constant.mT
    torch.testing.assert_close(nearest, closeness.amax(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(closeness.gather(-1, label.unsqueeze(-1)).squeeze(-1), nearest, rtol=1e-5, atol=1e-5)
    assert label.max() < count
    assert_summed(op.label_sums(key, value, label, share, count), key, value, label, share)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_the_unit_does_not_matter(size, dtype):
    """What is multiplied with keys of 16 bits keeps its range."""
    *problem, share = made(16, 8, dtype, size=size)
    found = op.survey(*problem)
    assert_surveyed(found, *problem)
    share = share * size
    assert_summed(op.label_sums(*problem[:2], found[4], share, 45), *problem[:2], found[4], share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(dtype):
    """Heads beside tokens as models have them, every other dimension, transposed, one head for all."""
    *problem, share = made(16, 8, dtype, keys=40, count=41, batch=2)
    key, value, *others = problem
    found = op.survey(*problem)
    sums = op.label_sums(key, value, found[4], share, 41)
    for lay in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: x.mT.contiguous().mT,
    ):
        laid = [lay(key), lay(value)]
        again = op.survey(*laid, *(lay(x) for x in others))
        assert all(torch.equal(*pair) for pair in zip(again, found, strict=True))
        label, shares = (lay(x.unsqueeze(-1)).squeeze(-1) for x in (found[4], share))
        assert torch.equal(op.label_sums(*laid, label, shares, 41), sums)
    one = [x[:, :1].expand(-1, 2, *x.shape[2:]) for x in (*problem, found[4], share)]
    for x in (*op.survey(*one[:7]), op.label_sums(*one[:2], *one[7:], 41)):
        assert torch.equal(x[:, 0], x[:, 1])


@pytest.mark.parametrize("programs", [1, 12, 10**4])
def test_the_split_of_sums_does_not_matter(programs, monkeypatch):
    """Over one part, some and as many as there are tiles; every time the same."""
    monkeypatch.setattr(op, "PROGRAMS", programs)
    key, value, *_, share = made(8, 5, keys=299)
    label = torch.arange(299, device=DEVICE).expand(1, 2, -1) % 7
    sums = op.label_sums(key, value, label, share, 9)
    assert_summed(sums, key, value, label, share)
    assert not sums[:, :, 7:].any()
    assert torch.equal(op.label_sums(key, value, label, share, 9), sums)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # as the interpreter tells of them
def test_keys_that_are_no_numbers_get_a_label():
    """A label that there is, and other keys theirs."""
    *problem, _ = made(16, 8)
    found = op.survey(*problem)
    problem[0][:, :, 5], problem[0][:, :, 50] = torch.nan, torch.inf
    again = op.survey(*problem)
    others = torch.ones(83, dtype=torch.bool, device=DEVICE)
    others[[5, 50]] = False
    assert all(torch.equal(one[..., others], other[..., others]) for one, other in zip(found, again, strict=True))
    assert ((again[3] >= 0) & (again[3] < 45)).all()


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize(
    "shape",
    [Shape(1, 4, 2, value_dim=5), Shape(2, 1, 1, 37, 50, lengths=(50, 21)), Shape(1, 1, 1, 60, 90, 64, 80)],
    ids=["grouped", "cross padded", "large heads"],
)
def test_clusters_and_means_are_those_of_torch(shape, dtype, taken):
    """The whole way, with lengths and first-order means; the keys are looked at once, after Lloyd's steps."""
    tensors = [x.to(DEVICE) for x in shape.draw(dtype=dtype)]
    lengths = shape.options["lengths"]
    options = shape.options | {"lengths": None if lengths is None else lengths.to(DEVICE)}

    def both(impl):
        x = check_inputs(*tensors, **options, impl=impl)
        found = sketch.clusters(x, 8)
        seen = sketch.key_statistics(x)
        return found, seen, fk.ClusterMeans(8, rank=3).prepare(x, Graph(x, (3, 3)), fk.Softmax()), x.valid

    *found, valid = both("triton")
    assert taken == ["assign", "label_sums", "assign", "label_sums", "survey", "label_sums"]
    *wanted, _ = both("torch")
    assert len(taken) == 6
    # Padding's label means nothing, and its share is zero.
    real = True if valid is None else valid[:, None]
    assert ((found[0].label == wanted[0].label) | ~torch.as_tensor(real)).all()
    for one, other in zip(found, wanted, strict=True):
        for name in (f.name for f in fields(one) if f.name not in ("label", "left", "right")):
            pair = [getattr(means, name) for means in (one, other)]
            assert (pair[0] is None) == (pair[1] is None)
            if pair[0] is not None:
                close = 10 * UNIT[dtype] * pair[1].abs().max().item()
                torch.testing.assert_close(*pair, rtol=10 * UNIT[dtype], atol=close)
    first_order = [means[2].left @ means[2].right for means in (found, wanted)]
    torch.testing.assert_close(*first_order, rtol=1e-2, atol=1e-2 * first_order[1].abs().max().item())


def test_equal_keys_are_told_apart_by_their_values():
    """Two clouds of values: Lloyd's steps find their middles."""
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 1, 9, 8, generator=g), torch.ones(1, 1, 40, 8)
    value = torch.tensor([0.0, 1.0, 10.0, 11.0]).repeat_interleave(10).view(1, 1, 40, 1).expand(-1, -1, -1, 3)
    x = check_inputs(*(row.to(DEVICE) for row in (query, key, value)), impl="triton")
    found = sketch.clusters(x, 2)
    torch.testing.assert_close(found.distance, (0.75 * sketch.frame(x).unit.square()).view(1, 1, 1).expand(1, 1, 40))


def test_statistics_alone(taken):
    """Where no clusters are asked for, values are not read."""
    x = check_inputs(*(row.to(DEVICE) for row in Shape(1, 1, 1).draw(dtype=torch.float32)), impl="triton")
    seen = sketch.key_statistics(x)
    assert taken == ["statistics"]
    wanted = sketch.key_statistics(replace(x, impl="torch", _memory={}))
    torch.testing.assert_close(seen.spread, wanted.spread, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen.importance, wanted.importance, rtol=1e-4, atol=1e-4)


def test_a_shard_takes_the_same_clusters(taken):
    """Totals of one process are its own: the kernels serve shards too."""
    x = check_inputs(*(row.to(DEVICE) for row in Shape(1, 1, 1).draw(dtype=torch.float32)), impl="triton")
    shard = replace(x, shard=Shard(WHOLE, 0, x.keys, 0, x.queries), _memory={})
    found = [sketch.clusters(inputs, 8) for inputs in (x, shard)]
    assert taken.count("survey") == 2
    assert all(torch.equal(getattr(found[0], f.name), getattr(found[1], f.name)) for f in fields(found[0]))


def test_attention_takes_the_kernels(taken):
    plan = fk.Plan(fk.Outliers(5, 8) | fk.Window(9), fk.ClusterMeans(8, rank=3))
    rows = [row.to(DEVICE) for row in Shape(1, 2, 1).draw(dtype=torch.float32)]
    output = fk.attention(*rows, plan=plan, impl="triton")
    assert "survey" in taken
    assert "label_sums" in taken
    wanted = fk.attention(*rows, plan=plan, impl="reference")
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


def test_gradients_flow_through_the_sums_and_clusters_carry_none(taken):
    rows = [row.to(DEVICE).requires_grad_() for row in Shape(1, 2, 1).draw(dtype=torch.float32)]

    def gradients(impl):
        output = fk.attention(*rows, keep=fk.Window(7), rest=fk.ClusterMeans(6), impl=impl)
        return torch.autograd.grad(output.square().sum(), rows)

    found = gradients("triton")
    # The sums of Lloyd's two steps, on all tensors detached; the means themselves go another way.
    assert taken == ["assign", "label_sums", "assign", "label_sums", "survey"]
    for fast, slow in zip(found, gradients("torch"), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


def test_what_the_kernels_cannot_do_goes_another_way(monkeypatch):
    key, value, form, *_, share = made(16, 8, dtype=torch.float16)
    assert choice.backend("triton", key, value, form) is op
    assert choice.backend("triton", key, None, form) is op
    assert choice.backend("triton", key.double(), value.double(), form) is None
    assert choice.backend("triton", key, value, form.double()) is None
    asked = key.clone().requires_grad_()
    assert choice.backend("triton", asked, value, form) is None
    assert choice.backend("triton", asked.detach(), value, form) is op
    for wide in (torch.ones(1, 1, 2, 257, device=DEVICE), torch.ones(1, 1, 2, 256, device=DEVICE)):
        kernels = op if wide.shape[-1] == 256 else None
        assert choice.backend("triton", wide, None) is choice.backend("triton", key, wide) is kernels
        assert choice.backend("triton", key, value, wide) is op  # centres are as wide as key and value together
    seen = []
    torch.func.vmap(lambda k: seen.append(choice.backend("triton", k, value, form)) or k)(key)
    assert seen == [None]
    sums = label_sums(key.double(), value.double(), share.long(), share.double(), 3, "triton")
    assert sums[0].dtype == torch.float64
    monkeypatch.delitem(__import__("sys").modules, op.__name__)
    monkeypatch.delattr("fewkeys.sketch.triton.op")
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    assert choice.backend("triton", key, value, form) is None


def test_they_are_taken_by_request(taken):
    """With impl="triton" alone, also where the interpreter is on."""
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 70, 16, generator=g).to(DEVICE) for _ in range(3)]
    plan = fk.Plan(fk.Outliers(4, 6) | fk.Window(5), fk.ClusterMeans(6, rank=2))
    found = {}
    for impl, wanted in (("triton", True), ("torch", False), ("auto", False)):
        found[impl] = fk.attention(*tensors, plan=plan, impl=impl)
        assert bool(taken) == wanted
        taken.clear()
    torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-4, atol=1e-4)


def test_operators_keep_the_rules_of_torch():
    """Schema, fake tensors, and tracing with symbolic sizes."""
    *problem, share = made(8, 5, keys=20, count=41)
    key, value, *seen = problem
    label = torch.arange(20, device=DEVICE).expand(1, 2, -1).contiguous() % 6
    torch.library.opcheck(op.survey_keys, problem)
    torch.library.opcheck(op.survey_keys, (key, None, *seen[:2], None, None, None))
    torch.library.opcheck(op.survey_keys, (key, value, None, None, *seen[2:4], None))
    torch.library.opcheck(op.add_by_label, (key, value, label, share, 6))
