"""What torch is told to take where nothing is said decides nothing here: every tensor says what it is."""

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_SHAPES, PLANS, RUNNING_PLANS, SHAPES

ALL = {**PLANS, **RUNNING_PLANS}


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("name", ALL)
def test_default_device_and_dtype_change_nothing(name, impl):
    shape = SHAPES["padded"]
    lengths, tensors = torch.tensor(shape.lengths), shape.draw(dtype=torch.float32)
    if ALL[name].rest.needs_causal:
        tensors, lengths = CAUSAL_SHAPES["causal padded"].draw(dtype=torch.float32), torch.tensor([150, 71])
    causal = ALL[name].rest.needs_causal

    def call():
        given = [tensor.clone().requires_grad_() for tensor in tensors]
        output = fk.attention(*given, plan=ALL[name], impl=impl, lengths=lengths, is_causal=causal)
        output.square().sum().backward()
        return [output.detach(), *(tensor.grad for tensor in given)]

    want = call()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            found = call()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, want, strict=True):
        if other is not None:
            assert torch.equal(one, other)
