"""Attention inside `torch.compile`: the graph ends before it and goes on after it."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="fewkeys chooses keys by numbers, which no graph knows; compile by torch.compile without fullgraph"
)
def outside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that chooses keys by data, from compiled code."""
    return function(*args, **kwargs)
