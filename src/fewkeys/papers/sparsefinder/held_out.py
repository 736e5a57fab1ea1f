"""A Sparsefinder fitted on a part of a capture, and what its groupings predict of the rest."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fewkeys.captures.capture import Capture
from fewkeys.papers.sparsefinder.evaluate import judge
from fewkeys.papers.sparsefinder.groupings import Buckets, ClusterPairs, Clusters, Distance, Grouping
from fewkeys.papers.sparsefinder.sparsefinder import Sparsefinder
from fewkeys.select import Window

WINDOW = 3
"""Keys of the window beside every grouping."""


def fit_and_judge(
    capture: Capture, share: float, *, directory: Path, progress: Callable[[int, int, str], None], **settings: Any
) -> tuple[Sparsefinder, dict[str, Any]]:
    """A Sparsefinder fitted with `settings` on all but the last `share` of the sequences, and a report on these.

    The report has the settings, and the rows of `evaluate.judge` for every kind of grouping, in the learned space and
    in that of the queries and keys themselves. directory: for finished layers, so that an interrupted fit goes on.
    """
    sequences = capture.sequences
    held_out = max(1, round(share * sequences))
    if sequences - held_out < 2:
        raise ValueError(
            f"share: expected at least 2 sequences left to fit on, got {sequences} in all and {held_out} held out; "
            "give more text"
        )
    seen, unseen = capture.part(0, sequences - held_out), capture.part(sequences - held_out, sequences)
    finder = Sparsefinder.fit(seen, **settings, directory=directory, progress=progress)
    raw = Sparsefinder.raw(seen, alpha=finder.settings.alpha, seed=finder.settings.seed)
    groupings = _groupings(unseen.longest, finder.settings.margin)

    def done(steps: int, of: int) -> None:
        progress(steps, of, "held-out sequences")

    rows = judge({"projected": finder, "raw": raw}, unseen, groupings, keep=Window(WINDOW), done=done)
    return finder, {
        "model": capture.model_name,
        "shape": asdict(finder.shape),
        "settings": asdict(finder.settings),
        "sequences": {"seen": seen.sequences, "held_out": unseen.sequences},
        "window": WINDOW,
        "rows": rows,
    }


def _groupings(length: int, margin: float) -> list[Grouping]:
    """Every kind: about as many clusters as the root of the length, a distance like the margin."""
    root = max(2, round(math.sqrt(length)))
    counts = sorted({max(2, root // 2), root})
    return [
        *(Clusters(count) for count in counts),
        Clusters(root, top=2),
        Clusters(root, rounds=2),
        *(ClusterPairs(root, lift) for lift in (2.0, 1.0)),
        Buckets(root),
        Buckets(root, "uniform"),
        Distance(round(margin**0.5, 3)),
    ]
