"""What kernels read of a graph of a band and one shared list."""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs


def listed(inputs: Inputs, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
    """Keys (B, Hkv, S, D), values and places (B, Hkv, S) of the shared list; fillings stand after the last key."""
    x = inputs
    if graph.columns is None:
        return x.key[:, :, :0], x.value[:, :, :0], x.key.new_zeros((), dtype=torch.int64).expand(x.batch, x.kv_heads, 0)
    index, used = graph.columns.index.squeeze(2), graph.columns.used.squeeze(2)
    key, value = (rows.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, rows.shape[-1])) for rows in (x.key, x.value))
    return key, value, index.masked_fill(~used, x.keys)
