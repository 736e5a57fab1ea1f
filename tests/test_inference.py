"""Law 2 for the path without gradients: it equals the reference, and the path with gradients, whatever the scores."""

from dataclasses import replace

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_SHAPES, PLANS, SHAPES
from fewkeys.execute import inference, linear
from fewkeys.validation import check_inputs

FORMS = {**SHAPES, **CAUSAL_SHAPES}
MEANS = [
    fk.Plan(fk.Outliers(5, 8) | fk.Window(9), fk.ClusterMeans(8, rank=3)),
    fk.Plan(fk.Leverage(7) | fk.Window(4), fk.ClusterMeans(8)),
    fk.Plan(fk.Window(7), fk.ClusterMeans(8, rank=3)),
    fk.Plan(fk.KeyNorm(5), fk.ClusterMeans(8, rank=3)),
    fk.Plan(fk.KeyNorm(5) | fk.Window(6), fk.UniformSample(8)),
    fk.Plan(fk.KeyNorm(5) | fk.Window(6)),
    fk.Plan(fk.Window(6)),
    fk.Plan(fk.Sinks(3)),
]


@pytest.fixture
def taken(monkeypatch):
    """How often the path was taken."""
    calls = []
    attend = inference.Inference.attend

    def spied(self, head, chunk):
        calls.append(chunk.start)
        return attend(self, head, chunk)

    monkeypatch.setattr(inference.Inference, "attend", spied)
    monkeypatch.setattr(linear, "INFERENCE_LEAST", 0)
    return calls


CASES = [
    (plan, form)
    for plan in MEANS
    for form, shape in FORMS.items()
    if not shape.is_causal or (plan.keep.causal and plan.rest.causal)
]


@pytest.mark.parametrize(("plan", "form"), CASES, ids=str)
def test_it_is_the_reference(plan, form, taken, monkeypatch):
    monkeypatch.setattr(linear, "INFERENCE_CHUNK", 1000)  # several chunks, the last one cut short
    shape = FORMS[form]
    tensors = shape.draw()
    found = fk.attention(*tensors, plan=plan, impl="torch", **shape.options)
    want = fk.attention(*tensors, plan=plan, impl="reference", **shape.options)
    torch.testing.assert_close(found, want, atol=1e-11, rtol=1e-9)
    covered = plan.keep.covers(check_inputs(*tensors, **shape.options))
    listed = shape.is_causal and plan.keep != fk.Window(6)
    assert bool(taken) == (not covered and not listed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", MEANS[:2], ids=str)
def test_low_precision_is_as_good_as_with_gradients(plan, dtype, taken):
    shape = SHAPES["grouped"]
    tensors = shape.draw(dtype=dtype)
    found = fk.attention(*tensors, plan=plan, impl="torch")
    assert taken
    want = fk.attention(*(x.requires_grad_() for x in tensors), plan=plan, impl="torch")
    torch.testing.assert_close(found, want, atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=1e-2)


@pytest.mark.parametrize("size", [30.0, 300.0])
@pytest.mark.parametrize("plan", MEANS, ids=str)
def test_far_scores_neither_overflow_nor_vanish_wrongly(plan, size, taken):
    """One key decides every row, and with it often one part of the row alone: list, band or stand-in."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 80, 8, generator=g, dtype=torch.float64)
    tensors = (size * q, k, v)
    found = fk.attention(*tensors, plan=plan, impl="torch")
    torch.testing.assert_close(found, fk.attention(*tensors, plan=plan, impl="reference"), atol=1e-9, rtol=1e-7)
    low = fk.attention(*(x.float() for x in tensors), plan=plan, impl="torch")
    assert low.isfinite().all()


def test_a_list_of_more_keys_than_there_are(taken):
    shape = replace(SHAPES["padded"], lengths=(SHAPES["padded"].keys, 2))
    tensors = [x + 3 for x in shape.draw()]  # fillings, were they counted, would weigh as much as keys
    for plan in (fk.Plan(fk.KeyNorm(5)), fk.Plan(fk.KeyNorm(5) | fk.Window(6))):
        found = fk.attention(*tensors, plan=plan, impl="torch", **shape.options)
        want = fk.attention(*tensors, plan=plan, impl="reference", **shape.options)
        torch.testing.assert_close(found[0], want[0])
        torch.testing.assert_close(found[1, :, :2], want[1, :, :2])
    assert taken


def test_rows_that_see_nothing_give_zeros(taken):
    q, k, v = torch.randn(3, 2, 1, 30, 4, generator=torch.Generator().manual_seed(0)).unbind()
    lengths = torch.tensor([30, 0])
    for plan in (fk.Plan(fk.Window(5)), fk.Plan(fk.KeyNorm(3)), fk.Plan(fk.KeyNorm(3) | fk.Window(5))):
        found = fk.attention(q, k, v, plan=plan, lengths=lengths, impl="torch")
        assert not found[1].any()
        assert found[0].any(-1).all()
    assert taken


OTHERS = [name for name, plan in PLANS.items() if not isinstance(plan.weights, fk.Softmax) or "moments" in name]


@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_and_curved_scores_go_another_way(name, taken):
    fk.attention(*SHAPES["plain"].draw(), plan=PLANS[name], impl="torch")
    assert not taken


def test_gradients_go_another_way(taken):
    tensors = [x.requires_grad_() for x in SHAPES["plain"].draw()]
    fk.attention(*tensors, plan=MEANS[0], impl="torch")
    assert not taken
    with torch.no_grad():
        fk.attention(*tensors, plan=MEANS[0], impl="torch")
    assert taken
