"""The ways to run a plan that laws go through, and how far the answers of each may be off."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

import fewkeys as fk
from cases import CASES, CAUSAL_SHAPES, SHAPES, SOME_PLANS, Shape
from fewkeys.core.validation import check_inputs
from fewkeys.execute.dispatch import EXECUTORS
from fewkeys.execute.problem import prepare

UNITS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2**-6}
"""Roundings, as a part of the largest entry: of sums of some hundred terms and of statistics, which square (float64,
float32); of every weight and of the output, each by half of 2^-7, and of what they are made of (bfloat16)."""
DTYPES = {
    "reference": (torch.float64,),
    "torch": (torch.float64, torch.float32),
    "native": (torch.float32, torch.bfloat16),
}
"""The dtypes in which each executor is tried; others are tried in float32."""
OFTEN = {*SOME_PLANS, "recent blocks + leverage + sinks, drop, softmax", "recent, running means"}
"""The plans that are tried in every way in every shape."""
FORMS = {**SHAPES, **CAUSAL_SHAPES}


@dataclass(frozen=True)
class Way:
    """An executor and the dtype of its inputs."""

    impl: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.impl}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def unit(self) -> float:
        return UNITS[self.dtype]

    def attend(self, *tensors, **options):
        return fk.attention(*tensors, impl=self.impl, **options)

    def assert_close(self, actual, expected, times=1.0):
        """Equal but for `times` as many roundings as one answer has."""
        actual, expected = actual.detach().double(), expected.detach().double()
        off = (actual - expected).abs().max() if actual.numel() else torch.tensor(0.0)
        limit = times * self.unit * expected.abs().max() if actual.numel() else 1.0
        assert off <= limit, f"{self}: off by {off:.3g}, expected at most {limit:.3g}"


WAYS = [Way(impl, dtype) for impl in EXECUTORS for dtype in DTYPES.get(impl, (torch.float32,))]


def support(problem, way, gradients=False):
    """Why the way cannot answer the problem, None where it can; with gradients, where they are asked for."""
    x = problem.inputs
    rows = {name: getattr(x, name).to(way.dtype).requires_grad_(gradients) for name in ("query", "key", "value")}
    return EXECUTORS[way.impl].unsupported(replace(problem, inputs=replace(x, **rows)))


@cache
def ways(name: str, is_causal: bool, gradients: bool = False) -> tuple[Way, ...]:
    """The ways that know the case, says `unsupported`.

    It looks at the form of the problem, which is that of 70 tokens here: a way that refused another shape would fail.
    """
    shape = Shape(batch=1, query_heads=1, kv_heads=1, is_causal=is_causal)
    problem = prepare(check_inputs(*shape.draw(dtype=torch.float32), **shape.options, impl="torch"), CASES[name].part)
    return tuple(way for way in WAYS if support(problem, way, gradients) is None)


def in_turns(names, forms):
    """Parameters (name, form): plans of `OFTEN` in every form, each other plan in one, the next in the next."""
    forms = list(forms)
    return [
        pytest.param(name, form, id=f"{name}-{form}")
        for turn, name in enumerate(names)
        for place, form in enumerate(forms)
        if name in OFTEN or place == turn % len(forms)
    ]


def rotated(first, second, third):
    """Parameters (one, two, three): all pairs of the first two; the next of either takes the next of the third."""
    triples = [(a, b, [*third][(i + j) % len(third)]) for i, a in enumerate(first) for j, b in enumerate(second)]
    return [pytest.param(*triple, id="-".join(map(str, triple))) for triple in triples]


def runs(names, forms, gradients=False):
    """Parameters (name, form, way): plans of `OFTEN` in every form in every way.

    All others take turns: each goes through torch in float64 and through every compiled or new way in one form, another
    one for every plan, and through the reference and torch in float32 for every third plan.
    `gradients`: only ways that have them.
    """
    cases_run = []
    for turn, name in enumerate(names):
        for place, form in enumerate(forms):
            for way in ways(name, FORMS[form].is_causal, gradients):
                its_turn = (turn + WAYS.index(way)) % len(forms) == place
                thin = way in (Way("reference", torch.float64), Way("torch", torch.float32)) and turn % 3
                if name not in OFTEN and (not its_turn or thin):
                    continue
                cases_run.append(pytest.param(name, form, way, id=f"{name}-{form}-{way}"))
    return cases_run
