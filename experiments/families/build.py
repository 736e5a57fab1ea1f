"""A small random model of any type that transformers knows: every known size of its configuration is made small."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

HIDDEN, HEADS, LENGTH = 32, 4, 24
VOCABULARY, FIRST_SPECIAL = 99, 40
"""Ids from `FIRST_SPECIAL` on are left to tokens with a meaning of their own, such as the place of an image."""
MOST_WEIGHTS = 75 * 10**6

Sizes = list[tuple[str, Any]]
SIZES: Sizes = [
    (r"use_cache", True),
    (r"(swa_)?(num|n)_(key_value|kv)_heads|num_kv_heads|num_global_key_value_heads", 2),
    (r"linear_num_(key|value)_heads|linear_num_heads", 2),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"index_n_heads|num_index_heads", 2),
    (r"(\w+_)?(attention_heads|num_heads|n_heads?)|num_attention_groups", HEADS),
    (r"(\w+_)?(num_hidden_layers|num_layers|n_layers?|num_blocks|depth|num_encoder_blocks)", 2),
    (r"(encoder|decoder|num_encoder|num_decoder|num_hidden)_layers|decoder_num_layers", 2),
    (r"first_k_dense_replace|mlp_only_layers_count|num_dense_layers", 1),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank", 16),
    (r"qk_rope_head_dim", 4),
    (r"qk_nope_head_dim|v_head_dim|index_head_dim", 8),
    (r"qk_head_dim", 12),
    (r"rotary_dim", 4),
    (r"(\w+_)?(head_dim|d_kv|kv_channels|dim_head|attention_head_size|d_head|head_size|head_width)", 8),
    (r"query_pre_attn_scalar", 8),
    (r"\w*(moe_topk|top_k|topk|num_experts_per_tok\w*|topk_group|n_group|num_expert_group|moe_k)", 1),
    (r"\w*(num_experts|n_routed_experts|num_local_experts|moe_num_experts)", 4),
    (r"\w*(shared_experts)", 1),
    (r"(\w+_)?vocab_size\w*|num_embeddings", VOCABULARY),
    (r"(\w+_)?codebook_size", 64),
    (r"num_groups", 2),
    (r"(text_|vision_|max_)?(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx)", 128),
    (r"(\w+_)?image_size|pretrain_image_size|input_size|img_size", 32),
    (r"patch_size", 8),
    (r"num_mel_bins|feature_size|num_mels", 16),
    (r"max_source_positions|max_target_positions", 64),
    (r"(\w+_)?sliding_window|window_size|local_attention|attention_window|attention_window_size", 4),
    (r"attention_chunk_size|local_window_size|max_chunk_size", 8),
    (r"(num_)?query_tokens|num_queries|num_latents", 4),
    (r"(\w+_)?(intermediate_size\w*|ffn_dim|d_ff|mlp_dim|ffn_hidden_size|ffn_size)", HIDDEN),
    (r"(\w+_)?(dim_feedforward|n_inner|ff_dim)", HIDDEN),
    (
        r"(\w+_)?(hidden_size|d_model|d_latents|n_embd|embed_dim|embedding_size|hidden_dim|emb_dim|embedding_dim)",
        HIDDEN,
    ),
    (r"dim|width|(\w+_)?(projection_dim|proj_dim|word_embed_proj_dim|output_dim|feature_dim|embed_proj_dim)", HIDDEN),
    (r"classifier_proj_size|codevector_dim|proj_codevector_dim|xvector_output_dim|tdnn_dim|latent_dim", HIDDEN),
    (r"num_conv_pos_embeddings", 4),
    (r"num_conv_pos_embedding_groups", 2),
    (r"(\w+_)?(state_size|d_state|ssm_state_size)", 4),
    (r"mamba_expand|expand", 2),
    (r"(init_std|initializer_range)", 0.3),
    (r"mamba_d_head|mamba_head_dim", 8),
    (r"mask_time_prob|mask_feature_prob|layerdrop|encoder_layerdrop|decoder_layerdrop|router_jitter_noise", 0.0),
]
"""Patterns of names and what a number of such a name becomes: the first that fits holds."""
SHALLOW: Sizes = [
    (r"use_cache", True),
    (r"(\w+_)?(num_hidden_layers|num_layers|n_layers?|num_blocks|depth|num_encoder_blocks|num_(en|de)coder_layers)", 2),
    (r"(encoder|decoder|num_encoder|num_decoder|num_hidden)_layers|decoder_num_layers", 2),
    (r"(\w+_)?vocab_size\w*|num_embeddings", VOCABULARY),
    (r"mask_time_prob|mask_feature_prob|layerdrop|encoder_layerdrop|decoder_layerdrop|router_jitter_noise", 0.0),
]
"""The same, for types whose widths depend on one another: few layers of the usual width."""
UNSET = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8}
UNSET |= {"prediction_length": 6, "context_length": 24}
UNSET |= {"num_experts_per_tok": 1, "n_routed_experts": 4, "n_shared_experts": 1}
"""What entries become that a type leaves to its users."""
DROPOUT = re.compile(r".*(dropout|pdrop|drop_rate|drop_path_rate|drop_prob|dropout_prob|dropout_rate|drop_path)")
SPECIAL = re.compile(r".*_(token_id|token_index|token_idx|id)")
DEPTHS = re.compile(r"depths|encoder_depths|decoder_depths|layers|num_blocks|layer_depths")
WIDTHS = re.compile(r".*(hidden_sizes|embed_dims?|dims|channels|hidden_channels|widths|conv_dim)")


NEEDS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "esmc": {"num_key_value_heads": HEADS},
    "gemma3n_text": {"intermediate_size": HIDDEN, "activation_sparsity_pattern": [0.0] * 4},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {"indexer_budget": 16, "indexer_compress_ratio": 4},
    "xmod": {"default_language": "en_XX"},
    "dots3_note": {"num_key_value_heads": HEADS},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "glm5_next_text": {"num_key_value_heads": HEADS, "index_topk": 16},
    "qwen2_5_vl_vision": {"fullatt_block_indexes": [1], "window_size": 32},
    "exaone4_5_vision": {"fullatt_block_indexes": [1], "window_size": 32},
}
"""What configurations of some types need beside small sizes."""


class CannotBuildError(ValueError):
    """No small model of a type; the message says why."""


def small_config(config: Any, more: dict[str, Any] | None = None, sizes: Sizes = SIZES) -> Any:
    """A configuration of the same class whose sizes are small; `more` sets what this type needs beside that."""
    values = vars(config)
    names = {*values, *config.attribute_map}
    kwargs: dict[str, Any] = {}
    for name in sorted(names):
        size = _small(name, _value(config, name), sizes)
        if size is not None:
            kwargs[name] = size
    kwargs |= _tokens(config, names)
    kwargs |= _layers(config, names)
    if sizes is SIZES and {"qk_rope_head_dim", "qk_nope_head_dim"} <= names:
        kwargs |= {"head_dim": 4, "num_key_value_heads": HEADS}
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            kwargs[name] = small_config(inner, NEEDS.get(inner.model_type), sizes)
    kwargs |= more or {}
    settable = {name: value for name, value in kwargs.items() if not _is_property(config, name)}
    return type(config)(**settable)


def _tokens(config: Any, names: set[str]) -> dict[str, Any]:
    """Tokens of a small vocabulary that have a meaning of their own."""
    special = [name for name in sorted(names) if SPECIAL.fullmatch(name) and type(_value(config, name)) is int]
    kwargs = {name: FIRST_SPECIAL + place for place, name in enumerate(special)}
    kwargs |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if "vocab_size" in names else {}
    return kwargs | ({"decoder_start_token_id": 1} if "decoder_start_token_id" in names else {})


def _is_property(config: Any, name: str) -> bool:
    return isinstance(getattr(type(config), config.attribute_map.get(name, name), None), property)


def _value(config: Any, name: str) -> Any:
    """An entry of a configuration; None where it is missing, or differs from layer to layer."""
    try:
        return getattr(config, name)
    except Exception:  # transformers has a class of its own for entries that differ from layer to layer
        return None


def _small(name: str, value: Any, sizes: Sizes) -> Any:
    """The small value of one entry of a configuration; None: as it is."""
    if value is None:
        return UNSET.get(name)
    if isinstance(value, bool):
        return True if name == "use_cache" else None
    if isinstance(value, float) and DROPOUT.fullmatch(name):
        return 0.0
    if isinstance(value, int | float):
        for pattern, size in sizes:
            if re.fullmatch(pattern, name):
                return type(value)(size) if isinstance(value, int) and not isinstance(size, float) else size
    if isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
        if DEPTHS.fullmatch(name):
            return type(value)([1] * len(value))
        if sizes is SHALLOW:
            return None
        if WIDTHS.fullmatch(name):
            return type(value)([8 * 2 ** min(place, 2) for place in range(len(value))])
        for pattern, size in SIZES:
            if re.fullmatch(pattern, name) and not isinstance(size, float):
                return type(value)([size] * len(value))
    if sizes is SIZES and name == "rope_parameters" and isinstance(value, dict):
        return _rope(value)
    return None


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Rotations of heads of eight numbers."""
    small = {name: _rope(part) if isinstance(part, dict) else part for name, part in value.items()}
    if not small or any(isinstance(part, dict) for part in small.values()):
        return small
    return small | {"mrope_section": [2, 1, 1] if small.get("partial_rotary_factor", 1) == 1 else [1, 1, 0]}


