"""Random projections: few random combinations of many rows that keep the length of vectors.

`S` (m, n) is drawn without looking at the data. With probability 1 - delta, `|S x|^2` is `|x|^2` up to a relative error
e in (0, 1): for some given vectors x, or for all x of a subspace of R^n at once. The vectors `K y` form one of
dimension rank(K) <= D, so `S K` (m, D) answers for every y, also for one chosen after looking at S. The rows m that
suffice:

- **Gaussian**, independent entries N(0, 1/m). `m |S x|^2 / |x|^2` is chi-squared with m degrees of freedom: it leaves
  (1 +- e) m with probability at most `2 exp(-m (e - log(1 + e)) / 2)` (Chernoff). On a subspace of dimension r the
  singular values of S lie in `1 +- (sqrt(r / m) + t)` with probability `1 - 2 exp(-m t^2 / 2)` (Davidson and Szarek
  2001, theorem II.13).
- **Hadamard**, the fast JL transform: random signs, a Walsh-Hadamard transform over the next power of two N, m of its
  rows without replacement. A row of `H D U`, U orthonormal (n, r), has a squared length of at most M / N for
  `M = (sqrt(r) + sqrt(8 log(N / delta)))^2`, for one given vector `2 log(2 N / delta)` (Hoeffding), and then the
  matrix Chernoff bound gives `2 r exp(-m ((1 + e) log(1 + e) - e) / M)` (Tropp, arXiv 1011.1595, lemmas 3.3, 3.4).
- **CountSketch**, the sparse embedding (Clarkson and Woodruff, arXiv 1207.6365): every row joins one random bucket of
  m, with a random sign. The pairs of rows that share a bucket give `E (|S x|^2 - 1)^2 <= 2 / m` for a unit x and
  `E |U^T S^T S U - I|_F^2 <= (r^2 + r) / m`; Chebyshev's inequality does the rest.

Cost of `S K`: `n m D`, `n D log n` and `n D`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import reduce
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

RADIX = 64
"""The largest order of the Hadamard matrix in one product."""


class Projection(ABC):
    """A family of random matrices S (m, n)."""

    @abstractmethod
    def rows_for_vectors(self, count: int, total: int, error: float, failure: float) -> int:
        """The m that keeps the squared lengths of `count` given vectors of `total` entries within `1 +- error`."""

    @abstractmethod
    def rows_for_subspace(self, rank: int, total: int, error: float, failure: float) -> int:
        """The same for all vectors of a given subspace of dimension `rank` at once."""

    @abstractmethod
    def apply(self, blocks: Iterator[Tensor], rows: int, generator: torch.Generator) -> Tensor:
        """`S K` (rows, D) for a K that comes in blocks of rows, in their dtype; S is drawn here."""


class Gaussian(Projection):
    """The fewest rows, and a dense product."""

    def rows_for_vectors(self, count: int, total: int, error: float, failure: float) -> int:
        return math.ceil(2 * math.log(2 * count / failure) / (error - math.log1p(error)))

    def rows_for_subspace(self, rank: int, total: int, error: float, failure: float) -> int:
        spread = math.sqrt(1 + error) - 1
        return math.ceil(((math.sqrt(rank) + math.sqrt(2 * math.log(2 / failure))) / spread) ** 2)

    def apply(self, blocks: Iterator[Tensor], rows: int, generator: torch.Generator) -> Tensor:
        parts = (normal((rows, block.shape[0]), block, generator) @ block for block in blocks)
        return reduce(torch.add, parts) / math.sqrt(rows)


class Hadamard(Projection):
    """Holds all of K, padded to a power of two."""

    def rows_for_vectors(self, count: int, total: int, error: float, failure: float) -> int:
        flat = 2 * math.log(4 * _power(total) * count / failure)
        return self._rows(flat, count, error, failure)

    def rows_for_subspace(self, rank: int, total: int, error: float, failure: float) -> int:
        flat = (math.sqrt(rank) + math.sqrt(8 * math.log(2 * _power(total) / failure))) ** 2
        return self._rows(flat, rank, error, failure)

    def _rows(self, flat: float, rank: int, error: float, failure: float) -> int:
        return math.ceil(flat * math.log(4 * rank / failure) / ((1 + error) * math.log1p(error) - error))

    def apply(self, blocks: Iterator[Tensor], rows: int, generator: torch.Generator) -> Tensor:
        matrix = torch.cat([block * signs(block.shape[0], block, generator).unsqueeze(-1) for block in blocks])
        size = _power(matrix.shape[0])
        matrix = pad(matrix, (0, 0, 0, size - matrix.shape[0]))
        chosen = torch.randperm(size, generator=generator, device=generator.device)[:rows].to(matrix.device)
        return hadamard(matrix)[chosen] / math.sqrt(rows)


class CountSketch(Projection):
    """Every key is added to, or subtracted from, one of m sums."""

    def rows_for_vectors(self, count: int, total: int, error: float, failure: float) -> int:
        return math.ceil(2 * count / (failure * error**2))

    def rows_for_subspace(self, rank: int, total: int, error: float, failure: float) -> int:
        return math.ceil((rank**2 + rank) / (failure * error**2))

    def apply(self, blocks: Iterator[Tensor], rows: int, generator: torch.Generator) -> Tensor:
        first = next(blocks)
        sums = first.new_zeros(rows, first.shape[1])
        for block in chain([first], blocks):
            bucket = torch.randint(rows, (block.shape[0],), generator=generator, device=generator.device)
            sign = signs(block.shape[0], block, generator)
            sums.index_add_(0, bucket.to(block.device), block * sign.unsqueeze(-1))
        return sums


PROJECTIONS: dict[str, Projection] = {"gaussian": Gaussian(), "hadamard": Hadamard(), "countsketch": CountSketch()}


def hadamard(matrix: Tensor) -> Tensor:
    """`H X` for X (N, D), N a power of two and H the symmetric matrix of signs `(-1)^popcount(i & j)`; `H H = N I`."""
    size, done = matrix.shape[0], 1
    pair = matrix.new_tensor([[1, 1], [1, -1]])
    while done < size:
        order = min(RADIX, size // done)
        factor = reduce(torch.kron, [pair] * (order.bit_length() - 1))
        matrix = (factor @ matrix.reshape(size // (done * order), order, -1)).reshape(size, -1)
        done *= order
    return matrix


def normal(shape: tuple[int, ...], template: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, in the dtype and on the device of `template`."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=template.dtype).to(template.device)


def signs(count: int, template: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs, in the dtype and on the device of `template`."""
    return torch.randint(2, (count,), generator=generator, device=generator.device).to(template) * 2 - 1


def _power(total: int) -> int:
    """The next power of two."""
    return 1 << (total - 1).bit_length()
