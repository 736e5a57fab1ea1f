"""Totals over a sequence of which a process may hold a part."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Totals(ABC):
    """Totals over all keys of a head, of which this process may hold a part: each method takes the part's total."""

    @abstractmethod
    def sum(self, part: Tensor) -> Tensor:
        """The sum of all parts."""

    @abstractmethod
    def max(self, part: Tensor) -> Tensor:
        """The entrywise largest of all parts."""

    @abstractmethod
    def logsumexp(self, part: Tensor) -> Tensor:
        """The logarithm of the sum of exponentials, where each part is one."""

    @abstractmethod
    def counted(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the parts before this one, and that of all."""

    @abstractmethod
    def rows(self, part: Tensor) -> Tensor:
        """The rows (B, H, N, ...) of all parts, one after the other."""


class Whole(Totals):
    """This process holds all keys: its totals are the totals."""

    def sum(self, part: Tensor) -> Tensor:
        return part

    def max(self, part: Tensor) -> Tensor:
        return part

    def logsumexp(self, part: Tensor) -> Tensor:
        return part

    def counted(self, part: Tensor) -> tuple[Tensor, Tensor]:
        return part.new_zeros(part.shape), part

    def rows(self, part: Tensor) -> Tensor:
        return part


WHOLE = Whole()