def _layers(config: Any, names: set[str]) -> dict[str, Any]:
    """Two layers, or one of each kind where there are more kinds."""
    layers = _value(config, "layer_types")
    if not isinstance(layers, list | tuple) or not layers or not isinstance(layers[0], str):
        return {}
    each = list(dict.fromkeys(layers))
    if len(each) == 1:
        each *= 2
    shared = {}
    if "num_kv_shared_layers" in names and getattr(config, "num_kv_shared_layers", 0):
        shared = {"num_kv_shared_layers": len(each)}
        each *= 2
    counts = {name: len(each) for name in ("num_hidden_layers", "n_layer", "num_layers") if name in names}
    return counts | shared | {"layer_types": each}


@dataclass(frozen=True)
class Kind:
    """A type of model, the auto class that makes it, and what its configuration needs beside small sizes."""

    name: str
    auto: str
    more: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        return self.label or self.name


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "num_hidden_layers": 2}
SETTINGS = [
    Kind("modernbert", "AutoModel", {"num_hidden_layers": 22, "layer_types": None}, "modernbert, its 22 layers"),
    Kind("gemma3_text", "AutoModel", SLIDING | {"use_bidirectional_attention": True}, "EmbeddingGemma"),
    Kind("qwen2", "AutoModelForCausalLM", SLIDING | {"use_sliding_window": True}, "qwen2, windows"),
    Kind("beit", "AutoModel", {"use_relative_position_bias": True}, "beit, bias"),
]
"""Settings of note."""


