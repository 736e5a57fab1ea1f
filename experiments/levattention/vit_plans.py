"""The rows of the experiment: what is kept at top-k, by name."""

from __future__ import annotations

from collections.abc import Callable

import fewkeys as fk

PLANS: dict[str, Callable[[int], fk.Plan]] = {
    "leverage": lambda k: fk.Plan(fk.select.Leverage(k)),
    "leverage, centred": lambda k: fk.Plan(fk.select.Leverage(k, centre=True)),
    "key norm": lambda k: fk.Plan(fk.select.KeyNorm(k)),
    "random": lambda k: fk.Plan(fk.RandomKeys(k)),
    "window": lambda k: fk.Plan(fk.Window(k)),
    "leverage + window": lambda k: fk.Plan(fk.select.Leverage(k // 2) | fk.Window(k - k // 2)),
    "fewkeys budget": lambda k: fk.budget(k, cohorts=1),
    "top-k oracle": lambda k: fk.Plan(fk.TopK(k)),
}
"""Every row switched on at inference. Half of the keys of "leverage + window" are local."""

TRAINED = ("leverage", "key norm", "random")
"""The rows that are trained at every k."""
