"""Normalisers and candidates from a small matrix G in place of the keys, and bounds on their rounding.

`Z_i = phi(q_i)^T G phi(q_i)`, `G = sum_l phi(k_l) phi(k_l)^T` over the m monomials of degree p/2 (m = D for p = 2).

**Normalisers.** With `g_a = sqrt(G_aa)`, `sum_l |phi_a(k_l) phi_b(k_l)| <= g_a g_b`. So rounding changes Z_i by at most
`gamma ratio_i Z_i`, where `gamma / u` counts the additions and `ratio_i = (sum_a |phi_a(q_i)| g_a)^2 / Z_i`. A query
is *trusted* if `gamma ratio_i <= TRUST`. The others have hardly any keys near and are answered from their scores.

**Candidates, p = 2.** Let `D = diag(g)` and `ridge = SLACK gamma / TRUST`. For a trusted query
`q^T (G + ridge D^2) q <= Z + ridge (sum_a |q_a| g_a)^2 <= (1 + SLACK) Z`, so by Cauchy-Schwarz

    A_ij = <q, k_j>^2 / Z <= (1 + SLACK) k_j^T (G + ridge D^2)^-1 k_j.

In units of g the matrix has trace `D (1 + ridge)` and eigenvalues of at least the ridge: Cholesky's factor exists in
float64 for every G. The bound is `|W^T k|^2`, `W W^T = (G + ridge D^2)^-1`. In float32 the rounding of `W^T k` is at
most `(D + 4) u |D W|_F |D^-1 k|`, and `|D^-1 k|` at most `sqrt(D (1 + ridge)) |W^T k|`; where the product exceeds
`SLACK / 2` float64 is used. Together these errors stay below 10 %, and keys are candidates from `MARGIN eps` on.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.papers.levattention.keys import BLOCK, ScaledKeys
from fewkeys.sketch.gram import gram, inverse_of
from fewkeys.sketch.lewis import lewis_weights
from fewkeys.sketch.tensor_power import tensor_features, width

BLOCK_FEATURES = 1 << 22
"""Features in memory at once."""
TRUST, SLACK, MARGIN = 1e-8, 0.04, 0.9
"""1 - MARGIN covers SLACK and twice the rounding of the roots of the scores."""


@dataclass(frozen=True, eq=False)
class Normaliser:
    """The normalisers `phi(q)^T G phi(q)`, or `|F phi(q)|^2` for a factor F (R, m) of fewer than m rows.

    `matrix`: G or F. `size` (m,): g. `exact`: G is that of the keys, not of a sketch.
    """

    matrix: Tensor
    size: Tensor
    gamma: float
    degree: int
    exact: bool = True

    @property
    def factored(self) -> bool:
        return len(self.matrix) < len(self.size)

    def __call__(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Normalisers and ratios (M,) of queries (M, D); both may be 0, and nan stands for 0 / 0."""
        features = tensor_features(query, self.degree)
        if self.factored:
            norm = (features @ self.matrix.mT).square().sum(-1)
        else:
            norm = ((features @ self.matrix) * features).sum(-1)
        return norm, (features.abs() @ self.size).square() / norm


def exact_form(keys: ScaledKeys, degree: int) -> Normaliser:
    """Cost O(n m^2), memory O(m^2) and a block."""
    columns = width(keys.dim, degree)
    block = feature_block(columns)
    total = keys.key.new_zeros((columns, columns), dtype=torch.float64)
    for part in keys.blocks(block):
        total += gram(tensor_features(part, degree))
    return Normaliser(total, total.diagonal().sqrt(), _gamma(len(keys), block, columns), degree)


def sketched_form(sketch: Tensor, total: int, degree: int) -> Normaliser:
    """From a sketch F (R, m) of the features of `total` keys."""
    columns, sketch = sketch.shape[1], sketch.double()
    size, gamma = sketch.square().sum(0).sqrt(), _gamma(total, BLOCK, columns)
    if degree == 1 or sketch.shape[0] >= columns:
        sketch = sum(map(gram, sketch.split(BLOCK)), sketch.new_zeros((columns, columns)))
    return Normaliser(sketch, size, gamma, degree, exact=False)


def feature_block(columns: int) -> int:
    """The keys of a block."""
    return min(BLOCK, max(1, BLOCK_FEATURES // columns))


def _gamma(total: int, block: int, columns: int) -> float:
    return (block + total / block + 4 * columns) * torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)
class Basis:
    """Coordinates `k key`, `q query` in which `G + ridge D^2` is the identity; they keep `<q, k>`.

    `rounding`: relative, of `|k key|` in float32.
    """

    key: Tensor
    query: Tensor
    rounding: float


def basis(form: Normaliser) -> Basis:
    """The basis of a normaliser of degree 1."""
    size = torch.where(form.size > 0, form.size, 1.0).unsqueeze(-1)
    ridge = SLACK * form.gamma / TRUST
    factor = torch.linalg.cholesky(form.matrix / size / size.mT + torch.diag(ridge + (form.size == 0).double()))
    root, dim = inverse_of(factor), len(size)
    steps = (dim + 4) * torch.finfo(torch.float32).eps / 2
    return Basis(root / size, size * factor, steps * float(root.norm()) * (dim * (1 + ridge)) ** 0.5)


def candidates(keys: ScaledKeys, form: Normaliser, eps: float, power: float) -> Tensor:
    """The indices of keys that have every entry >= eps of trusted queries. Cost O(n D^2); p > 2: a few times that.

    Lewis weights, for p > 2, miss only what directions below 1e-7 of the strongest add to a score: negligible for
    trusted queries.
    """
    if power == 2:
        change = basis(form)
        return at_least(keys, change.key, change.rounding, MARGIN * eps)
    bounds = lewis_weights(keys.rows(slice(None))[None, None], power).bounds[0, 0]
    return (bounds >= MARGIN * eps).nonzero().squeeze(-1)


def at_least(keys: ScaledKeys, root: Tensor, rounding: float, threshold: float) -> Tensor:
    """The indices of the keys with `|k root|^2 >= threshold`, in float32 unless `rounding` forbids. Cost O(n D C)."""
    dtype = torch.float32 if rounding <= SLACK / 2 else torch.float64
    weight = root.to(dtype)
    scores = torch.cat([(part @ weight).square_().sum(-1) for part in keys.blocks(4 * BLOCK, dtype)])
    return (scores >= threshold).nonzero().squeeze(-1)
