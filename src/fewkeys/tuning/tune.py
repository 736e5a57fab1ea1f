"""Choose a plan for every head: the split of its slots, and how many of the model's slots it gets."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.captures.capture import Capture, check_capture
from fewkeys.core.precision import full_precision, plain_defaults
from fewkeys.core.tensor_files import Form, LayerFile
from fewkeys.core.validation import check_count, check_real
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan
from fewkeys.tuning.allocate import within_error, within_slots
from fewkeys.tuning.candidates import Candidate, splits, variants
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
    memory: Literal["all", "constant"] = "all",
    seed: int = 0,
) -> ModelPlan:
    """The plan of each layer and key head that makes the output of the layers most like exact attention.

    Splits of the slots into outliers, window, rank of the first-order term and cluster means, from 3/8 to 4 times the
    mean slots, are run in every head of the captured text; then neighbours of the best. Causal: scans, up to 6 times
    the mean, and sinks with a window, down to 1/8; `memory="constant"`: sinks, leverage and windows, recent blocks and
    running means; with a bias of the distance (T5): sinks, leverage and windows. The choice minimises, over all heads,

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
        memory: of causal plans, as in `fewkeys.budget`.
        progress: called as `progress(done, total, what)`.
        seed: of everything random.

    Returns:
        `ModelPlan`, whose `record` holds the settings and, for the choice and under "budget" for `budget(slots)`, the
        "slots", the "error" (mean relative error of head outputs) and the "layer_error" (of the layers' outputs after
        the projection) on the captured text.

    Raises `TypeError` or `ValueError` for malformed arguments.

    Cost: each of about 250 candidates once per layer, in linear time; 8 sequences of 512 tokens of a model with 6
    layers of 12 heads take two to three minutes on two cores. Deterministic on a CPU.

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
    if memory != "all" and not capture.is_causal:
        raise ValueError(f"memory: expected 'all' for attention that sees the future, got {memory!r}; drop it")
    width = capture.head_dim + capture.value_dim
    causal, keys = capture.is_causal, capture.longest
    first = splits(asked, is_causal=causal, keys=keys, width=width, memory=memory, biased=capture.biased)
    scorer = _Scorer(capture, None if directory is None else Path(directory), progress, seed)

    def choose(candidates: Sequence[Sequence[Candidate]], scores: Sequence[Scores]) -> list[list[Candidate]]:
        relative = _padded([score.relative for score in scores])
        if capture.gradients:
            cost = _padded([score.output_change for score in scores])
        else:  # the first candidate is budget(slots)
            added = _padded([score.added for score in scores])
            cost = relative / relative[:, 0].mean().clamp_min(1e-30) + added / added[:, 0].mean().clamp_min(1e-30)
        slots = _padded([torch.tensor([[c.slots for c in row]] * capture.kv_heads).double() for row in candidates])
        if max_error is None:
            choice = within_slots(cost, slots, asked)
        else:
            choice = within_error(cost, slots, relative, max_error)
        rows = choice.view(capture.layers, capture.kv_heads).tolist()
        return [[candidates[layer][index] for index in row] for layer, row in enumerate(rows)]

    scores = scorer.score([first] * capture.layers)
    best = choose([first] * capture.layers, scores)
    near = [dict.fromkeys(other for candidate in row for other in variants(candidate, width=width)) for row in best]
    scored = set(first)
    more = [[candidate for candidate in row if candidate not in scored] for row in near]
    all_scores = [
        Scores(*(torch.cat(errors, 1) for errors in zip(*stages, strict=True)))
        for stages in zip(scores, scorer.score(more), strict=True)
    ]
    chosen = choose([first + row for row in more], all_scores)
    layers = tuple(tuple(candidate.plan for candidate in row) for row in chosen)
    paid = sum(candidate.slots for row in chosen for candidate in row) / (capture.layers * capture.kv_heads)
    record = {
        "model": capture.model_name,
        "weights": list(capture.weights),
        "tokens": capture.tokens,
        "asked": {"slots": slots, "max_error": max_error} if max_error is not None else {"slots": asked},
        "seed": seed,
        **_judged(capture, layers, seed, paid),
        "budget": _judged(capture, [[first[0].plan] * capture.kv_heads] * capture.layers, seed, first[0].slots),
    }
    return ModelPlan(layers, record)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows (H, K_l) of all layers, filled up with infinity: (L H, K)."""
    longest = max(row.shape[1] for row in rows)
    return torch.cat([pad(row, (0, longest - row.shape[1]), value=torch.inf) for row in rows])


def _judged(capture: Capture, layers: Sequence[Sequence[Plan]], seed: int, slots: float) -> dict[str, float]:
    errors = [layer_error(capture, layer, plans, seed=seed) for layer, plans in enumerate(layers)]
    heads, whole = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    return {"slots": slots, "error": heads, "layer_error": whole}


@dataclass
class _Scorer:
    """Scores the candidates of each layer, and keeps the scores in a folder."""

    capture: Capture
    folder: Path | None
    progress: Progress | None
    seed: int
    done: int = 0
    total: int = 0

    def score(self, rows: Sequence[Sequence[Candidate]]) -> list[Scores]:
        self.total += sum(map(len, rows)) * self.capture.batches
        return [self._score_layer(layer, candidates) for layer, candidates in enumerate(rows)]

    def _score_layer(self, layer: int, candidates: Sequence[Candidate]) -> Scores:
        capture = self.capture
        facts = [capture.digest(layer), self.seed, torch.__version__, *(item.plan.to_dict() for item in candidates)]
        file = LayerFile(self.folder, "scores", f"scores-{layer:03d}", facts)
        form = Form((capture.kv_heads, len(candidates)), torch.float64)
        if (finished := file.read(dict.fromkeys(Scores._fields, form))) is not None:
            self._step(layer, len(candidates) * capture.batches)
            return Scores(**finished[1])
        scores = score_layer(capture, layer, candidates, seed=self.seed, done=partial(self._step, layer))
        file.write({}, scores._asdict())
        return scores

    def _step(self, layer: int, amount: int = 1) -> None:
        self.done += amount
        if self.progress is not None:
            self.progress(self.done, self.total, f"layer {layer + 1} of {self.capture.layers}")
