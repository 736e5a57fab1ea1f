"""The result: a sparse attention matrix per batch entry and head."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

Entries = tuple[Tensor, Tensor, Tensor]
"""Rows, columns and values of some entries of one head."""


@dataclass(frozen=True, eq=False)
class HeavyEntries:
    """The entries >= eps of attention: `indices` (4, M), int64, as (batch, query head, query, key); `values` (M,).

    Sorted by batch, head, query, key, each once. `shape` is (B, Hq, Nq, Nk).
    """

    indices: Tensor
    values: Tensor
    shape: tuple[int, int, int, int]

    def __len__(self) -> int:
        return self.values.numel()

    def to_coo(self) -> Tensor:
        """The entries as a coalesced sparse tensor (B, Hq, Nq, Nk)."""
        return torch.sparse_coo_tensor(self.indices, self.values, self.shape, check_invariants=True, is_coalesced=True)

    def to_csr(self, batch: int, head: int) -> Tensor:
        """The entries of one query head as a sparse CSR matrix (Nq, Nk).

        Raises `ValueError` for a batch entry or a head that is not there.
        """
        for name, value, size in (("batch", batch, self.shape[0]), ("head", head, self.shape[1])):
            if value not in range(size):
                raise ValueError(f"{name}: expected an integer from 0 to {size - 1}, got {value!r}")
        of_head = (self.indices[0] == batch) & (self.indices[1] == head)
        query, key = self.indices[2, of_head], self.indices[3, of_head]
        starts = torch.zeros(self.shape[2] + 1, dtype=torch.int64, device=query.device)
        starts[1:] = torch.bincount(query, minlength=self.shape[2]).cumsum(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(starts, key, self.values[of_head], self.shape[2:], check_invariants=True)
