"""Judge plans on what a model really attends to: error of the output, not of the weights.

For each layer and block of heads the exact weights and outputs are computed once, and every plan is held against
them. Memory is bounded by one block (`fewkeys.measure.exact`), however long the text; time is O(n^2) per plan, since
mass and recall need the exact weights.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fewkeys.attention import attention, run
from fewkeys.measure.capture import Capture
from fewkeys.measure.effect import Batch, Effect, effects
from fewkeys.measure.exact import Block, Exact, blocks, exact, held
from fewkeys.measure.machine import machine, versions
from fewkeys.measure.metrics import relative_error
from fewkeys.measure.result import Report, Row, Skipped, plain
from fewkeys.measure.tally import Tally
from fewkeys.plan import Plan
from fewkeys.validation import check_inputs

Progress = Callable[[int, int, str], None]
Plans = Mapping[str, Plan] | Mapping[int, Mapping[str, Plan]] | Sequence[Plan]

TIMED = 6
"""Timings per plan, at least: one in each layer, more where there are fewer layers."""


@dataclass
class _Entry:
    """One plan under judgement. `reason` is why it was given up, None while it runs."""

    name: str
    budget: int | None
    plan: Plan
    tally: Tally
    reason: str | None = None
    ms: list[float] = field(default_factory=list)
    exact_ms: list[float] = field(default_factory=list)
    effect: Effect | None = None

    def generator(self, where: str, device: torch.device) -> torch.Generator:
        """Randomness that depends on the place (which begins with the seed) and the row, not on the other rows."""
        return self.restart(torch.Generator(device), where)

    def restart(self, generator: torch.Generator, where: str) -> torch.Generator:
        """Put a generator where `generator(where, ...)` begins."""
        return generator.manual_seed(zlib.crc32(f"{where}/{self.name}/{self.budget}".encode()))


def compare(
    capture: Capture,
    plans: Plans,
    *,
    model: Any = None,
    batches: Iterable[Batch] | None = None,
    eps: float = 0.05,
    progress: Progress | None = None,
    seed: int = 0,
) -> Report:
    """Hold each plan against exact attention on captured queries, keys and values.

    Args:
        capture: the attention inputs of every layer, from `fewkeys.capture`.
        plans: rows by name, as `standard_plans(64)` gives them; or `{budget: rows}` for several budgets at once (a
            row that is the same at every budget, such as exact attention, is judged once); or a list of plans.
        model: the model itself, for the effect of replacing attention in every layer; None leaves that out.
        batches: the token ids that were captured; needed with `model`.
        eps: entries of exact attention at or above it count as heavy in `recall`; in (0, 1].
        progress: called as `progress(done, total, what)`.
        seed: of everything random in the plans. Same seed, same numbers, timings aside.

    A plan that refuses this model, such as stand-ins that cannot be causal, is listed in `skipped` with its reason.
    Raises ValueError for bad arguments, and if every plan refuses.
    """
    if not 0.0 < eps <= 1.0:
        raise ValueError(f"eps: expected a number in (0, 1], got {eps!r}; the default is 0.05")
    if (model is None) != (batches is None):
        raise ValueError("model, batches: expected both or neither, got one; pass the model with the batches captured")
    entries, budgets = _entries(plans, capture)
    passes = capture.layers + (0 if model is None else 1)
    counter = _Counter(progress, capture.sequences * (1 + len(entries)) * passes)
    shape = _judge_layers(capture, entries, eps, seed, counter)
    running = [entry for entry in entries if entry.reason is None]
    if not running:
        raise ValueError(f"plans: expected one that runs on this model, got only refusals; first: {entries[0].reason}")
    if model is not None and batches is not None:
        _judge_model(model, batches, running, seed, counter)
    counter.finish()
    lengths = _lengths(capture)
    return Report(
        model=capture.model_name,
        layers=capture.layers,
        query_heads=capture.query_heads,
        kv_heads=capture.kv_heads,
        head_dim=capture.head_dim,
        value_dim=capture.value_dim,
        is_causal=capture.is_causal,
        sequences=capture.sequences,
        length=max(lengths),
        tokens=sum(lengths),
        settings={"eps": eps, "seed": seed, "budgets": budgets, "timed_shape": shape},
        versions=versions(with_transformers=model is not None),
        machine=machine(),
        rows=[_row(entry, capture) for entry in running],
        skipped=[Skipped(e.name, e.budget, e.reason) for e in entries if e.reason is not None],
    )


class _Counter:
    """Counts finished sequences (times plans, times layers) for a progress bar."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0.0

    def __call__(self, amount: float, what: str) -> None:
        self.done += amount
        if self.progress is not None:
            self.progress(min(round(self.done), self.total), self.total, what)

    def finish(self) -> None:
        self(self.total, "done")


