"""Running totals of one plan in constant memory: means per layer and head, quantiles over all queries."""

from __future__ import annotations

import torch
from torch import Tensor

# Quantiles come from a histogram of log10(error): 12 decades in 16,384 bins, so a bin is 0.17 percent wide.
_LOW, _HIGH, _BINS = -8.0, 4.0, 16_384


class Tally:
    """Totals over the queries of one plan, (layers, heads), float64: `queries`, and of all queries `error`, `mass` and
    `slots`; `heavy` counts the heavy entries, `heavy_kept` the kept ones of them.

    `add` takes a block of queries of one layer, at a cost linear in their number. Memory: O(layers * heads) and one
    histogram.
    """

    def __init__(self, layers: int, heads: int) -> None:
        zeros = torch.zeros(6, layers, heads, dtype=torch.float64, device="cpu")
        self.queries, self.error, self.mass, self.slots, self.heavy, self.heavy_kept = zeros
        self.histogram = torch.zeros(_BINS, dtype=torch.float64, device="cpu")

    def add(
        self, layer: int, heads: slice, errors: Tensor, mass: Tensor, slots: Tensor, heavy: Tensor, heavy_kept: Tensor
    ) -> None:
        """Add a block of queries of some heads: `errors`, `mass`, `slots` per query (B, H, N), the others per head."""
        self.queries[layer, heads] += errors.shape[0] * errors.shape[2]
        for total, part in ((self.error, errors), (self.mass, mass), (self.slots, slots)):
            total[layer, heads] += part.double().sum((0, 2)).cpu()
        self.heavy[layer, heads] += heavy.double().cpu()
        self.heavy_kept[layer, heads] += heavy_kept.double().cpu()
        bins = (errors.double().clamp_min(10.0**_LOW).log10() - _LOW) * (_BINS / (_HIGH - _LOW))
        self.histogram += torch.bincount(bins.long().clamp(0, _BINS - 1).flatten().cpu(), minlength=_BINS)

    def means(self) -> dict[str, Tensor]:
        """Means over queries, per layer and head (L, H)."""
        return {name: getattr(self, name) / self.queries for name in ("error", "mass", "slots")}

    def quantile(self, q: float) -> float:
        """The error that a share `q` of all queries does not exceed; 0 below 1e-8, where float32 ends."""
        reached = self.histogram.cumsum(0) >= q * self.histogram.sum()
        index = int(reached.int().argmax())
        return 0.0 if index == 0 else float(10.0 ** (_LOW + (index + 0.5) * (_HIGH - _LOW) / _BINS))
