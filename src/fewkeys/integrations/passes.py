"""A text as the tokens of a SentenceTransformer: the length of one pass, and how to cut longer texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fewkeys.core.validation import check_count
from fewkeys.integrations.interface import unwrapped
from fewkeys.integrations.loading import need_sentence_transformers
from fewkeys.integrations.text import positions

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Span = tuple[int, int]


def split(
    encoder: SentenceTransformer, text: str, *, prompt_name: str | None = None, prompt: str | None = None
) -> list[Span]:
    """The characters (start, stop) of the fewest parts, about equally long, that the encoder reads in one pass each.

    Parts begin with a word where there is white space. One part, the text, where it fits. Cost: tokens of the text.
    """
    most = longest(encoder)
    before = resolved_prompt(encoder, prompt_name, prompt)
    places = read_tokens(encoder, before, text)
    count = len(places.ids)
    if most is None or count <= most:
        return [(0, len(text))]
    room = most - (count - (places.stop - places.start))
    if room < 1:
        raise ValueError(f"prompt: expected room for text beside {most - room} tokens, got {most}; shorten the prompt")
    starts = [max(0, start) for start, _ in places.offsets[places.start : places.stop]]
    cuts, first = [0], 0
    while first < len(starts):
        left = len(starts) - first
        take = -(-left // -(-left // room))
        place = _before_word(text, starts, first, first + take)
        # The tokens of a part may be others than those of the same characters in the text: fewer, until they fit.
        while (
            take > 1 and len(read_tokens(encoder, before, text[cuts[-1] : _character(text, starts, place)]).ids) > most
        ):
            take -= max(1, take // 16)
            place = _before_word(text, starts, first, first + take)
        cuts.append(_character(text, starts, place))
        first = place
    return list(pairwise(cuts))


def longest(encoder: SentenceTransformer) -> int | None:
    """The most tokens of one pass: what the encoder is set to, at most the model's positions; None: no limit known."""
    limits = (encoder.max_seq_length, positions(unwrapped(encoder)))
    return min((limit for limit in limits if limit is not None), default=None)


def tokens_of(encoder: SentenceTransformer, text: str, prompt: str) -> int:
    """How many tokens one pass over prompt and text has, special ones included. `ValueError` where it has none."""
    return len(read_tokens(encoder, prompt, text).ids)


def check_encoder(encoder: object) -> None:
    """`ModuleNotFoundError` without sentence-transformers, `TypeError` for what is no SentenceTransformer."""
    need_sentence_transformers()
    from sentence_transformers import SentenceTransformer

    if not isinstance(encoder, SentenceTransformer):
        raise TypeError(f"encoder: expected a SentenceTransformer, got {type(encoder).__name__}")


def resolved_prompt(encoder: SentenceTransformer, name: str | None, prompt: str | None) -> str:
    """The prompt before the text, as `encoder.encode` chooses it."""
    check_encoder(encoder)
    if name is not None and prompt is not None:
        raise ValueError("prompt, prompt_name: expected at most one of the two, got both")
    if prompt is not None:
        return prompt
    name = encoder.default_prompt_name if name is None else name
    if name is not None and name not in encoder.prompts:
        names = ", ".join(map(repr, sorted(encoder.prompts)))
        raise ValueError(f"prompt_name: expected one of {names}, got {name!r}; or give the text itself as prompt")
    return "" if name is None else encoder.prompts[name] or ""


@dataclass(frozen=True)
class Places:
    """The tokens of prompt and text: ids, characters of the text (negative in the prompt), and which are the text's."""

    ids: list[int]
    offsets: list[Span]
    start: int
    stop: int

    def chunked(self, chunks: int | Sequence[Span] | None) -> tuple[tuple[Span, ...], list[Span]]:
        """The characters of each chunk and the range of its tokens."""
        if chunks is None or isinstance(chunks, int):
            size = self.stop - self.start if chunks is None else check_count("chunks", chunks)
            ranges = [(first, min(first + size, self.stop)) for first in range(self.start, self.stop, size)]
            spans = [(max(0, self.offsets[first][0]), self.offsets[last - 1][1]) for first, last in ranges]
        else:
            spans = [(int(start), int(stop)) for start, stop in chunks]
            if not spans:
                raise ValueError("chunks: expected at least one span of characters, got none; None is the whole text")
            ranges = [self._within(span) for span in spans]
        return tuple(spans), [self._with_ends(one) for one in ranges]

    def _within(self, span: Span) -> Span:
        start, stop = span
        tokens = range(self.start, self.stop)
        inside = [i for i in tokens if max(start, self.offsets[i][0]) < min(stop, self.offsets[i][1])]
        if not inside:
            raise ValueError(f"chunks: expected spans (start, stop) that hold a token each, got {span} without one")
        return inside[0], inside[-1] + 1

    def _with_ends(self, tokens: Span) -> Span:
        first, last = tokens
        return 0 if first == self.start else first, len(self.ids) if last == self.stop else last


def read_tokens(encoder: SentenceTransformer, prompt: str, text: str) -> Places:
    """The tokens of prompt and text as the encoder's tokenizer makes them, none cut off."""
    if not isinstance(text, str):
        raise TypeError(f"text: expected a str, got {type(text).__name__}; pass texts one by one")
    tokenizer: Any = encoder.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"encoder: expected a fast tokenizer, which knows the characters of its tokens, got "
            f"{type(tokenizer).__name__}"
        )
    options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    made = tokenizer(prompt + text, truncation=False, padding=False, verbose=False, **options)
    offsets = [(start - len(prompt), stop - len(prompt)) for start, stop in made["offset_mapping"]]
    marked = zip(offsets, made["special_tokens_mask"], strict=True)
    of_text = [i for i, ((_, stop), special) in enumerate(marked) if not special and stop > 0]
    if not of_text:
        raise ValueError("text: expected some text, got none that makes a token")
    return Places(made["input_ids"], offsets, of_text[0], of_text[-1] + 1)


def _character(text: str, starts: Sequence[int], place: int) -> int:
    """Where the token at `place` begins; the end of the text after the last."""
    return starts[place] if place < len(starts) else len(text)


def _before_word(text: str, starts: Sequence[int], first: int, place: int) -> int:
    """The last place in the second half of first .. place where a word begins; `place`, where none does."""
    if place >= len(starts):
        return len(starts)
    for word in range(place, first + (place - first) // 2, -1):
        if any(map(str.isspace, text[max(0, starts[word] - 1) : starts[word] + 1])):
            return word
    return max(place, first + 1)
