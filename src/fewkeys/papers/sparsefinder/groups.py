"""Edges by groups: a query attends to the keys of its own groups, such as clusters, buckets or hash codes.

Rounds and dimensions have ids of their own: round r of C clusters has ids r C .. (r + 1) C - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import marked_places
from fewkeys.core.validation import check_count, describe
from fewkeys.papers.sparsefinder.grouped import GroupedKeys, distinct


@dataclass(frozen=True, eq=False)
class Groups:
    """Query i and key j are an edge when they share a group; sharing several counts once.

    `query` (B, Hq, Nq, Mq) and `key` (B, Hq, Nk, Mk), int64: their groups, 0 .. count - 1, -1 for none, for every
    *query* head.
    """

    query: Tensor
    key: Tensor
    count: int

    def __post_init__(self) -> None:
        check_count("Groups count", self.count)
        for name, ids in (("query", self.query), ("key", self.key)):
            if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
                raise TypeError(f"Groups {name}: expected int64 ids, got {describe(ids)}; convert them with .long()")
            if ids.ndim != 4:
                raise ValueError(
                    f"Groups {name}: expected shape (batch, query heads, tokens, memberships), got {tuple(ids.shape)}; "
                    "add the missing dimensions with unsqueeze"
                )
            low, high = map(int, ids.aminmax()) if ids.numel() else (-1, -1)
            if low < -1 or high >= self.count:
                raise ValueError(
                    f"Groups {name}: expected ids in 0 .. {self.count - 1}, or -1 for none, got {low} .. {high}; "
                    "raise count or clamp the ids"
                )
        if self.query.shape[:2] != self.key.shape[:2]:
            raise ValueError(
                f"Groups key: expected the batch and query heads of the queries, {tuple(self.query.shape[:2])}, got "
                f"{tuple(self.key.shape[:2])}; repeat the groups of shared keys for every query head"
            )

    def check(self, inputs: Inputs) -> None:
        x = inputs
        for name, ids, tokens in (("query", self.query, x.queries), ("key", self.key, x.keys)):
            if ids.shape[:3] != (x.batch, x.query_heads, tokens):
                raise ValueError(
                    f"groups: expected {name} ids of shape ({x.batch}, {x.query_heads}, {tokens}, any), got "
                    f"{tuple(ids.shape)}; ids are per batch entry, query head and token"
                )

    def __or__(self, other: Groups) -> Groups:
        """Edges of either: the ids of `other` follow those of this one."""
        query, key = (torch.where(ids < 0, ids, ids + self.count) for ids in (other.query, other.key))
        count = self.count + other.count
        return Groups(torch.cat([self.query, query], -1), torch.cat([self.key, key], -1), count)

    def mask(self, start: int, stop: int) -> Tensor:
        """Whether queries start .. stop - 1 share a group with each key: bool (B, Hq, stop - start, Nk)."""
        query = self.query[:, :, start:stop]
        shared = query.new_zeros((*query.shape[:3], self.key.shape[2]), dtype=torch.bool)
        for query_ids in query.masked_fill(query < 0, -2).unbind(-1):
            for key_ids in self.key.unbind(-1):
                shared |= query_ids.unsqueeze(-1) == key_ids.unsqueeze(-2)
        return shared

    def delayed(self, count: int) -> Groups:
        return replace(self, query=pad(self.query, (0, 0, count, 0), value=-1))

    def source(self, graph: Graph) -> GroupedKeys:
        return GroupedKeys(graph, self.query, self.key, self.count)

    def computation_sparsity(self) -> Tensor:
        """`1 - sum_g |Q_g| |K_g| / (Nq Nk)`, at least 0, per head (B, Hq): the share of all scores not computed.

        At most the sparsity of the edges: hidden pairs are computed too, and pairs that share two groups twice.
        """
        scores = (_members(self.query, self.count) * _members(self.key, self.count)).sum(-1)
        return (1.0 - scores / (self.query.shape[2] * self.key.shape[2])).clamp_min(0.0).float()

    def entropy(self) -> Tensor:
        """`-sum_g p_g log p_g / log count`, 0 to 1, per head (B, Hq), p_g the share of the keys' memberships in g."""
        size = _members(self.key, self.count)
        p = size / size.sum(-1, keepdim=True).clamp_min(1)
        entropy: Tensor = torch.special.entr(p).sum(-1)
        return (entropy / math.log(max(self.count, 2))).clamp(0.0, 1.0).float()


def member_ids(member: Tensor) -> Tensor:
    """Ids (..., M), -1 for none, of the groups that `member` (..., C) bool marks."""
    ids = marked_places(member)
    return ids.masked_fill(~member.gather(-1, ids), -1)


def _members(ids: Tensor, count: int) -> Tensor:
    """The members (B, H, count), float64, of every group; a token that names a group twice is one."""
    place = distinct(ids).flatten(2) + 1
    size = place.new_zeros((*place.shape[:2], count + 1), dtype=torch.float64)
    return size.scatter_add_(-1, place, torch.ones_like(place, dtype=torch.float64))[..., 1:]
