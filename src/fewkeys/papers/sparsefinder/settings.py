"""How a predictor was fitted, and the model it was fitted on."""

from __future__ import annotations

from dataclasses import dataclass

from fewkeys.captures.capture import Capture
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


@dataclass(frozen=True)
class Shape:
    """The attention of the model. `kind`: "bidirectional", "causal" or "cross" (queries are other tokens than keys)."""

    model: str
    kind: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("layers", "query_heads", "kv_heads", "head_dim"):
            check_count(name, getattr(self, name))
        if self.kind not in ("bidirectional", "causal", "cross"):
            raise ValueError(f"kind {self.kind!r}")

    @staticmethod
    def of(capture: Capture) -> Shape:
        """The model of a capture."""
        same = all(c.query.shape[2] == c.key.shape[2] and c.query_mask is None for c in capture.calls(0))
        kind = "causal" if capture.is_causal else "bidirectional" if same else "cross"
        return Shape(capture.model_name, kind, capture.layers, capture.query_heads, capture.kv_heads, capture.head_dim)


def check_capture(capture: object) -> None:
    """Raise `TypeError` if it is not a capture, `ValueError` if the model has a distance bias."""
    if not isinstance(capture, Capture):
        raise TypeError(f"capture: expected a Capture, got {type(capture).__name__}; make one with fewkeys.capture")
    if capture.biased:
        raise ValueError(
            "capture: expected scores of queries and keys alone, got a model with a distance bias, which predicted "
            "graphs do not support; use fewkeys.tune"
        )


def split(capture: Capture, validation: float | Capture) -> tuple[Capture, Capture | None]:
    """The sequences to learn from, and those to stop by: another capture, the last share of this one, or None."""
    if isinstance(validation, Capture):
        for name in ("layers", "query_heads", "kv_heads", "head_dim", "is_causal", "scales"):
            if getattr(capture, name) != getattr(validation, name):
                raise ValueError(
                    f"validation: expected a capture of the same model, got {name} {getattr(validation, name)} against "
                    f"{getattr(capture, name)}"
                )
        return capture, validation
    if not validation:
        return capture, None
    last = capture.sequences - max(1, round(validation * capture.sequences))
    if last <= 0:
        raise ValueError(
            f"validation: expected sequences left to learn from, got {capture.sequences} in all; capture more, "
            "or pass validation=0"
        )
    return capture.part(0, last), capture.part(last, capture.sequences)
