"""`heavy_entries` from random sketches (the paper's remarks on faster algorithms): estimates, errors, failure
probabilities. docs/levattention.md has the times: they rarely save any.

Let `Z_i = |K q_i|^2`, the normalisers of power 2, and `F = S K` for a projection S (projections.py).

- *Normalisers.* `Z~_i = |F q_i|^2`, within `(1 +- e) Z_i`. Even p > 2: the same of the tensor powers. For p = 2 an
  estimated entry is at most `k_j^T (F^T F)^+ k_j`, for every q and every F. So the keys with such scores >= eps have
  all estimated entries >= eps.
- *Scores.* With `R^T R = F^T F` the score above is `|R^-T k_j|^2 = sup_y <k_j, y>^2 / |F y|^2`. If
  `|F y|^2 <= (1 + f) |K y|^2` for all y, it is at least the leverage score over `1 + f`. The lengths of the rows
  `R^-T k_j` are estimated from C random combinations of their D numbers. By the lower tail of chi-squared an estimate
  is below `1 - h` of the truth with probability at most `exp(-C (-h - log(1 - h)) / 2)`, and at most `D / eps` keys
  have a score >= eps. So keys whose estimate reaches `eps (1 - h) / (1 + f)` include all of these; a second pass, with
  h = 0, discards the others.
- *Numerators.* `<q_i, k_j> = <R q_i, R^-T k_j>` is estimated from CountSketches of the two rows, m sums each. The
  estimate is unbiased with variance at most `2 |R q_i|^2 |R^-T k_j|^2 / m`, so by Chebyshev's inequality it errs by
  more than `a |R q_i| |R^-T k_j|` with probability at most `2 / (m a^2)`. Divided by `|R q_i| = sqrt(Z~_i)`: the root
  of an entry is off by at most a times the root of the key's score.

Queries that are not trusted (gram.py) are answered from all scores: the statements hold for all queries.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from experiments.levattention.projections import PROJECTIONS, CountSketch, normal
from torch import Tensor

from fewkeys.core.precision import full_precision, working_dtype
from fewkeys.core.validation import check_inputs, check_real
from fewkeys.papers.levattention.gram import (
    BLOCK_FEATURES,
    MARGIN,
    Normaliser,
    at_least,
    basis,
    candidates,
    exact_form,
    rounding_of,
)
from fewkeys.papers.levattention.keys import BLOCK, ScaledKeys
from fewkeys.papers.levattention.search import SCORES, Entries, HeavyEntries, by_head, directly_of, raised
from fewkeys.papers.levattention.tensor_power import MAX_WIDTH, even_degree, tensor_features, width


@dataclass(frozen=True)
class Sketched:
    """The estimated parts of heavy entries, each with its error; None: exact.

    Returned are the entries of candidates with an estimate A~ of at least eps.

    Args:
        normalizers: e in (0, 1), any even power: with probability `1 - failure`, for all queries of the call,
            `A~ = A c` with one factor c in `[1 / (1 + e), 1 / (1 - e)]` per query. So every entry >= `(1 + e) eps` is
            returned and none below `(1 - e) eps`.
        scores: s in (0, 1), power 2: keys are candidates from an estimated leverage score of `(1 - s) eps` on. With
            probability `1 - failure` no entry >= eps is missing, also for queries chosen to break the sketch. Alone it
            changes no value.
        numerators: a in (0, 1), power 2: for each pair of a query and a candidate, with probability `1 - failure`,
            `sqrt(A~)` is within `a sqrt(t)` of what the exact numerator would give, t <= 1 the leverage score of the
            key (beside `normalizers`: its estimate).
        failure: delta in (0, 1), of normalisers and scores for the whole call, of numerators per pair.
        projection: S for normalisers and scores: "gaussian", "hadamard" (fast JL) or "countsketch" (sparse).

    A sketch no smaller than its input is replaced by the exact computation. Cost per head: `S K` in place of `K^T K`,
    n C in place of n D products of D numbers for the scores, m in place of D products for a pair of query and
    candidate. `TypeError`, `ValueError` for numbers outside (0, 1), an unknown projection, nothing to estimate.

    Source: LevAttention (arXiv 2410.05462), remarks on faster algorithms.
    """

    normalizers: float | None = None
    scores: float | None = None
    numerators: float | None = None
    failure: float = 0.01
    projection: str = "gaussian"

    def __post_init__(self) -> None:
        for name in ("normalizers", "scores", "numerators"):
            if (value := getattr(self, name)) is not None:
                check_real(f"Sketched {name}", value, above=0.0, below=1.0)
        if self.normalizers is None and self.scores is None and self.numerators is None:
            raise ValueError("Sketched: expected an error for normalizers, scores or numerators, got none; give one")
        check_real("Sketched failure", self.failure, above=0.0, below=1.0)
        if self.projection not in PROJECTIONS:
            raise ValueError(f"Sketched projection: expected one of {sorted(PROJECTIONS)}, got {self.projection!r}")

    def check(self, power: float, dim: int) -> None:
        """Raise `ValueError` for a power for which these parts cannot be estimated."""
        degree = even_degree(power)
        if (self.scores or self.numerators) and power != 2:
            raise ValueError(f"sketch: expected power=2 for scores and numerators, got power={power}; leave them None")
        if not degree or width(dim, degree) > MAX_WIDTH:
            raise ValueError(
                f"sketch: expected an even power with at most {MAX_WIDTH} monomials in {dim} variables, got "
                f"power={power}; leave sketch=None"
            )


class Numerators(NamedTuple):
    """Estimated scores of queries q and candidates j: `(q @ query) . key[j]`."""

    query: Tensor
    key: Tensor


@dataclass(frozen=True, eq=False)
class Estimated(Normaliser):
    """Normalisers by a sketch: `|F phi(q)|^2` where `matrix` is a factor F (R, m) of fewer than m rows."""

    def of(self, features: Tensor) -> Tensor:
        if len(self.matrix) >= len(self.size):
            return super().of(features)
        return (features @ self.matrix.mT).square().sum(-1)


Parts = tuple[Normaliser, Tensor, Numerators | None]
"""Normalisers, the indices of the candidates, and numerators (None: exact ones)."""


@full_precision()
@torch.no_grad()
def sketched_entries(
    query: Tensor,
    key: Tensor,
    eps: float,
    power: float = 2.0,
    *,
    sketch: Sketched,
    lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> HeavyEntries:
    """`heavy_entries` with parts estimated by `sketch`, drawn from `generator` (default: seed 0 at every call)."""
    x = check_inputs(query, key, key, lengths=lengths, generator=generator)
    sketch.check(power, x.head_dim)
    generator = generator or torch.Generator("cpu").manual_seed(0)
    heads = x.batch * x.kv_heads

    def entries(rows: Tensor, keys: ScaledKeys) -> Iterator[Entries]:
        return _entries(rows, keys, eps, power, sketched_parts(sketch, len(rows), heads, keys, eps, power, generator))

    return by_head(x, power, entries)


def _entries(query: Tensor, keys: ScaledKeys, eps: float, power: float, parts: Parts) -> Iterator[Entries]:
    """The entries of queries (M, D): of trusted queries from `parts`, of the others directly."""
    form, chosen, numerators = parts
    key_rows = keys.rows(chosen) if numerators is None else numerators.key
    direct, start = (query != 0).any(-1), 0
    for part in query.split(max(1, SCORES // max(form.size.numel(), chosen.numel()))):
        norm, _, trusted = form.trusted(part, eps, power)
        weight = raised((part if numerators is None else part @ numerators.query) @ key_rows.mT, power)
        row, column = (weight >= torch.where(trusted, eps * norm, torch.inf).unsqueeze(-1)).nonzero(as_tuple=True)
        direct[start : start + len(part)] &= ~trusted
        yield row + start, chosen[column], weight[row, column] / norm[row]
        start += len(part)
    yield from directly_of(query, direct, keys, eps, power)


def sketched_parts(
    sketch: Sketched, queries: int, heads: int, keys: ScaledKeys, eps: float, power: float, generator: torch.Generator
) -> Parts:
    """The parts for one head of `heads`."""
    delta, degree, total = sketch.failure / heads, even_degree(power), len(keys)
    columns = width(keys.dim, degree)
    rows = sketch_rows(sketch, queries, total, columns, delta)
    if rows == total:
        form = exact_form(keys, degree)
    else:
        blocks = keys.blocks(min(BLOCK, max(1, BLOCK_FEATURES // columns)), working_dtype(keys.key.dtype))
        features = (tensor_features(part, degree) for part in blocks)
        form = sketched_form(PROJECTIONS[sketch.projection].apply(features, rows, generator), total, degree)
    if sketch.scores is None:
        chosen = candidates(keys, form, eps, power)
    else:
        chosen = _candidates(keys, form, eps, sketch.scores, delta, generator)
    return form, chosen, _numerators(sketch, keys, form, chosen, generator)


def sketched_form(sketch: Tensor, total: int, degree: int) -> Estimated:
    """From a sketch F (R, m) of the features of `total` keys."""
    columns, sketch = sketch.shape[1], sketch.double()
    size, gamma = sketch.square().sum(0).sqrt(), rounding_of(total, BLOCK, columns)
    if degree == 1 or sketch.shape[0] >= columns:
        sketch = sum((part.mT @ part for part in sketch.split(BLOCK)), sketch.new_zeros((columns, columns)))
    return Estimated(sketch, size, gamma, degree)


def sketch_rows(sketch: Sketched, queries: int, total: int, columns: int, delta: float) -> int:
    """The rows of S for `total` keys with `columns` features; `total` if the exact G is no larger."""
    if sketch.normalizers is None:
        return total
    projection = PROJECTIONS[sketch.projection]
    rows = min(
        projection.rows_for_vectors(queries, total, sketch.normalizers, delta),
        projection.rows_for_subspace(columns, total, sketch.normalizers, delta),
    )
    if sketch.scores is not None:
        rows = max(rows, projection.rows_for_subspace(columns, total, sketch.scores / 2, delta / 2))
    return min(rows, total)


def _candidates(
    keys: ScaledKeys, form: Normaliser, eps: float, error: float, delta: float, generator: torch.Generator
) -> Tensor:
    """As in the header; f is half the error if the normaliser is sketched."""
    root, rounding = basis(form)
    stretch, failure = (1 + error / 2, delta / 2) if isinstance(form, Estimated) else (1.0, delta)
    low, least = (1 - error) * stretch, MARGIN * eps / stretch  # low: 1 - h
    columns = math.ceil(2 * math.log(min(len(keys), keys.dim / eps) / failure) / (low - 1 - math.log(low)))
    if columns >= keys.dim:
        return at_least(keys, root, rounding, least)
    mix = normal((keys.dim, columns), root, generator) / math.sqrt(columns)
    # The mix may magnify rounding, and estimates may be low.
    rounding = rounding * float(torch.linalg.matrix_norm(mix, 2)) / math.sqrt(low)
    chosen = at_least(keys, root @ mix, rounding, low * least)
    return chosen[(keys.rows(chosen) @ root).square().sum(-1) >= least]


def _numerators(
    sketch: Sketched, keys: ScaledKeys, form: Normaliser, chosen: Tensor, generator: torch.Generator
) -> Numerators | None:
    """After one CountSketch of the coordinates; None if it would have D sums or more."""
    if sketch.numerators is None:
        return None
    columns = math.ceil(2.2 / (sketch.failure * sketch.numerators**2))  # 2.2: the ridge adds up to 4 %
    if columns >= keys.dim:
        return None
    root, _ = basis(form)
    eye = torch.eye(keys.dim, dtype=root.dtype, device=root.device)
    spread = CountSketch().apply(iter([eye]), columns, generator).mT
    # `k root` and `q root^-T` have the product of k and q.
    return Numerators(torch.linalg.inv(root).mT @ spread, keys.rows(chosen) @ (root @ spread))
