"""Normalisers and candidates from a small matrix G in place of the keys, and bounds on their rounding.

`Z_i = phi(q_i)^T G phi(q_i)`, `G = sum_l phi(k_l) phi(k_l)^T` over the m monomials of degree p/2 (m = D for p = 2).

**Normalisers.** With `g_a = sqrt(G_aa)`, rounding changes Z_i by at most `gamma ratio_i Z_i`, where `gamma / u` counts
the additions and `ratio_i = (sum_a |phi_a(q_i)| g_a)^2 / Z_i`. A query is *trusted* if `gamma ratio_i <= TRUST`. The
others have hardly any keys near and are answered from their scores.

**Candidates, p = 2.** Keys with `k_j^T (G + ridge diag(g)^2)^-1 k_j >= MARGIN eps`, `ridge = SLACK gamma / TRUST`, have
every entry >= eps of trusted queries (proof: docs/levattention.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.papers.levattention.keys import BLOCK, ScaledKeys
from fewkeys.papers.levattention.lewis import lewis_weights
from fewkeys.papers.levattention.tensor_power import tensor_features, width
from fewkeys.sketch.gram import inverse_of

BLOCK_FEATURES = 1 << 22
"""Features in memory at once."""
TRUST, SLACK, MARGIN = 1e-8, 0.04, 0.9
"""1 - MARGIN covers SLACK and twice the rounding of the roots of the scores."""


@dataclass(frozen=True, eq=False)
class Normaliser:
    """The normalisers `phi(q)^T G phi(q)`. `matrix`: G. `size` (m,): g."""

    matrix: Tensor
    size: Tensor
    gamma: float
    degree: int

    def of(self, features: Tensor) -> Tensor:
        return ((features @ self.matrix) * features).sum(-1)

    def trusted(self, query: Tensor, eps: float, power: float) -> tuple[Tensor, Tensor, Tensor]:
        """Normalisers (M,), the relative rounding of an entry of `eps`, which queries (M, D) are trusted."""
        features = tensor_features(query, self.degree)
        norm = self.of(features)
        ratio = (features.abs() @ self.size).square() / norm  # nan for 0 / 0
        # The second term is the rounding of the score, `D u sum_a |q_a k_ja|`.
        unit = torch.finfo(torch.float64).eps
        doubt = self.gamma * ratio + 2 * power * query.shape[1] * unit * (ratio / eps) ** (1 / power)
        return norm, doubt, (norm > 0) & (doubt <= TRUST)


def exact_form(keys: ScaledKeys, degree: int) -> Normaliser:
    """Cost O(n m^2), memory O(m^2) and a block."""
    columns = width(keys.dim, degree)
    block = min(BLOCK, max(1, BLOCK_FEATURES // columns))
    total = keys.key.new_zeros((columns, columns), dtype=torch.float64)
    for part in keys.blocks(block):
        features = tensor_features(part, degree)
        total += features.mT @ features
    return Normaliser(total, total.diagonal().sqrt(), rounding_of(len(keys), block, columns), degree)


def rounding_of(total: int, block: int, columns: int) -> float:
    """gamma, for `total` keys in blocks of `block`."""
    return (block + total / block + 4 * columns) * torch.finfo(torch.float64).eps


def basis(form: Normaliser) -> tuple[Tensor, float]:
    """W (D, D) with `W W^T = (G + ridge diag(g)^2)^-1`, and the relative rounding of `|k W|` in float32."""
    size = torch.where(form.size > 0, form.size, 1.0).unsqueeze(-1)
    ridge = SLACK * form.gamma / TRUST
    factor = torch.linalg.cholesky(form.matrix / size / size.mT + torch.diag(ridge + (form.size == 0).double()))
    root, dim = inverse_of(factor), len(size)
    steps = (dim + 4) * torch.finfo(torch.float32).eps / 2
    return root / size, steps * float(root.norm()) * (dim * (1 + ridge)) ** 0.5


def candidates(keys: ScaledKeys, form: Normaliser, eps: float, power: float) -> Tensor:
    """The indices of keys that have every entry >= eps of trusted queries. Cost O(n D^2); p > 2: a few times that.

    Lewis weights, for p > 2, miss only what directions below 1e-7 of the strongest add to a score: negligible for
    trusted queries.
    """
    if power == 2:
        return at_least(keys, *basis(form), MARGIN * eps)
    bounds = lewis_weights(keys.rows(slice(None))[None, None], power).bounds[0, 0]
    return (bounds >= MARGIN * eps).nonzero().squeeze(-1)


def at_least(keys: ScaledKeys, root: Tensor, rounding: float, threshold: float) -> Tensor:
    """The indices of the keys with `|k root|^2 >= threshold`, in float32 unless `rounding` forbids. Cost O(n D C)."""
    dtype = torch.float32 if rounding <= SLACK / 2 else torch.float64
    weight = root.to(dtype)
    scores = torch.cat([(part @ weight).square_().sum(-1) for part in keys.blocks(4 * BLOCK, dtype)])
    return (scores >= threshold).nonzero().squeeze(-1)
