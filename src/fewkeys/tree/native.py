"""The compiled kernels that grow forests (`native/split.h`, `native/forest.h`); all tensors are float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, dense, pointers, struct
from fewkeys.past.running import RunningQueries


def split(rows: Tensor) -> Tensor:
    """What `tree.split.split` promises, of float32 rows; within leaves in their old order."""
    rows = rows.contiguous()
    order = rows.new_empty(rows.shape[:2], dtype=torch.int64)
    sizes = dict(zip(("count", "size", "dim"), rows.shape, strict=True))
    call("fewkeys_split", struct("Split")(**pointers({"rows": rows, "order": order}), **sizes))
    return order


def grow(
    key: Tensor,
    value: Tensor,
    root: Tensor,
    kind: Tensor,
    size: Tensor,
    start: Tensor,
    base: Tensor,
    value_weight: float,
) -> Tensor:
    """The order (H, R) of trees of keys (H, n, D) and values, all float32.

    root (H, E, D, D): lower triangular. kind, size, start and base (trees,), int64: which root, how many keys from
    which on, and where the tree stands in the order. value_weight: of the values in the features.
    """
    key, value = dense(key.unsqueeze(1)), dense(value.unsqueeze(1))
    heads, places = key.shape[0], int(size.sum())
    order = torch.empty((heads, places), dtype=torch.int64, device="cpu")
    held: dict[str, Tensor | None] = {"root": root, "size": size, "start": start, "base": base, "kind": kind}
    held = {name: None if part is None else part.contiguous() for name, part in held.items()} | {"order": order}
    told = struct("Trees")(
        key=Rows.of(key),
        value=Rows.of(value),
        **pointers(held),
        heads=heads,
        trees=size.numel(),
        roots=root.shape[1],
        places=places,
        dim=key.shape[3],
        value_dim=value.shape[3],
        value_weight=value_weight,
    )
    call("fewkeys_grow", told)
    return order


def roots(
    query: Tensor, asking: Tensor, stop: Tensor, turn: Tensor, ridge: float, past: RunningQueries | None = None
) -> Tensor:
    """What `tree.metric.roots` promises, (H, E, D, D), of scaled queries (H, gqa_ratio, Nq, D).

    asking (N,): the queries that count, by their turns. stop (turns,): how many are of this turn or of one before. turn
    (E,), ascending: up to which turn. past: the queries before them.
    """
    query = dense(query)
    heads, gqa_ratio, _, dim = query.shape
    root = query.new_empty((heads, turn.numel(), dim, dim))
    held = {"asking": asking.contiguous(), "stop": stop.contiguous(), "turn": turn.contiguous(), "root": root}
    sizes = {"heads": heads, "gqa_ratio": gqa_ratio, "turns": stop.numel(), "count": turn.numel(), "dim": dim}
    if past is not None:
        held |= {"total": past.total.contiguous(), "square": past.square.contiguous()}
        sizes["before"] = int(past.count)
    call("fewkeys_roots", struct("TreeRoots")(query=Rows.of(query), **pointers(held), **sizes, ridge=ridge))
    return root


def summarise(
    key: Tensor, value: Tensor, order: Tensor, size: Tensor, base: Tensor, rows: Mapping[int, int]
) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Mean key, mean value and variances, (H, R_s, D or Dv), of all nodes of trees of keys (H, n, D) and values.

    order (H, R); size and base (trees,), int64: how many keys, and from where on in the order. rows: how many nodes
    there are of each size, the leaves first.
    """
    dims = (key.shape[2], value.shape[2], key.shape[2])
    found = {size: tuple(key.new_empty((key.shape[0], count, width)) for width in dims) for size, count in rows.items()}
    numbers = [[*(part.data_ptr() for part in own), own[0].shape[1], size] for size, own in found.items()]
    tables = torch.tensor(numbers, device="cpu")
    key, value = dense(key.unsqueeze(1)), dense(value.unsqueeze(1))
    held = {"order": order.contiguous(), "size": size.contiguous(), "base": base.contiguous(), "tables": tables}
    arguments = struct("Summaries")(
        key=Rows.of(key),
        value=Rows.of(value),
        **pointers(held),
        heads=key.shape[0],
        trees=size.numel(),
        places=order.shape[1],
        dim=key.shape[3],
        value_dim=value.shape[3],
        count=len(found),
    )
    call("fewkeys_summarise", arguments)
    return {size: (own[0], own[1], own[2]) for size, own in found.items()}
