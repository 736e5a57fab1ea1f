"""Attention inside `torch.compile`: the graph ends before it and goes on after it. Imports torch's compiler."""

from collections.abc import Callable
from typing import Any

import torch


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


outside = torch.compiler.disable(
    _call, reason="fewkeys chooses keys by numbers, which no graph knows; compile by torch.compile without fullgraph"
)
"""Call a function as it is, from compiled code: one that chooses keys by data."""