def _entries(plans: Plans, capture: Capture) -> tuple[list[_Entry], list[int]]:
    """The rows to judge, in order, and the budgets they were made for."""
    groups: list[tuple[Any, Any]] = [(None, plans)]
    if not isinstance(plans, Mapping):
        groups = [(None, {str(plan): plan for plan in plans})]
    elif all(isinstance(value, Mapping) for value in plans.values()):
        groups = list(plans.items())
    found: list[_Entry] = []
    for budget, rows in groups:
        for name, plan in rows.items():
            if not isinstance(plan, Plan):
                raise TypeError(
                    f"plans: expected a Plan under {name!r}, got {type(plan).__name__}; make one with Plan()"
                )
            own = None if plan.keep is None else budget
            if all((name, own) != (other.name, other.budget) for other in found):
                found.append(_Entry(name, own, plan, Tally(capture.layers, capture.query_heads)))
    if not found:
        raise ValueError("plans: expected at least one plan, got none; standard_plans(64) gives the usual rows")
    return found, [budget for budget, _ in groups if budget is not None]


def _lengths(capture: Capture) -> list[int]:
    """Valid tokens of every sequence."""
    found: list[int] = []
    for call in capture.calls(0):
        if call.key_mask is None:
            found += [call.key.shape[2]] * call.key.shape[0]
        else:
            found += call.key_mask.sum(-1).tolist()
    return found


def _judge_layers(capture: Capture, entries: Sequence[_Entry], eps: float, seed: int, counter: _Counter) -> list[int]:
    """Fill the tallies and timings of all entries. Returns the shape that was timed."""
    shape: list[int] = []
    repeats = math.ceil(TIMED / capture.layers)
    for layer in range(capture.layers):
        what = f"layer {layer + 1} of {capture.layers}"
        timed = False
        for index, call in enumerate(capture.calls(layer)):
            cut = list(blocks(call))
            for number, block in enumerate(cut):
                share = len(call.query) / len(cut)
                truth = exact(block, eps)
                counter(share, what)
                for entry in entries:
                    if entry.reason is None:
                        try:
                            _judge_block(entry, layer, block, truth, f"{seed}/{layer}/{index}/{number}")
                        except ValueError as error:
                            entry.reason = str(error)
                    if entry.reason is None and not timed:
                        _time(entry, block, f"{seed}/timing", repeats)
                    counter(share, what)
                if not timed:
                    timed, shape = True, list(block.query.shape)
    return shape


def _judge_block(entry: _Entry, layer: int, block: Block, truth: Exact, where: str) -> None:
    """Add one block to the tally of an entry."""
    keep, rest = entry.plan.keep, entry.plan.rest
    generator = entry.generator(where, block.query.device)
    inputs = check_inputs(
        block.query,
        block.key,
        block.value,
        is_causal=block.is_causal,
        scale=block.scale,
        query_offset=block.query_offset,
        generator=generator,
    )
    output = run(inputs, entry.plan, "torch")
    if not bool(output.isfinite().all()):
        raise ValueError(f"the output is not finite in layer {layer}; nothing can be measured")
    errors = relative_error(output.float(), truth.output)
    if keep is None:
        mass, slots, found = torch.ones_like(errors), truth.visible.expand_as(errors), truth.heavy_per_head
    else:
        # The same inputs, and the generator where it began: the edges that the output was made from.
        entry.restart(generator, where)
        edges = keep.select(inputs).to_mask()
        mass, slots = held(truth.weights, edges)
        found = truth.count(edges.flatten()[truth.heavy])
        if bool((slots < truth.visible).any()):  # where every key is kept, nothing stands in
            slots += rest.slots(block.query.shape[-1], block.value.shape[-1])
    entry.tally.add(layer, block.heads, errors, mass, slots, truth.heavy_per_head, found)


