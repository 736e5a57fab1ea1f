"""What a plan is worth to a whole model: calls with exact attention and under `fewkeys.apply`, and attention's share.

Weights are random, since times do not depend on them: a shape is all it takes, that of a model of one's own, or one of

    minilm      encoder of all-MiniLM-L6-v2's size: 6 layers, 384 wide, 12 heads of 32
    base        encoder of BERT-base's: 12 layers, 768 wide, 12 heads of 64
    modernbert  encoder of ModernBERT-base's: 22 layers, 768 wide, 12 heads of 64, two of three layers within a window
    smollm2     decoder SmolLM2-135M: 30 layers, 576 wide, 9 query and 3 key heads of 64; without the vocabulary's head
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewkeys.integrations.families import NAME
from fewkeys.integrations.transformers import apply
from fewkeys.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TURNS, ENOUGH_SECONDS = 9, 8.0
"""Turns at a length: `TURNS`, or fewer once they have taken this long, but at least one after the first, which warms up
and counts where it took as long by itself.
"""
TOKENS = 1000
"""Kinds of tokens that are fed, where a model knows as many."""
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
    "smollm2": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}
DECODERS = ("smollm2",)


@dataclass(frozen=True)
class ModelTiming:
    """A model and a plan at one length: medians over `turns`, `ratio` of the ratios turn by turn.

    `exact_share`, `share`: what part of a call is inside attention, exact or under the plan.
    """

    length: int
    turns: int
    exact_ms: float
    ms: float
    ratio: float
    exact_share: float
    share: float


@torch.no_grad()
def time_model(name_or_dir: str, plan: Plan, length: int, *, dtype: torch.dtype = torch.float32) -> ModelTiming:
    """One sequence of `length` tokens without padding through a model of this shape, both ways in turns, on the CPU."""
    model = random_model(name_or_dir, length, dtype)
    ids = torch.randint(min(TOKENS, model.config.vocab_size), (1, length), generator=torch.Generator().manual_seed(0))
    exact: list[tuple[float, float]] = []
    ours: list[tuple[float, float]] = []
    start = perf_counter()
    while len(exact) <= TURNS and (len(exact) < 2 or perf_counter() - start < ENOUGH_SECONDS):
        with _watched("sdpa") as spent:
            exact.append(_timed(model, ids, spent))
        with apply(model, plan.never_exact()), _watched(NAME) as spent:
            ours.append(_timed(model, ids, spent))
        if len(exact) == 1 and perf_counter() - start > ENOUGH_SECONDS:
            break
    first = int(len(exact) > 1)
    exact, ours = exact[first:], ours[first:]
    ratio = median(a / b for (a, _), (b, _) in zip(exact, ours, strict=True))
    (exact_ms, exact_share), (ms, share) = (map(median, zip(*each, strict=True)) for each in (exact, ours))
    return ModelTiming(length, len(exact), exact_ms, ms, ratio, exact_share, share)


def random_model(name_or_dir: str, length: int, dtype: torch.dtype) -> PreTrainedModel:
    """A model of a shape, with `length` positions."""
    from transformers import AutoConfig, AutoModel

    room = {"max_position_embeddings": length, "attn_implementation": "sdpa"}
    if name_or_dir in SHAPES:
        shape = {"num_attention_heads": 12, "vocab_size": TOKENS, **SHAPES[name_or_dir], **room}
        config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    else:
        config = AutoConfig.from_pretrained(name_or_dir, **room)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModel.from_config(config, dtype=dtype).eval()
    return model


@contextmanager
def _watched(name: str) -> Iterator[Callable[[], float]]:
    """The seconds spent since in the attention function that transformers knows under a name."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend, spent = ALL_ATTENTION_FUNCTIONS[name], [0.0]

    def watch(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        output = attend(*args, **kwargs)
        spent[0] += perf_counter() - start
        return output

    AttentionInterface.register(name, watch)
    try:
        yield lambda: spent[0]
    finally:
        AttentionInterface.register(name, attend)


def _timed(model: torch.nn.Module, ids: Tensor, spent: Callable[[], float]) -> tuple[float, float]:
    """Milliseconds of a call, and attention's share of them."""
    start = perf_counter()
    model(input_ids=ids)
    whole = perf_counter() - start
    return 1000 * whole, spent() / whole
