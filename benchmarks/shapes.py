"""Models of random weights: times do not depend on weights.

minilm      encoder of all-MiniLM-L6-v2's size: 6 layers, 384 wide, 12 heads of 32
base        encoder of BERT-base's: 12 layers, 768 wide, 12 heads of 64
modernbert  encoder of ModernBERT-base's: 22 layers, 768 wide, 12 heads of 64, two of three layers within a window
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

TOKENS = 1000
"""The size of the vocabulary."""
SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {"model_type": "bert", "num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1536},
    "base": {"model_type": "bert", "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072},
    "modernbert": {
        "model_type": "modernbert",
        "num_hidden_layers": 22,
        "hidden_size": 768,
        "intermediate_size": 1152,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
    },
}


def random_model(name: str, length: int, dtype: torch.dtype) -> PreTrainedModel:
    """A model of this shape with `length` positions."""
    shape = {"num_attention_heads": 12, "vocab_size": TOKENS, **SHAPES[name]}
    kind = shape.pop("model_type")
    config = AutoConfig.for_model(kind, **shape, max_position_embeddings=length, attn_implementation="sdpa")
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModel.from_config(config, dtype=dtype).eval()
    return model
