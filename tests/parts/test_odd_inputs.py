"""Inputs that are rare and right: their outputs are defined, and the same however they are told."""

import pytest
import torch

import fewkeys as fk
from cases import PLANS, RUNNING_PLANS, SHAPES

ALL = {**PLANS, **RUNNING_PLANS}


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("name", ALL)
def test_sequences_without_a_key_give_zero(name, impl):
    plan = ALL[name].always()
    q, k, v = SHAPES["plain"].draw(dtype=torch.float32)
    for lengths in ([0, 0], [70, 0]):
        options = {"lengths": torch.tensor(lengths), "is_causal": plan.rest.needs_causal}
        output = fk.attention(q, k, v, plan=plan, impl=impl, **options)
        assert output.isfinite().all()
        assert not output[1].any()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_views_that_promise_another_sign(impl, is_causal):
    tensors = SHAPES["long"].draw(dtype=torch.float32)
    plan = fk.budget(24, is_causal=is_causal).always()
    want = fk.attention(*(-x for x in tensors), plan=plan, impl=impl, is_causal=is_causal)
    found = fk.attention(*(torch._neg_view(x) for x in tensors), plan=plan, impl=impl, is_causal=is_causal)
    assert torch.equal(found, want)
