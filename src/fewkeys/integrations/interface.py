"""The door between transformers and this package: who answers the attention calls of a model, and with which mask.

transformers asks two registries by one name: the attention function, and the function that builds its mask. Both are
registered here, once, on first use; a model switched to the name without a mask function would silently lose its
padding. Our mask function builds nothing of size n x n. It checks that the model wants plain causal or plain
bidirectional attention and passes on which keys are real:

    None            every key is real; the attention module says whether it is causal
    (B, Nk)         real keys of a causal call
    (B, 1, 1, Nk)   real keys of a call in which every query sees them all

Who answers is a stack per attention module, so that nested `apply` calls and captures undo in any order. Modules are
weak keys and nothing that is kept refers to a model: a model that is dropped takes its entries with it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fewkeys.captures.capture import AttentionInputs
from fewkeys.integrations import streams
from fewkeys.integrations.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.configuration_utils import PreTrainedConfig

NAME = "fewkeys"

_INERT = {
    "cache_position",
    "encoder_attention_mask",
    "encoder_hidden_states",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "token_type_ids",
    "use_cache",
}
"""Arguments that models hand down to their attention and that do not change its answer."""


class Answer(Protocol):
    """Answers one attention call of the `layer`-th attention module: (B, Hq, Nq, Dv)."""

    def __call__(self, layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor: ...


_answers: weakref.WeakKeyDictionary[nn.Module, list[tuple[int, Answer]]] = weakref.WeakKeyDictionary()
_switched: dict[int, tuple[PreTrainedConfig, str | None, int]] = {}
"""By id of a configuration: itself, its own attention implementation, how many attachments hold it switched."""


def attach(model: PreTrainedModel, answer: Answer) -> Callable[[], None]:
    """Let `answer` answer every attention call of `model` from now on; the returned function undoes it, once.

    Raises `TypeError` for what is not a transformers model and `ValueError` for one whose attention cannot be
    replaced; the model is then as it was.
    """
    modules = attention_modules(model)
    _register()
    configs = _configs(model)
    release = weakref.finalize(model, _release, configs)
    release.atexit = False
    _hold(configs)
    try:
        _switch(model)
    except BaseException:
        release()
        raise
    hook = model.register_forward_pre_hook(_refuse_output_attentions, with_kwargs=True)
    for layer, module in enumerate(modules):
        _answers.setdefault(module, []).append((layer, answer))
    alive = [weakref.ref(module) for module in modules]

    def detach() -> None:
        if not release.alive:
            return
        for layer, reference in enumerate(alive):
            module = reference()
            if module is not None:
                _answers[module].remove((layer, answer))
        hook.remove()
        release()

    return detach


def attention_modules(model: object) -> list[nn.Module]:
    """The modules of `model` that ask the attention interface, in the model's own order: layer 0, layer 1, ..."""
    need_transformers()
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a transformers PreTrainedModel, got {type(model).__name__}; "
            "pass the transformers model inside it"
        )
    modules = [module for module in model.modules() if _asks_interface(type(module))]
    if not modules:
        raise ValueError(
            f"model: {type(model).__name__} does not use transformers' attention interface, so its attention cannot "
            "be replaced; use an architecture that does (BERT, RoBERTa, Llama, Qwen, GPT-2, ...)"
        )
    return modules


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


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, _key_mask)


# --- the configurations that name the implementation --------------------------------------------------------------


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
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


def _hold(configs: list[PreTrainedConfig]) -> None:
    for config in configs:
        _, own, count = _switched.get(id(config), (config, config._attn_implementation, 0))
        _switched[id(config)] = (config, own, count + 1)


def _release(configs: list[PreTrainedConfig]) -> None:
    for config in configs:
        _, own, count = _switched.pop(id(config))
        if count > 1:
            _switched[id(config)] = (config, own, count - 1)
        else:
            config._attn_implementation = {"": own}  # this configuration alone, not those inside it


def _switch(model: PreTrainedModel) -> None:
    from transformers import PreTrainedModel

    for module in model.modules():  # the outermost first; some parts hold a configuration of their own
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation != NAME:
            with quiet():
                module.set_attn_implementation(NAME)
            stayed = module.config._attn_implementation
            if stayed != NAME:
                raise ValueError(
                    f"model: {type(module).__name__} does not let its attention implementation be set (it stayed "
                    f"{stayed!r}), so its attention cannot be replaced"
                )


