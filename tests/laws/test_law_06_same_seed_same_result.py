"""Law 6: the same seed gives the same bits; randomness comes from `generator` alone, `impl="auto"` is reproducible."""

import os
import subprocess
import sys

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_SHAPES, PLANS, RUNNING_PLANS, SHAPES

RANDOM = ["random keys, drop, softmax", "baseline random edges, drop, softmax", "leverage + window, sample, softmax"]
FIXED = ["leverage, drop, softmax", "outliers + window, first-order means, softmax"]


def answer(plan, impl, seed, shape=SHAPES["padded"]):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    tensors = [x.requires_grad_() for x in shape.draw(dtype=torch.float32)]
    try:
        output = fk.attention(*tensors, plan=plan, impl=impl, generator=generator, **shape.options)
    except ValueError as error:
        if impl != "native" or "impl='native'" not in str(error):
            raise
        return None  # what it cannot do, it refuses
    return [output.detach(), *torch.autograd.grad(output.square().sum(), tensors)]


def assert_same(plan, impl, **shape):
    before = torch.get_rng_state()
    for seed in (None, 3):
        first, again = answer(plan, impl, seed, **shape), answer(plan, impl, seed, **shape)
        assert (first is None) == (again is None)
        if first is not None:
            assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's numbers are drawn


@pytest.mark.parametrize("impl", ["reference", "torch", "native", "auto"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_same_seed_same_bits(plan, impl):
    assert_same(plan, impl)


@pytest.mark.parametrize("impl", ["reference", "torch", "native", "auto"])
@pytest.mark.parametrize("plan", RUNNING_PLANS.values(), ids=RUNNING_PLANS)
def test_same_seed_same_bits_of_a_past(plan, impl):
    assert_same(plan, impl, shape=CAUSAL_SHAPES["causal grouped"])


@pytest.mark.parametrize("name", RANDOM)
def test_another_seed_may_give_another_result(name):
    found = [answer(PLANS[name], "torch", seed)[0] for seed in (None, 0, 1)]
    assert torch.equal(found[0], found[1])  # without a generator: seed 0
    assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize("name", FIXED)
def test_plans_that_draw_nothing_do_not_care(name):
    assert torch.equal(answer(PLANS[name], "torch", 1)[0], answer(PLANS[name], "torch", 2)[0])


AUTO = """
import hashlib, torch
import fewkeys as fk
from fewkeys.core.validation import check_inputs
from fewkeys.cost.crossover import exact_is_faster

plan, low, high = fk.budget(32), 64, 2**15
while high - low > 1:  # the first length at which the plan runs
    middle = (low + high) // 2
    faster = exact_is_faster(check_inputs(*torch.zeros(3, 1, 1, middle, 16)), plan)
    low, high = (middle, high) if faster else (low, middle)
for length in (low, high):
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, length, 16, generator=draw)
    output = fk.attention(q, k, v, plan=plan)
    told = fk.explain(q, k, v, plan=plan)
    print(length, told.runs, told.exact_ms, told.plan_ms, hashlib.sha256(output.numpy().tobytes()).hexdigest())
"""


def test_auto_is_the_same_in_every_process(tmp_path):
    """On both sides of where it changes from exact attention to the plan, by the times that the first one measured."""
    told = []
    for _ in range(2):
        environment = {**os.environ, "FEWKEYS_CACHE": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", AUTO], capture_output=True, text=True, env=environment, check=True)
        told.append(done.stdout)
    assert told[0] == told[1]
    assert [line.split()[1] for line in told[0].splitlines()] == ["exact", "plan"]
