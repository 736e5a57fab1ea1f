"""A tiny random model of every family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "encoder_hidden_size", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_decoder_layers"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "hidden_dim"), 32),
    **dict.fromkeys(("n_inner", "moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "n_group", "topk_group"), 1),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    "eos_token_id": None,
    "vocab_size": 60,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "kv_channels": 8,
    "num_decoder_layers": 2,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_seq_len": 128,
    "image_size": 32,
    "patch_size": 4,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "use_cache": True,
}
DROPOUTS = ("dropout", "pdrop", "drop_rate", "drop_path_rate", "layerdrop", "drop_prob", "dropout_prob", "dropout_rate")


@dataclass(frozen=True)
class Family:
    """`kind`: encoder, decoder, both, vision, sound. `more`: what its configuration needs beside `SIZES`."""

    name: str
    kind: str
    more: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def model(self) -> nn.Module:
        """A random model in eval mode, of the same weights every time, without dropout."""
        from transformers import (
            AutoConfig,
            AutoModel,
            AutoModelForCausalLM,
            AutoModelForSeq2SeqLM,
            AutoModelForSpeechSeq2Seq,
        )

        config = AutoConfig.for_model(self.name)
        known = {*vars(config), *config.attribute_map}
        own = {name: size for name, size in SIZES.items() if name in known}
        own |= {name: 0.0 for name in known if name.endswith(DROPOUTS) and isinstance(getattr(config, name), float)}
        config = type(config)(**(own | self.more))
        torch.manual_seed(0)
        writes = AutoModelForSpeechSeq2Seq if self.name == "whisper" else AutoModelForSeq2SeqLM
        factory: Any = {"decoder": AutoModelForCausalLM, "both": writes}.get(self.kind, AutoModel)
        with torch.device("meta"):
            if factory.from_config(config).num_parameters() > 10**6:
                raise ValueError(f"{self.name}: expected a tiny model; give the sizes of its parts")
        model: nn.Module = factory.from_config(config).eval()
        return model


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
MLA |= {"head_dim": 4, "num_key_value_heads": 4}
SEQUENCE = {"decoder_start_token_id": 1, "bos_token_id": 1}
GEMMA = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 60,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "query_pre_attn_scalar": 8,
    "dropout_rate": 0.0,
    "attention_dropout": 0.0,
    **SLIDING,
}
SWIN = {
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "num_attention_heads": [2, 4],
    "window_size": 4,
    "patch_size": 2,
}
CONVOLUTIONS = {
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}
FAMILIES = [
    *[Family(name, "encoder") for name in ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra")],
    *[Family(name, "encoder") for name in ("albert", "mpnet", "deberta-v2", "xlnet", "longformer", "big_bird")],
    Family("modernbert", "encoder", SLIDING | {"local_attention": 8}),
    Family("modernbert", "encoder", {"num_hidden_layers": 22, "local_attention": 8}, "modernbert, its 22 layers"),
    Family("gemma3_text", "encoder", SLIDING | {"use_bidirectional_attention": True}, "EmbeddingGemma"),
    *[Family(name, "decoder") for name in ("gpt2", "gptj", "gpt_neox", "opt", "bloom", "mpt", "falcon")],
    Family("falcon", "decoder", {"alibi": True, "multi_query": False}, "falcon, ALiBi"),
    Family("gpt_neo", "decoder", {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    *[Family(name, "decoder") for name in ("llama", "mixtral", "qwen3", "qwen3_moe", "gemma", "phi", "phi3")],
    *[Family(name, "decoder") for name in ("cohere", "olmo2", "starcoder2", "smollm3", "granite", "stablelm", "glm4")],
    Family("mistral", "decoder", {"sliding_window": 4}),
    Family("qwen2", "decoder", SLIDING | {"use_sliding_window": True}),
    Family("qwen2_moe", "decoder"),
    Family("gemma2", "decoder", SLIDING | {"query_pre_attn_scalar": 8}),
    Family("gemma3_text", "decoder", SLIDING),
    Family("olmo3", "decoder", SLIDING),
    Family("cohere2", "decoder", SLIDING),
    Family("gpt_oss", "decoder", SLIDING),
    Family(
        "llama4_text", "decoder", {"attention_chunk_size": 8, "no_rope_layers": [1, 0], "intermediate_size_mlp": 32}
    ),
    Family("deepseek_v3", "decoder", MLA),
    Family("mamba", "decoder"),
    *[Family(name, "both") for name in ("bart", "mbart", "pegasus", "m2m_100")],
    Family("marian", "both", SEQUENCE),
    Family("t5", "both", SEQUENCE),
    Family("t5gemma", "both", {"encoder": GEMMA, "decoder": GEMMA, "vocab_size": 60} | SEQUENCE),
    Family("whisper", "both", {"num_mel_bins": 6, "max_source_positions": 20, "eos_token_id": 2} | SEQUENCE),
    *[Family(name, "vision") for name in ("vit", "deit", "dinov2", "siglip_vision_model", "clip_vision_model")],
    Family("beit", "vision", {"use_relative_position_bias": True}),
    Family("swin", "vision", SWIN),
    *[Family(name, "sound", CONVOLUTIONS) for name in ("wav2vec2", "hubert")],
]
