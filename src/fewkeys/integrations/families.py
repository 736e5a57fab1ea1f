"""Families whose attention modules do not use the interface: one of their methods is replaced by one that does.

As long as the model's attention runs through fewkeys, `Restated` stands in such a module in place of that method (by
the instance: classes stay as they are). It makes queries, keys and values as the module does, asks the attention
function of transformers' registry, and goes on from the output as the module does. A key's own bias (ALiBi: slope times
place, of which softmax sees differences alone) goes along as `key_bias` (B, Hq, Nk), a bias for every distance as
`position_bias` (B or 1, Hq, Nq, Nk).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fewkeys.integrations import streams

NAME = "fewkeys"
"""What the attention function is registered as."""


@dataclass(frozen=True)
class Family:
    """What is restated of an attention module: the method, by which function, whether the module is causal, and where
    the mask stands among the method's arguments.
    """

    method: str
    how: Callable[..., Any]
    is_causal: bool = True
    mask_at: int | None = None


@dataclass(eq=False)
class Restated:
    """A method of one module. Calls that began before it stood here have a mask of another kind: they end as they
    began.
    """

    module: nn.Module
    family: Family

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        at = self.family.mask_at
        mask = args[at] if at is not None and len(args) > at else kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 4 and (self.family.is_causal or mask.is_floating_point()):
            return getattr(type(self.module), self.family.method)(self.module, *args, **kwargs)
        return self.family.how(self.module, *args, **kwargs)


def family_of(module: nn.Module) -> Family | None:
    """How a module is rewritten; None: it uses the interface itself, or has no known attention."""
    kind = type(module)
    return FAMILIES.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


def restate(module: nn.Module) -> None:
    """Make a module use the interface from now on; nothing if it does already."""
    family = family_of(module)
    if family is None:
        return
    if not isinstance(vars(module).setdefault(family.method, Restated(module, family)), Restated):
        raise ValueError(
            f"model: expected {type(module).__name__}.{family.method} to be that of its class, got one of the module's "
            "own, as hooks of accelerate are; apply the plan first, or remove the hooks"
        )


def give_back(module: nn.Module) -> None:
    """The end of `restate`."""
    family = family_of(module)
    if family is not None and isinstance(vars(module).get(family.method), Restated):
        del vars(module)[family.method]


def _ask(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, **more: Any
) -> Tensor:
    """The output (B, Nq, Hq Dv)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    dropout = dropout if module.training else 0.0
    attend: Any = ALL_ATTENTION_FUNCTIONS[NAME]
    output, _ = attend(module, query, key, value, mask, dropout=dropout, **{"is_causal": True} | more)
    flat: Tensor = output.flatten(2)
    return flat


def _mpnet(
    module: Any, hidden: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None, **_: Any
) -> tuple[Tensor]:
    rows = (part(hidden).unflatten(-1, (-1, module.attention_head_size)) for part in (module.q, module.k, module.v))
    query, key, value = (part.transpose(1, 2) for part in rows)
    more = {"scaling": module.attention_head_size**-0.5, "position_bias": position_bias, "is_causal": False}
    return (module.o(_ask(module, query, key, value, attention_mask, module.dropout.p, **more)),)


def _bloom(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    bias = _latest(alibi.unflatten(0, (-1, module.num_heads)).squeeze(2), key, layer_past, module.layer_idx)
    more = {"scaling": module.inv_norm_factor, "key_bias": bias}
    mixed = module.dense(_ask(module, query, key, value, attention_mask, module.attention_dropout.p, **more))
    return residual + nn.functional.dropout(mixed, module.hidden_dropout, module.training), None


def _falcon(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    query, key, value = (part.transpose(1, 2) for part in module._split_heads(module.query_key_value(hidden_states)))
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)  # type: ignore[misc]
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    more: dict[str, Any] = {"scaling": module.inv_norm_factor}
    if alibi is not None:
        slopes = alibi.reshape(len(query), module.num_heads, -1) * module.inv_norm_factor
        more["key_bias"] = _latest(slopes, key, layer_past, module.layer_idx)
    dropout = 0.0 if alibi is None else module.attention_dropout.p
    return module.dense(_ask(module, query, key, value, attention_mask, dropout, **more)), None


def _mpt(
    module: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (part.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for part in mixed.chunk(3, dim=2))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    bias = position_bias.transpose(0, 1)  # (1, Hq, length), ends at 0
    if streams.waiting(key):
        slope = bias[..., -1:] - bias[..., -2:-1]
        first = past_key_values.get_seq_length(module.layer_idx)
        bias = slope * torch.arange(first, first + key.shape[2], device=key.device)
    else:
        bias = bias[..., -key.shape[2] :]
    more = {"scaling": module.softmax_scale, "key_bias": bias.to(key.dtype)}
    return module.out_proj(_ask(module, query, key, value, attention_mask, module.attn_dropout_p, **more)), None


def _gptj(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    more = {"scaling": 1 / module.scale_attn}
    mixed = _ask(module, query, key, value, attention_mask, module.attn_dropout.p, **more)
    return mixed.unflatten(-1, (-1, value.shape[-1])).transpose(1, 2), None


def _gpt_neo(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    local = module.config.attention_layers[module.layer_id] == "local"
    more = {"scaling": 1.0, "window": module.config.window_size if local else None}
    mixed = _ask(module, query, key, value, attention_mask, module.attn_dropout.p, **more)
    return mixed.unflatten(-1, (-1, value.shape[-1])).transpose(1, 2), None


def _latest(bias: Tensor, key: Tensor, past: Any, layer: int) -> Tensor:
    """The bias of the keys of this call. A stream holds earlier keys elsewhere: there, that of the latest places."""
    if streams.waiting(key) and bias.shape[-1] != past.get_seq_length(layer) + key.shape[2]:
        raise ValueError(
            "attention_mask: expected one over all tokens so far, which gives new tokens their positions, got none; "
            "pass the tokenizer's attention_mask, lengthened by ones, as model.generate does"
        )
    return bias[..., -key.shape[2] :]


FAMILIES = {
    "MPNetSelfAttention": Family("forward", _mpnet, is_causal=False, mask_at=1),
    "BloomAttention": Family("forward", _bloom),
    "FalconAttention": Family("forward", _falcon),
    "MptAttention": Family("forward", _mpt),
    "GPTJAttention": Family("_attn", _gptj, mask_at=3),
    "GPTNeoSelfAttention": Family("_attn", _gpt_neo, mask_at=3),
}
"""By the name of a class of transformers."""
