"""Attention inside groups, beside a band and one shared list, by Triton's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.groups import Groups
from fewkeys.core.inputs import Inputs
from fewkeys.core.weights import Entmax, Softmax, Weights
from fewkeys.rest.base import BlockStandIns, StandIns


def unsupported(groups: Groups, stand_ins: StandIns | BlockStandIns | None, weights: Weights) -> str | None:
    """What `attend` does not take of these, to follow "impl='triton':"; None where it takes all."""
    if groups.query.shape[3] != 1 or groups.key.shape[3] != 1:
        return "expected one group for each query and key, got several memberships"
    if stand_ins is not None:
        return "expected rest=Drop() beside groups, got stand-ins"
    if isinstance(weights, Entmax) and weights.alpha > 2:
        return f"expected an alpha of at most 2, got {weights}"
    if not isinstance(weights, Softmax | Entmax):
        return f"expected Softmax() or Entmax() weights, got {weights}"
    return None


def attend(inputs: Inputs, graph: Graph, groups: Groups, hidden: Tensor | None, weights: Weights) -> Tensor:
    """The output (B, Hq, Nq, Dv), equal to `reference.attend` up to rounding.

    `hidden` (B, Hkv, Nk), uint8, marks keys that the band does not reach. Products are taken in the input's dtype and
    summed in float32. Second derivatives do not exist. Cost O((edges + n band) (D + Dv)), entmax so many times more as
    it takes rounds, of which nothing but the output is stored; sorting is O(n log n).
    """
    from fewkeys.execute.triton.grouped_op import grouped

    x = inputs
    # An empty band ends before it begins, for every query.
    left, right = (0, -x.queries - x.keys) if graph.band is None else graph.band
    output: Tensor = grouped(
        x.query,
        x.key,
        x.value,
        hidden,
        None if graph.columns is None else _listed(x, graph.columns.index, graph.columns.used),
        *_sorted(groups.query, None, groups.count),
        *_sorted(groups.key, x.valid, groups.count),
        groups.count,
        weights.alpha if isinstance(weights, Entmax) else 1.0,
        x.scale,
        # What no query finds on its left or right, and what causality forbids, is not looked for.
        min(left, x.queries - 1 + x.offset),
        min(right, 0 if x.is_causal else x.keys - 1 - x.offset),
        x.offset,
        x.is_causal,
    )[0]
    return output


def _sorted(ids: Tensor, valid: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Groups (B, Hq, N) of tokens, -1 for none and for padding, and the tokens by group; those of none last."""
    group = ids.squeeze(-1)
    if valid is not None:
        group = group.masked_fill(~valid.unsqueeze(1), -1)
    order = group.masked_fill(group < 0, count).argsort(stable=True, dim=-1)
    return group.to(torch.int32), order.to(torch.int32)


def _listed(x: Inputs, index: Tensor, used: Tensor) -> Tensor:
    """Places (B, Hkv, S) of the shared list, Nk at fillings."""
    return index.squeeze(2).masked_fill(~used.squeeze(2), x.keys).to(torch.int32)
