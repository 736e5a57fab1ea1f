"""The keys of one head, in blocks in float64, scaled to sizes near one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fewkeys.sketch.gram import power_of_two

BLOCK = 1024
"""Keys converted at once, which fit a core's cache with their products."""
MODERATE = 60
"""Columns whose largest numbers to the power p are within 2^+-60 are not scaled."""


class ScaledKeys:
    """Keys (N, D) of any floating dtype, divided by powers of two, without rounding, if columns are of extreme sizes.

    `largest` (D,), float64: the largest number of each column then.
    """

    def __init__(self, key: Tensor, power: float) -> None:
        largest = torch.stack([part.abs().amax(0) for part in key.split(BLOCK)]).amax(0).double()
        scale = power_of_two(largest)
        self.key = key
        self.scale = scale if bool((scale.log2().abs() > MODERATE / max(power, 2.0)).any()) else None
        self.largest = largest if self.scale is None else largest / self.scale

    def __len__(self) -> int:
        return self.key.shape[0]

    @property
    def dim(self) -> int:
        return self.key.shape[1]

    def blocks(self, size: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
        for part in self.key.split(size):
            yield self._scaled(part, dtype)

    def rows(self, index: Tensor | slice) -> Tensor:
        return self._scaled(self.key[index], torch.float64)

    def queries(self, query: Tensor) -> Tensor:
        """Queries (M, D), in float64, whose attention to the scaled keys is that of `query` to the keys. A power of two
        for each query cancels in attention.
        """
        query = _unit(query.double())
        return query if self.scale is None else _unit(query * self.scale)

    def _scaled(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        return part.to(dtype) if self.scale is None else (part.double() / self.scale).to(dtype)


def _unit(rows: Tensor) -> Tensor:
    return rows / power_of_two(rows.abs().amax(-1, keepdim=True))
