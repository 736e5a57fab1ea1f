"""Learned spaces in which selectors compare queries and keys, head by head, and what is learned there."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.tensor_files import Learned
from fewkeys.core.validation import check_finite, describe


@dataclass(frozen=True, eq=False, repr=False)
class Projection(Learned):
    """`q' = q^T A_h`, `k' = k^T B_h` for every query head h: A = `query` and B = `key`, both (Hq, D, r), floating."""

    query: Tensor
    key: Tensor

    def __post_init__(self) -> None:
        _check_tables("Projection", "(query heads, head dimension, r)", query=self.query, key=self.key)

    @property
    def rank(self) -> int:
        """The dimension r."""
        return self.query.shape[2]


class Fitted(Learned, listed=False):
    """Values of every query head that were learned in a space."""

    rank_axis: ClassVar[int] = 2
    """The axis of the r dimensions; the other one of 1 and 2 has the values of a head."""

    @property
    def rank(self) -> int:
        """The dimension r."""
        return self._first.shape[self.rank_axis]

    @property
    def size(self) -> int:
        """The number of values for each head."""
        return self._first.shape[3 - self.rank_axis]

    @property
    def _first(self) -> Tensor:
        return next(iter(self.tensors.values()))

    def check(self, heads: int, rank: int, like: str = "") -> None:
        """Raise `ValueError` for other dimensions or heads; values of one head serve all."""
        if self._first.shape[0] not in (1, heads) or self.rank != rank:
            raise ValueError(
                f"fitted: expected values of {heads} query heads in {rank} dimensions{like}, got {self}; use them in "
                "the layer and the space they were fitted on"
            )

    def for_rows(self, rows: Tensor) -> list[Tensor]:
        """The tensors in dtype and device of rows (B, Hq, N, r); `ValueError` for other heads or dimensions."""
        self.check(rows.shape[1], rows.shape[3])
        return [tensor.detach().to(rows) for tensor in self.tensors.values()]


@dataclass(frozen=True, eq=False, repr=False)
class Centroids(Fitted):
    """C centroids for every query head: `place` (Hq, C, r), floating; (1, C, r): the same for all heads."""

    place: Tensor

    def __post_init__(self) -> None:
        _check_tables("Centroids", "(query heads, centroids, r)", place=self.place)


@dataclass(frozen=True, eq=False, repr=False)
class Edges(Fitted):
    """The edges between buckets for every query head and dimension: `query` and `key` (Hq, r, beta - 1), ascending."""

    query: Tensor
    key: Tensor
    rank_axis: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_tables("Edges", "(query heads, r, beta - 1)", may_be_empty=True, **self.tensors)
        for name, edges in self.tensors.items():
            if bool((edges.diff(dim=-1) < 0).any()):
                raise ValueError(f"Edges {name}: expected ascending edges, got descending ones; sort them")


@dataclass(frozen=True, eq=False, repr=False)
class Joined(Fitted):
    """Centroids `query` and `key` (Hq, C, r) of clusters of queries and of keys, and which of them are joined.

    `pairs` bool (Hq, C, C): cluster a of the queries is joined to cluster b of the keys.
    """

    query: Tensor
    key: Tensor
    pairs: Tensor

    def __post_init__(self) -> None:
        _check_tables("Joined", "(query heads, clusters, r)", query=self.query, key=self.key)
        heads, clusters, _ = self.query.shape
        if not isinstance(self.pairs, Tensor) or self.pairs.dtype != torch.bool:
            raise TypeError("Joined pairs: expected a bool tensor (query heads, clusters, clusters), got another")
        if self.pairs.shape != (heads, clusters, clusters):
            raise ValueError(f"Joined pairs: expected {(heads, clusters, clusters)}, got {tuple(self.pairs.shape)}")


def projected(inputs: Inputs, project: Projection | None) -> tuple[Tensor, Tensor]:
    """Queries (B, Hq, Nq, r) and keys (B, Hq, Nk, r) in the space, in working precision, no gradient. Cost O(n D r).

    Raises `ValueError` for a projection of other heads.
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
    """r, and operations per key of `projected`."""
    if project is None:
        return inputs.head_dim, 0.0
    return project.rank, 4.0 * project.rank * inputs.head_dim * inputs.gqa_ratio


def centred(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (B, H, N, r) and centroids (H, C, r) about their mean: an offset would drown differences."""
    middle = centroids.mean(-2, keepdim=True)
    return rows - middle, centroids - middle


def closeness(rows: Tensor, centroids: Tensor) -> Tensor:
    """`(|x|^2 - |x - c|^2) / 2` (B, H, N, C) of rows x and centroids c."""
    return rows @ centroids.mT - 0.5 * centroids.square().sum(-1).unsqueeze(-2)


def nearest(rows: Tensor, centroids: Tensor, count: int = 1) -> Tensor:
    """The `count` centroids (B, H, N, count) nearest to each row."""
    return closeness(*centred(rows, centroids)).topk(count, -1).indices


def check_space(project: object, fitted: object = None) -> None:
    """Refuse other classes, and values fitted in another space."""
    if project is not None and not isinstance(project, Projection):
        raise TypeError(f"project: expected a Projection or None, got {type(project).__name__}")
    if fitted is not None and not isinstance(fitted, Fitted):
        raise TypeError(f"fitted: expected Centroids or None, got {type(fitted).__name__}; wrap the tensor")
    if project is not None and fitted is not None:
        fitted.check(project.query.shape[0], project.rank, like=" like the projection's")


def _check_tables(kind: str, axes: str, *, may_be_empty: bool = False, **tables: Tensor) -> None:
    """Refuse all but finite floating tensors of rank 3 and one shape; `may_be_empty`: along the last axis."""
    first = next(iter(tables.values()))
    for name, tensor in tables.items():
        title = f"{kind} {name}"
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{title}: expected a floating tensor {axes}, got {describe(tensor)}")
        if tensor.ndim != 3 or 0 in (tensor.shape[:2] if may_be_empty else tensor.shape):
            raise ValueError(f"{title}: expected shape {axes}, none of them 0, got {tuple(tensor.shape)}")
        if tensor.shape != first.shape:
            raise ValueError(f"{title}: expected {tuple(first.shape)} like query, got {tuple(tensor.shape)}")
        check_finite(**{title: tensor})
