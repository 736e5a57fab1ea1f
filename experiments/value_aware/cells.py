"""Every figure of the table, cell by cell: what is finished is kept in the work folder and not computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from experiments.value_aware import evaluation
from experiments.value_aware.data import Batch, following, masked, token_ids
from experiments.value_aware.methods import METHODS
from experiments.value_aware.stages import KERNELS, MODELS, Keeper, Settings

from fewkeys.core.files import read_json, write_json
from fewkeys.integrations.loading import quiet

Say = Callable[[str], None]


def sizes(settings: Settings, model: Any) -> list[int]:
    """The r of the table; Dv + 1, from which on the value-aware error is zero, is always among them."""
    return sorted({*settings.sizes, value_dim(model) + 1})


def value_dim(model: Any) -> int:
    """Dv of every head."""
    return int(model.config.hidden_size // model.config.num_attention_heads)


def held_out(settings: Settings, model: str, text: str, keeper: Keeper) -> Batch:
    """The held-out sequences: the first ones of the text, each token in at most one of them."""
    tokenizer = keeper.tokenizer(f"{model}-tokenizer")
    inside = settings.length - (2 if model == "encoder" else 0)
    with quiet():
        ids = token_ids(text, tokenizer)
    count = min(settings.sequences, len(ids) // inside)
    if count < settings.error_sequences:
        raise ValueError(f"--text: expected {settings.error_sequences} held-out sequences or more, got {count}")
    rows = ids[: count * inside].view(count, inside)
    if model == "encoder":
        return masked(rows, tokenizer, settings.mask_share, torch.Generator().manual_seed(7))
    return following(rows)


def compute(settings: Settings, text: str, work: Path, say: Say) -> None:
    """Fill the cells of both models with every kernel."""
    keeper = Keeper(work)
    for model_name in MODELS:
        batch = held_out(settings, model_name, text, keeper)
        for kernel_name in KERNELS:
            stage = f"{model_name}-{kernel_name}"
            _Cells(settings, work, stage, keeper.model(stage), batch, lambda text, s=stage: say(f"{s}: {text}")).fill()


def load(work: Path, stage: str) -> dict[str, Any]:
    """The cells of one model and kernel so far."""
    if not (work / f"{stage}.json").is_file():
        return {}
    found: dict[str, Any] = read_json(work, f"{stage}.json")
    return found


def first(batch: Batch, count: int) -> Batch:
    """The first sequences of a batch."""
    return Batch(batch.ids[:count], batch.labels[:count])


class _Cells:
    def __init__(self, settings: Settings, work: Path, stage: str, model: Any, batch: Batch, say: Say) -> None:
        self.settings, self.work, self.stage, self.model, self.batch, self.say = (
            settings, work, stage, model, batch, say,
        )  # fmt: skip
        self.kernel = KERNELS[stage.split("-")[1]]
        self.sizes = sizes(settings, model)
        self.found = load(work, stage)

    def fill(self) -> None:
        """Compute whatever is missing."""
        few = first(self.batch, self.settings.error_sequences)
        self._once("exact", lambda: evaluation.exact_error(self.model, self.kernel, self.batch))
        self._once("skew", lambda: evaluation.skew(self.model, self.kernel, few))
        for number, (method, r) in enumerate(self._pairs()):
            if f"model/{method}/{r}" not in self.found:
                self.say(f"model error, {number + 1}/{len(self._pairs())}: {method}, r = {r}")
            self._once(f"model/{method}/{r}", lambda m=method, r=r: self._model_error(m, r))
        self._once("output", lambda: evaluation.output_errors(self.model, self.kernel, few, self._pairs(), self.say))
        self._once("gap", lambda: evaluation.solver_gap(self.model, self.kernel, few, self.settings.gap_sizes))

    def _pairs(self) -> list[tuple[str, int]]:
        """All cells; from Dv + 1 on, where the value-aware error is zero, one stands for those after it."""
        enough = value_dim(self.model) + 1
        return [(method, r) for r in self.sizes for method in METHODS if method != "aware" or r <= enough]

    def _model_error(self, method: str, r: int) -> dict[str, list[float]]:
        count = len(self.batch.ids)
        if method == "aware" and r > 8:
            # The solvers slow down with r, while there is ever less to tell apart.
            count = max(self.settings.error_sequences, count // (2 if r <= 16 else 6))
        return evaluation.model_error(self.model, self.kernel, first(self.batch, count), method, r)

    def _once(self, name: str, compute: Callable[[], Any]) -> None:
        if name not in self.found:
            self.found[name] = compute()
            write_json(self.work, f"{self.stage}.json", self.found)
