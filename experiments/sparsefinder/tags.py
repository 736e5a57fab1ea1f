"""Which parts of speech the clusters of a head hold, with any tagger, and how full the clusters are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

Tagger = Callable[[Sequence[str]], Sequence[str]]
"""Words of one sentence to as many tags."""

CLOSED = {
    "DET": "a an the this that these those some any no every each another both all",
    "ADP": "of in on at by for with about against between into through during before after above below to from up "
    "down over under near behind beside along across around outside inside while",
    "PRON": "i you he she it we they me him her us them his hers its their theirs my your our who whom which what "
    "himself herself themselves itself",
    "CONJ": "and or but nor so yet as if because than",
    "AUX": "is are was were be been being am has have had do does did will would can could may might shall should must",
}
_TAG = {word: tag for tag, words in CLOSED.items() for word in words.split()}


def closed_class(words: Sequence[str]) -> list[str]:
    """A small tagger of English words: closed classes by list, NUM, PUNCT, and OPEN for all others."""
    return [_tag(word) for word in words]


def _tag(word: str) -> str:
    if not any(letter.isalnum() for letter in word):
        return "PUNCT"
    if any(letter.isdigit() for letter in word):
        return "NUM"
    return _TAG.get(word.lower(), "OPEN")


@dataclass(frozen=True)
class Occupancy:
    """What one cluster of one head holds: `count` tokens, as the share of every tag."""

    head: int
    cluster: int
    count: int
    tags: dict[str, float]


def tag_tokens(tokens: Sequence[str], tagger: Tagger, begin: str = "▁") -> list[str]:
    """A tag for every piece of a word: that of its word. A piece with `begin` starts a word; "</s>" is "END".

    Raises `ValueError` for a tagger that does not give one tag per word.
    """
    words: list[str] = []
    owner: list[int | None] = []
    for token in tokens:
        if token.startswith("<") and token.endswith(">"):
            owner.append(None)
            continue
        if token.startswith(begin) or not words or owner[-1] is None:
            words.append("")
        words[-1] += token.removeprefix(begin)
        owner.append(len(words) - 1)
    tags = list(tagger(words))
    if len(tags) != len(words):
        raise ValueError(f"tagger: expected {len(words)} tags for {len(words)} words, got {len(tags)}")
    return ["END" if word is None else tags[word] for word in owner]


def occupancy(ids: Iterable[Tensor], tags: Iterable[Sequence[str]], count: int) -> list[Occupancy]:
    """Every cluster of every head over sentences: `ids` (H, N) of the first membership, `tags` N strings each."""
    held: dict[tuple[int, int], Counter[str]] = {}
    heads = 0
    for own, names in zip(ids, tags, strict=True):
        heads = len(own)
        for head, row in enumerate(own.tolist()):
            for cluster, tag in zip(row, names, strict=True):
                held.setdefault((head, cluster), Counter())[tag] += 1
    found = []
    for head in range(heads):
        for cluster in range(count):
            tally = held.get((head, cluster), Counter())
            total = sum(tally.values())
            shares = {tag: number / total for tag, number in tally.most_common()} if total else {}
            found.append(Occupancy(head, cluster, total, shares))
    return found
