"""Choose a plan for every head: the split of its slots, and how many of the model's slots it gets."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import torch

from fewkeys.captures.capture import Capture, check_capture
from fewkeys.core.precision import full_precision, plain_defaults
from fewkeys.core.tensor_files import Form, LayerFile
from fewkeys.core.validation import check_count, check_real
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan
from fewkeys.tuning.allocate import within_error, within_slots
from fewkeys.tuning.candidates import Candidate, splits
from fewkeys.tuning.score import Scores, layer_error, score_layer

Progress = Callable[[int, int, str], None]

DEFAULT_SLOTS = 64
"""Also the budget around which plans are searched if only an error is requested."""


@full_precision()
@plain_defaults()
def tune(
    capture: Capture,
    slots: int | None = None,
    *,
    max_error: float | None = None,
    directory: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> ModelPlan:
    """The plan of each layer and key head that makes the output of the layers most like exact attention.

    Splits of the slots into outliers, window, rank of the first-order term and cluster means, from 3/8 to 4 times the
    mean slots, are run in every head of the captured text. Causal: scans, up to 6 times the mean, and sinks with a
    window, down to 1/8; with a bias of the distance (T5): sinks, leverage and windows. The choice minimises, over all
    heads,

        sum_h  added_h / sum_h added_h(budget)  +  sum_h relative_h / sum_h relative_h(budget)

    or, where the capture holds gradients, sum_h output_change_h, at the price per slot that the budget allows
    (Lagrange; the optimum among all choices of that many slots). `fewkeys.tuning.score` defines these errors: added_h
    of the layer's output *after the output projection*, relative_h of the head's own. `budget` is
    `fewkeys.budget(slots)`; for causal scores with a bias, sinks and a window.

    Args:
        capture: from `fewkeys.capture`, on text like that which the model will see.
        slots: per query, on average over all heads; default 64.
        max_error: in place of `slots`, the largest mean relative output error, as reports show it, on this text; slots
            are then as few as the candidates allow.
        directory: for finished layers, so that an interrupted run on the same capture goes on.
        progress: called as `progress(done, total, what)`.
        seed: of everything random.

    Returns:
        `ModelPlan`, whose `record` holds the settings and, for the choice and under "budget" for `budget(slots)`, the
        "slots", the "error" (mean relative error of head outputs) and the "layer_error" (of the layers' outputs after
        the projection) on the captured text.

    Raises `TypeError` or `ValueError` for malformed arguments.

    Cost: each of about 200 candidates once per layer, in linear time; 8 sequences of 512 tokens of a model with 6
    layers of 12 heads take about two minutes on two cores. Deterministic on a CPU.

    Source: the objective is that of Value-aware Approximate Attention (arXiv 2103.09857), section 3; the search ours.
    """
    if slots is not None and max_error is not None:
        raise ValueError("slots, max_error: expected one of them, got both; drop one")
    check_capture(capture)
    if 0 < len(capture.weights) < capture.layers:
        raise ValueError(
            f"capture: expected a model whose layers have an attention module each, got {capture.layers} layers that "
            f"share {len(capture.weights)}, which takes one plan for all; use fewkeys.budget(slots)"
        )
    if max_error is not None:
        check_real("max_error", max_error, above=0.0)
    asked = DEFAULT_SLOTS if slots is None else check_count("slots", slots)
    causal, keys, width = capture.is_causal, capture.longest, capture.head_dim + capture.value_dim
    candidates = splits(asked, is_causal=causal, keys=keys, width=width, biased=capture.biased)
    scores = _scores(capture, candidates, None if directory is None else Path(directory), progress, seed)
    if capture.gradients:
        cost = scores.output_change
    else:  # the first candidate is budget(slots)
        relative, added = (part / part[:, 0].mean().clamp_min(1e-30) for part in (scores.relative, scores.added))
        cost = relative + added
    paid = torch.tensor([float(candidate.slots) for candidate in candidates]).expand_as(cost)
    if max_error is None:
        choice = within_slots(cost, paid, asked)
    else:
        choice = within_error(cost, paid, scores.relative, max_error)
    chosen = [candidates[index] for index in choice.tolist()]
    heads = capture.kv_heads
    layers = tuple(tuple(c.plan for c in chosen[first : first + heads]) for first in range(0, len(chosen), heads))
    record = {
        "model": capture.model_name,
        "weights": list(capture.weights),
        "tokens": capture.tokens,
        "asked": {"slots": slots, "max_error": max_error} if max_error is not None else {"slots": asked},
        "seed": seed,
        **_judged(capture, layers, seed, sum(candidate.slots for candidate in chosen) / len(chosen)),
        "budget": _judged(capture, [[candidates[0].plan] * heads] * capture.layers, seed, candidates[0].slots),
    }
    return ModelPlan(layers, record)


def _judged(capture: Capture, layers: Sequence[Sequence[Plan]], seed: int, slots: float) -> dict[str, float]:
    errors = [layer_error(capture, layer, plans, seed=seed) for layer, plans in enumerate(layers)]
    heads, whole = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    return {"slots": slots, "error": heads, "layer_error": whole}


def _scores(
    capture: Capture, candidates: Sequence[Candidate], folder: Path | None, progress: Progress | None, seed: int
) -> Scores:
    """The scores in the key heads of all layers (L Hkv, K). `folder` keeps those of finished layers."""
    layers, total = [], len(candidates) * capture.batches * capture.layers
    form = Form((capture.kv_heads, len(candidates)), torch.float64)
    steps = count(1)

    def step(layer: int) -> None:
        done = next(steps)
        if progress is not None:
            progress(done, total, f"layer {layer + 1} of {capture.layers}")

    for layer in range(capture.layers):
        facts = [capture.digest(layer), seed, torch.__version__, *(item.plan.to_dict() for item in candidates)]
        file = LayerFile(folder, "scores", f"scores-{layer:03d}", facts)
        if (finished := file.read(dict.fromkeys(Scores._fields, form))) is not None:
            scores = Scores(**finished[1])
            for _ in range(total // capture.layers):
                step(layer)
        else:
            scores = score_layer(capture, layer, candidates, seed=seed, done=partial(step, layer))
            file.write({}, scores._asdict())
        layers.append(scores)
    return Scores(*map(torch.cat, zip(*layers, strict=True)))
