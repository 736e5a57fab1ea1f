"""What tests of compiled kernels share."""

import os
import shutil

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_SHAPES, SHAPES
from fewkeys.native import build, sets

# Where an instruction set is asked for by name, its kernels must be there.
needs_compiler = pytest.mark.skipif(
    os.environ.get(build.SWITCH) == "0" or not (any(map(shutil.which, sets.COMPILERS)) or os.environ.get(sets.FORCED)),
    reason="no C++ compiler",
)
CLOSE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}
FORMS = {**SHAPES, **CAUSAL_SHAPES}
MEANS = [
    fk.Plan(fk.Outliers(5, 8) | fk.Window(9), fk.ClusterMeans(8, rank=3)),
    fk.Plan(fk.select.Leverage(7) | fk.Window(4), fk.ClusterMeans(8)),
    fk.Plan(fk.Window(7), fk.ClusterMeans(8, rank=3)),
    fk.Plan(fk.select.KeyNorm(5), fk.ClusterMeans(8, rank=3)),
    fk.Plan(fk.select.KeyNorm(5) | fk.Window(6), fk.rest.UniformSample(8)),
    fk.Plan(fk.select.KeyNorm(5) | fk.Window(6)),
    fk.Plan(fk.Window(6)),
    fk.Plan(fk.Sinks(3)),
    fk.Plan(fk.Sinks(3) | fk.Window(41)),
]
CASES = [
    (plan, form, [*CLOSE][(turn + place) % 2])
    for turn, plan in enumerate(MEANS)
    for place, (form, shape) in enumerate(FORMS.items())
    if (plan.keep.causal and plan.rest.causal if shape.is_causal else not plan.rest.needs_causal)
]
"""Plans and shapes, each in one of the dtypes: the next plan, and the next shape, takes the other."""


def has_kernel(plan, x):
    """Whether there is one: not for lists by blocks, nor for other weights; nor is one needed for all keys."""
    columns = plan.keep.select(x).columns
    by_block = columns is not None and columns.blocks > 1
    return isinstance(plan.weights, fk.Softmax) and not by_block and not plan.keep.covers(x)


def without(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEWKEYS_NATIVE", "0")
        return call()


def spy(monkeypatch, module):
    """The arguments of every call of the module's `attend`, from now on."""
    calls = []
    attend = module.attend

    def spied(*problem):
        calls.append(problem)
        return attend(*problem)

    monkeypatch.setattr(module, "attend", spied)
    return calls
