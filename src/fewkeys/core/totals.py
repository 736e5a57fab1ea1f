"""Totals over a sequence that may be distributed over processes."""

import torch
from torch import Tensor


class Totals:
    """Totals over the parts of a sequence, from this process's part. Here this is the only one."""

    def sum(self, part: Tensor) -> Tensor:
        return part

    def max(self, part: Tensor) -> Tensor:
        return part

    def logsumexp(self, part: Tensor) -> Tensor:
        return part

    def counted(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the parts before this one, and the sum of all parts."""
        return part.new_zeros(part.shape), part

    def rows(self, part: Tensor) -> Tensor:
        """The rows (B, H, N, ...) of all parts, one after the other."""
        return part


WHOLE = Totals()


def row_maximum(rows: Tensor) -> Tensor:
    """The largest entry (..., 1) of rows (..., N), this process's part of a `max`; -inf for empty rows."""
    if not rows.shape[-1]:
        return rows.new_full((*rows.shape[:-1], 1), -torch.inf)
    return rows.amax(-1, keepdim=True)