def _attend(entry: _Entry, block: Block, where: str) -> Tensor:
    return attention(
        block.query,
        block.key,
        block.value,
        plan=entry.plan,
        is_causal=block.is_causal,
        scale=block.scale,
        query_offset=block.query_offset,
        generator=entry.generator(where, block.query.device),
        impl="torch",
    )


def _time(entry: _Entry, block: Block, where: str, repeats: int) -> None:
    """Time the plan and exact attention in turns, so that both meet the same machine. Both have run before."""
    for _ in range(repeats):
        entry.exact_ms.append(_clock(lambda: _exact_attention(block), block.query.device))
        entry.ms.append(_clock(lambda: _attend(entry, block, where), block.query.device))


def _exact_attention(block: Block) -> Tensor:
    if block.is_causal and block.query_offset:  # the fused kernel aligns queries with the first keys only
        rows = torch.arange(block.query.shape[2])[:, None] + block.query_offset
        mask = (torch.arange(block.key.shape[2]) <= rows).to(block.query.device)
        return scaled_dot_product_attention(
            block.query, block.key, block.value, attn_mask=mask, scale=block.scale, enable_gqa=True
        )
    return scaled_dot_product_attention(
        block.query, block.key, block.value, is_causal=block.is_causal, scale=block.scale, enable_gqa=True
    )


def _clock(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds that `work` takes, waiting for a GPU to finish."""
    _wait(device)
    start = perf_counter()
    work()
    _wait(device)
    return (perf_counter() - start) * 1000.0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _judge_model(model: Any, batches: Iterable[Batch], entries: Sequence[_Entry], seed: int, counter: _Counter) -> None:
    """Fill the effects of all entries."""
    what = "whole model"
    found = effects(
        model,
        batches,
        [entry.plan for entry in entries],
        generator=lambda i: entries[i].generator(f"{seed}/model", model.device),
        done=lambda sequences: counter(sequences, what),
    )
    for entry, effect in zip(entries, found, strict=True):
        entry.effect = effect


def _row(entry: _Entry, capture: Capture) -> Row:
    """The numbers of a finished entry."""
    tally, effect, keep = entry.tally, entry.effect, entry.plan.keep
    error, held = tally.mean("errors"), tally.mean("masses")
    worst = int(error.argmax())
    heavy = float(tally.heavy.sum())
    return Row(
        name=entry.name,
        budget=entry.budget,
        kind="exact" if keep is None else "oracle" if keep.is_oracle else "method",
        plan=str(entry.plan),
        config=plain(entry.plan.to_dict()),
        slots=tally.overall("slots"),
        error=tally.overall("errors"),
        error_p50=tally.quantile(0.5),
        error_p90=tally.quantile(0.9),
        worst_head=list(divmod(worst, capture.query_heads)),
        worst_head_error=float(error.flatten()[worst]),
        mass=tally.overall("masses"),
        recall=float(tally.found.sum()) / heavy if heavy else None,
        cosine=None if effect is None else effect.cosine,
        cosine_min=None if effect is None else effect.cosine_min,
        token_cosine=None if effect is None else effect.token_cosine,
        ms=median(entry.ms),
        exact_ms=median(entry.exact_ms),
        per_layer={
            "error": error.mean(1).tolist(),
            "mass": held.mean(1).tolist(),
            "recall": _listed(tally.found.sum(1) / tally.heavy.sum(1)),
            "slots": tally.mean("slots").mean(1).tolist(),
        },
        per_head={
            "error": error.tolist(),
            "mass": held.tolist(),
            "recall": [_listed(row) for row in tally.found / tally.heavy],
        },
    )


def _listed(values: Tensor) -> list[float | None]:
    """A list with None for what does not exist (0 / 0)."""
    return [None if math.isnan(value) else value for value in values.tolist()]
