"""The effect of a plan on a whole model: how far its last hidden states move, and how long a call takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fewkeys.core.clock import clock
from fewkeys.core.impl import Impl
from fewkeys.integrations.capture import Batch, batch_arguments, run_without_cache
from fewkeys.integrations.interface import unwrapped
from fewkeys.integrations.transformers import apply
from fewkeys.judge.layer import Entry
from fewkeys.judge.result import Effect
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TURNS = 9
"""The largest number of timed turns at one length."""


def judge_model(
    model: Any, batches: Iterable[Batch], entries: Sequence[Entry], seed: int, impl: Impl, done: Callable[[int], None]
) -> None:
    """Set the effect of each entry's plan on `model` over `batches` of token ids (or mappings with an attention mask).

    Costs one forward pass per batch and plan, and one exact one per batch; keeps the hidden states of one batch.
    `done(sequences)` is called after each pass.
    """
    model = unwrapped(model)
    pooled: list[list[Tensor]] = [[] for _ in entries]
    tokens = torch.zeros(len(entries), dtype=torch.float64, device="cpu")
    count = 0
    generators = [entry.generator(f"{seed}/model", model.device) for entry in entries]
    for index, batch in enumerate(batches):
        exact, mask = _states(model, batch, index)
        count += int(mask.sum())
        done(len(exact))
        for i, entry in enumerate(entries):
            with apply(model, entry.plan.never_exact(), impl=impl, generator=generators[i]):
                approximate, _ = _states(model, batch, index)
            pooled[i].append(cosine_similarity(_mean(exact, mask), _mean(approximate, mask), dim=-1).cpu())
            tokens[i] += cosine_similarity(exact[mask].double(), approximate[mask].double(), dim=-1).sum().cpu()
            done(len(exact))
    if count == 0:
        raise ValueError("batches: expected at least one batch with a valid token, got none; pass the captured batches")
    for entry, cosines, total in zip(entries, map(torch.cat, pooled), tokens, strict=True):
        entry.effect = Effect(float(cosines.mean()), float(cosines.min()), float(total / count))


def _states(model: Any, batch: Batch, index: int) -> tuple[Tensor, Tensor]:
    """Last hidden states (B, N, H) in float32 and which tokens are valid (B, N)."""
    arguments = batch_arguments(model, batch, index)
    with torch.no_grad():
        states: Tensor = run_without_cache(model.base_model, arguments).last_hidden_state.float()
    mask = arguments.get("attention_mask")
    valid = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if mask is None else mask.bool()
    return states, valid


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    """Mean over valid tokens (B, H), in float64, since cosines are near 1."""
    weight = mask.double().unsqueeze(-1)
    return (states * weight).sum(1) / weight.sum(1).clamp_min(1.0)


@torch.no_grad()
def time_model(
    model: PreTrainedModel, plans: Sequence[Plan | ModelPlan], length: int, *, seconds: float
) -> list[tuple[int, float, float]]:
    """Time a model of this shape with random weights, on the CPU, on one sequence of `length` tokens without padding.

    For each plan: the number of turns, and the median milliseconds of a call under the plan and with exact attention,
    which take turns. After `seconds` no turn begins. The first turn warms up, and does not count if another follows.
    """
    from transformers import AutoModel

    config = deepcopy(model.config)
    config.max_position_embeddings = length
    torch.manual_seed(0)
    twin: Any = AutoModel.from_config(config, dtype=model.dtype, attn_implementation="sdpa").eval()
    ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    call = partial(twin, input_ids=ids)
    turns: list[list[float]] = []
    start = perf_counter()
    while len(turns) <= TURNS and (not turns or perf_counter() - start < seconds):
        turn = [clock(call, ids.device)]
        for plan in plans:
            with apply(twin, plan.never_exact()):
                turn.append(clock(call, ids.device))
        turns.append(turn)
    exact, *by_plan = zip(*turns[int(len(turns) > 1) :], strict=True)
    return [(len(exact), median(times), median(exact)) for times in by_plan]
