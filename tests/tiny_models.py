"""Tiny random models of each kind, and inputs for them."""

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 32, "vocab_size": 60}
GROUPED = SIZES | {"num_key_value_heads": 2, "initializer_range": 0.3}


def bert():
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES, max_position_embeddings=40, initializer_range=0.3)).eval()


def llama():
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**GROUPED)).eval()


def gpt2(**more):
    torch.manual_seed(2)
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**sizes, **more, bos_token_id=0, eos_token_id=0)).eval()


MODELS = {"bert": bert, "llama": llama, "gpt2": gpt2}
AFTER_ATTENTION = {"bert": "attention.output.dense", "llama": "self_attn.o_proj", "gpt2": "attn.c_proj"}
"""The module of each layer that reads the output of its attention."""


def tokens(batch=3, length=11, seed=3):
    return torch.randint(1, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(side, lengths=(7, 11, 1), length=11):
    """Inputs with padding on one side (None: no padding)."""
    if side is None:
        return {"input_ids": tokens(len(lengths), length)}
    place = torch.arange(length)
    real = torch.stack([place < n if side == "right" else place >= length - n for n in lengths]).long()
    return {
        "input_ids": tokens(len(lengths), length),
        "attention_mask": real,
        "position_ids": (real.cumsum(1) - 1).clamp(min=0),
    }


@torch.no_grad()
def run(model, **inputs):
    """The first output of the model."""
    return model(**inputs)[0]


def close(one, other, real=None):
    """Assert that two outputs agree where tokens are real."""
    if real is not None:
        one, other = one[real.bool()], other[real.bool()]
    torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def far(one, other):
    """Whether two outputs are plainly different."""
    return bool((one - other).abs().max() > 1e-2)


def after_attention(model, name):
    """The modules that read the output of each attention, layer by layer."""
    return [module for path, module in model.named_modules() if path.endswith(AFTER_ATTENTION[name])]
