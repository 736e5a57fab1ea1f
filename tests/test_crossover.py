"""`impl="auto"`: exact attention where the model says it is cheaper, only for plans that allow it."""

from dataclasses import replace

import pytest
import torch

import fewkeys as fk
from fewkeys.crossover import exact_is_faster, exact_operations, plan_operations
from fewkeys.validation import check_inputs


def problem(n, heads=1, dim=16):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, n, dim, generator=g) for _ in range(3)]


@pytest.mark.parametrize(("n", "expected"), [(100, "exact"), (3000, "plan")])
def test_auto_goes_the_way_the_model_says(n, expected):
    q, k, v = problem(n)
    plan = fk.budget(32)
    assert exact_is_faster(check_inputs(q, k, v), plan) == (expected == "exact")
    found = fk.attention(q, k, v, plan=plan)
    truth = {"exact": fk.attention(q, k, v), "plan": fk.attention(q, k, v, plan=plan, impl="torch")}
    assert torch.equal(found, truth[expected])
    assert not torch.equal(truth["exact"], truth["plan"])


def test_only_plans_that_allow_it_become_exact():
    q, k, v = problem(100)
    strict = replace(fk.budget(32), exact_if_faster=False)
    assert torch.equal(fk.attention(q, k, v, plan=strict), fk.attention(q, k, v, plan=strict, impl="torch"))
    found = fk.attention(q, k, v, keep=fk.Window(5))
    assert torch.equal(found, fk.attention(q, k, v, keep=fk.Window(5), impl="torch"))
    assert not torch.equal(found, fk.attention(q, k, v))


def test_there_is_one_crossover():
    """With growing length exact attention loses once and for all."""
    for slots in (16, 64, 192):
        answers = [exact_is_faster(check_inputs(*problem(n, dim=32)), fk.budget(slots)) for n in range(64, 4097, 64)]
        assert answers == sorted(answers, reverse=True)
        assert answers[0]
        assert not answers[-1]


def test_operations_grow_as_they_should():
    plan, previous = fk.budget(64), None
    for n in (2048, 4096, 8192):
        inputs = check_inputs(*problem(n))
        now = exact_operations(inputs) * n, plan_operations(inputs, plan) * n
        if previous is not None:
            assert now[0] == pytest.approx(4 * previous[0])
            assert now[1] < 2.2 * previous[1]
        previous = now


@pytest.mark.parametrize("keep", [fk.TopK(8), fk.BestColumns(8)], ids=str)
def test_oracles_pay_for_scoring_every_pair(keep):
    inputs = check_inputs(*problem(512))
    assert plan_operations(inputs, fk.Plan(keep)) > 2 * 16 * 512  # scoring every pair
