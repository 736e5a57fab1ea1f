"""all-MiniLM-L6-v2 with rotary positions: the weights of BERT in the class of Jina v3, which is BERT with RoPE.

The 512 learned positions go; their mean joins the token types. Queries and keys are rotated instead, so that the model
takes any length. Its other weights are MiniLM's until `train` repairs what the change of positions broke.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

TOKENS = 8192
NAMES = (
    ("encoder.layer", "layers"),
    ("attention.self.query", "self_attn.q_proj"),
    ("attention.self.key", "self_attn.k_proj"),
    ("attention.self.value", "self_attn.v_proj"),
    ("attention.output.dense", "self_attn.o_proj"),
    ("attention.output.LayerNorm", "post_attention_layernorm"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
    ("output.LayerNorm", "post_mlp_layernorm"),
)
"""BERT's names of weights and Jina v3's, replaced in this order."""


def teacher_and_tokenizer() -> tuple[Any, Any]:
    """all-MiniLM-L6-v2 and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    from fewkeys.demo import model_folder

    return AutoModel.from_pretrained(model_folder()).eval(), AutoTokenizer.from_pretrained(model_folder())


def rotary(teacher: Any) -> Any:
    """The untrained student: the teacher's weights, positions by rotation."""
    from transformers import JinaEmbeddingsV3Config, JinaEmbeddingsV3Model

    bert = teacher.config
    shape = {name: getattr(bert, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers",
             "num_attention_heads", "intermediate_size", "type_vocab_size", "layer_norm_eps")}  # fmt: skip
    config = JinaEmbeddingsV3Config(
        **shape, max_position_embeddings=2 * TOKENS, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    model = JinaEmbeddingsV3Model(config, add_pooling_layer=False)
    weights = {}
    for name, weight in teacher.state_dict().items():
        for old, new in NAMES:
            name = name.replace(old, new)
        weights[name] = weight
    types = "embeddings.token_type_embeddings.weight"
    weights[types] = weights[types] + weights.pop("embeddings.position_embeddings.weight").mean(0)
    weights = {name: weight for name, weight in weights.items() if not name.startswith("pooler") and "_ids" not in name}
    model.load_state_dict(weights)
    return model


def framed(rows: list[Tensor], tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Rows of tokens between [CLS] and [SEP], filled to one length (B, n), and their mask."""
    cls, sep = torch.tensor([tokenizer.cls_token_id]), torch.tensor([tokenizer.sep_token_id])
    framed_rows = [torch.cat([cls, row, sep]) for row in rows]
    return pad_sequence(framed_rows, batch_first=True), pad_sequence(
        [row >= 0 for row in framed_rows], batch_first=True
    )


def states(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """The last hidden states (B, n, D), in float32. A mask without gaps is not passed: attention is faster without."""
    seen = None if bool(mask.all()) else mask.to(model.device)
    return model(input_ids=tokens.to(model.device), attention_mask=seen).last_hidden_state.float()


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Unit vectors (B, D): the mean over the tokens."""
    weights = mask[..., None].to(hidden)
    return normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def saved_student(folder: Path) -> Any:
    """What `train` saved."""
    from transformers import JinaEmbeddingsV3Model

    return JinaEmbeddingsV3Model.from_pretrained(folder, add_pooling_layer=False).eval()
