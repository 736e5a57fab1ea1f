"""The configurations that name a model's attention implementation: switched to ours while somebody needs it, with the
modules below them that ask for attention only when told to (`families`).

A configuration goes back to its own implementation when nobody holds it any more, and no call of another thread is
under way whose mask is ours: it would hand the mask to an implementation that cannot read it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fewkeys.integrations.door import LOCK
from fewkeys.integrations.families import NAME, family_of, give_back, restate
from fewkeys.integrations.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.configuration_utils import PreTrainedConfig


@dataclass
class Held:
    """A configuration, its own implementation, how many hold it switched, and living masks by the thread they serve."""

    config: PreTrainedConfig
    own: str | None
    holders: int = 0
    masks: Counter[int] = field(default_factory=Counter)
    modules: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    def let_go(self, waiting: bool) -> None:
        """Give the configuration its own implementation back, if nobody needs ours."""
        if self.holders or waiting or held.get(id(self.config)) is not self:
            return
        del held[id(self.config)]
        if self.config._attn_implementation == NAME:  # else somebody set another one, which stays
            self.config._attn_implementation = {"": self.own}  # this configuration alone, not those inside it
        for module in self.modules:
            give_back(module)

    def gone(self, thread: int) -> None:
        """A mask that served this thread is gone."""
        with LOCK:
            self.masks[thread] -= 1
            self.let_go(any(self.masks.values()))


held: dict[int, Held] = {}
"""By id of a configuration."""


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every configuration in `model` that names an attention implementation, outer before inner, each once."""
    from transformers import PreTrainedModel

    found: dict[int, PreTrainedConfig] = {}

    def add(config: PreTrainedConfig) -> None:
        found.setdefault(id(config), config)
        for name in config.sub_configs:
            inner = getattr(config, name, None)
            if inner is not None:
                add(inner)

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            add(module.config)
    return list(found.values())


def hold(configs: list[PreTrainedConfig], modules: list[nn.Module]) -> None:
    """Keep these configurations switched, the outermost first, and attention modules of theirs, until they are
    released as often.
    """
    with LOCK:
        for config in configs:
            entry = held.setdefault(id(config), Held(config, config._attn_implementation))
            if config._attn_implementation != NAME:  # set to another one since it was first held
                entry.own = config._attn_implementation
            entry.holders += 1
        held[id(configs[0])].modules.update(modules)


def release(configs: list[PreTrainedConfig]) -> None:
    """The end of one `hold`."""
    with LOCK:
        for config in configs:
            found = held[id(config)]
            found.holders -= 1
            mine = threading.get_ident()
            found.let_go(any(count for thread, count in found.masks.items() if thread != mine))


def own_implementation(module: nn.Module) -> str | None:
    """What answers the attention calls of a module when nobody holds its configuration; None: not known."""
    entry = held.get(id(getattr(module, "config", None)))
    return None if entry is None else entry.own


def switch(model: PreTrainedModel) -> None:
    """Set every configuration in `model` to our implementation."""
    from transformers import PreTrainedModel

    for module in model.modules():  # the outermost first; some parts hold a configuration of their own
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation != NAME:
            own = [part for part in module.modules() if family_of(part)]
            for part in own:
                restate(part)
            if own:  # which transformers itself does not switch
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
    """A call with our mask is under way for as long as the mask lives."""
    found = None if torch.compiler.is_compiling() else held.get(id(config))
    if found is not None:
        thread = threading.get_ident()
        with LOCK:
            found.masks[thread] += 1
        weakref.finalize(mask, found.gone, thread).atexit = False
