"""Vectors of texts by a SentenceTransformer: one for a whole text, or late chunks, one for each part of it.

Late chunking (Guenther et al., 2024, arXiv 2409.04701) reads the text in one pass and pools its token embeddings part
by part, so that each vector depends on the whole text. The encoder's modules after the first (pooling, dense layers,
normalisation) run on each part as on a text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewkeys.core import records
from fewkeys.core.validation import check_count
from fewkeys.guard.fallback import Fallbacks, Guard
from fewkeys.integrations.interface import need, unwrapped
from fewkeys.integrations.text import positions

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Span = tuple[int, int]
OVER_TOKENS = ("mean", "mean_sqrt_len_tokens", "max")
"""Poolings that parts of a text can have; the others read one token or weigh by position."""
WATCH = Guard(sys.float_info.max, queries=8)
"""As `max_error` of `fewkeys.apply`, it estimates errors and makes nothing exact."""
SAMPLE = 64
"""Numbers read of each weight, to identify an encoder."""


class NoTokenError(ValueError):
    """A text of which the tokenizer makes no token."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """The vectors (C, d) of C parts of a text, their characters [start, stop), and their numbers of tokens."""

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

    `vector_c = post(pool(h_i for tokens i of chunk c))`, `h = transformer(prompt + text)`.

    Args:
        encoder: its first module gives token embeddings, and one of the others pools.
        text: `split` cuts texts that are too long for one pass of the encoder.
        chunks: tokens in a chunk (the last may be shorter); or the characters (start, stop) of each chunk, which may
            overlap or leave gaps; None: the whole text, with the vector of `encoder.encode(text)`. A token belongs to
            every chunk that has a character of it; prompt and special tokens to the chunk beside them.
        prompt_name, prompt: as in `encoder.encode`.

    `ValueError` for a text that is empty or too long, a chunk without tokens, and, for chunks, an encoder whose pooling
    means nothing for parts (`cls`, `lasttoken`, `weightedmean`).

    Cost: one pass, plus O(tokens d).
    """
    before = resolved_prompt(encoder, prompt_name, prompt)
    places = read_tokens(encoder, before, text)
    limit = longest(encoder)
    if limit is not None and len(places.ids) > limit:
        got = f"{len(places.ids)}; embed the parts that fewkeys.integrations.embed.split gives"
        raise ValueError(f"text: expected at most {limit} tokens in one pass of the encoder, got {got}")
    spans, ranges = places.chunked(chunks)
    pooling = check_chunks(encoder, chunks)
    with torch.inference_mode():
        embeddings, start = _embedded(encoder, before, text, places, pooling)
        parts = [embeddings[:, max(first, start) : last] for first, last in ranges]
        if empty := [span for span, part in zip(spans, parts, strict=True) if not part.shape[1]]:
            raise ValueError(f"chunks: expected a token beside the prompt in each, got {empty[0]} without one")
        vectors = torch.cat([_pooled(encoder, part) for part in parts])
    return Chunks(vectors, spans, tuple(part.shape[1] for part in parts))


def estimated(before: Sequence[Fallbacks], after: Sequence[Fallbacks]) -> float:
    """The plan's error between two readings of `Applied.fallbacks` under `max_error=WATCH`: the mean over layers.

    It is zero in layers that exact attention answered; layers with a sliding window do not count.
    """
    means = []
    for old, new in zip(before, after, strict=True):
        if new.calls > old.calls:
            total = (new.error or 0.0) * new.checked - (old.error or 0.0) * old.checked
            means.append(total / max(1, new.checked - old.checked))
    return sum(means) / max(1, len(means))


