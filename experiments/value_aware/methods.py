"""The rows of the table: each answers an attention call with about r keys per query."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from experiments.value_aware.hyper import hyper_weights
from experiments.value_aware.prefix import keep_best, prefix_leverage
from torch import Tensor

import fewkeys as fk
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.weights import Weights
from fewkeys.papers import value_aware
from fewkeys.papers.value_aware.value_aware import Method as Solver
from fewkeys.select import Selector


@dataclass(frozen=True)
class Call:
    """One attention call without padding, and its exact answer.

    weights (B, H, N, N), key (B, H, N, D) and value (B, H, N, Dv), key heads repeated for their queries; scores as the
    kernel takes them, -inf where hidden.
    """

    inputs: AttentionInputs
    kernel: Weights
    generator: torch.Generator
    scores: Tensor
    weights: Tensor
    key: Tensor
    value: Tensor

    @staticmethod
    def of(inputs: AttentionInputs, kernel: Weights, generator: torch.Generator) -> Call:
        groups = inputs.query.shape[1] // inputs.key.shape[1]
        key, value = inputs.key.repeat_interleave(groups, 1), inputs.value.repeat_interleave(groups, 1)
        scores = inputs.query @ key.mT * inputs.scale
        if inputs.is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(inputs.query_offset)
            scores = scores.masked_fill(~seen, -torch.inf)
        # A copy: a kernel may work in place.
        return Call(inputs, kernel, generator, scores, kernel.normalised(scores.clone()), key, value)

    @property
    def output(self) -> Tensor:
        """The exact answer."""
        return self.weights @ self.value


Method = Callable[[Call, int], Tensor]


def solver(r: int) -> Solver:
    """Between 1 and Dv + 1 values: greedy growth, elimination where r is so large that growth is the slower."""
    return "eliminate" if r > 16 else "greedy"


def aware(call: Call, r: int, method: Solver | None = None) -> Tensor:
    """The optimal value-aware approximation, as far as the solver finds it."""
    mask = call.scores > -torch.inf if call.inputs.is_causal else None
    return value_aware.value_aware(call.weights, call.value, r, method or solver(r), mask=mask) @ call.value


def _oblivious(call: Call, r: int) -> Tensor:
    return value_aware.value_oblivious(call.weights, r) @ call.value


def _projected(call: Call, r: int) -> Tensor:
    return value_aware.value_oblivious(call.weights, r, "projected") @ call.value


def _hyper(call: Call, r: int) -> Tensor:
    x = call.inputs
    found = hyper_weights(x.query, call.key, call.scores, call.kernel, r, x.is_causal, call.generator)
    return found @ call.value


def budget(r: int, kernel: Weights, is_causal: bool) -> fk.Plan:
    """`fk.budget(r, cohorts=1)` with any kernel. The first-order term is defined for softmax: elsewhere its slots are
    means.
    """
    plan = fk.budget(r, is_causal=is_causal, cohorts=1)
    if isinstance(plan.rest, fk.ClusterMeans) and plan.rest.rank and not isinstance(kernel, fk.Softmax):
        window, outliers = r // 4 | 1, r * 3 // 16
        means = r - window - outliers
        plan = replace(plan, keep=fk.Outliers(outliers, means) | fk.Window(window), rest=fk.ClusterMeans(means))
    return replace(plan, weights=kernel)


def _planned(plan: Callable[[int, Weights, bool], fk.Plan]) -> Method:
    def answer(call: Call, r: int) -> Tensor:
        x = call.inputs
        return fk.attention(
            x.query,
            x.key,
            x.value,
            plan=plan(r, call.kernel, x.is_causal).never_exact(),
            is_causal=x.is_causal,
            scale=x.scale,
            query_offset=x.query_offset,
            generator=call.generator,
        )

    return answer


def _keep(selector: Callable[[int], Selector], importance: Callable[[Call, Tensor], Tensor] | None = None) -> Method:
    """The selector; under causality, where it has one, the r keys of largest `importance(call, key)` of the past."""
    answer = _planned(lambda r, kernel, is_causal: fk.Plan(selector(r), weights=kernel))

    def causal(call: Call, r: int) -> Tensor:
        if importance is None or not call.inputs.is_causal:
            return answer(call, r)
        return keep_best(call.scores, importance(call, call.key), call.kernel, r) @ call.value

    return causal


METHODS: Mapping[str, Method] = {
    "oblivious": _oblivious,
    "oblivious (projected)": _projected,
    "aware": aware,
    "fewkeys": _planned(budget),
    "LevAttention": _keep(fk.select.Leverage, lambda call, key: prefix_leverage(key)),
    "HyperAttention": _hyper,
    "window": _keep(fk.Window),
    "key norm": _keep(fk.select.KeyNorm, lambda call, key: key.square().sum(-1)),
    "random keys": _keep(fk.RandomKeys, lambda call, key: torch.rand(key.shape[:3], generator=call.generator)),
}
