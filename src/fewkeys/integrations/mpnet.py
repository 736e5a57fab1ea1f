"""MPNet (all-mpnet-base-v2), whose attention does not use transformers' interface.

While a plan is active, `MPNetForward` replaces `forward` in the attention module, not in its class.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fewkeys.integrations.answers import plan_stack


@dataclass(eq=False)
class MPNetForward:
    """The `forward` of one module, which calls the attention function."""

    module: nn.Module

    def __call__(
        self, hidden: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None, **options: Any
    ) -> Any:
        module: Any = self.module
        # A call that began before the replacement has the model's own mask.
        is_own_mask = attention_mask is not None and attention_mask.is_floating_point()
        if is_own_mask or plan_stack(module).innermost() is None:
            return type(module).forward(module, hidden, attention_mask, position_bias, **options)
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        size = module.attention_head_size
        rows = (linear(hidden).unflatten(-1, (-1, size)).transpose(1, 2) for linear in (module.q, module.k, module.v))
        attend: Any = ALL_ATTENTION_FUNCTIONS["fewkeys"]
        terms = {"scaling": size**-0.5, "position_bias": position_bias, "is_causal": False}
        terms["dropout"] = module.dropout.p if module.training else 0.0
        by_token, _ = attend(module, *rows, attention_mask, **terms)
        return (module.o(by_token.flatten(2)),)


def is_mpnet(module: nn.Module) -> bool:
    """Whether it is MPNet's attention module."""
    kind = type(module)
    return kind.__name__ == "MPNetSelfAttention" and kind.__module__.startswith("transformers.models.")


def restate(modules: Iterable[nn.Module]) -> None:
    """Replace `forward` in the modules that are MPNet's."""
    ours = [module for module in modules if is_mpnet(module)]
    if any(not isinstance(vars(module).get("forward", MPNetForward(module)), MPNetForward) for module in ours):
        raise ValueError("model: expected MPNet without hooks in its attention, such as accelerate's; remove them")
    for module in ours:
        vars(module).setdefault("forward", MPNetForward(module))


def give_back(module: nn.Module) -> None:
    """Undo `restate`."""
    if isinstance(vars(module).get("forward"), MPNetForward):
        del vars(module)["forward"]
