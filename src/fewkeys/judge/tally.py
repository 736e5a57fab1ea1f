"""Running totals of one plan in constant memory: means per layer and head, quantiles over all queries."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Quantiles come from a histogram of log10(error): 12 decades in 16,384 bins, so a bin is 0.17 percent wide.
_LOW, _HIGH, _BINS = -8.0, 4.0, 16_384


class Tally:
    """Totals over the queries of one plan.

    `add` takes a block of queries of one layer, at a cost linear in their number. Memory: O(layers * heads) and one
    histogram.
    """

    def __init__(self, layers: int, heads: int) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device="cpu")

        self.queries, self.errors, self.masses = zeros(layers, heads), zeros(layers, heads), zeros(layers, heads)
        self.heavy, self.heavy_kept, self.slots = zeros(layers, heads), zeros(layers, heads), zeros(layers, heads)
        self.histogram = zeros(_BINS)

    def add(
        self, layer: int, heads: slice, errors: Tensor, mass: Tensor, slots: Tensor, heavy: Tensor, heavy_kept: Tensor
    ) -> None:
        """Add a block of queries of heads `heads`.

        `errors`, `mass` and `slots` are per query (B, H, N); `heavy` and `heavy_kept` (H,) count the heavy entries and
        the kept ones of them.
        """
        self.queries[layer, heads] += errors.shape[0] * errors.shape[2]
        for total, part in ((self.errors, errors), (self.masses, mass), (self.slots, slots)):
            total[layer, heads] += part.double().sum((0, 2)).cpu()
        self.heavy[layer, heads] += heavy.double().cpu()
        self.heavy_kept[layer, heads] += heavy_kept.double().cpu()
        bins = (errors.double().clamp_min(10.0**_LOW).log10() - _LOW) * (_BINS / (_HIGH - _LOW))
        self.histogram += torch.bincount(bins.long().clamp(0, _BINS - 1).flatten().cpu(), minlength=_BINS)

    def mean(self, name: Literal["errors", "masses", "slots"]) -> Tensor:
        """Mean over queries, per layer and head (L, H)."""
        return {"errors": self.errors, "masses": self.masses, "slots": self.slots}[name] / self.queries

    def overall(self, name: Literal["errors", "masses", "slots"]) -> float:
        """Mean over queries, heads and layers."""
        return float(self.mean(name).mean())

    def quantile(self, q: float) -> float:
        """The error that a share `q` of all queries does not exceed; 0 below 1e-8, where float32 ends."""
        reached = self.histogram.cumsum(0) >= q * self.histogram.sum()
        index = int(reached.int().argmax())
        return 0.0 if index == 0 else float(10.0 ** (_LOW + (index + 0.5) * (_HIGH - _LOW) / _BINS))
