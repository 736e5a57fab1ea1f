"""The time of a whole model, with exact attention and under plans.

Times do not depend on weights: a model of the same configuration with random weights takes as long, and it has room for
as many tokens as one asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fewkeys.integrations.transformers import apply
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TURNS = 9
"""The most turns at a length that count."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a call with exact attention and under a plan: medians over `turns`."""

    turns: int
    exact_ms: float
    ms: float


@torch.no_grad()
def time_model(
    model: PreTrainedModel, plans: Sequence[Plan | ModelPlan], length: int, *, seconds: float
) -> list[Timing]:
    """One sequence of `length` tokens without padding: exact attention and each plan in turns, on the CPU.

    No turn is begun after so many seconds, except the second where the first took less. The first turn warms up, and
    counts only where it took as long by itself.
    """
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    turns: list[list[float]] = []
    start = perf_counter()
    while len(turns) <= TURNS and (len(turns) < 2 or perf_counter() - start < seconds):
        turn = [_timed(model, ids)]
        for plan in plans:
            with apply(model, plan.never_exact()):
                turn.append(_timed(model, ids))
        turns.append(turn)
        if len(turns) == 1 and perf_counter() - start > seconds:
            break
    exact, *by_plan = zip(*turns[int(len(turns) > 1) :], strict=True)
    return [Timing(len(exact), median(exact), median(times)) for times in by_plan]


def of_shape(config: PretrainedConfig, length: int, dtype: torch.dtype) -> PreTrainedModel:
    """A model of this configuration with random weights and room for so many tokens."""
    from transformers import AutoModel

    config = deepcopy(config)
    config.max_position_embeddings = length
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    return model


def _timed(model: torch.nn.Module, ids: Tensor) -> float:
    """Milliseconds of a call."""
    start = perf_counter()
    model(input_ids=ids)
    return 1000 * (perf_counter() - start)
