"""Autocast lowers what attention reads, as it does for torch's own, and nothing that is computed from it."""

import pytest
import torch

import fewkeys as fk
from captures import captured
from cases import CAUSAL_SHAPES, SHAPES, SOME_PLANS
from fewkeys.papers import levattention

PLANS = {**SOME_PLANS, "budget": fk.budget(24)}


def lowered(tensors):
    return [tensor.bfloat16() for tensor in tensors]


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_call_under_autocast_is_the_call_on_lowered_inputs(plan, impl):
    """To the last bit: no Gram matrix, factor or sum follows autocast."""
    shape = SHAPES["padded"]
    tensors = shape.draw(dtype=torch.float32)
    want = fk.attention(*lowered(tensors), plan=plan, impl=impl, **shape.options)
    with torch.autocast("cpu", torch.bfloat16):
        actual = fk.attention(*tensors, plan=plan, impl=impl, **shape.options)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, want)


def test_dtypes_that_autocast_mixes_are_one():
    """Rotary embeddings leave queries and keys in float32 beside values in bfloat16."""
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    want = fk.attention(*lowered((q, k, v)), plan=fk.budget(24))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fk.attention(q, k, v.bfloat16(), plan=fk.budget(24)), want)
    with pytest.raises(ValueError, match="value: expected"):
        fk.attention(q, k, v.bfloat16(), plan=fk.budget(24))


def test_double_precision_stays():
    tensors = SHAPES["plain"].draw()
    with torch.autocast("cpu", torch.bfloat16):
        actual = fk.attention(*tensors, plan=fk.budget(24))
    assert torch.equal(actual, fk.attention(*tensors, plan=fk.budget(24)))


@pytest.mark.long
@pytest.mark.parametrize("shape", [SHAPES["plain"], CAUSAL_SHAPES["causal"]], ids=["plain", "causal"])
def test_gradients_are_those_of_the_lowered_call(shape):
    plan = fk.budget(24, is_causal=shape.is_causal).never_exact()

    def gradients(run):
        tensors = [tensor.requires_grad_() for tensor in shape.draw(dtype=torch.float32)]
        run(tensors).float().square().sum().backward()
        return [tensor.grad for tensor in tensors]

    def plain(tensors):
        return fk.attention(*lowered(tensors), plan=plan, **shape.options)

    def under(tensors):
        with torch.autocast("cpu", torch.bfloat16):
            return fk.attention(*tensors, plan=plan, **shape.options)

    outside = gradients(under)
    for actual, want in zip(outside, gradients(plain), strict=True):
        assert actual.isfinite().all()
        torch.testing.assert_close(actual, want, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(under)
    for actual, want in zip(inside, outside, strict=True):
        assert (actual - want).norm() < 1e-3 * want.norm()  # derivatives of torch's own operations follow autocast


def test_explanations_and_spot_checks_are_of_the_lowered_call():
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    plan, rows = fk.Plan(fk.TopK(9)), lowered((4 * q, k, v))
    want = str(fk.explain(*rows, plan=plan)), fk.spot_check(*rows, plan).error
    with torch.autocast("cpu", torch.bfloat16):
        assert (str(fk.explain(4 * q, k, v.bfloat16(), plan=plan)), fk.spot_check(*rows, plan).error) == want


@pytest.mark.parametrize(
    "plan",
    [fk.budget(24, is_causal=True, memory="constant").never_exact(), fk.Plan(fk.KeyScan(9), fk.BlockMeans(3))],
    ids=["constant memory", "scan"],
)
def test_streams_under_autocast(plan):
    q, k, v = CAUSAL_SHAPES["causal"].draw(dtype=torch.float32)
    one, other = fk.stream(plan), fk.stream(plan)
    actual = []
    for part in torch.arange(150).split(7):
        one.append(*lowered((k[:, :, part], v[:, :, part])))
        want = one.attend(q[:, :, part].bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            other.append(k[:, :, part], v[:, :, part])
            actual.append(torch.equal(other.attend(q[:, :, part]), want))
    assert all(actual)


def test_statistics_of_keys_do_not_follow():
    keys = SHAPES["plain"].draw(dtype=torch.float32)[1]
    want = levattention.leverage_scores(keys), levattention.universal_set(keys, 0.2)
    sketch, other = levattention.KeySketch(0.2), levattention.KeySketch(0.2)
    sketch.update(keys)
    with torch.autocast("cpu", torch.bfloat16):
        actual = levattention.leverage_scores(keys), levattention.universal_set(keys, 0.2)
        other.update(keys)
    assert all(map(torch.equal, actual, want))
    assert torch.equal(other.universal_set().scores, sketch.universal_set().scores)
    heavy = levattention.heavy_entries(*SHAPES["plain"].draw(dtype=torch.float32)[:2], 0.2)
    with torch.autocast("cpu", torch.bfloat16):
        again = levattention.heavy_entries(*SHAPES["plain"].draw(dtype=torch.float32)[:2], 0.2)
    assert torch.equal(again.indices, heavy.indices)


def test_comparisons_are_those_without_autocast():
    taken, plans = captured(), {"few": fk.Plan(fk.TopK(9))}
    want = fk.compare(taken, plans).row("few").error
    with torch.autocast("cpu", torch.bfloat16):
        assert fk.compare(taken, plans).row("few").error == want
