"""Attention by a rule: for every query the keys that it keeps, the stand-ins, and how many means it scores.

Slow and simple: all scores are computed and masked. One causal sequence at a time, without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from fewkeys.captures.capture import AttentionInputs


@dataclass(frozen=True, eq=False)
class Look:
    """What queries start .. stop - 1 attend to.

    `kept` (Hkv, G, M, stop), bool: keys kept exactly; later keys are hidden whatever it says. `scored` (Hkv, G, M): how
    many means, pages or the like each query scored. `logit` (Hkv, G, M, U) and `value` (Hkv, U, Dv): stand-ins; -inf
    where a query does not use one.
    """

    start: int
    stop: int
    kept: Tensor
    scored: Tensor
    logit: Tensor | None = None
    value: Tensor | None = None


class Rule(Protocol):
    """From scaled queries (Hkv, G, N, D), keys and values (Hkv, N, D) to what every query attends to, in order."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Look]: ...


@dataclass
class ByRule:
    """Answers the attention calls of a model by a rule, and counts what queries from `first` on pay."""

    rule: Rule
    first: int
    spent: float = field(default=0.0, init=False)
    queries: int = field(default=0, init=False)

    @property
    def paid(self) -> float:
        """Kept keys and scored means, averaged over queries, heads and layers."""
        return self.spent / max(1, self.queries)

    def __call__(self, layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        if len(inputs.key) > 1 or inputs.key_mask is not None or inputs.query_offset or not inputs.is_causal:
            raise ValueError("inputs: expected one causal sequence from its beginning, without padding")
        key, value = inputs.key[0], inputs.value[0]
        query = (inputs.query[0] * inputs.scale).unflatten(0, (len(key), -1))
        out = torch.cat([self._attend(query, key, value, look) for look in self.rule(query, key, value)], 2)
        return out.flatten(0, 1).unsqueeze(0)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, look: Look) -> Tensor:
        """(Hkv, G, M, Dv)."""
        place = torch.arange(look.stop)
        kept = look.kept & (place <= place[look.start :, None])
        late = slice(max(0, self.first - look.start), None)
        paid = (kept.sum(-1) + look.scored)[:, :, late]
        self.spent, self.queries = self.spent + float(paid.sum()), self.queries + paid.numel()
        scores = query[:, :, look.start : look.stop] @ key[:, None, : look.stop].mT
        scores = scores.masked_fill_(~kept, -torch.inf)
        if look.logit is None or look.value is None:
            return scores.softmax(-1) @ value[:, None, : look.stop]
        weights = torch.cat([scores, look.logit], -1).softmax(-1)
        return weights[..., : look.stop] @ value[:, None, : look.stop] + weights[..., look.stop :] @ look.value[:, None]
