"""The settings of a fit."""

from __future__ import annotations

from dataclasses import dataclass

from fewkeys.core.validation import check_count, check_real


@dataclass(frozen=True)
class Settings:
    """The arguments of `Sparsefinder.fit` besides the capture, by the same names."""

    rank: int = 4
    alpha: float = 1.5
    shared: bool = True
    margin: float = 1.0
    lr: float = 1e-3
    epochs: int = 3
    batch: int = 32
    validation: float = 0.1
    patience: int = 3
    sample: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "epochs", "batch", "patience", "sample"):
            check_count(name, getattr(self, name))
        check_count("seed", self.seed, least=0)
        check_real("alpha", self.alpha, above=1.0)
        check_real("margin", self.margin, above=0.0)
        check_real("lr", self.lr, above=0.0)
        if not isinstance(self.shared, bool):
            raise TypeError(f"shared: expected True or False, got {self.shared!r}")
        if self.validation != 0:
            check_real("validation", self.validation, above=0.0, below=1.0)
