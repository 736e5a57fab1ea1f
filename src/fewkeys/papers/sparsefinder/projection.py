"""Learned spaces in which selectors may compare queries and keys, head by head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.learned import Learned
from fewkeys.core.precision import working
from fewkeys.core.validation import check_finite


@dataclass(frozen=True, eq=False, repr=False)
class Projection(Learned):
    """`q' = q^T A_h`, `k' = k^T B_h` for every query head h: A = `query` and B = `key`, both (Hq, D, r), floating.

    Where query heads share their keys, every query head still has a space of its own. Selectors that take a
    `project` compare q' and k' in place of q and k. Compared by content, saved with plans.
    """

    query: Tensor
    key: Tensor

    def __post_init__(self) -> None:
        check_table("Projection query", self.query, "(query heads, head dimension, r)")
        check_table("Projection key", self.key, "(query heads, head dimension, r)")
        if self.query.shape != self.key.shape:
            raise ValueError(
                f"Projection key: expected the shape of query, {tuple(self.query.shape)}, got "
                f"{tuple(self.key.shape)}; both map to one space"
            )

    @property
    def rank(self) -> int:
        """r, the dimension of the space."""
        return self.query.shape[2]


@dataclass(frozen=True, eq=False, repr=False)
class Centroids(Learned):
    """C centroids for every query head: `place` (Hq, C, r), floating; (1, C, r): the same for all heads.

    Compared by content, saved with plans.
    """

    place: Tensor

    def __post_init__(self) -> None:
        check_table("Centroids place", self.place, "(query heads, centroids, r)")

    @property
    def count(self) -> int:
        """C, the number of centroids of a head."""
        return self.place.shape[1]

    def for_rows(self, rows: Tensor) -> Tensor:
        """(Hq, C, r) in dtype and device of rows (B, Hq, N, r); `ValueError` where heads or dimensions differ."""
        heads, rank = rows.shape[1], rows.shape[3]
        if self.place.shape[0] not in (1, heads) or self.place.shape[2] != rank:
            raise ValueError(
                f"centroids: expected shape ({heads}, any, {rank}) for {heads} query heads compared in {rank} "
                f"dimensions, got {tuple(self.place.shape)}; fit them in the space in which they are used"
            )
        return self.place.detach().to(rows)


def projected(inputs: Inputs, project: Projection | None) -> tuple[Tensor, Tensor]:
    """Queries (B, Hq, Nq, r) and keys (B, Hq, Nk, r) in the space, or as they are; one row of keys per query head.

    In float32 (float64 for float64 inputs), without gradient. Cost O(n D r). Raises `ValueError` where the projection
    was made for another number of heads or another head dimension.
    """
    x = inputs
    query, key = working(x.query.detach()), working(x.key.detach())
    if project is None:
        return query, key.repeat_interleave(x.gqa_ratio, 1)
    if project.query.shape[:2] != (x.query_heads, x.head_dim):
        raise ValueError(
            f"project: expected a projection of {x.query_heads} query heads of dimension {x.head_dim}, got "
            f"{project.query.shape[0]} of {project.query.shape[1]}; fit it on the layer it is used in"
        )
    to_query, to_key = (matrix.detach().to(query) for matrix in (project.query, project.key))
    keys = key.unsqueeze(2) @ to_key.unflatten(0, (x.kv_heads, x.gqa_ratio))
    return query @ to_query, keys.flatten(1, 2)


def space_work(inputs: Inputs, project: Projection | None) -> tuple[int, float]:
    """r, and operations per key of bringing queries and keys there; for `Selector.work`."""
    if project is None:
        return inputs.head_dim, 0.0
    return project.rank, 4.0 * project.rank * inputs.head_dim * inputs.gqa_ratio


def check_table(name: str, value: object, axes: str, *, empty: bool = False) -> None:
    """Refuse all but finite floating tensors of rank 3; `empty`: where the last axis may have no entry."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected a floating tensor {axes}, got {got}")
    if value.ndim != 3 or 0 in (value.shape[:2] if empty else value.shape):
        raise ValueError(f"{name}: expected shape {axes}, none of them 0, got {tuple(value.shape)}")
    check_finite(**{name: value})


def check_space(project: object, centroids: object = None) -> None:
    """Refuse what is neither None nor of the right class, and centroids of another rank than the projection."""
    if project is not None and not isinstance(project, Projection):
        raise TypeError(f"project: expected a Projection or None, got {type(project).__name__}")
    if centroids is not None and not isinstance(centroids, Centroids):
        raise TypeError(f"centroids: expected Centroids or None, got {type(centroids).__name__}; wrap the tensor")
    if project is None or centroids is None:
        return
    if centroids.place.shape[0] not in (1, project.query.shape[0]) or centroids.place.shape[2] != project.rank:
        raise ValueError(
            f"centroids: expected shape ({project.query.shape[0]}, any, {project.rank}) like the projection's space, "
            f"got {tuple(centroids.place.shape)}; fit them after the projection"
        )
