"""From the cells to the figures of the table: means, standard errors, paired differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.value_aware.cells import load
from experiments.value_aware.methods import METHODS
from experiments.value_aware.stages import KERNELS, MODELS, Keeper

Judged = Mapping[str, Sequence[float]]


def summarise(work: Path, sizes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Rows and facts of every model and kernel. Errors of models are in per cent, losses in nats per prediction."""
    keeper = Keeper(work)
    rows, facts = [], []
    for model in MODELS:
        for kernel in KERNELS:
            stage = f"{model}-{kernel}"
            cells = load(work, stage)
            exact = cells["exact"]
            facts.append(
                {
                    "model": model,
                    "kernel": kernel,
                    "training": keeper.record(stage),
                    "exact": percent(exact) | {"sequences": len(exact["count"]), "predictions": sum(exact["count"])},
                    "skew": cells["skew"],
                    "solver_gap": cells["gap"],
                }
            )
            for method in METHODS:
                rows += [_row(cells, model, kernel, method, r, sizes[model]) for r in sizes[model]]
    return rounded({"facts": facts, "rows": rows})


def rounded(data: Any) -> Any:
    """The same with six significant digits, which is more than any of it means."""
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [rounded(value) for value in data]
    return float(f"{data:.6g}") if isinstance(data, float) else data


def _row(
    cells: Mapping[str, Any], model: str, kernel: str, method: str, r: int, sizes: Sequence[int]
) -> dict[str, Any]:
    judged, output = _cell(cells, method, r, sizes)
    rival, _ = _cell(cells, "oblivious", r, sizes)
    above, exact = difference(judged, cells["exact"]), percent(cells["exact"])
    layers = [sum(layer) / len(layer) for layer in output]
    each = [sum(values) / len(values) for values in zip(*output, strict=True)]
    mean = sum(each) / len(each)
    spread = sum((value - mean) ** 2 for value in each) / max(1, len(each) - 1)
    return {
        "model": model,
        "kernel": kernel,
        "method": method,
        "r": r,
        "output_error": mean,
        "output_error_se": math.sqrt(spread / len(each)),
        "output_error_per_layer": layers,
        # Relative to exact attention on the same sequences: some cells were judged on fewer than all.
        "model_error": exact["error"] + above["error"],
        "model_loss": exact["loss"] + above["loss"],
        "sequences": len(judged["count"]),
        "above_exact": above,
        "below_oblivious": difference(rival, judged),
    }


def _cell(cells: Mapping[str, Any], method: str, r: int, sizes: Sequence[int]) -> tuple[Judged, list[list[float]]]:
    """What was judged and the output errors; the value-aware error is zero from Dv + 1 on, which is computed once."""
    while f"model/{method}/{r}" not in cells:
        r = max(size for size in sizes if size < r)
    # JSON has no integers as keys.
    output = {int(size): value for size, value in cells["output"][method].items()}
    return cells[f"model/{method}/{r}"], output[r]


def percent(judged: Judged) -> dict[str, float]:
    """Share of wrong predictions in per cent, mean loss, and the standard errors of both."""
    wrong = [n - right for n, right in zip(judged["count"], judged["right"], strict=True)]
    return _figures(wrong, judged["loss"], judged["count"])


def difference(one: Judged, other: Judged) -> dict[str, float]:
    """Error of `one` minus error of `other` in points, and of the losses, on the sequences both were judged on."""
    number = min(len(one["count"]), len(other["count"]))
    wrong, loss = (
        [sign * (a - b) for a, b in zip(one[name][:number], other[name][:number], strict=True)]
        for name, sign in (("right", -1), ("loss", 1))
    )
    return _figures(wrong, loss, one["count"][:number])


def _figures(wrong: Sequence[float], loss: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
    (error, error_se), (mean, mean_se) = _ratio(wrong, counts), _ratio(loss, counts)
    return {"error": 100 * error, "se": 100 * error_se, "loss": mean, "loss_se": mean_se}


def _ratio(parts: Sequence[float], counts: Sequence[float]) -> tuple[float, float]:
    """`sum parts / sum counts` and its standard error, for which a sequence is the unit that was drawn."""
    total, number = sum(counts), len(counts)
    ratio = sum(parts) / total
    spread = sum((part - ratio * count) ** 2 for part, count in zip(parts, counts, strict=True))
    scale = number / max(1, number - 1)
    return ratio, math.sqrt(scale * spread) / total
