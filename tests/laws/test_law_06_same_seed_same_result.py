"""Law 6: the same seed gives the same bits; randomness comes from `generator` alone, `impl="auto"` is reproducible."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cases import CASES, PLANS, RUNNING_PLANS
from executors import FORMS, WAYS, Way, runs
from fewkeys.native import build

RANDOM = ["random keys, drop, softmax", "random edges, drop, softmax", "leverage + window, sample, softmax"]
FIXED = ["leverage, drop, softmax", "outliers + window, first-order means, softmax"]


def answer(name, way, seed, shape):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    tensors = [x.requires_grad_() for x in shape.draw(dtype=way.dtype)]
    output = way.attend(*tensors, plan=CASES[name].part, generator=generator, **shape.options)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), tensors)]


def assert_same(name, way, shape, *seeds):
    before = torch.get_rng_state()
    for seed in seeds:
        first, again = answer(name, way, seed, shape), answer(name, way, seed, shape)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's numbers are drawn


@pytest.mark.parametrize(
    ("name", "form", "way"),
    runs(PLANS, ["padded"], gradients=True) + runs(RUNNING_PLANS, ["causal grouped"], gradients=True),
)
def test_same_seed_same_bits(name, form, way):
    """Without a generator and with one; where nothing is drawn, every other way has one."""
    seeds = (None, 3)
    assert_same(name, way, FORMS[form], *(seeds if CASES[name].draws else [seeds[WAYS.index(way) % 2]]))


@pytest.mark.parametrize("name", PLANS | RUNNING_PLANS)
def test_auto_gives_the_same_bits(name):
    assert_same(name, Way("auto", torch.float32), FORMS["causal grouped" if name in RUNNING_PLANS else "padded"], None)


@pytest.mark.parametrize(("name", "form", "way"), runs(RANDOM, ["padded"]))
def test_another_seed_may_give_another_result(name, form, way):
    actual = [answer(name, way, seed, FORMS[form])[0] for seed in (None, 0, 1)]
    assert torch.equal(actual[0], actual[1])  # without a generator: seed 0
    assert not torch.equal(actual[1], actual[2])


@pytest.mark.parametrize(("name", "form", "way"), runs(FIXED, ["padded"]))
def test_plans_that_draw_nothing_do_not_care(name, form, way):
    assert torch.equal(answer(name, way, 1, FORMS[form])[0], answer(name, way, 2, FORMS[form])[0])


class Accumulated(TorchDispatchMode):
    """Whether `index_put_` adds float32 rows of the same place: on several threads, torch adds them in any order."""

    seen = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "index_put" in function.name() and args[3:4] == (True,) and args[0].dtype == torch.float32:
            index = [numbers for numbers in args[1] if numbers is not None]
            places = torch.stack(torch.broadcast_tensors(*index)).flatten(1)
            self.seen |= places.shape[1] > places.unique(dim=1).shape[1]
        return function(*args, **(kwargs or {}))


def assert_summed_in_one_order(name, way, shape, **options):
    tensors = [x.requires_grad_() for x in shape.draw(dtype=way.dtype)]
    output = way.attend(*tensors, plan=CASES[name].part, **shape.options, **options)
    with Accumulated() as mode:
        output.square().sum().backward()
    assert not mode.seen


@pytest.mark.parametrize(
    ("name", "form", "way"),
    runs(PLANS, ["grouped"], gradients=True) + runs(RUNNING_PLANS, ["causal grouped"], gradients=True),
)
def test_gradients_are_summed_in_one_order(name, form, way):
    assert_summed_in_one_order(name, way, FORMS[form])


@pytest.mark.parametrize(("name", "form", "way"), runs(FIXED[1:], ["grouped"], gradients=True))
def test_gradients_of_heads_that_fall_back_are_summed_in_one_order(name, form, way):
    """Of several query heads that share a key head."""
    assert_summed_in_one_order(name, way, FORMS[form], max_error=0.25)


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
    explanation = fk.explain(q, k, v, plan=plan)
    digest = hashlib.sha256(output.numpy().tobytes()).hexdigest()
    print(length, explanation.runs, explanation.exact_ms, explanation.plan_ms, digest)
"""


@pytest.mark.long
def test_auto_is_the_same_in_every_process(tmp_path):
    """On both sides of where it changes from exact attention to the plan, by the times that the first one measured."""
    if build.missing() is None:
        (tmp_path / "kernels").mkdir()
        shutil.copy(build.place(), tmp_path / "kernels")  # they take half a minute to compile
    printed = []
    for _ in range(2):
        environment = {**os.environ, "FEWKEYS_CACHE": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", AUTO], capture_output=True, text=True, env=environment, check=True)
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert [line.split()[1] for line in printed[0].splitlines()] == ["exact", "plan"]