# --- what transformers calls --------------------------------------------------------------------------------------


def _refuse_output_attentions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("output_attentions")
    if wanted if wanted is not None else getattr(module.config, "output_attentions", False):
        raise ValueError(
            "output_attentions: expected False, since no n x n weights are formed here; restore the model, or set its "
            "attention implementation to 'eager', to read attention weights"
        )


def _key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> Tensor | None:
    """The real keys, in the forms the head of this file lists. Raises `ValueError` for any pattern beside padding.

    transformers allows the skip of a mask exactly where the pattern is plain, so its own flags tell packed sequences,
    prefix-bidirectional blocks and other overlays.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    bidirectional = allow_is_bidirectional_skip
    if not bidirectional and int(q_offset) + q_length != kv_offset + kv_length:
        raise ValueError(
            f"past_key_values: expected a cache that holds the seen tokens only, got {kv_length} slots for "
            f"{int(q_offset) + q_length} tokens; use DynamicCache instead of a static or preallocated cache"
        )
    if local_size is not None and kv_length > local_size and not isinstance(kv_length, streams.Length):
        raise ValueError(
            f"sliding_window: this model lets a query see {local_size} keys, got {kv_length}; windows of the model "
            f"are not honoured, use sequences of at most {local_size} tokens"
        )
    plain = mask_function in (bidirectional_mask_function, causal_mask_function) or local_size is not None
    if not plain or not (bidirectional or allow_is_causal_skip):
        raise ValueError(
            "attention_mask: expected plain causal or bidirectional attention with padding, got another pattern "
            "(packed sequences, blocks, or a compiled cache); give each sequence its own row and pad by attention_mask"
        )
    if attention_mask is None:
        return None
    real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if real.shape[1] < kv_length:
        real = nn.functional.pad(real, (0, kv_length - real.shape[1]))
    if bool(real.all()):
        return None
    return real[:, None, None, :] if bidirectional else real


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: (B, Hq, Nq, D) in, (B, Nq, Hq, Dv) and no weights out."""
    stack = _answers.get(module)
    if not stack:
        raise ValueError(
            f"model: the attention of this {type(module).__name__} was never replaced, though its configuration says "
            "so; a copy of a model, or a model that shares its configuration, needs its own fewkeys.apply"
        )
    _refuse(module, key, dropout, kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    real, causal = _read_mask(attention_mask, query, key, causal)
    if causal and key.shape[2] < query.shape[2]:
        raise ValueError(f"key: expected at least {query.shape[2]} keys in a causal call, got {key.shape[2]}")
    inputs = AttentionInputs(
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        is_causal=causal,
        key_mask=real,
        query_offset=key.shape[2] - query.shape[2] if causal else 0,
    )
    layer, answer = stack[-1]
    return answer(layer, module, inputs).transpose(1, 2).contiguous(), None


def _read_mask(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> tuple[Tensor | None, bool]:
    """The real keys (B, Nk) or None, and whether the call is causal."""
    if mask is None:
        return None, causal
    batch, keys = query.shape[0], key.shape[2]
    if mask.dtype == torch.bool and mask.shape == (batch, keys):
        return mask, True
    if mask.dtype == torch.bool and mask.shape == (batch, 1, 1, keys):
        return mask[:, 0, 0, :], False
    raise ValueError(
        f"attention_mask: expected padding of shape {(batch, keys)}, got {mask.dtype} of shape {tuple(mask.shape)}; "
        "pass the two-dimensional attention_mask of the tokenizer, not one prepared for each query"
    )


def _refuse(module: nn.Module, key: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` for each wish of the model that is not honoured."""
    if dropout:
        raise ValueError(
            f"dropout: expected 0, got {dropout}; call model.eval(), or configure the model with no attention dropout"
        )
    window = kwargs.pop("sliding_window", None)
    if window is not None and key.shape[2] > window and not streams.waits(key):
        raise ValueError(
            f"sliding_window: this model lets a query see {window} keys, got {key.shape[2]}; windows of the model are "
            f"not honoured, use sequences of at most {window} tokens"
        )
    for name, given in kwargs.items():
        if name not in _INERT and given is not None and given is not False:
            raise ValueError(
                f"{name}: {type(module).__name__} hands this to its attention, and it is not honoured here; "
                "use a model or a call without it"
            )
