"""Switches the attention implementation that a model's configurations name to ours, and back.

A configuration is switched back when the last plan is removed, and no call of another thread still uses a mask of ours:
the model's own implementation could not read that mask. Modules of `families` are rewritten and restored with it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fewkeys.integrations.families import NAME, family_of, give_back, restate
from fewkeys.integrations.plan_stack import LOCK
from fewkeys.integrations.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.configuration_utils import PreTrainedConfig


@dataclass
class SwitchedConfig:
    """A switched configuration, its own implementation, how many hold it switched, and its living masks by thread."""

    config: PreTrainedConfig
    implementation: str | None
    holders: int = 0
    masks: Counter[int] = field(default_factory=Counter)
    modules: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    def restore(self, in_use: bool) -> None:
        """Give the configuration its own implementation back, unless ours is `in_use` or held."""
        if self.holders or in_use or held.get(id(self.config)) is not self:
            return
        del held[id(self.config)]
        if self.config._attn_implementation == NAME:  # another one that a user has set stays
            # This configuration alone, not those inside it.
            self.config._attn_implementation = {"": self.implementation}
        for module in self.modules:
            give_back(module)

    def mask_freed(self, thread: int) -> None:
        """A mask of this thread was freed."""
        with LOCK:
            self.masks[thread] -= 1
            self.restore(any(self.masks.values()))


held: dict[int, SwitchedConfig] = {}
"""By id of a configuration."""


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every configuration in `model` that names an attention implementation, outer before inner, each once."""
    from transformers import PreTrainedModel

    configs: dict[int, PreTrainedConfig] = {}

    def add(config: PreTrainedConfig) -> None:
        configs.setdefault(id(config), config)
        for name in config.sub_configs:
            inner = getattr(config, name, None)
            if inner is not None:
                add(inner)

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            add(module.config)
    return list(configs.values())


def hold(configs: list[PreTrainedConfig], modules: list[nn.Module]) -> None:
    """Keep these configurations switched, the outermost first, and attention modules of theirs, until they are
    released as often.
    """
    with LOCK:
        for config in configs:
            entry = held.setdefault(id(config), SwitchedConfig(config, config._attn_implementation))
            if config._attn_implementation != NAME:  # set to another one since it was first held
                entry.implementation = config._attn_implementation
            entry.holders += 1
        held[id(configs[0])].modules.update(modules)


def release(configs: list[PreTrainedConfig]) -> None:
    """The end of one `hold`."""
    with LOCK:
        for config in configs:
            entry = held[id(config)]
            entry.holders -= 1
            this_thread = threading.get_ident()
            entry.restore(any(count for thread, count in entry.masks.items() if thread != this_thread))


def own_implementation(module: nn.Module) -> str | None:
    """The module's own attention implementation; None where its configuration is not switched."""
    entry = held.get(id(getattr(module, "config", None)))
    return None if entry is None else entry.implementation


def switch(model: PreTrainedModel) -> None:
    """Set every configuration in `model` to our implementation."""
    from transformers import PreTrainedModel

    for module in model.modules():  # the outermost first; some parts hold a configuration of their own
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation != NAME:
            restated = [part for part in module.modules() if family_of(part)]
            for part in restated:
                restate(part)
            if restated:  # which transformers itself does not switch
                module.config._attn_implementation = {"": NAME}
                continue
            with quiet():
                module.set_attn_implementation(NAME)
            stayed = module.config._attn_implementation
            if stayed != NAME:
                raise ValueError(
                    f"model: {type(module).__name__} does not let its attention implementation be set (it stayed "
                    f"{stayed!r}), so its attention cannot be replaced"
                )


def watch(config: PreTrainedConfig, mask: Tensor) -> None:
    """Count a call that uses our mask, for as long as the mask lives."""
    entry = None if torch.compiler.is_compiling() else held.get(id(config))
    if entry is not None:
        thread = threading.get_ident()
        with LOCK:
            entry.masks[thread] += 1
        weakref.finalize(mask, entry.mask_freed, thread).atexit = False
