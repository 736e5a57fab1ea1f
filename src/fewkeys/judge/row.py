"""One plan of a comparison: plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Effect:
    """Cosines between the exact and the approximated model.

    `cosine` compares mean-pooled last hidden states: the mean over sequences, `cosine_min` the worst sequence.
    `token_cosine` compares the states of single tokens: the mean over all valid tokens.
    """

    cosine: float
    cosine_min: float
    token_cosine: float


@dataclass(frozen=True)
class Row:
    """One plan at one budget, judged over every layer, head and valid query.

    The relative error of a query is `||approximate - exact|| / ||exact||` of its attention output in one head.

    Attributes:
        name: what the row is called; together with `budget` it is unique in a report.
        budget: the requested slots; None for a plan that was not made for a budget (exact attention).
        kind: "exact" (keeps every key), "oracle" (computes all scores to choose keys: a bound only) or "method".
        plan: the plan in words; `config` is the same plan as `Plan.to_dict()` gives it.
        slots: mean slots used per query: kept keys plus the price of the stand-ins.
        error: mean relative error over queries, heads and layers; `error_p50` and `error_p90` are quantiles of the
            same population (to within 0.1 percent, from a histogram).
        worst_head: [layer, head] with the largest mean error, which is `worst_head_error`.
        mass: mean share of the exact attention weight of a query that lies on its kept keys.
        recall: share of exact attention weights >= `settings["eps"]` whose key is kept; None if there are none.
        cosine: mean over sequences of the cosine between the mean-pooled last hidden states of the exact model and of
            the model with this plan in every layer; `cosine_min` is the worst sequence. `token_cosine` is the mean
            over tokens of the cosine between their last hidden states. All None if no model was given.
        ms: median milliseconds of one attention call (one layer, shape in `settings["timed_shape"]`).
        exact_ms: the same for exact attention (`scaled_dot_product_attention`), measured in turns with the plan.
        per_layer: lists of length `layers` under "error", "mass", "recall" and "slots".
        per_head: lists of `layers` lists of `query_heads` numbers under "error", "mass" and "recall".
    """

    name: str
    budget: int | None
    kind: str
    plan: str
    config: dict[str, Any]
    slots: float
    error: float
    error_p50: float
    error_p90: float
    worst_head: list[int]
    worst_head_error: float
    mass: float
    recall: float | None
    cosine: float | None
    cosine_min: float | None
    token_cosine: float | None
    ms: float
    exact_ms: float
    per_layer: dict[str, list[float | None]] = field(repr=False)
    per_head: dict[str, list[list[float | None]]] = field(repr=False)


@dataclass(frozen=True)
class WholeTime:
    """A whole model of the same shape, one text of `length` tokens: median milliseconds over `turns`.

    `name` and `budget` are those of a `Row`, whose plan runs in every layer; `exact_ms` was measured in turns with it.
    """

    name: str
    budget: int | None
    length: int
    turns: int
    ms: float
    exact_ms: float


@dataclass(frozen=True)
class Skipped:
    """A plan that could not be judged on this model, and why (for instance stand-ins that cannot be causal)."""

    name: str
    budget: int | None
    reason: str