def kinds() -> list[Kind]:
    """Every type that an auto class makes, twice where it makes two kinds of writers, and some settings of note."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    makers = {
        "AutoModelForSeq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForSpeechSeq2Seq": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        "AutoModel": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "AutoModelForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    found = []
    for name in sorted(CONFIG_MAPPING_NAMES):
        makes = [maker for maker, table in makers.items() if name in table]
        if not makes and name in auto.MODEL_MAPPING_NAMES:
            makes = ["AutoModel"]
        if makes:
            found.append(Kind(name, makes[0], NEEDS.get(name, {})))
        if "AutoModelForCausalLM" in makes[1:]:
            decoder = {"is_decoder": True} | NEEDS.get(name, {})
            found.append(Kind(name, "AutoModelForCausalLM", decoder, f"{name}, decoder"))
    return found + SETTINGS


def forms(kind: Kind) -> Iterator[tuple[str, nn.Module]]:
    """Random models of a type: small, else of the usual widths, else the models inside these, those of text first.

    Raises `CannotBuildError` with the first reason, after the last one.
    """
    reasons: list[CannotBuildError] = []
    wholes: dict[str, nn.Module] = {}
    for form, sizes in (("", SIZES), ("of the usual widths", SHALLOW)):
        try:
            wholes[form] = build(kind, sizes)
        except CannotBuildError as error:
            reasons.append(error)
        else:
            yield form, wholes[form]
    for form, whole in wholes.items():
        for name, part in _parts(whole):
            yield ", ".join([f"its {name}", *[form] * bool(form)]), part
    if reasons:
        raise reasons[0]


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    from transformers import PreTrainedModel

    parts = {name: part for name, part in model.named_modules() if name and isinstance(part, PreTrainedModel)}
    for name in sorted(parts, key=lambda name: ("text" not in name, name.count("."), name)):
        yield name, parts[name]


def build(kind: Kind, sizes: Sizes = SIZES) -> nn.Module:
    """A small random model in eval mode, of the same weights every time; `CannotBuildError` with the reason."""
    import transformers

    factory: Any = getattr(transformers, kind.auto)
    try:
        config = small_config(transformers.AutoConfig.for_model(kind.name), kind.more, sizes)
        torch.manual_seed(0)
        with torch.device("meta"):
            weights = factory.from_config(config).num_parameters()
    except Exception as error:
        raise CannotBuildError(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]) from error
    if weights > MOST_WEIGHTS:
        raise CannotBuildError(f"{weights / 10**6:.0f} million weights")
    try:
        torch.manual_seed(0)
        model: nn.Module = factory.from_config(config).eval()
    except Exception as error:
        raise CannotBuildError(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]) from error
    return model
