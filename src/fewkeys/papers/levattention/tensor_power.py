"""Symmetric tensor powers, which turn an even power of a dot product into a square.

For degree m the `C(d + m - 1, m)` features are `phi_a(k) = sqrt(m! / (a_1! ... a_d!)) k^a`, a a multi-index with
|a| = m. By the multinomial theorem `<phi(k), phi(q)> = <k, q>^m`, so `<k, q>^(2m) = <phi(k), phi(q)>^2`.
"""

import math
from collections import Counter
from functools import lru_cache
from itertools import combinations_with_replacement

import torch
from torch import Tensor

MAX_WIDTH = 2500
"""The widest features worth a Gram matrix: d = 64 has 2080 at degree 2, 45760 at degree 3."""
MAX_DEGREE = 30
"""Squares of higher powers may leave the range of float64."""


def width(size: int, degree: int) -> int:
    """The number of monomials of a degree in `size` variables."""
    return math.comb(size + degree - 1, degree)


def even_degree(power: float) -> int:
    """`power / 2` if that is an integer up to `MAX_DEGREE`, else 0."""
    return int(power) // 2 if power % 2 == 0 and power <= 2 * MAX_DEGREE else 0


def tensor_features(rows: Tensor, degree: int) -> Tensor:
    """`phi(k)` (..., N, `width(D, degree)`) of rows (..., N, D)."""
    if degree == 1:
        return rows
    index, weight = _monomials(rows.shape[-1], degree)
    index = index.to(rows.device)
    result = rows[..., index[0]]
    for factor in index[1:]:
        result = result * rows[..., factor]
    return result * weight.to(rows)


@lru_cache(maxsize=8)
def _monomials(size: int, degree: int) -> tuple[Tensor, Tensor]:
    """The variables of every monomial (degree, width), and the roots of its coefficient (width,)."""
    factors = list(combinations_with_replacement(range(size), degree))
    powers = (Counter(variables).values() for variables in factors)
    roots = [math.sqrt(math.factorial(degree) / math.prod(map(math.factorial, power))) for power in powers]
    return torch.tensor(factors, device="cpu").T.contiguous(), torch.tensor(roots, dtype=torch.float64, device="cpu")
