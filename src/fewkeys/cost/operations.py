"""Operations per query of exact attention and of plans: a model, not a measurement."""

from fewkeys.core.inputs import Inputs
from fewkeys.core.work import Work, per_score
from fewkeys.plan import Plan


def exact_operations(inputs: Inputs) -> float:
    """Operations per query of exact attention."""
    return visible_keys(inputs) * per_score(inputs)


def visible_keys(inputs: Inputs) -> float:
    """Keys that a query sees on average, with padding: under causality, `min(i + 1 + offset, Nk)` for query i."""
    x = inputs
    if not x.is_causal:
        return float(x.keys)
    growing = min(max(0, x.keys - 1 - x.offset), x.queries)
    return (growing * (x.offset + (growing + 1) / 2) + (x.queries - growing) * x.keys) / x.queries


def plan_operations(inputs: Inputs, plan: Plan) -> float:
    """Operations per query of selecting, summarising and attending."""
    x = inputs
    if plan.keep is None:
        return exact_operations(x)
    work = plan_work(x, plan)
    # A key head's keys serve `gqa_ratio` query heads.
    attending = (work.scores * per_score(x) + work.scanned) * answered_queries(x, plan)
    return (attending + work.per_key * x.keys / x.gqa_ratio) / x.queries


def plan_work(inputs: Inputs, plan: Plan) -> Work:
    """The `work` of `keep` and `rest` together."""
    if plan.keep is None:
        return Work(visible_keys(inputs))
    return plan.keep.work(inputs) + plan.rest.work(inputs, plan.keep)


def answered_queries(inputs: Inputs, plan: Plan) -> int:
    """Nq, and all earlier queries where stand-ins begin with the first token."""
    return inputs.queries + (inputs.offset if plan.rest.needs_causal else 0)


def scan_share(inputs: Inputs, plan: Plan) -> float:
    """Operations of a query's scan over those of its kept keys and stand-ins; 0 without a scan."""
    work = plan_work(inputs, plan)
    return work.scanned / (work.scores * per_score(inputs))
