"""Falling back to exact attention where a plan's error is too large, and counting how often."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_count, check_real
from fewkeys.core.weights import Weights
from fewkeys.execute import exact
from fewkeys.guard.sample import draw, sampled_errors, uniform

QUERIES = 32
"""Queries of each sequence and head that are computed exactly to judge a plan."""


@dataclass(frozen=True)
class Fallbacks:
    """What a guard has seen so far.

    Attributes:
        calls: attention calls.
        checked: heads whose error was estimated, each sequence of a batch counting anew.
        fallbacks: those of `checked` that were answered exactly, their estimate being above the limit.
        error: mean of the estimates over `checked`: of the plan, before anything fell back. None before the first.

    A call that checks nothing was answered exactly to begin with: it had no more queries than a check computes, or
    its plan is exact attention on such input.
    """

    calls: int = 0
    checked: int = 0
    fallbacks: int = 0
    error: float | None = None

    def __str__(self) -> str:
        if self.error is None:
            return f"calls: {self.calls}, nothing to check"
        return (
            f"calls: {self.calls}, heads answered exactly: {self.fallbacks} of {self.checked}, "
            f"estimated error of the plan: {self.error:.3g}"
        )


class Guard:
    """Checks a plan on every call, and answers exactly for each sequence and head whose error is above `max_error`.

    Pass it as `fewkeys.attention(..., max_error=Guard(0.05))` and read `fallbacks` afterwards; `fewkeys.apply` makes
    one for each layer.

    The error of a head is estimated from `queries` of its queries, computed exactly: the unbiased estimate of
    `fewkeys.spot_check`, not the upper end of its interval. A head whose true error is near the limit may therefore
    fall on either side; but such mistakes cancel over heads and calls, while the upper end would give up plans that
    keep the limit. Choose a smaller limit where it must never be passed.

    Heads are judged one by one, since a few bad heads usually make a plan bad, and sequences too, so that the answer
    for one does not depend on the others of its batch. In a causal call the whole call is judged at once: later
    tokens may decide whether earlier outputs are the plan's or the exact ones.

    Cost of a call: the plan, plus O(queries n (D + Dv)) per head, plus exact attention for heads that fall back. A
    call with no more than `queries` queries, such as a decoded token, is answered exactly and costs that alone:
    checking every query is answering it.

    Raises `ValueError` or `TypeError` for a negative or non-finite `max_error` and for `queries` below 1.
    """

    def __init__(self, max_error: float, *, queries: int = QUERIES) -> None:
        self.max_error = check_real("max_error", max_error)
        if self.max_error < 0:
            raise ValueError(f"max_error: expected at least 0, got {max_error}; 0.05 allows an error of five percent")
        self.queries = check_count("queries", queries)
        self._seen = Fallbacks()

    @property
    def fallbacks(self) -> Fallbacks:
        """The counts so far."""
        return self._seen

    def count_call(self) -> None:
        """Count an attention call."""
        self._seen = replace(self._seen, calls=self._seen.calls + 1)

    def correct(self, inputs: Inputs, weights: Weights, output: Tensor) -> Tensor:
        """The plan's `output` (B, Hq, Nq, Dv), with the exact one in place of heads above the limit.

        Gradients flow through whichever answers.
        """
        # All heads of all sequences are asked at the same places: no answer depends on who else is in the batch.
        sample = draw(inputs, uniform((self.queries,), inputs.generator, output.device))
        error = sample.mean(sampled_errors(inputs, weights, output, sample))
        real = (sample.count > 0).unsqueeze(-1)
        failed = ~(error <= self.max_error)  # an error that is not a number has failed too
        checked = int(real.sum()) * inputs.query_heads
        fallbacks = int(failed.sum())
        self._count(checked, fallbacks, float(error.sum()))
        if fallbacks == 0:
            return output
        if bool((failed | ~real).all()):
            return exact.attend(inputs, weights)
        if inputs.bias is not None:  # heads of different tables make no problem of one head
            return torch.where(failed[..., None, None], exact.attend(inputs, weights), output)
        sequence, head = failed.nonzero(as_tuple=True)
        answer = exact.attend(_single_heads(inputs, sequence, head), weights)
        return output.index_put((sequence, head), answer.squeeze(1))

    def _count(self, checked: int, fallbacks: int, total: float) -> None:
        seen = self._seen
        known = 0.0 if seen.error is None else seen.error * seen.checked
        every = seen.checked + checked
        error = (known + total) / every if every else None
        self._seen = Fallbacks(seen.calls, every, seen.fallbacks + fallbacks, error)


def _single_heads(inputs: Inputs, sequence: Tensor, head: Tensor) -> Inputs:
    """The problem of these heads alone, (M,) sequences and (M,) query heads, as M sequences of one head."""
    key_head = torch.div(head, inputs.gqa_ratio, rounding_mode="floor")
    return replace(
        inputs,
        query=inputs.query[sequence, head].unsqueeze(1),
        key=inputs.key[sequence, key_head].unsqueeze(1),
        value=inputs.value[sequence, key_head].unsqueeze(1),
        valid=None if inputs.valid is None else inputs.valid[sequence],
        _memory={},
    )
