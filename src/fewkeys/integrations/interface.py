"""How transformers calls this package: the attention function and the mask function of a model.

transformers looks both up in registries, under one name. Both are registered here, once, on first use: with an
attention function but no mask function (`masks`), a model would silently lose its padding. Some modules do not use the
registries; `families` makes those that it lists do so.

Each attention module holds a stack of plans (`plan_stack`). If no plan is in force, the call is answered by exact
attention. Nothing global refers to a model, so dropping a model drops its entries.
"""

from __future__ import annotations

import copyreg
import inspect
import weakref
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fewkeys.call import attention
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.precision import autocast_is_on, lowered
from fewkeys.integrations import packed, streams, switch
from fewkeys.integrations.families import NAME, family_of
from fewkeys.integrations.masks import key_mask, read_mask, visible
from fewkeys.integrations.patterns import check_honoured
from fewkeys.integrations.plan_stack import Answer, Application, PlanStack, plan_stack, push, remove
from fewkeys.integrations.terms import check_sink, distance_bias, in_terms, plain, with_key_bias, with_sink

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MIXED = ", and its scores depend on contents and distances together, which no plan knows"
_SPARSE = ", and it is sparse by a rule of its own"
OUTSIDE = {
    **dict.fromkeys(("deberta", "deberta-v2", "xlnet"), _MIXED),
    **dict.fromkeys(("longformer", "led", "big_bird", "bigbird_pegasus", "informer"), _SPARSE),
    **dict.fromkeys(("mamba", "mamba2", "rwkv"), ", as it has none"),
}
"""Why models of some types cannot ask the interface."""
PARTLY = ("informer",)
"""Types of which some layers ask it, and others, which compute with the mask, do not."""


class Attachment:
    """What `attach` did to a model, to be undone."""

    def __init__(self, model: PreTrainedModel, application: Application | None) -> None:
        self._application = application
        self._modules = [weakref.ref(module) for module in attention_modules(model)]
        configs = switch.configs_of(model)
        self._release = weakref.finalize(model, switch.release, configs)
        self._release.atexit = False
        switch.hold(configs, self._alive())
        try:
            switch.switch(model)
        except BaseException:
            self._release()
            raise
        self._hook = model.register_forward_pre_hook(_refuse_output_attentions, with_kwargs=True)
        for layer, module in enumerate(self._alive()):
            if application is not None:
                push(layer, module, application)

    def enter(self) -> None:
        """From now on, answer only in the current context."""
        if self._application is not None:
            self._application.enter()

    def detach(self) -> None:
        """Undo everything; a second time does nothing."""
        if self._application is not None:
            self._application.leave()
        if self._release.alive:
            for module in self._alive():
                if self._application is not None:
                    remove(module, self._application)
            self._hook.remove()
            self._release()

    def _alive(self) -> list[nn.Module]:
        return [module for module in (reference() for reference in self._modules) if module is not None]


def attach(model: PreTrainedModel, answer: Answer | None) -> Attachment:
    """Let `answer` answer every attention call of `model` from now on; None: leave the stacks of plans as they are.

    Raises `TypeError` for what is not a transformers model and `ValueError` for one whose attention cannot be
    replaced; the model is then as it was.
    """
    attention_modules(model)
    register()
    return Attachment(model, None if answer is None else Application(answer))


