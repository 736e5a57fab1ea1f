"""A plan for every head of a model, as one value that can be saved, loaded and applied."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fewkeys.core.files import folder_of, read_json
from fewkeys.core.records import Load, not_here
from fewkeys.core.tensor_files import load_learned
from fewkeys.plan import MODEL_FILE, Plan, save_plans

FORMAT, FILE = 1, MODEL_FILE


@dataclass(frozen=True)
class ModelPlan(Sequence[tuple[Plan, ...]]):
    """One plan for every layer and key head: `model_plan[layer][head]`.

    `fewkeys.apply(model, model_plan)` runs it, `fewkeys.attention(..., plan=model_plan[layer])` one layer.

    Args:
        layers: for each attention layer, one plan for each key head, or one for all of them.
        record: facts about the plan, as JSON values: of `fewkeys.tune` its arguments, the model, errors and slots.
            `fewkeys.apply` warns if "weights", the norms of the weights of all attention layers, are not the model's.
    """

    layers: Sequence[Sequence[Plan]]
    record: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence):
            raise TypeError(
                f"layers: expected a tuple with the plans of each layer, got {type(self.layers).__name__}; "
                "ModelPlan.of({0: plan, 1: plan}) makes one"
            )
        if not self.layers or not all(self.layers):
            raise ValueError("layers: expected at least one layer with at least one plan each, got none")
        for layer, plans in enumerate(self.layers):
            if not isinstance(plans, Sequence) or not all(isinstance(plan, Plan) for plan in plans):
                raise TypeError(
                    f"layers: expected a tuple of plans in layer {layer}, one for each key head or one for all, got "
                    f"{plans!r}; write (plan,)"
                )
        object.__setattr__(self, "layers", tuple(map(tuple, self.layers)))

    @classmethod
    def of(cls, plans: Mapping[int, Plan | Sequence[Plan]]) -> ModelPlan:
        """From a dictionary by layer, 0 .. L - 1, of one plan for the layer or one for each key head."""
        if not isinstance(plans, Mapping):
            raise TypeError(f"plans: expected a dictionary by layer, got {type(plans).__name__}; write {{0: plan}}")
        if set(plans) != set(range(len(plans))):
            raise ValueError(f"plans: expected every layer from 0 on, got {[*plans]}; name those in between")
        by_layer = (plans[layer] for layer in range(len(plans)))
        return cls([item if isinstance(item, Sequence) else (item,) for item in by_layer])

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: Any) -> Any:
        return self.layers[layer]

    def __str__(self) -> str:
        distinct = len({plan for plans in self.layers for plan in plans})
        heads = f" of {len(self.layers[0])} heads" if len(self.layers[0]) > 1 else ""
        layers = f"{len(self.layers)} layer{'s' * (len(self.layers) > 1)}"
        return f"{distinct} plan{'s' * (distinct > 1)} over {layers}{heads}"

    def never_exact(self) -> ModelPlan:
        """The same plans, which also run where exact attention is faster."""
        return replace(self, layers=[[plan.never_exact() for plan in plans] for plans in self.layers])

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the distinct plans, and for each layer and head the number of its plan."""
        number: dict[Plan, int] = {}
        layers = [[number.setdefault(plan, len(number)) for plan in plans] for plans in self.layers]
        plans = [plan.to_dict() for plan in number]
        return {"format": FORMAT, "plans": plans, "layers": layers, "record": dict(self.record)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], learned: Load = not_here) -> ModelPlan:
        """The plans that `to_dict` described. learned: as in `Plan.from_dict`."""
        kind = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        if kind != FORMAT or "layers" not in data:
            raise ValueError(f"model plan: expected a description of format {FORMAT} with layers, got {kind!r}")
        try:
            if odd := data.keys() - {"format", "plans", "layers", "record"}:
                raise ValueError(f"unknown fields {sorted(odd)}")
            plans = {number: Plan.from_dict(plan, learned) for number, plan in enumerate(data["plans"])}
            return cls([[plans[number] for number in layer] for layer in data["layers"]], dict(data["record"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"model plan: expected what ModelPlan.to_dict() writes ({error})") from None

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write `model_plan.json` and learned tensors into `directory` (made if missing), as `Plan` does."""
        save_plans(directory, FILE, self.to_dict(), [plan for plans in self.layers for plan in plans])

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> ModelPlan:
        """The plans saved in `directory`, a folder or a file in it. `ValueError` for missing or damaged files."""
        folder = folder_of(directory)
        return cls.from_dict(read_json(folder, FILE), partial(load_learned, folder))
