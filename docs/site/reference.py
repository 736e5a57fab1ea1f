"""The reference: every public name, from its docstring."""

import inspect
from importlib import import_module

from docs.site.catalogue import SECTIONS

import fewkeys as fk

SPARSEFINDER = (
    "Sparsefinder",
    "Projection",
    "Centroids",
    "Edges",
    "Joined",
    "Groups",
    "score_graphs",
    "GraphScores",
)
PAGES = {
    "attention": (
        "Attention and plans",
        ["attention", "budget", "Plan", "ModelPlan", "select.Graph", "select.ExtraEdges"],
    ),
    "cost": ("What a call does", ["explain", "explanation.Explanation"]),
    "models": (
        "Models",
        ["apply", "cache", "pipeline", "capture", "captures.Capture", "compare", "judge.result.Report", "tune"],
    ),
    "quality": ("Quality control", ["spot_check", "judge.spot_check.SpotCheck", "Guard", "guard.fallback.Fallbacks"]),
    "streams": ("Streams", ["stream", "memory.Stream"]),
    "levattention": (
        "LevAttention",
        [f"papers.levattention.{name}" for name in dir(fk.papers.levattention)],
    ),
    "sparsefinder": ("Sparsefinder", [f"papers.sparsefinder.{name}" for name in SPARSEFINDER]),
    "value_aware": (
        "Value-aware Approximate Attention",
        [f"papers.value_aware.{name}" for name in dir(fk.papers.value_aware)],
    ),
    "rooms": ("Measures, shards", ["core.metrics", "distributed"]),
}
"""Pages, their titles, and the names on them, as they follow `fewkeys.`; parts of plans have pages of their own."""
ROOMS = ("select", "rest", "weights", "metrics", "papers")
"""Public modules whose names have pages."""


def pages() -> dict[str, str]:
    """Markdown by place. Raises `ValueError` where a public name has no page."""
    listed = {name for _, names in PAGES.values() for name in names} | set(ROOMS)
    parts = {name for _, named, _ in SECTIONS.values() for name in named}
    if lost := set(fk.__all__) - listed - parts:
        raise ValueError(f"docs/site/reference.py: expected a page for every public name, got none for {sorted(lost)}")
    markdown = {}
    for place, (title, names) in PAGES.items():
        markdown[f"reference/{place}.md"] = (
            "\n\n".join([f"# {title}", *(f"::: {_path(name)}" for name in names)]) + "\n"
        )
    return markdown


def navigation() -> list[dict[str, str]]:
    """Every page by its title."""
    return [{title: f"reference/{place}.md"} for place, (title, _) in PAGES.items()]


def _path(name: str) -> str:
    """Where a public name is defined."""
    room, _, last = f"fewkeys.{name}".rpartition(".")
    value = getattr(import_module(room), last)
    if inspect.ismodule(value):
        return value.__name__
    return f"{inspect.getmodule(value).__name__}.{last}"
