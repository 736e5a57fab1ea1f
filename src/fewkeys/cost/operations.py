"""Arithmetic of exact attention and of plans, operations per query: a model, not a measurement."""

from __future__ import annotations

from fewkeys.core.inputs import Inputs
from fewkeys.core.work import per_score
from fewkeys.plan import Plan


def exact_operations(inputs: Inputs) -> float:
    """Operations per query of exact attention."""
    seen = inputs.keys * (0.5 if inputs.is_causal and not inputs.offset else 1.0)
    return seen * per_score(inputs)


def plan_operations(inputs: Inputs, plan: Plan) -> float:
    """Operations per query of selecting, summarising and attending: what keep and rest state (`fewkeys.core.work`)."""
    x = inputs
    if plan.keep is None:
        return exact_operations(x)
    work = plan.keep.work(x) + plan.rest.work(x, plan.keep)
    # There are so many keys per query of one key head's group.
    return work.scores * per_score(x) + work.per_key * x.keys / (x.queries * x.gqa_ratio)
