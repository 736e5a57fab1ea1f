"""Attention inside `torch.compile`: the graph ends before it and goes on after it. Imports torch's compiler."""

from __future__ import annotations

import torch

from fewkeys.flow import attention

outside = torch.compiler.disable(attention)
"""`fewkeys.flow.attention`, which chooses keys by data: compiled code calls it as it is."""
