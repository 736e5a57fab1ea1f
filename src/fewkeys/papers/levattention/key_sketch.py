"""The universal set of a stream of keys, in constant memory.

The sketch has the Gram matrix G of all keys seen (of their tensor powers for even p > 2) and the keys that are still
candidates. A key's leverage score against the keys seen, `sup_y <k, y>^2 / sum_l <k_l, y>^2`, can only fall: its
denominator gains terms. So keys with scores below eps are dropped, and one pass gives the same set as two. The
candidates of two sketches include those of their union: sketches merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.precision import full_precision
from fewkeys.core.rows import marked_places
from fewkeys.core.validation import check_real
from fewkeys.papers.levattention.tensor_power import MAX_WIDTH, even_degree, tensor_features, width
from fewkeys.sketch.gram import BLOCK, root64, score_rows
from fewkeys.sketch.leverage import checked

ROUNDING = 1e-6
"""The relative margin below eps, besides the error of the score, from which a key is dropped."""
LEAST_EXPONENT = -1000
"""Keys are zero or larger than their unit by far less than float64 holds."""


@dataclass(frozen=True, eq=False)
class UniversalKeys:
    """The universal set of a stream of `shape` (B, H, N): `indices` (3, M), int64, as (batch, head, position), sorted;
    `keys` (M, D), float64 or float32; `scores` (M,), float64.
    """

    indices: Tensor
    keys: Tensor
    scores: Tensor
    shape: tuple[int, int, int]

    def to_mask(self) -> Tensor:
        """A bool mask (B, H, N), True at the keys of the set."""
        mask = torch.zeros(self.shape, dtype=torch.bool, device=self.indices.device)
        mask[tuple(self.indices)] = True
        return mask


class KeySketch:
    """A sketch of a stream of keys that gives their scores and their universal set for weights `|s|^p`.

    `update` takes the stream in pieces of any size. One pass: `universal_set`. Two: `scores` of each piece after the
    whole stream. Rows of zeros (padding) only take a position.

    Args:
        eps: the smallest entry that must not be missed, in (0, 1).
        power: even, up to 60; m is the number of monomials of degree power / 2 (D for 2).

    Memory per head: m^2 float64 numbers and at most `2 m / eps + 8192` keys. Cost: O(m^2) per key, and O(m^3 / eps)
    each time that as many keys as are kept, at least 4096, have come. Directions in which the keys are below about
    `1e-7^(2 / power)` of the strongest count as absent.

    Raises:
        TypeError, ValueError: an eps outside (0, 1), or another power: l_p Lewis weights need all keys.

    Source: LevAttention (arXiv 2410.05462), streaming.
    """

    def __init__(self, eps: float, power: float = 2.0) -> None:
        self.eps = check_real("eps", eps, above=0.0, below=1.0)
        self.power = check_real("power", power, above=0.0)
        self._degree = even_degree(self.power)
        if not self._degree:
            raise ValueError(f"power: expected an even number up to 60, got {power}; use universal_set")
        self.count = 0
        """The number of keys seen, per head."""
        self._limit = 2 * BLOCK
        # Until the first keys. The Gram matrix is of keys / 2^exponent, whose powers float64 holds.
        self._gram = self._keys = self._positions = self._exponent = torch.empty(0)

    @property
    def nbytes(self) -> int:
        """The bytes of the sketch."""
        return self._keys.nbytes + self._positions.nbytes + self._gram.nbytes

    @full_precision()
    def update(self, keys: Tensor) -> None:
        """Take in the next keys (B, H, N, D), N >= 0. `TypeError`, `ValueError` if they do not continue the stream."""
        if isinstance(keys, Tensor) and keys.ndim == 4 and keys.shape[2] == 0:
            return
        rows = checked("keys", keys)
        self._open(rows)
        self._enlarge(rows.abs().amax((2, 3), keepdim=True).double().frexp().exponent.clamp_min(LEAST_EXPONENT))
        for part in rows.split(BLOCK, 2):
            features = self._features(part)
            self._gram += features.mT @ features
            place = torch.arange(self.count, self.count + part.shape[2], device=rows.device)
            self._append(part, place.expand(part.shape[:3]))
            self.count += part.shape[2]

    @full_precision()
    def merge(self, other: KeySketch) -> None:
        """Take in the sketch of the keys that follow; `other` does not change.

        `TypeError`, `ValueError` where `other` is no sketch of such keys with the same eps and power.
        """
        if not isinstance(other, KeySketch):
            raise TypeError(f"other: expected a KeySketch, got {type(other).__name__}")
        if (other.eps, other.power) != (self.eps, self.power):
            raise ValueError(
                f"other: expected eps={self.eps} and power={self.power}, got eps={other.eps} and power={other.power}; "
                "sketch with the same ones"
            )
        if not other.count:
            return
        self._open(other._keys)
        self._enlarge(other._exponent)
        self._gram += other._gram.ldexp(2 * self._degree * (other._exponent - self._exponent))
        positions = torch.where(other._positions >= 0, other._positions + self.count, other._positions)
        self.count += other.count
        self._append(other._keys.clone(), positions)

    def scores(self, keys: Tensor) -> Tensor:
        """Leverage scores (B, H, N), float64, of keys that were seen (B, H, N, D) against all keys seen.

        For larger powers those of the tensor powers, which bound the sensitivities. Relative error: a few
        `m u kappa^2`, u = 1e-16, kappa the condition number of the keys (of their features) with columns of unit norm.
        Raises as `update`, and before the first `update`.
        """
        rows = checked("keys", keys)
        if not self.count:
            raise ValueError("keys: expected keys of the stream, got some before any update; call update first")
        self._open(rows)
        return self._score(rows)[0]

    @full_precision()
    def universal_set(self, eps: float | None = None) -> UniversalKeys:
        """The keys seen with a score of at least `eps`, at most `m / eps` per head: they have every entry >= eps.

        eps: by default the sketch's. `ValueError` for a smaller one, and before any key was seen.
        """
        eps = self.eps if eps is None else check_real("eps", eps, above=0.0, below=1.0)
        if eps < self.eps:
            raise ValueError(f"eps: expected at least the sketch's {self.eps}, got {eps}; make the sketch with it")
        if not self.count:
            raise ValueError("universal_set: expected some keys first, got none; call update")
        scores, upper = self._score(self._keys)
        at = ((upper >= eps) & (self._positions >= 0)).nonzero(as_tuple=True)
        indices = torch.stack([*at[:2], self._positions[at]])
        return UniversalKeys(indices, self._keys[at], scores[at], (*self._keys.shape[:2], self.count))

    def _open(self, rows: Tensor) -> None:
        """Check that rows (B, H, N, D) continue the stream; before the first, make the empty state."""
        if not self.count:
            size = width(rows.shape[-1], self._degree)
            if size > MAX_WIDTH:
                raise ValueError(
                    f"power: expected at most {MAX_WIDTH} monomials, got {size} for power {self.power} and head "
                    f"dimension {rows.shape[-1]}; use a smaller power"
                )
            self._gram = rows.new_zeros((*rows.shape[:2], size, size), dtype=torch.float64)
            self._exponent = torch.full((*rows.shape[:2], 1, 1), LEAST_EXPONENT, device=rows.device)
            self._keys = rows[:, :, :0].clone()
            self._positions = torch.zeros(self._keys.shape[:3], dtype=torch.int64, device=rows.device)
        expected, actual = ((*keys.shape[:2], keys.shape[3]) for keys in (self._keys, rows))
        if actual != expected or rows.dtype != self._keys.dtype:
            raise ValueError(
                f"keys: expected (batch, heads, dim) = {expected} in {self._keys.dtype} like the stream before, got "
                f"{actual} in {rows.dtype}; one sketch holds one stream"
            )

    def _enlarge(self, exponent: Tensor) -> None:
        """Count in units (B, H, 1, 1) of at least 2^exponent."""
        exponent = exponent.maximum(self._exponent)
        self._gram = self._gram.ldexp(2 * self._degree * (self._exponent - exponent))
        self._exponent = exponent

    def _features(self, rows: Tensor) -> Tensor:
        return tensor_features(rows.double().ldexp(-self._exponent), self._degree)

    def _append(self, keys: Tensor, positions: Tensor) -> None:
        """Add candidates, and prune once there are twice as many as after the last pruning."""
        self._keys = torch.cat([self._keys, keys], 2)
        self._positions = torch.cat([self._positions, positions], 2)
        if self._keys.shape[2] < self._limit:
            return
        kept = (self._score(self._keys)[1] >= self.eps) & (self._positions >= 0)
        # Heads with fewer candidates have places of position -1 with keys of zeros.
        order = marked_places(kept)
        kept = kept.gather(-1, order)
        self._positions = self._positions.gather(-1, order).masked_fill(~kept, -1)
        rows = self._keys.gather(2, order.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1]))
        self._keys = rows.masked_fill(~kept.unsqueeze(-1), 0.0)
        self._limit = max(2 * BLOCK, 2 * self._keys.shape[2] + BLOCK)

    def _score(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, H, N) of rows (B, H, N, D), and the same rounded up by the error `m u` of G times the inverse."""
        root = root64(self._gram, rows.dtype)
        parts = map(self._features, rows.split(BLOCK, 2))
        scores = torch.cat([score_rows(part, root) for part in parts], -1)
        size = self._gram.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-1)
        error = 8 * root.shape[-1] * torch.finfo(torch.float64).eps * (root * size).square().sum((-2, -1))
        return scores, scores * (1 + ROUNDING + error.clamp_max(1.0)).unsqueeze(-1)
