"""Running totals of one plan in constant memory: means per layer and head, quantiles over all queries."""

import torch
from torch import Tensor

# The histogram of log10(error): 12 decades in 16,384 bins of 0.17 percent.
_LOW, _HIGH, _BINS = -8.0, 4.0, 16_384


class Tally:
    """Totals over the queries of one plan, (layers, heads), float64: the number `queries`, the sums of `error`, `mass`
    and `slots`, and the numbers of `heavy` entries and of those kept.
    """

    def __init__(self, layers: int, heads: int) -> None:
        zeros = torch.zeros(6, layers, heads, dtype=torch.float64, device="cpu")
        self.queries, self.error, self.mass, self.slots, self.heavy, self.heavy_kept = zeros
        self.histogram = torch.zeros(_BINS, dtype=torch.float64, device="cpu")

    def add(
        self, layer: int, heads: slice, errors: Tensor, mass: Tensor, slots: Tensor, heavy: Tensor, heavy_kept: Tensor
    ) -> None:
        """Add `errors`, `mass` and `slots` (B, H, N) of a block, and marks of entries (B, H, N, Nk)."""
        self.queries[layer, heads] += errors.shape[0] * errors.shape[2]
        for total, numbers in ((self.error, errors), (self.mass, mass), (self.slots, slots)):
            total[layer, heads] += numbers.double().sum((0, 2)).cpu()
        for total, marks in ((self.heavy, heavy), (self.heavy_kept, heavy_kept)):
            total[layer, heads] += marks.sum((0, 2, 3)).cpu()
        bins = (errors.double().clamp_min(10.0**_LOW).log10() - _LOW) * (_BINS / (_HIGH - _LOW))
        self.histogram += torch.bincount(bins.long().clamp(0, _BINS - 1).flatten().cpu(), minlength=_BINS)

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean error, mass and slots of queries, per layer and head (L, H)."""
        return self.error / self.queries, self.mass / self.queries, self.slots / self.queries

    def quantile(self, q: float) -> float:
        """The error that a share `q` of all queries does not exceed; 0 below 1e-8, where float32 ends."""
        reached = self.histogram.cumsum(0) >= q * self.histogram.sum()
        index = int(reached.int().argmax())
        return 0.0 if index == 0 else float(10.0 ** (_LOW + (index + 0.5) * (_HIGH - _LOW) / _BINS))
