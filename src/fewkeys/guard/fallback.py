"""Falls back to exact attention where a plan's error is too large, and counts how often."""

import threading
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision
from fewkeys.core.validation import check_count, check_real
from fewkeys.core.weights import Weights
from fewkeys.execute import exact
from fewkeys.guard.sample import sampled_errors

_LOCK = threading.Lock()
"""Held while a guard counts: threads may share one. Not an attribute, which could not be copied with a model."""
QUERIES = 32
"""The default number of exact queries of each sequence and head."""


@dataclass(frozen=True)
class Fallbacks:
    """The counts of a guard so far.

    Attributes:
        calls: attention calls, also those answered exactly without a check.
        checked: heads whose error was estimated, each once for every sequence.
        fallbacks: those answered exactly, with an estimate above the limit.
        error: mean estimate over `checked`: the plan's error before any fallback. None before the first check.
    """

    calls: int = 0
    checked: int = 0
    fallbacks: int = 0
    error: float | None = None


class Guard:
    """Checks a plan on every call, and answers exactly for each sequence and head whose error is above `max_error`.

    Pass it as `fewkeys.attention(..., max_error=Guard(0.05))` and read its counts, `fallbacks`, afterwards;
    `fewkeys.apply` makes one for each layer.

    The error of a head of a sequence is estimated without bias from `queries` exact queries, as by
    `fewkeys.spot_check`. A head whose true error is near the limit may fall on either side: choose a smaller limit if
    it must never be exceeded. A causal call is judged as a whole: later tokens may decide whether earlier outputs are
    the plan's or the exact ones.

    Cost of a call: the plan, O(queries n (D + Dv)) per head, and exact attention for heads that fall back. A call with
    no more than `queries` queries, such as a decoded token, costs exact attention alone.

    Raises `ValueError` or `TypeError` for a negative or non-finite `max_error` and for `queries` below 1.
    """

    def __init__(self, max_error: float, *, queries: int = QUERIES) -> None:
        self.max_error = check_real("max_error", max_error)
        if self.max_error < 0:
            raise ValueError(f"max_error: expected at least 0, got {max_error}; 0.05 allows an error of five percent")
        self.queries = check_count("queries", queries)
        self.fallbacks = Fallbacks()

    def count_call(self) -> None:
        with _LOCK:
            self.fallbacks = replace(self.fallbacks, calls=self.fallbacks.calls + 1)

    @full_precision()
    def correct(self, inputs: Inputs, weights: Weights, output: Tensor) -> Tensor:
        """The plan's `output` (B, Hq, Nq, Dv), with exact attention for heads above the limit. Gradients flow."""
        # All heads of all sequences draw the same places, so that no answer depends on the other sequences.
        sample, errors = sampled_errors(inputs, weights, output, (self.queries,), inputs.generator)
        error = sample.mean(errors)
        real = (sample.count > 0).unsqueeze(-1)
        failed = ~(error <= self.max_error)  # NaN counts as failed
        fallbacks, heads, error_sum = int(failed.sum()), int(real.sum()) * inputs.query_heads, float(error.sum())
        with _LOCK:
            before = self.fallbacks
            checked, total = before.checked + heads, (before.error or 0.0) * before.checked + error_sum
            mean = total / checked if checked else None
            self.fallbacks = Fallbacks(before.calls, checked, before.fallbacks + fallbacks, mean)
        if fallbacks == 0:
            return output
        if bool((failed | ~real).all()):
            return exact.attend(inputs, weights)
        if inputs.bias is not None:  # heads with different tables cannot become sequences of one head
            return torch.where(failed[..., None, None], exact.attend(inputs, weights), output)
        sequence, head = failed.nonzero(as_tuple=True)
        place = sequence * inputs.kv_heads + head // inputs.gqa_ratio  # several query heads may share a key head
        key, value = (rows.flatten(0, 1).index_select(0, place).unsqueeze(1) for rows in (inputs.key, inputs.value))
        query = inputs.query[sequence, head].unsqueeze(1)
        valid = None if inputs.valid is None else inputs.valid[sequence]
        alone = replace(inputs, query=query, key=key, value=value, valid=valid, _memory={})  # sequences of one head
        return output.index_put((sequence, head), exact.attend(alone, weights).squeeze(1))
