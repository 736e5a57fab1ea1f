"""Run a plan inside a model of Hugging Face transformers: `fewkeys.apply`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.impl import Impl, check_impl
from fewkeys.core.validation import check_generator
from fewkeys.flow import gives_way
from fewkeys.guard.fallback import Fallbacks, Guard
from fewkeys.integrations.capture import capture, weights_of
from fewkeys.integrations.interface import attach, attention_modules, cross_attention, unwrapped
from fewkeys.integrations.loading import load_model
from fewkeys.integrations.masks import layer_window
from fewkeys.integrations.terms import attend, plain, window_has_gaps
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan
from fewkeys.select import Window

__all__ = ["Applied", "apply", "capture", "load_model"]

LayerPlan = Plan | Sequence[Plan]
Plans = Plan | Mapping[int, LayerPlan] | Sequence[LayerPlan]
TOLERANCE = 0.01
"""The relative difference of norms of weights that counts as equal, for another dtype."""


def apply(
    model: nn.Module,
    plan: Plans,
    *,
    impl: Impl = "auto",
    generator: torch.Generator | None = None,
    max_error: float | Guard | None = None,
) -> Applied:
    """Replace attention in every layer of `model` by `plan`, until `restore` or the end of a `with`.

        with fk.apply(model, fk.budget(64)):
            approximate = model(**inputs)
        exact = model(**inputs)                     # bit for bit as before

    Args:
        model: a transformers model or a part of one (`model.encoder`), or a module around one (SentenceTransformer,
            peft, compiled, distributed). docs/families.md lists model families.
        plan: one plan, or one for each attention layer, as a sequence or a mapping from layer index. That of a layer
            may be a sequence with one for each key head. A `ModelPlan` is all of these.
        impl, generator: as in `fewkeys.attention`. With `impl="auto"`, the model's own SDPA answers calls for which
            exact attention is expected to be faster; `plan.never_exact()` always runs.
        max_error: as in `fewkeys.attention`, for each layer by itself; `fallbacks` of the result counts. Decoded tokens
            are answered exactly.

    Grouped queries, padding (2-D attention_mask), prefill, and decoding with `DynamicCache` work as in the model. A
    causal plan selects again for each decoded token. Layers with a sliding window keep it; a sequence of plans may
    leave them out. Soft caps of scores (Gemma 2), learned sinks (gpt-oss) and biases that depend on distance (T5,
    MPNet) are kept (`fewkeys.integrations.terms`).

    Entered by `with`, the plan acts only in the current context (`contextvars`: this thread, this task of asyncio);
    else in every thread, and in copies of the model, also in other processes. The innermost of nested plans answers.
    docs/serving.md has examples.

    Raises:
        TypeError: a `model` or `plan` of another kind.
        ValueError: a model whose attention does not go through transformers' interface, and plans that do not match its
            layers. Calls of `model` raise it for attention dropout, chunked attention, packed causal sequences,
            prepared 4-D masks, static caches, `output_attentions`, and a plan that is not causal in a causal model.
    """
    model = unwrapped(model)
    modules = attention_modules(model)
    plans = tuple(plans_per_layer(plan, modules))
    if isinstance(plan, ModelPlan):
        check_same_weights(plan, [module for module, layer_plan in zip(modules, plans, strict=True) if layer_plan])
    limit = max_error if isinstance(max_error, Guard | None) else Guard(max_error)
    guards = tuple(limit and Guard(limit.max_error, queries=limit.queries) for _ in plans)
    check_impl(impl)
    check_generator(generator)
    return Applied(model, ByPlan(plans, impl, generator, guards, cross_attention(model)))


class Applied(attach):
    """An active plan of `model`, until `restore()` or the end of the `with` block, also when this object is deleted."""

    restore = attach.detach

    def __init__(self, model: Any, answer: ByPlan) -> None:
        super().__init__(model, answer)
        self.model, self._guards = model, answer.guards

    @property
    def fallbacks(self) -> tuple[Fallbacks, ...]:
        """For each layer, how often `max_error` made it answer exactly, so far. Empty without `max_error`."""
        return tuple(guard.fallbacks for guard in self._guards if guard is not None)


@dataclass(frozen=True, eq=False)
class ByPlan:
    """The answer of a plan for each layer."""

    plans: tuple[tuple[Plan, ...], ...]
    impl: Impl
    generator: torch.Generator | None
    guards: tuple[Guard | None, ...]
    cross: frozenset[int]
    """The layers of cross-attention."""

    def __call__(self, layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor | None:
        plans, guard = self.plans[layer], self.guards[layer]
        if inputs.window is not None:
            plans, guard = (Plan(Window(inputs.window), exact_if_faster=True),), None
        if not plans:
            raise ValueError(f"plan: expected one for layer {layer}, whose call has no window; pass one for each layer")
        if plain(inputs):
            rows, how = (inputs.query, inputs.key, inputs.value), (inputs.is_causal, inputs.query_offset, self.impl)
            # `attention` counts calls with a guard.
            if window_has_gaps(inputs) or (guard is None and gives_way(plans, rows, *how)):
                return None
        inputs = inputs.apart() if layer in self.cross else inputs
        return attend(inputs, plans, impl=self.impl, generator=self.generator, max_error=guard)


def plans_per_layer(plan: Plans, modules: Sequence[nn.Module]) -> list[tuple[Plan, ...]]:
    """The plans of each layer: one for all key heads, or one for each; none for layers with a window that lack one."""
    layers = len(modules)
    if isinstance(plan, Plan):
        return [(plan,)] * layers
    if not isinstance(plan, Mapping | Sequence):
        raise TypeError(f"plan: expected a Plan, or one per layer, got {type(plan).__name__}")
    if not isinstance(plan, ModelPlan):
        plan = ModelPlan.of(plan if isinstance(plan, Mapping) else dict(enumerate(plan)))
    no_window = [layer for layer, module in enumerate(modules) if layer_window(module) is None]
    of_plan = range(layers) if len(plan) == layers else no_window
    if len(plan) != len(of_plan):
        also = "" if len(no_window) == layers else f", or of the {len(no_window)} that see every key"
        raise ValueError(f"plan: expected one plan for each of {layers} attention layers{also}, got {len(plan)}")
    plan_of = dict(zip(of_plan, plan, strict=True))
    return [plan_of.get(layer, ()) for layer in range(layers)]


def check_same_weights(plan: ModelPlan, modules: Sequence[nn.Module]) -> None:
    """Warn if the plan was tuned on other weights."""
    tuned: Any = plan.record.get("weights") or []
    weights = weights_of(modules) if tuned else []
    if len(weights) == len(tuned) and any(abs(a - b) > TOLERANCE * b for a, b in zip(weights, tuned, strict=True)):
        what = f"tuned on {plan.record.get('model')}, and this model's attention has other weights"
        warnings.warn(f"plan: {what}; measure it by fewkeys.compare, or tune it again", stacklevel=3)
