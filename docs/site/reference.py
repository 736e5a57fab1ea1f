"""The reference: every public name, from its docstring."""

import inspect

from docs.site.catalogue import SECTIONS

import fewkeys as fk

PAGES = {
    "attention": ("Attention and plans", ["attention", "budget", "Plan", "ModelPlan", "Graph", "Groups"]),
    "cost": ("What a call does", ["explain", "Explanation"]),
    "models": (
        "Models",
        ["apply", "cache", "pipeline", "capture", "Capture", "compare", "Report", "tune"],
    ),
    "quality": ("Quality control", ["spot_check", "SpotCheck", "Guard", "Fallbacks"]),
    "streams": ("Streams", ["stream", "Stream"]),
    "levattention": (
        "LevAttention",
        ["leverage_scores", "universal_set", "heavy_entries", "HeavyEntries", "Sketched", "KeySketch", "UniversalKeys"],
    ),
    "prediction": ("Predicting the graph", ["Sparsefinder", "Projection", "Centroids", "Edges", "Joined"]),
    "rooms": ("Measures, oracles, shards", ["metrics", "oracle", "distributed"]),
}
"""Pages, their titles, and the public names on them; parts of plans have pages of their own."""


def pages() -> dict[str, str]:
    """Markdown by place. Raises `ValueError` where a public name has no page."""
    listed = {name for _, names in PAGES.values() for name in names}
    parts = {name for _, catalogue, _ in SECTIONS.values() for name in catalogue.named()}
    if lost := set(fk.__all__) - listed - parts:
        raise ValueError(f"docs/site/reference.py: expected a page for every public name, got none for {sorted(lost)}")
    found = {}
    for place, (title, names) in PAGES.items():
        found[f"reference/{place}.md"] = "\n\n".join([f"# {title}", *(f"::: {_path(name)}" for name in names)]) + "\n"
    return found


def navigation() -> list[dict[str, str]]:
    """Every page by its title."""
    return [{title: f"reference/{place}.md"} for place, (title, _) in PAGES.items()]


def _path(name: str) -> str:
    """Where a public name is defined."""
    value = getattr(fk, name)
    if inspect.ismodule(value):
        return value.__name__
    return f"{inspect.getmodule(value).__name__}.{name}"
