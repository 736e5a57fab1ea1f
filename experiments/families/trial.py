"""What works in a family: `apply`, generation under it, generation by `cache`, training; else the reason, in a line."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from experiments.families.models import Family
from torch import Tensor, nn

import fewkeys as fk

LENGTH = 24
YES = "yes"
WINDOWS = "yes: every layer keeps its window"
COLUMNS = ("apply", "generate", "cache", "train")


def trial(family: Family) -> dict[str, str | None]:
    """By column, "yes", the reason why not, or None where the question makes no sense."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = family.model(), _inputs(family)
        writes = family.kind in ("decoder", "both")
        return {
            "apply": _tried(lambda: _applied(family, model, inputs)),
            "generate": _tried(lambda: _generated(family, model, inputs)) if writes else None,
            "cache": _tried(lambda: _cached(model, inputs)) if family.kind == "decoder" else None,
            "train": _tried(lambda: _trained(family, model, inputs)),
        }


def _tried(work: Callable[[], str]) -> str:
    try:
        return work()
    except (ValueError, TypeError) as error:
        return "no: " + str(error).partition("; ")[0]


def _inputs(family: Family) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (2, LENGTH), generator=draw)
    if family.kind == "vision":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw)}
    if family.kind == "sound":
        return {"input_values": torch.randn(2, 400, generator=draw)}
    if family.name == "whisper":
        return {"input_features": torch.randn(2, 6, 40, generator=draw), "decoder_input_ids": ids[:, :7]}
    real = torch.ones_like(ids)
    real[0, :5] = 0
    if family.kind != "decoder":
        real = real.flip(1)
    found = {"input_ids": ids, "attention_mask": real}
    return found | {"decoder_input_ids": ids[:, :7]} if family.kind == "both" else found


def plan_of(family: Family) -> fk.Plan:
    """The plan, of so few slots that every family can feel it."""
    if family.name == "t5gemma":
        return fk.Plan(fk.Window(3), fk.ClusterMeans(4))
    if family.kind == "decoder":
        return fk.budget(8, is_causal=True, memory="constant").never_exact()
    return fk.budget(8).never_exact()


def _part(family: Family, model: nn.Module) -> nn.Module:
    """What a plan is applied to: of an encoder-decoder, its encoder."""
    return model.get_encoder() if family.kind == "both" else model


@torch.no_grad()
def _run(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    found = model(**inputs)[0].float()
    real = inputs.get("attention_mask")
    return found if real is None or real.shape != found.shape[:2] else found[real.bool()]


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() < 1e-4 * other.norm())


def _applied(family: Family, model: nn.Module, inputs: dict[str, Tensor]) -> str:
    before = _run(model, inputs)
    with fk.apply(model if family.kind == "both" else _part(family, model), fk.Plan()):
        if not _same(_run(model, inputs), before):
            return "WRONG: an exact plan is not the model"
    with fk.apply(_part(family, model), plan_of(family)):
        few = _run(model, inputs)
    if not few.isfinite().all():
        return "WRONG: not finite"
    if not torch.equal(_run(model, inputs), before):
        return "WRONG: the model is not what it was"
    return WINDOWS if _same(few, before) else YES


def _written(model: Any, inputs: dict[str, Tensor], **more: Any) -> Tensor:
    given = {name: rows for name, rows in inputs.items() if name != "decoder_input_ids"}
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    found: Tensor = model.generate(**given, **how, **more)
    return found


def _generated(family: Family, model: nn.Module, inputs: dict[str, Tensor]) -> str:
    before = _written(model, inputs)
    with fk.apply(model if family.kind == "both" else _part(family, model), fk.Plan()):
        if not torch.equal(_written(model, inputs), before):
            return "WRONG: an exact plan writes something else"
    with fk.apply(_part(family, model), plan_of(family)):
        _written(model, inputs)
    return YES


def _cached(model: nn.Module, inputs: dict[str, Tensor]) -> str:
    every = fk.Plan(fk.RecentBlocks(32, 2), fk.RunningMeans(1))
    before = _written(model, inputs)
    return YES if torch.equal(_written(model, inputs, past_key_values=fk.cache(model, every)), before) else "WRONG"


def _trained(family: Family, model: nn.Module, inputs: dict[str, Tensor]) -> str:
    model = copy.deepcopy(model).train()
    with fk.apply(_part(family, model), plan_of(family)):
        model(**inputs)[0].float().square().mean().backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    sound = grads and all(bool(grad.isfinite().all()) for grad in grads)
    return YES if sound else "WRONG: gradients are not finite"
