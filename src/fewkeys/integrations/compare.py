"""Judge plans on a model's own queries, keys and values: by the error of the output, not of the weights.

The exact weights and outputs of each layer and block of heads are computed once for all plans. Memory: one block
(`fewkeys.judge.exact`). Time: O(n^2) per plan, since mass and recall need the exact weights.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from torch import Tensor

from fewkeys.bench.machine import machine, versions
from fewkeys.captures.capture import Capture, check_capture
from fewkeys.core.impl import Impl, check_impl
from fewkeys.core.precision import full_precision
from fewkeys.integrations.capture import Batch, check_eval
from fewkeys.integrations.effect import judge_model
from fewkeys.integrations.interface import unwrapped
from fewkeys.judge.exact import blocks, exact, first_sequence
from fewkeys.judge.layer import Entry, HeaviestKeys, judge_block, time_block
from fewkeys.judge.result import Report, Row, Skipped, plain
from fewkeys.judge.tally import Tally
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan

Count = Callable[[float, str], None]
AnyPlan = Plan | ModelPlan
Plans = Mapping[str, AnyPlan] | Mapping[int | None, Mapping[str, AnyPlan]] | Sequence[AnyPlan]

COPIED = ("layers", "query_heads", "kv_heads", "head_dim", "value_dim", "is_causal", "sequences")
"""What a report repeats of a capture."""
TIMED = 6
"""The least number of timings per plan: one in each layer, more where there are fewer layers."""


def compare(
    capture: Capture,
    plans: Plans | AnyPlan,
    *,
    model: Any = None,
    batches: Iterable[Batch] | None = None,
    eps: float = 0.05,
    impl: Impl = "auto",
    progress: Callable[[int, int, str], None] | None = None,
    seed: int = 0,
) -> Report:
    """Compare each plan with exact softmax attention on captured queries, keys and values.

    Args:
        capture: the inputs of every layer, from `fewkeys.capture`.
        plans: rows by name, as `standard_plans(64)` gives them; or `{budget: rows}` (exact attention is judged once);
            or a list of plans, or one plan. A plan may be a `ModelPlan`, as `fewkeys.tune` makes it.
        model, batches: the model, in eval mode, and the token ids that were captured, for the effect of replacing
            attention in every layer; None leaves it out.
        eps: entries of exact attention at or above it count as heavy in `recall`; in (0, 1].
        impl: as in `fewkeys.attention`; plans run even where exact attention is faster.
        progress: called as `progress(done, total, what)`.
        seed: of everything random in the plans.

    A plan that refuses this model or `impl` is listed in `skipped` with its reason. `ValueError` for bad arguments, and
    if every plan refuses.
    """
    if not 0.0 < eps <= 1.0:
        raise ValueError(f"eps: expected a number in (0, 1], got {eps!r}; the default is 0.05")
    if (model is None) != (batches is None):
        raise ValueError("model, batches: expected both or neither, got one; pass the model with the batches captured")
    check_impl(impl)
    check_capture(capture)
    if model is not None:
        check_eval(unwrapped(model))
    entries, budgets = _entries(plans, capture)
    total, done = capture.sequences * (1 + len(entries)) * (capture.layers + (model is not None)), 0.0

    def count(amount: float, what: str) -> None:
        nonlocal done
        done += amount
        if progress is not None:
            progress(min(round(done), total), total, what)

    heaviest = HeaviestKeys(capture.layers, capture.query_heads)
    shape = _judge_layers(capture, entries, eps, seed, impl, count, heaviest)
    running = [entry for entry in entries if entry.reason is None]
    if not running:
        raise ValueError(f"plans: expected one that runs on this model, got only refusals; first: {entries[0].reason}")
    if batches is not None:
        judge_model(model, batches, running, seed, impl, lambda sequences: count(sequences, "whole model"))
    count(total, "done")
    lengths: list[int] = []
    for call in capture.calls(0):
        batch, _, keys, _ = call.key.shape
        lengths += [keys] * batch if call.key_mask is None else call.key_mask.sum(-1).tolist()
    return Report(
        model=capture.model_name,
        **{name: getattr(capture, name) for name in COPIED},
        length=max(lengths),
        tokens=sum(lengths),
        settings={"eps": eps, "seed": seed, "impl": impl, "budgets": budgets, "timed_shape": shape},
        versions=versions(),
        machine=machine(),
        rows=[_row(entry, capture) for entry in running],
        skipped=[Skipped(e.name, e.budget, e.reason) for e in entries if e.reason is not None],
        sample=heaviest.sample if all(heaviest.sample.keys) else None,
    )


def _entries(plans: Plans | AnyPlan, capture: Capture) -> tuple[list[Entry], list[int]]:
    """The rows to judge, and the budgets they were made for."""
    if isinstance(plans, Plan | ModelPlan):
        plans = [plans]
    by_name: Any = plans if isinstance(plans, Mapping) else {str(plan): plan for plan in plans}
    if by_name is not plans and any(by_name[str(plan)] != plan for plan in plans):
        raise ValueError(f"plans: expected different names, got two of {', '.join(by_name)}; pass a mapping")
    is_by_budget = isinstance(plans, Mapping) and all(isinstance(rows, Mapping) for rows in plans.values())
    by_budget = by_name if is_by_budget else {None: by_name}
    entries: list[Entry] = []
    for budget, rows in by_budget.items():
        for name, plan in rows.items():
            if not isinstance(plan, Plan | ModelPlan):
                raise TypeError(f"plans: expected a Plan under {name!r}, got {type(plan).__name__}")
            heads = [len(layer) for layer in plan] if isinstance(plan, ModelPlan) else []
            if heads and (len(heads) != capture.layers or not {1, capture.kv_heads}.issuperset(heads)):
                shape = f"{capture.layers} layers of {capture.kv_heads} plans, or one for all"
                raise ValueError(f"plans: expected {shape}, under {name!r}, got {heads}; tune on this model")
            entry_budget = None if isinstance(plan, Plan) and plan.keep is None else budget
            if all((name, entry_budget) != (other.name, other.budget) for other in entries):
                tally = Tally(capture.layers, capture.query_heads)
                entries.append(Entry(name, entry_budget, plan, tally, kept=[[] for _ in range(capture.layers)]))
    if not entries:
        raise ValueError("plans: expected at least one plan, got none; standard_plans(64) gives the usual rows")
    return entries, [budget for budget in by_budget if budget is not None]


@full_precision()
def _judge_layers(
    capture: Capture, entries: Sequence[Entry], eps: float, seed: int, impl: Impl, count: Count, heaviest: HeaviestKeys
) -> list[int]:
    """Fill the tallies and timings of all entries, and the sample. Returns the shape that was timed."""
    shape: list[int] = []
    repeats = math.ceil(TIMED / capture.layers)
    for layer in range(capture.layers):
        what = f"layer {layer + 1} of {capture.layers}"
        timed = False
        for index, call in enumerate(capture.calls(layer)):
            call_blocks = list(blocks(call))
            for number, block in enumerate(call_blocks):
                fraction = len(call.query) / len(call_blocks)
                truth = exact(block, eps)
                is_first = index == block.sequence == 0
                if is_first:
                    heaviest.add(layer, truth)
                count(fraction, what)
                for entry in entries:
                    if entry.reason is None:
                        try:
                            where = f"{seed}/{layer}/{index}/{number}"
                            judge_block(entry, layer, block, truth, where, impl, heaviest if is_first else None)
                        except ValueError as error:
                            entry.reason = str(error)
                    count(fraction, what)
            if call_blocks and not timed:
                sequence = first_sequence(call)
                for entry in entries:
                    if entry.reason is None:
                        time_block(entry, layer, sequence, f"{seed}/timing", repeats, impl)
                timed, shape = True, list(sequence.query.shape)
    return shape


def _row(entry: Entry, capture: Capture) -> Row:
    tally = entry.tally
    error, mass, slots = tally.means()
    worst = int(error.argmax())
    return Row(
        name=entry.name,
        budget=entry.budget,
        kind=entry.kind,
        plan=str(entry.plan),
        config=plain(entry.plan.to_dict()),
        slots=float(slots.mean()),
        error=float(error.mean()),
        error_p50=tally.quantile(0.5),
        error_p90=tally.quantile(0.9),
        worst_head=list(divmod(worst, capture.query_heads)),
        worst_head_error=float(error.flatten()[worst]),
        mass=float(mass.mean()),
        recall=_listed(tally.heavy_kept.sum() / tally.heavy.sum()),
        **entry.effect,
        ms=median(entry.exact_ms if entry.plan == Plan() else entry.ms),  # a speed of 1
        exact_ms=median(entry.exact_ms),
        per_layer={
            "error": error.mean(1).tolist(),
            "mass": mass.mean(1).tolist(),
            "recall": _listed(tally.heavy_kept.sum(1) / tally.heavy.sum(1)),
            "slots": slots.mean(1).tolist(),
        },
        per_head={
            "error": error.tolist(),
            "mass": mass.tolist(),
            "recall": _listed(tally.heavy_kept / tally.heavy),
        },
        kept=entry.kept,
    )


def _listed(values: Tensor) -> Any:
    """`values.tolist()` with None for what does not exist (0 / 0)."""
    if values.ndim:
        return [_listed(value) for value in values]
    return None if values.isnan() else float(values)
