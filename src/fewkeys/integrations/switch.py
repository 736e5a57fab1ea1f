"""Switches the attention implementation in a model's configurations to ours, and back when the last plan ends.

A call that runs meanwhile in another thread stays correct: a mask that the model made goes to the model's own
attention, and SDPA reads ours (`masks.KeyMask`).
"""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fewkeys.integrations.answers import Scope
from fewkeys.integrations.mpnet import is_mpnet

NAME = "fewkeys"
"""The name of the attention function in transformers' registries."""


@dataclass
class SwitchedConfig:
    """A configuration's own implementation, and the scopes that need the switch (None: a cache)."""

    implementation: str | None
    holders: list[Scope | None] = field(default_factory=list)


switched = WeakIdKeyDictionary()
"""A `SwitchedConfig` for each configuration that is switched."""


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations in `model` that name an attention implementation, each once."""
    from transformers import PreTrainedConfig, PreTrainedModel

    # Layers may read a copy (X-CLIP's message attention).
    configs: list[Any] = [
        config for part in model.modules() if isinstance(config := getattr(part, "config", None), PreTrainedConfig)
    ]
    parts = {id(part.config): part for part in reversed(list(model.modules())) if isinstance(part, PreTrainedModel)}
    for part in parts.values():  # the outermost of each configuration
        if not part._can_set_attn_implementation() and not any(map(is_mpnet, part.modules())):
            raise ValueError(f"model: {type(part).__name__} does not let its attention implementation be set")
    for config in configs:  # the list grows
        configs += [inner for name in config.sub_configs if (inner := getattr(config, name, None)) is not None]
    return list({id(config): config for config in configs}.values())


def hold(configs: list[Any], holder: Scope | None) -> None:
    """Keep these configurations switched until as many calls of `release`. The caller has the `LOCK`."""
    for config in configs:
        entry = switched.setdefault(config, SwitchedConfig(config._attn_implementation))
        if config._attn_implementation != NAME:  # new, or set to another one since
            entry.implementation = config._attn_implementation
            config._attn_implementation = {"": NAME}  # of this one, not of nested ones
        entry.holders.append(holder)


def release(configs: list[Any], holder: Scope | None) -> None:
    """Undo one `hold`. The caller has the `LOCK`."""
    for config in configs:
        entry = switched[config]
        entry.holders.remove(holder)
        if not entry.holders:
            if config._attn_implementation == NAME:  # another one that a user has set stays
                config._attn_implementation = {"": entry.implementation}
            del switched[config]


def holders(config: Any) -> list[Scope]:
    """The scopes of plans that need the switch of a configuration."""
    entry = switched.get(config)
    # The tuple is a copy made in one step: other threads append and remove meanwhile, and a loop would miss scopes.
    return [] if entry is None else [scope for scope in tuple(entry.holders) if scope is not None]


def own_implementation(config: Any) -> str | None:
    """The implementation of a configuration without us; None: unknown, as in a copy of a switched one."""
    entry = None if config is None else switched.get(config)
    name: str | None = getattr(config, "_attn_implementation", None) if entry is None else entry.implementation
    return None if name == NAME else name
