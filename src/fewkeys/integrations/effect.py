"""The effect of a plan on a whole model: how far its last hidden states move, and how long a call takes."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.clock import clock
from fewkeys.core.impl import Impl
from fewkeys.core.validation import describe
from fewkeys.integrations.capture import Batch, base_of, batch_arguments, run_without_cache
from fewkeys.integrations.interface import attach, cross_attention, exact, unwrapped
from fewkeys.integrations.text import positions
from fewkeys.integrations.transformers import apply
from fewkeys.judge.layer import Entry
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan

TURNS = 9
"""The most timed turns at one length."""


def judge_model(
    model: Any, batches: Iterable[Batch], entries: Sequence[Entry], seed: int, impl: Impl, done: Callable[[int], None]
) -> None:
    """Set the effect of each entry's plan on `model` over `batches`. `done(sequences)` is called after each pass.

    Cost: a pass per batch and plan, and an exact one per batch. Memory: the hidden states of one batch.
    """
    model = unwrapped(model)
    cosines: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in entries]
    generators = [entry.generator(f"{seed}/model", model.device) for entry in entries]
    for index, batch in enumerate(batches):
        arguments = batch_arguments(model, batch, index)
        states, real = _exact_states(model, arguments)
        done(len(states))
        for entry, generator, (pooled, single) in zip(entries, generators, cosines, strict=True):
            with apply(model, entry.plan.never_exact(), impl=impl, generator=generator):
                approximate = _states(model, arguments)
            pooled.append(cosine_similarity(_mean(states, real), _mean(approximate, real), dim=-1)[real.any(1)].cpu())
            single.append(cosine_similarity(states[real].double(), approximate[real].double(), dim=-1).cpu())
            done(len(states))
    for entry, parts in zip(entries, cosines, strict=True):
        if not any(map(Tensor.numel, parts[1])):
            raise ValueError("batches: expected at least one batch with a valid token; pass the captured batches")
        of_texts, of_tokens = map(torch.cat, parts)
        means = {"cosine": float(of_texts.mean()), "token_cosine": float(of_tokens.mean())}
        entry.effect = {**means, "cosine_min": float(of_texts.min())}


def _exact_states(model: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The exact model's states, even inside `apply`, and which are real (B, N), by its last mask of self-attention."""
    cross, masks = cross_attention(model), list[Tensor | None]([None])

    def answer(layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        if layer not in cross:
            masks.append(inputs.key_mask)
        return exact(module, inputs)

    with attach(model, answer):
        states = _states(model, arguments)
    real = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if masks[-1] is None else masks[-1]
    if real.shape != states.shape[:2]:
        wanted = f"padding of the {states.shape[1]} states that {type(model).__name__} returns"
        raise ValueError(f"batches: expected {wanted}, got that of {real.shape[1]} keys; pass sequences of one length")
    return states, real


@torch.no_grad()
def _states(model: Any, arguments: dict[str, Any]) -> Tensor:
    """Last hidden states (B, N, H) in float32."""
    states = getattr(run_without_cache(base_of(model), arguments), "last_hidden_state", None)
    if not isinstance(states, Tensor) or states.ndim != 3:
        got = f"{describe(states)} from {type(model).__name__}"
        raise ValueError(f"model: expected one that returns last_hidden_state (B, N, H), got {got}")
    return states.float()


def _mean(states: Tensor, real: Tensor) -> Tensor:
    """Mean over real tokens (B, H), in float64, since cosines are near 1."""
    weight = real.double().unsqueeze(-1)
    return (states * weight).sum(1) / weight.sum(1).clamp_min(1.0)


@torch.no_grad()
def time_model(
    model: Any, plans: Sequence[Plan | ModelPlan], length: int, *, seconds: float
) -> list[tuple[int, float, float]]:
    """Time a model of this shape with random weights, on the CPU, on one sequence of `length` tokens without padding.

    For each plan: the number of turns, and the median milliseconds of a call under the plan and with exact attention.
    No turn begins after `seconds`. The first one warms up, and does not count if another follows.
    """
    base: Any = base_of(model)
    config = deepcopy(base.config)
    words = config.get_text_config()
    if (longest := positions(base)) is not None:
        words.max_position_embeddings += length - longest
    implementation = "sdpa" if base._supports_sdpa else "eager"  # MPNet has no other
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        twin = type(base)._from_config(config, dtype=model.dtype, attn_implementation=implementation).eval()
        ids = torch.randint(words.vocab_size, (1, length))
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
