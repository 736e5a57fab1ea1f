"""Law 12: `explain` says what `attention` does: both go the same way, whatever the shape and the size of numbers."""

from contextlib import contextmanager

import pytest
import torch

import fewkeys as fk
import odd_keys
from cases import CASES
from executors import FORMS
from fewkeys.cost import crossover
from fewkeys.cost.crossover import Line
from fewkeys.execute import exact
from fewkeys.execute.dispatch import EXECUTORS

BOTH_WAYS = [form for form, shape in FORMS.items() if not form.startswith("tiny") and not shape.is_causal]
CAUSAL = [form for form, shape in FORMS.items() if not form.startswith("tiny") and shape.is_causal]
IMPLS = ("auto", "torch", "reference")


@contextmanager
def recorded(monkeypatch):
    """The names of who answers, and the problems of executors; what they ask for in turn does not count."""
    ran, inside = [], []

    def noting(name, attend):
        def wrapped(*arguments):
            if not inside:
                ran.append((name, arguments[0]))
            inside.append(name)
            try:
                return attend(*arguments)
            finally:
                inside.pop()

        return wrapped

    with monkeypatch.context() as patch:
        for name, room in {"exact": exact, **EXECUTORS}.items():
            patch.setattr(room, "attend", noting(name, room.attend))
        yield ran


def assert_true(monkeypatch, tensors, plan, **options):
    """What `explain` says is what runs."""
    explanation = fk.explain(*tensors, plan=plan, **options)
    with recorded(monkeypatch) as ran:
        output = fk.attention(*tensors, plan=plan, **options)
    assert {name for name, _ in ran} == {"exact" if explanation.runs == "exact" else explanation.executor}
    return output


def forms_of(plan, turn):
    """One shape without causality and one with it, as far as the plan knows them."""
    actual = [] if plan.rest.needs_causal else [BOTH_WAYS[turn % len(BOTH_WAYS)]]
    knows = plan.keep.causal and plan.rest.causal
    return actual + ([CAUSAL[turn % len(CAUSAL)]] if knows else [])


@pytest.mark.parametrize(("turn", "name"), [*enumerate(CASES)])
def test_every_plan_in_every_shape(monkeypatch, turn, name):
    plan = CASES[name].part
    for number, form in enumerate(forms_of(plan, turn)):
        shape = FORMS[form]
        impl = IMPLS[(turn + number) % len(IMPLS)]
        tensors = shape.draw(dtype=torch.float32)
        assert_true(monkeypatch, tensors, plan, impl=impl, **shape.options)


@pytest.mark.parametrize(("turn", "name"), [*enumerate(CASES)])
def test_every_plan_with_extreme_numbers(monkeypatch, turn, name):
    plan, kinds = CASES[name].part, [*odd_keys.EXTREME]
    *factors, scale = odd_keys.EXTREME[kinds[turn % len(kinds)]]
    tensors = [x * by for x, by in zip(FORMS["long"].draw(dtype=torch.float32), factors, strict=True)]
    options = {"is_causal": plan.rest.needs_causal, "scale": scale, "impl": IMPLS[turn % 2]}
    assert assert_true(monkeypatch, tensors, plan, **options).isfinite().all()


@pytest.mark.parametrize("kind", odd_keys.KINDS)
@pytest.mark.parametrize("slots", [8, 24, 64])
def test_recommended_plans_of_odd_keys(monkeypatch, kind, slots):
    key = odd_keys.keys(kind).float()
    for is_causal, cohorts in ((False, None), (False, 1), (True, None)):
        plan = fk.budget(slots, is_causal=is_causal, cohorts=cohorts).never_exact()
        assert_true(monkeypatch, (key.flip(2), key, key), plan, is_causal=is_causal)


LINES = {
    "exact": (Line(0, 0), Line(9, 0), Line(9, 0)),
    "plan": (Line(9, 1), Line(0, 0), Line(0, 0)),
}
"""Of exact attention, of preparing and of attending."""


@pytest.mark.parametrize("faster", LINES)
@pytest.mark.parametrize("memory", ["all", "constant"])
def test_whatever_is_faster(monkeypatch, faster, memory):
    """Also with left padding, where queries begin late, and with a bias of the distance."""
    monkeypatch.setattr(crossover, "_lines", lambda *_: LINES[faster])
    monkeypatch.setattr(crossover, "exact_operations", lambda *_: 1e9)
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 300, 8, generator=draw)
    real = torch.arange(300) >= torch.tensor([[0], [90]])
    table = torch.randn(4, 9, generator=draw)
    calls = [{}, {"key_mask": real}, {"key_mask": real, "impl": "torch"}]
    plain, causal = fk.budget(64), fk.budget(80 if memory == "all" else 40, is_causal=True, memory=memory)
    for more in [*calls, {"distance_bias": table}, {"distance_bias": table, "key_mask": real}]:
        assert_true(monkeypatch, (query, key, value), plain, **more)
    for more in calls:
        assert_true(monkeypatch, (query, key, value), causal, is_causal=True, **more)
        late = {"query_offset": 250, "is_causal": True, **more}
        assert_true(monkeypatch, (query[:, :, 250:], key, value), causal, **late)