def unwrapped(model: object) -> PreTrainedModel:
    """The transformers model: `model` itself, or the one inside it.

    A SentenceTransformer, a model of peft, a compiled or distributed one hold one each. `TypeError` for others.
    """
    need_transformers()
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return model
    inside = [] if not isinstance(model, nn.Module) else [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    parts = {id(part) for inner in inside for part in inner.modules() if part is not inner}
    outermost = [inner for inner in inside if id(inner) not in parts]
    if len(outermost) != 1:
        raise TypeError(
            f"model: expected a transformers PreTrainedModel, or a module around one, got {type(model).__name__} with "
            f"{len(outermost)} inside; pass the transformers model itself"
        )
    return outermost[0]


def attention_modules(model: object) -> list[nn.Module]:
    """The modules of `model` that ask the attention interface, in the model's own order: layer 0, layer 1, ..."""
    model = unwrapped(model)
    modules = [module for module in model.modules() if family_of(module) or _asks_interface(type(module))]
    if not modules or model.config.model_type in PARTLY:
        why = OUTSIDE.get(model.config.model_type, "")
        raise ValueError(
            f"model: {type(model).__name__} does not use transformers' attention interface, so its attention cannot "
            f"be replaced{why}; use an architecture that does (BERT, RoBERTa, ModernBERT, Llama, Qwen, GPT-2, ...)"
        )
    return modules


def is_causal(module: nn.Module) -> bool:
    """Whether the queries of an attention module see no future."""
    family = family_of(module)
    return bool(getattr(module, "is_causal", True)) if family is None else family.is_causal


def need_transformers() -> None:
    """Raise `ModuleNotFoundError` that names the extra to install, where transformers is missing."""
    if find_spec("transformers") is None:
        raise ModuleNotFoundError("transformers is needed for this and is not installed; pip install 'fewkeys[hf]'")


def _asks_interface(kind: type) -> bool:
    """Whether a `forward` of this class, its own or inherited, looks its attention up in the interface."""
    for base in kind.__mro__:
        code = (
            getattr(inspect.unwrap(base.__dict__["forward"]), "__code__", None) if "forward" in base.__dict__ else None
        )
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            return True
    return False


def register() -> None:
    """Register both functions under our name; a process that receives a copied model does so, too."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, _mask)


def _copied_stack(innermost: tuple[int, Answer] | None) -> PlanStack:
    """The stack of a copied module, perhaps in a process that has not imported fewkeys yet."""
    register()
    return PlanStack() if innermost is None else PlanStack(((innermost[0], Application(innermost[1])),))


copyreg.pickle(PlanStack, lambda stack: (_copied_stack, (stack.innermost(),)))


def exact(module: nn.Module, inputs: AttentionInputs) -> Tensor:
    """The call as the model's own SDPA implementation answers it: the same function, mask and bits.

    SDPA has no caps, sinks and biases of distances: calls with these are answered exactly by `fewkeys.attention`.
    """
    if not plain(inputs):
        call = with_sink(inputs)
        return by_token(attention(call.query, call.key, call.value, plan=in_terms(inputs, None), **call.options()))
    mask = None
    queries, keys = inputs.query.shape[2], inputs.key.shape[2]
    if inputs.key_mask is not None or inputs.window is not None or (inputs.is_causal and 1 < queries != keys):
        how = (inputs.is_causal, inputs.window, inputs.query_offset, inputs.key_mask, inputs.key.device)
        mask = visible(queries, keys, *how).expand(inputs.query.shape[0], 1, queries, keys)
    out, _ = _sdpa(module, inputs.query, inputs.key, inputs.value, mask, inputs.scale, inputs.is_causal)
    return out.transpose(1, 2)


def by_token(output: Tensor) -> Tensor:
    """The output (B, Hq, Nq, Dv) in the memory layout that the model's output projection reads.

    `ProjectionFinder` recognises the projection by the address of its input.
    """
    return output.transpose(1, 2).contiguous().transpose(1, 2)


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    is_causal: bool | None,
    softcap: float | None = None,
) -> tuple[Tensor, None]:
    return _transformers_sdpa()(module, query, key, value, mask, scaling=scale, is_causal=is_causal, softcap=softcap)


@cache
def _transformers_sdpa() -> Callable[..., tuple[Tensor, None]]:
    """The attention function of transformers: imported once, since an `import` in each layer of each call adds up."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def _is_causal_unmasked(module: nn.Module, argument: bool | None, by_mask: bool | None) -> bool:
    """Whether a call without padding or window is causal. `by_mask`: what its mask says, None without a mask.

    "eager" follows the mask. The other implementations drop such a mask and follow the argument, or without one the
    flag of the module. The flag is wrong in some models (AIMv2), which a plan does not mend. An argument that differs
    from the flag may only say whether there is a mask (Moonshine).
    """
    if switch.own_implementation(module) == "eager":
        return bool(by_mask)
    flag = bool(getattr(module, "is_causal", True))
    if argument is None or argument == flag:
        return flag
    return argument if by_mask is None else by_mask


# --- what transformers calls --------------------------------------------------------------------------------------


def _refuse_output_attentions(module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
    if kwargs is None:  # another thread's call, while torch registers the hook: not one of ours
        return
    wanted = kwargs.get("output_attentions")
    if wanted if wanted is not None else getattr(module.config, "output_attentions", False):
        raise ValueError(
            "output_attentions: expected False, since no n x n weights are formed here; restore the model, or set its "
            "attention implementation to 'eager', to read attention weights"
        )


def _mask(**kwargs: Any) -> Tensor:
    """The mask function of transformers."""
    mask = key_mask(**kwargs)
    if kwargs.get("config") is not None:
        switch.watch(kwargs["config"], mask)
    return mask


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    key_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: (B, Hq, Nq, D) in, (B, Nq, Hq, Dv) and no weights out.

    key_bias, window: only of the families that `families` rewrites. position_bias: (B or 1, Hq, Nq, Nk), of distances.
    """
    check_honoured(module, dropout, kwargs)
    stack, softcap, sink = plan_stack(module), kwargs.get("softcap"), kwargs.get("s_aux")
    innermost = stack.innermost()
    is_plain, mask = sink is None and position_bias is None, attention_mask
    if is_plain and innermost is None and mask is not None and mask.ndim == 4 and mask.shape[2] > 1:
        # A call of another thread that built its mask before the switch.
        return _sdpa(module, query, key, value, attention_mask, scaling, is_causal, softcap)
    if attention_mask is None:
        real, causal, own_window = None, _is_causal_unmasked(module, is_causal, None), None
    else:
        real, causal, own_window = read_mask(module, attention_mask, (query.shape[0], key.shape[2]))
        if real is None and own_window is None and (query.shape[2] == key.shape[2] or not causal):
            causal = _is_causal_unmasked(module, is_causal, causal)
    window = own_window if window is None else window
    if causal and key.shape[2] < query.shape[2]:
        raise ValueError(f"key: expected at least {query.shape[2]} keys in a causal call, got {key.shape[2]}")
    offset, bias = key.shape[2] - query.shape[2] if causal else 0, position_bias
    waiting, scale = streams.waiting(key), query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    facts, is_lowered = None, autocast_is_on()
    is_plain = is_plain and real is None and window is None and waiting is None and softcap is None and key_bias is None
    if is_plain and not (offset or is_lowered or torch.compiler.is_compiling() or "cu_seq_lens_q" in kwargs):
        shapes, threads = (query.shape, key.shape, value.shape), torch.get_num_threads()
        facts = (innermost, causal, scale, *shapes, query.dtype, query.device, threads)
        if facts == stack.own_call:
            return _sdpa(module, query, key, value, None, scale, causal)
    if key_bias is not None:
        query, key, value = with_key_bias(query, key, value, key_bias, scale, centred=waiting is None)
    if is_lowered:
        query, key, value = lowered(query), lowered(key), lowered(value)
    inputs = AttentionInputs(
        query=query,
        key=key,
        value=value,
        scale=scale,
        is_causal=causal,
        key_mask=real,
        query_offset=offset,
        window=window,
        softcap=softcap,
        sink=None if sink is None else check_sink(sink, query.shape[1]),
        distance_bias=None if bias is None else distance_bias(bias, offset),
    )
    if waiting is not None:
        output = waiting.attend(inputs)
    else:
        real = packed.real_tokens(inputs, kwargs)
        inputs = inputs if real is None else packed.in_rows(inputs, real)
        answered = None if innermost is None else innermost[1](innermost[0], module, inputs)
        if innermost is not None and answered is None:
            stack.own_call = facts
        output = exact(module, inputs) if answered is None else answered
        output = output if real is None else packed.in_one_row(output, real)
    return output.transpose(1, 2).contiguous(), None
