"""From the slots of a query and the number of sealed keys to the nodes that it scores and opens.

Sealed keys 0 .. T - 1 (the first keys after the sinks) are covered by trees of 32, 128, 512, ... keys, at most three of
each, and for blocks of 16 one of 16: as T / 32 is written in base 4. The largest come first, so that a tree of z keys
begins at a multiple of z. In base 2 every key would be in twice as many trees in its time, for answers as good.
Nodes have 8, 32, 128, ... keys. The query scores all nodes of the coarsest level, which has at most a quarter as many
as it has slots, opens the best, scores their four children each, and so on; the leaves that it opens, of 8 keys, are
attended to exactly. Trees smaller than the nodes of a level enter at the first level that has nodes as small. So the
number of nodes scored is known before any data is:

    scored_l = entering_l + 4 opened_(l-1)          opened_l = min(beam_l, scored_l)

and slots are kept keys plus all nodes scored, opened or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

SINKS = 4
"""First keys, exact for ever, in no tree."""
LEAF, BRANCH = 8, 4
LEAST = 64
"""Slots below which nothing would be left for opening."""
INNER = 1.1
"""Nodes opened on an inner level for each leaf opened, measured on a decoder (docs/trees.md)."""


@dataclass(frozen=True)
class Level:
    """Nodes of `size` keys: `scored` of them, of which the best `opened` are opened.

    `trees`: start and size of those whose nodes enter here.
    """

    size: int
    trees: tuple[tuple[int, int], ...]
    scored: int
    opened: int

    @property
    def entering(self) -> int:
        return sum(size // self.size for _, size in self.trees)


def block_of(slots: int) -> int:
    """How many keys are sealed at a time."""
    return 32 if slots > 128 else 16


def exact_keys(block: int) -> int:
    """Sinks and unsealed keys that a causal query keeps, on average over a block, rounded up."""
    return SINKS + block // 2 + 1


@lru_cache(4096)
def cover(sealed: int, block: int) -> tuple[tuple[int, int], ...]:
    """Start and size of the trees over the first `sealed` keys, a multiple of `block`."""
    sizes, found, start = [block], [], 0
    while sizes[-1] * together(sizes[-1]) <= sealed:
        sizes.append(sizes[-1] * together(sizes[-1]))
    for size in reversed(sizes):
        while start + size <= sealed:
            found.append((start, size))
            start += size
    return tuple(found)


def together(size: int) -> int:
    """So many trees of a size become one, as the last of them would be built."""
    return BRANCH if size >= LEAF * BRANCH else LEAF * BRANCH // size


@lru_cache(4096)
def levels_of(slots: int, sealed: int, exact: int, block: int) -> tuple[Level, ...]:
    """The levels for a query of `slots` slots, `exact` of which are spent; none where all sealed keys can be kept.

    Inner levels open about `INNER` nodes for each leaf; what is left over buys leaves, then inner nodes.
    """
    room = slots - exact
    if sealed <= room:
        return ()
    first = LEAF * BRANCH
    while sealed // first > slots // 4:
        first *= BRANCH
    sizes = [first]
    while sizes[-1] > LEAF:
        sizes.append(sizes[-1] // BRANCH)
    inner = len(sizes) - 1
    trees = cover(sealed, block)
    entering = [
        tuple(tree for tree in trees if size <= tree[1] and (level == 0 or tree[1] < sizes[level - 1]))
        for level, size in enumerate(sizes)
    ]
    left = room - sum(size // sizes[level] for level, own in enumerate(entering) for _, size in own)
    leaves = max(1, int(left / (LEAF + BRANCH * INNER * inner)))
    beams = [max(1, (left - LEAF * leaves) // (BRANCH * inner))] * inner + [leaves]
    found = _levels(sizes, entering, beams)
    for level in (inner, *range(inner)):
        while beams[level] < sealed // sizes[level]:
            more = [beam + (place == level) for place, beam in enumerate(beams)]
            grown = _levels(sizes, entering, more)
            if price(grown) > room:
                break
            beams, found = more, grown
    return found


def _levels(sizes: list[int], entering: list[tuple[tuple[int, int], ...]], beams: list[int]) -> tuple[Level, ...]:
    found, opened = [], 0
    for size, trees, beam in zip(sizes, entering, beams, strict=True):
        scored = sum(tree // size for _, tree in trees) + BRANCH * opened
        opened = min(beam, scored)
        found.append(Level(size, trees, scored, opened))
    return tuple(found)


def scored(levels: tuple[Level, ...]) -> int:
    """Nodes that a query scores, on all levels."""
    return sum(level.scored for level in levels)


def price(levels: tuple[Level, ...]) -> int:
    """Slots of a descent: nodes scored and keys of the leaves opened."""
    return scored(levels) + (LEAF * levels[-1].opened if levels else 0)
