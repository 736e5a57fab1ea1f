"""The precision that statistics are computed in, whatever the inputs come in."""

from __future__ import annotations

import torch
from torch import Tensor


def working(tensor: Tensor) -> Tensor:
    """`tensor` in the precision of statistics: float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
