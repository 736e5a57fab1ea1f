"""A page for every selector, rest and kernel: its docstring, its cost, a picture of what it keeps."""

from typing import Any

import torch
from torch import Tensor

import fewkeys as fk
from fewkeys.core.catalogue import listed
from fewkeys.core.validation import check_inputs
from fewkeys.papers import sparsefinder

TOKENS = 64
EXAMPLES: dict[str, Any] = {
    "Window": fk.Window(9),
    "Sinks": fk.Sinks(4),
    "GlobalTokens": sparsefinder.GlobalTokens(3),
    "RecentBlocks": fk.select.RecentBlocks(8, 2),
    "Leverage": fk.select.Leverage(8, centre=True),
    "KeyNorm": fk.select.KeyNorm(8),
    "RandomKeys": fk.RandomKeys(8),
    "RandomEdges": sparsefinder.RandomEdges(8),
    "TopK": fk.TopK(8),
    "BestColumns": fk.select.BestColumns(8),
    "Outliers": fk.Outliers(8, clusters=6),
    "KeyScan": fk.KeyScan(8),
    "EntmaxSupport": sparsefinder.EntmaxSupport(1.5),
}
"""What is drawn; the other selectors need something learned, or more tokens than a picture has room for."""
CAUSAL = ("RecentBlocks", "KeyScan")
SECTIONS = {
    "select": ("Selectors", listed(fk.select.Selector), "Which keys each query attends to exactly."),
    "rest": ("Rest", listed(fk.rest.Rest), "What stands in for the keys that are not kept."),
    "weights": ("Weights", listed(fk.weights.Weights), "How scores become weights."),
}


def pages() -> dict[str, str]:
    """Markdown by place: a page for each part, and one that lists them."""
    markdown = {}
    for folder, (title, named, about) in SECTIONS.items():
        lines = [f"- [`{name}`]({name.lower()}.md): {_first(kind)}" for name, kind in named.items()]
        markdown[f"{folder}/index.md"] = f"# {title}\n\n{about}\n\n" + "\n".join(lines) + "\n"
        for name, kind in named.items():
            markdown[f"{folder}/{name.lower()}.md"] = _page(name, kind)
    return markdown


def navigation() -> list[dict[str, list[Any]]]:
    """Sections of pages, each with its list first."""
    return [
        {title: [f"{folder}/index.md", *({name: f"{folder}/{name.lower()}.md"} for name in named)]}
        for folder, (title, named, _) in SECTIONS.items()
    ]


def _first(kind: type) -> str:
    """The first sentence of a docstring."""
    paragraph = " ".join((kind.__doc__ or "").strip().split("\n\n")[0].split())
    return paragraph.split(". ")[0].split(": ")[0].rstrip(".") + "."


def _page(name: str, kind: type) -> str:
    parts = [f"::: {kind.__module__}.{name}\n    options: {{members: false, heading_level: 1, show_bases: false}}"]
    example = EXAMPLES.get(name)
    if example is not None:
        parts.append(_picture(example, name in CAUSAL, TOKENS))
    return "\n\n".join(parts) + "\n"


def _picture(example: Any, is_causal: bool, tokens: int) -> str:
    """The pairs that are kept among tokens, and what they cost."""
    query, key = _inputs(tokens)
    graph = example.graph(query, key, is_causal=is_causal)
    mask = graph.to_mask()[0, 0]
    kept = "under a causal mask" if is_causal else "in both directions"
    work = example.work(check_inputs(query, key, key, is_causal=is_causal))
    marks = "".join(
        f'<rect x="{start}" y="{row}" width="{length}" height="1"/>'
        for row, line in enumerate(mask)
        for start, length in _runs(line)
    )
    return (
        f"## What it keeps\n\n`{example!r}` over {tokens} tokens, {kept}: {graph.slots():.1f} keys per "
        f"query. By its own account, choosing costs about {work.per_key:,.0f} operations per key at {key.shape[-1]} "
        "dimensions.\n\n"
        f'<svg class="kept" viewBox="-1 -1 {tokens + 2} {tokens + 2}" role="img" '
        f'aria-label="Queries downwards, keys to the right; a mark where a query keeps a key">'
        f'<rect class="frame" x="-0.5" y="-0.5" width="{tokens + 1}" height="{tokens + 1}"/>{marks}</svg>\n\n'
        "*Queries downwards, keys to the right. Both wander slowly from token to token, and every ninth key stands "
        "apart.*"
    )


def _inputs(tokens: int) -> tuple[Tensor, Tensor]:
    """Queries and keys that resemble their neighbours, and a few keys that resemble none."""
    drawn = torch.randn(2, 1, 1, tokens, 16, generator=torch.Generator().manual_seed(4))
    query, key = drawn.cumsum(-2) / 3
    query = query + key / 2
    key[:, :, ::9] += 2 * drawn[1, :, :, ::9]
    return query, key


def _runs(line: Tensor) -> list[tuple[int, int]]:
    """Where neighbouring kept keys begin, and how many they are."""
    places = set(line.nonzero().flatten().tolist())
    starts = sorted(j for j in places if j - 1 not in places)
    return [(start, next(n for n in range(1, len(line) + 1) if start + n not in places)) for start in starts]
