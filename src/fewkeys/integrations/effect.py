"""The effect of a plan on a whole model: how far its last hidden states move, and how long a call takes.

Times do not depend on weights. So a model of the same configuration with random weights is timed, with as many
positions as the length needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fewkeys.core.impl import Impl
from fewkeys.integrations.interface import unwrapped
from fewkeys.integrations.transformers import apply
from fewkeys.judge.result import Effect
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Batch = Tensor | Mapping[str, Tensor]
TURNS = 9
"""The largest number of timed turns at one length."""


def effects(
    model: Any,
    batches: Iterable[Batch],
    plans: Sequence[Plan | ModelPlan],
    *,
    impl: Impl = "auto",
    generator: Callable[[int], torch.Generator],
    done: Callable[[int], None],
) -> list[Effect]:
    """The effect of each plan on `model` over `batches` of token ids (or mappings with an attention mask).

    Costs one forward pass per batch and plan, and one exact one per batch; keeps the hidden states of one batch.
    `impl` is that of `fewkeys.apply`, `generator(i)` gives plan i its randomness, `done(sequences)` is called after
    each pass.
    """
    model = unwrapped(model)
    pooled: list[list[Tensor]] = [[] for _ in plans]
    tokens = torch.zeros(len(plans), dtype=torch.float64, device="cpu")
    count = 0
    generators = [generator(i) for i in range(len(plans))]
    for batch in batches:
        states, mask = _states(model, batch)
        count += int(mask.sum())
        done(len(states))
        for i, plan in enumerate(plans):
            with apply(model, plan.never_exact(), impl=impl, generator=generators[i]):
                other, _ = _states(model, batch)
            pooled[i].append(cosine_similarity(_mean(states, mask), _mean(other, mask), dim=-1).cpu())
            tokens[i] += cosine_similarity(states[mask].double(), other[mask].double(), dim=-1).sum().cpu()
            done(len(states))
    if count == 0:
        raise ValueError("batches: expected at least one batch with a valid token, got none; pass the captured batches")
    return [
        Effect(float(torch.cat(p).mean()), float(torch.cat(p).min()), float(t / count))
        for p, t in zip(pooled, tokens, strict=True)
    ]


def _states(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Last hidden states (B, N, H) in float32 and which tokens are valid (B, N)."""
    inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    base = model.base_model  # without the head that predicts words
    extra = {"use_cache": False} if "use_cache" in inspect.signature(base.forward).parameters else {}
    with torch.no_grad():
        states: Tensor = base(**inputs, **extra).last_hidden_state.float()
    mask = inputs.get("attention_mask")
    valid = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if mask is None else mask.bool()
    return states, valid


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    """Mean over valid tokens (B, H), in float64: cosines near 1 are the ones that matter."""
    weight = mask.double().unsqueeze(-1)
    return (states * weight).sum(1) / weight.sum(1).clamp_min(1.0)


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

    No turn begins after this number of seconds, except the second where the first took less. The first turn warms up.
    It counts only where it alone took that long.
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
