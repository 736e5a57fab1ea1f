"""Vectors of texts by a SentenceTransformer: one for a whole text, or late chunks, one for each part of it.

Late chunking (Guenther et al., "Late Chunking", 2024, arXiv 2409.04701) reads the text in one pass and pools its token
embeddings part by part, so that the vector of a part knows the rest of the text. The modules after the encoder's first
(pooling, dense layers, normalisation) run on each part as they would on a text, with nothing re-implemented here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewkeys.guard.fallback import Fallbacks, Guard
from fewkeys.integrations.passes import Places, Span, longest, read_tokens, resolved_prompt
from fewkeys.integrations.passes import split as split

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

OVER_TOKENS = ("mean", "mean_sqrt_len_tokens", "max")
"""Poolings that mean the same for a part as for the whole text; the others read one token or weigh by place."""
WATCH = Guard(sys.float_info.max, queries=8)
"""As `max_error` of `fewkeys.apply`: errors are estimated, and nothing is answered exactly because of them. Eight
queries of every head are enough for a mean over all heads.
"""


@dataclass(frozen=True, eq=False)
class Chunks:
    """The vectors (C, d) of C parts of a text, the characters [start, stop) of each, and how many tokens it pools."""

    vectors: Tensor
    spans: tuple[Span, ...]
    tokens: tuple[int, ...]


def late_chunks(
    encoder: SentenceTransformer,
    text: str,
    chunks: int | Sequence[Span] | None = 256,
    *,
    prompt_name: str | None = None,
    prompt: str | None = None,
) -> Chunks:
    """One pass of `encoder` over `text`, and a vector for each chunk.

        with fk.apply(encoder, fk.budget(192)):
            chunks = late_chunks(encoder, text, 256)        # chunks.vectors, chunks.spans

    `vector_c = post(pool(h_i for tokens i of chunk c))`, `h = transformer(prompt + text)`, where `pool` and `post` are
    the encoder's own modules.

    Args:
        encoder: its first module gives token embeddings; it must end in one pooling module and what follows that.
        text: at most as many tokens as the encoder takes in one pass; `split` cuts longer ones. Nothing is truncated.
        chunks: tokens in a chunk (the last may be shorter); or the characters (start, stop) of each chunk, such as the
            sentences that a splitter found, which may overlap or leave gaps; None: one chunk, the whole text. A token
            belongs to every chunk that has a character of it. The special tokens and the prompt before the text belong
            to the chunk with the first token, those after it to the chunk with the last: a single chunk is
            `encoder.encode(text)`.
        prompt_name, prompt: as in `encoder.encode`; the default is that of the encoder.

    Raises:
        ValueError: a text that is empty or too long, a chunk without tokens, and an encoder whose pooling means nothing
            for parts (`cls`, `lasttoken`, `weightedmean`) where there are several.

    Cost: one pass, plus O(tokens d). Memory: that of one pass.
    """
    before = resolved_prompt(encoder, prompt_name, prompt)
    places = read_tokens(encoder, before, text)
    most = longest(encoder)
    if most is not None and len(places.ids) > most:
        raise ValueError(
            f"text: expected at most {most} tokens, which is what the encoder reads in one pass, got "
            f"{len(places.ids)}; embed the parts that fewkeys.integrations.embed.split gives, or raise "
            "encoder.max_seq_length where the model has more positions"
        )
    spans, ranges = places.chunked(chunks)
    pooling = check_chunks(encoder, chunks)
    with torch.inference_mode():
        tokens, start = _embedded(encoder, before, text, places, pooling)
        vectors = [_pooled(encoder, tokens[:, max(first, start) : last]) for first, last in ranges]
    return Chunks(torch.cat(vectors), spans, tuple(last - max(first, start) for first, last in ranges))


def estimated(before: Sequence[Fallbacks], after: Sequence[Fallbacks]) -> float:
    """The plan's error between two looks at `Applied.fallbacks`, under `max_error=WATCH`: the mean over layers.

    Layers that exact attention answered have none; those within a window of their own do not count.
    """
    layers = [(one, two) for one, two in zip(before, after, strict=True) if two.calls > one.calls]
    return sum(_between(one, two) for one, two in layers) / max(1, len(layers))


def _between(before: Fallbacks, after: Fallbacks) -> float:
    """The mean estimate of the heads checked since."""
    checked = after.checked - before.checked
    total = (after.error or 0.0) * after.checked - (before.error or 0.0) * before.checked
    return total / checked if checked else 0.0


def check_chunks(encoder: SentenceTransformer, chunks: object) -> Any:
    """The encoder's pooling module. `ValueError` where there is not one, or where it means nothing for parts of texts
    and `chunks` asks for such.
    """
    from sentence_transformers.sentence_transformer.modules import Pooling

    pooling = [module for module in list(encoder)[1:] if isinstance(module, Pooling)]
    if len(pooling) != 1:
        raise ValueError(
            f"encoder: expected one pooling module after the transformer, got {len(pooling)} in "
            f"{', '.join(type(module).__name__ for module in encoder)}"
        )
    mode = pooling[0].pooling_mode
    modes = {mode} if isinstance(mode, str) else set(mode)
    if chunks is not None and not modes <= set(OVER_TOKENS):
        raise ValueError(
            f"chunks: expected an encoder that pools by {', '.join(OVER_TOKENS)}, got {', '.join(sorted(modes))}, "
            "which means nothing for a part of a text; embed whole texts, or each part as a text of its own"
        )
    return pooling[0]


def _embedded(encoder: SentenceTransformer, prompt: str, text: str, places: Places, pooling: Any) -> tuple[Tensor, int]:
    """The token embeddings (1, N, d) of prompt and text, and the first token that pooling counts."""
    from sentence_transformers.util import batch_to_device

    encoder.eval()
    features: Any = encoder.preprocess([text], prompt=prompt or None)
    if features["input_ids"].flatten().tolist() != places.ids:
        raise ValueError(
            "encoder: expected one that reads its prompt and the text as they are, got one that puts them into a "
            "template or cuts them; use encoder.encode for whole texts"
        )
    skipped = 0 if pooling.include_prompt else int(features.get("prompt_length", 0))
    tokens: Tensor = encoder[0](batch_to_device(features, encoder.device))["token_embeddings"]
    return tokens, skipped


def _pooled(encoder: SentenceTransformer, tokens: Tensor) -> Tensor:
    """The vector (1, d) of a text whose token embeddings are (1, N, d)."""
    mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    features: Any = {"token_embeddings": tokens, "attention_mask": mask}
    for module in list(encoder)[1:]:
        features = module(features)
    vector: Tensor = features["sentence_embedding"]
    return vector if encoder.truncate_dim is None else vector[..., : encoder.truncate_dim]
