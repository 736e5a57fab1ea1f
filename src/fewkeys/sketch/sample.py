"""Evenly spaced samples of real rows, and centring: padding changes nothing."""

from dataclasses import dataclass

from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import marked_places, take
from fewkeys.core.totals import WHOLE, Totals

PART = 4
"""One in so many keys is sampled, within bounds."""


@dataclass(frozen=True, eq=False)
class Subset:
    """Rows of every sequence: those in a slice, or at places (B, M); `real` (B, M), None: all."""

    place: slice | Tensor
    real: Tensor | None = None

    def take(self, rows: Tensor) -> Tensor:
        """These rows (B, H, M, F) of (B, H, N, F), zero where they are not real."""
        if isinstance(self.place, slice):
            rows = rows[:, :, self.place]
        else:
            rows = take(rows, self.place[:, None].expand(-1, rows.shape[1], -1))
        if self.real is None:
            return rows
        # A product is several times as fast as masked_fill.
        return rows[:, :, : self.real.shape[1]] * self.real[:, None, :, None].to(rows.dtype)


def sample(real: Tensor, most: int | Tensor) -> Subset:
    """Every s-th true entry of `real` (B, N), about `most` (an int, or (B, 1)) of each row."""
    stride = (real.sum(-1, keepdim=True) // most).clamp_min(1)
    sampled = real & ((real.cumsum(-1) - 1) % stride == 0)
    step = int(stride.max())
    if step == int(stride.min()) and not bool((real[:, 1:] & ~real[:, :-1]).any()):  # a slice suffices
        return Subset(slice(None, None, step), sampled[:, ::step][:, : max(1, int(sampled.sum(-1).max()))])
    index = marked_places(sampled, least=1)
    return Subset(index, sampled.gather(-1, index))


def sample_keys(inputs: Inputs, least: int, most: int) -> Subset:
    """About a quarter of the real keys of every sequence, from `least` to `most`."""
    if inputs.valid is not None:
        return sample(inputs.valid, (inputs.valid.sum(-1, keepdim=True) // PART).clamp(least, most))
    stride = max(1, inputs.whole.keys // min(most, max(least, inputs.whole.keys // PART)))
    return Subset(slice(-inputs.whole.first_key % stride, None, stride))


def centre(rows: Tensor, valid: Tensor | None, totals: Totals = WHOLE) -> Tensor:
    """Rows (B, H, N, D) minus the mean of those `valid` (B, N); the others are zero."""
    count = rows.new_full((), rows.shape[2]) if valid is None else valid.sum(-1)[:, None, None, None]
    rows = rows - totals.sum(rows.sum(-2, keepdim=True)) / totals.sum(count).clamp_min(1)
    return rows if valid is None else rows.masked_fill(~valid[:, None, :, None], 0.0)
