"""When exact attention is faster than a plan."""

from __future__ import annotations

from fewkeys.inputs import Inputs
from fewkeys.plan import Plan


def exact_is_faster(inputs: Inputs, plan: Plan) -> bool:
    return False
