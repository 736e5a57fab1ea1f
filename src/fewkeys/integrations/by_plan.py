"""Who answers a call of a layer: the model's own SDPA where that is expected to be faster, or else the layer's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewkeys.call import attention
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.impl import Impl
from fewkeys.flow import gives_way
from fewkeys.guard.fallback import Guard
from fewkeys.integrations.terms import in_terms, plain, with_sink
from fewkeys.plan import Plan
from fewkeys.select import Window

LayerPlan = Plan | Sequence[Plan]


@dataclass(frozen=True, eq=False)
class ByPlan:
    """The answer of a plan for each layer; a layer with a window of its own keeps that window."""

    plans: tuple[LayerPlan | None, ...]
    impl: Impl
    generator: torch.Generator | None
    guards: tuple[Guard, ...]

    def __call__(self, layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor | None:
        plan = self.plans[layer]
        if plan is None and inputs.window is None:
            raise ValueError(
                f"plan: expected layer {layer} to have a sliding window, got a call without one; pass a plan for "
                "every layer"
            )
        if self._gives_way(plan, inputs):
            return None
        call = with_sink(inputs)
        guard = self.guards[layer] if self.guards and inputs.window is None else None
        plans = in_terms(inputs, plan)
        return attention(
            call.query, call.key, call.value, plan=plans, max_error=guard, **call.options(self.generator, self.impl)
        )

    def _gives_way(self, plan: LayerPlan | None, inputs: AttentionInputs) -> bool:
        """Whether the model's own SDPA answers: it knows windows, but no caps, sinks or biases.

        Calls with a guard go to `attention`, which counts them.
        """
        if not plain(inputs) or (self.guards and inputs.window is None):
            return False
        if inputs.window is not None:
            plan = Plan(Window(inputs.window), exact_if_faster=True)
        rows = (inputs.query, inputs.key, inputs.value)
        return plan is not None and gives_way(plan, rows, inputs.is_causal, inputs.query_offset, self.impl)