def split(
    encoder: SentenceTransformer, text: str, *, prompt_name: str | None = None, prompt: str | None = None
) -> list[Span]:
    """The characters (start, stop) of the fewest parts, about equally long, that the encoder reads in one pass each.

    Parts begin with a word where there is white space. Cost: tokens of the text.
    """
    limit = longest(encoder)
    before = resolved_prompt(encoder, prompt_name, prompt)
    places = read_tokens(encoder, before, text)
    if limit is None or len(places.ids) <= limit:
        return [(0, len(text))]
    around = len(places.ids) - (places.stop - places.start)
    room = limit - around
    if room < 1:
        beside = f"{around} tokens of prompt and special ones"
        raise ValueError(f"encoder.max_seq_length: expected room for text beside {beside}, got {limit}; raise it")
    starts = [max(0, start) for start, _ in places.offsets[places.start : places.stop]]
    # A part may have more tokens alone than within the text: then one more part makes all of them shorter.
    for parts in range(-(-len(starts) // room), len(starts) + 1):
        tokens, half = [len(starts) * part // parts for part in range(1, parts)], len(starts) // (2 * parts)
        cuts = [_word(text, starts[token - half], starts[token]) for token in tokens]
        spans = list(pairwise([0, *cuts, len(text)]))
        if all(len(read_tokens(encoder, before, text[start:stop]).ids) <= limit for start, stop in spans):
            break
    return spans


def longest(encoder: SentenceTransformer) -> int | None:
    """The most tokens of one pass, by the encoder's setting and the model's positions, if known."""
    limits = (encoder.max_seq_length, positions(unwrapped(encoder)))
    return min((limit for limit in limits if limit is not None), default=None)


def digest(encoder: SentenceTransformer) -> str:
    """A digest of what vectors depend on: modules, settings, tokenizer, a sample of every weight."""
    settings = unwrapped(encoder).config.to_json_string(), fast_tokenizer(encoder).backend_tokenizer.to_str()
    weights = {
        name: (weight.dtype, weight.flatten()[:: max(1, weight.numel() // SAMPLE)].tolist())
        for name, weight in encoder.state_dict().items()
    }
    return records.digest(repr((encoder, encoder.truncate_dim, settings, weights)))


def compile_model(encoder: SentenceTransformer) -> None:
    """Compile the encoder's transformer by `torch.compile`, once for texts of any length.

    It freezes weights in the whole process: only then linear layers are oneDNN's. `ValueError` without a C++ compiler.
    """
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        raise ValueError("compile: expected a C++ compiler, got none; install g++, or do not compile") from None
    config.freezing = True
    model = unwrapped(encoder)
    model.forward = torch.compile(model.forward, dynamic=True)


def resolved_prompt(encoder: SentenceTransformer, name: str | None, prompt: str | None) -> str:
    """The prompt before the text, as `encoder.encode` chooses it. `TypeError` for what is no SentenceTransformer."""
    need("sentence_transformers", "embed")
    from sentence_transformers import SentenceTransformer

    if not isinstance(encoder, SentenceTransformer):
        raise TypeError(f"encoder: expected a SentenceTransformer, got {type(encoder).__name__}")
    if name is not None and prompt is not None:
        raise ValueError("prompt, prompt_name: expected at most one of the two, got both")
    name = encoder.default_prompt_name if name is None else name
    if prompt is None and name is not None:
        if name not in encoder.prompts:
            names = ", ".join(map(repr, sorted(encoder.prompts)))
            raise ValueError(f"prompt_name: expected one of {names}, got {name!r}; or give the text itself as prompt")
        prompt = encoder.prompts[name]
    if not isinstance(prompt, str | None):
        raise TypeError(f"prompt: expected a str, got {type(prompt).__name__}")
    return prompt or ""


def check_chunks(encoder: SentenceTransformer, chunks: object) -> Any:
    """The encoder's only pooling module. `ValueError` without one, and for `chunks` that it cannot pool."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    pooling = [module for module in list(encoder)[1:] if isinstance(module, Pooling)]
    if len(pooling) != 1:
        raise ValueError(f"encoder: expected one pooling module after the transformer, got {len(pooling)}")
    mode = pooling[0].pooling_mode
    modes = {mode} if isinstance(mode, str) else set(mode)
    if chunks is not None and not modes <= set(OVER_TOKENS):
        got = f"{', '.join(sorted(modes))}, which means nothing for a part of a text"
        raise ValueError(f"chunks: expected an encoder that pools by {', '.join(OVER_TOKENS)}, got {got}")
    return pooling[0]


@dataclass(frozen=True)
class Places:
    """The tokens of prompt and text, their characters (negative in the prompt), and the range of the text's."""

    ids: list[int]
    offsets: list[Span]
    start: int
    stop: int

    def chunked(self, chunks: int | Sequence[Span] | None) -> tuple[tuple[Span, ...], list[Span]]:
        """The characters of each chunk, and the range of its tokens."""
        if chunks is None or isinstance(chunks, int):
            size = self.stop - self.start if chunks is None else check_count("chunks", chunks)
            ranges = [(first, min(first + size, self.stop)) for first in range(self.start, self.stop, size)]
            spans = [(max(0, self.offsets[first][0]), self.offsets[last - 1][1]) for first, last in ranges]
        else:
            try:
                spans = [(index(start), index(stop)) for start, stop in chunks]
            except (TypeError, ValueError):
                what = "a number of tokens, spans (start, stop) of characters, or None"
                raise TypeError(f"chunks: expected {what}, got {chunks!r:.80}") from None
            if not spans:
                raise ValueError("chunks: expected at least one span of characters, got none; None is the whole text")
            ranges = [self._within(span) for span in spans]
        # The first and the last chunk take the tokens around the text.
        ranges = [(a if a > self.start else 0, b if b < self.stop else len(self.ids)) for a, b in ranges]
        return tuple(spans), ranges

    def _within(self, span: Span) -> Span:
        """The range of the tokens that have a character in `span`."""
        start, stop = span
        tokens = range(self.start, self.stop)
        inside = [i for i in tokens if max(start, self.offsets[i][0]) < min(stop, self.offsets[i][1])]
        if not inside:
            raise ValueError(f"chunks: expected spans (start, stop) that hold a token each, got {span} without one")
        return inside[0], inside[-1] + 1


def fast_tokenizer(encoder: SentenceTransformer) -> Any:
    """The encoder's tokenizer; `ValueError` unless it is of the `tokenizers` library."""
    tokenizer: Any = encoder.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"encoder: expected a fast tokenizer, got {type(tokenizer).__name__}")
    return tokenizer


def read_tokens(encoder: SentenceTransformer, prompt: str, text: str) -> Places:
    """The tokens of prompt and text, none cut off."""
    if not isinstance(text, str):
        raise TypeError(f"text: expected a str, got {type(text).__name__}; pass texts one by one")
    (prompt + text).encode()  # raises `ValueError` for lone surrogates, of which tokenizers say something else
    tokenizer = fast_tokenizer(encoder)
    options = dict.fromkeys(("return_offsets_mapping", "return_special_tokens_mask"), True)
    encoding = tokenizer(prompt + text, truncation=False, padding=False, verbose=False, **options)
    offsets = [(start - len(prompt), stop - len(prompt)) for start, stop in encoding["offset_mapping"]]
    marked = zip(offsets, encoding["special_tokens_mask"], strict=True)
    of_text = [i for i, ((_, stop), special) in enumerate(marked) if not special and stop > 0]
    if not of_text:
        raise NoTokenError("text: expected some text, got none that makes a token")
    return Places(encoding["input_ids"], offsets, of_text[0], of_text[-1] + 1)


def _word(text: str, first: int, place: int) -> int:
    """The last character between the two with white space before it, else `place`."""
    return next((i + 1 for i in range(place, first, -1) if text[i].isspace()), place)


def _embedded(encoder: SentenceTransformer, prompt: str, text: str, places: Places, pooling: Any) -> tuple[Tensor, int]:
    """The token embeddings (1, N, d) of prompt and text, and the first token that pooling counts."""
    from sentence_transformers.util import batch_to_device

    encoder.eval()
    features: Any = encoder.preprocess([text], prompt=prompt or None)
    if features["input_ids"].flatten().tolist() != places.ids:
        raise ValueError("encoder: expected one that reads prompt and text as they are, without template or cuts")
    skipped = 0 if pooling.include_prompt else int(features.get("prompt_length", 0))
    return encoder[0](batch_to_device(features, encoder.device))["token_embeddings"], skipped


def _pooled(encoder: SentenceTransformer, tokens: Tensor) -> Any:
    """The vector (1, d) of a text whose token embeddings are (1, N, d)."""
    mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    features: Any = {"token_embeddings": tokens, "attention_mask": mask}
    for module in list(encoder)[1:]:
        features = module(features)
    return features["sentence_embedding"][..., : encoder.truncate_dim]
