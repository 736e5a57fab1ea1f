"""A few queries of one sequence in detail: which keys each row of a comparison keeps, and its stand-ins' weights.

`fewkeys report` shows them. No number of a `Report` is computed from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.captures.capture import AttentionInputs, Capture
from fewkeys.core import tensor_files
from fewkeys.core.inputs import Inputs
from fewkeys.core.metrics import relative_error
from fewkeys.core.precision import plain_defaults
from fewkeys.core.records import build
from fewkeys.execute import reference
from fewkeys.execute.problem import Problem
from fewkeys.flow import by_plan, canonicalise, choose, prepare, run
from fewkeys.judge.exact import blocks, exact
from fewkeys.model_plan import ModelPlan
from fewkeys.past.scan import States
from fewkeys.plan import Plan
from fewkeys.rest.base import BlockStandIns, CohortStandIns, RangeStandIns, StandIns

QUERIES = 8
"""Queries in a sample; fewer if the file would be larger than `MOST`."""
MOST = 16 * 2**20
"""Bytes of all tensors, before compression."""
UNIT = 32767
"""Weights are whole multiples of 1 / UNIT."""
KIND = "sample"


@dataclass(frozen=True, eq=False)
class Sample:
    """Q queries of the first sequence, in every layer and query head (L, H), for every row of a report, in its order.

    Attributes:
        tokens: of the sequence, as its tokenizer writes them; empty if unknown.
        queries: the positions of the queries.
        tensors: "exact" (L, H, Q, N), the weights of exact attention. For row r: "r.kept" (L, H, Q, N / 8), a bit for
            each key, the lowest first; "r.error" (L, H, Q); if it has stand-ins, "r.weight" (L, H, Q, C); if each
            key has one stand-in for all queries, "r.label" (L, H, N), its number, -1 for none. Weights are int16, in
            units of 1 / `UNIT`.
    """

    tokens: tuple[str, ...]
    queries: tuple[int, ...]
    tensors: Mapping[str, Tensor]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as one safetensors file, whole or not at all."""
        facts = {"tokens": list(self.tokens), "queries": list(self.queries)}
        tensor_files.write(path, KIND, facts, self.tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sample:
        """Read what `save` wrote. Raises `ValueError` for a file that is damaged or something else."""
        facts, tensors = tensor_files.read(path, KIND)
        header = build(_Facts, facts)
        tensor_files.check(tensors, _forms(tensors, len(header.queries)))
        return cls(tuple(header.tokens), tuple(header.queries), tensors)


@dataclass(frozen=True)
class _Facts:
    """The header of a file."""

    tokens: list[str]
    queries: list[int]


def _forms(tensors: Mapping[str, Tensor], queries: int) -> dict[str, tensor_files.Form]:
    """The expected shapes and dtypes, derived from the shape of the exact weights."""
    exact = tensors.get("exact", torch.empty(0))
    layers, heads, _, keys = exact.shape if exact.ndim == 4 else (None,) * 4
    per_query = (layers, heads, queries)
    kinds = {
        "kept": tensor_files.Form((*per_query, None if keys is None else -(-keys // 8)), torch.uint8),
        "error": tensor_files.Form(per_query, torch.float32),
        "weight": tensor_files.Form((*per_query, None), torch.int16),
        "label": tensor_files.Form((layers, heads, keys), torch.int16),
    }
    rows = {name: kinds[kind] for name in tensors if (kind := name.partition(".")[2]) in kinds}
    return {"exact": tensor_files.Form((*per_query, keys), torch.int16), **rows}


@plain_defaults()
def take(
    capture: Capture, plans: Sequence[Plan | ModelPlan], *, tokens: Sequence[str] = (), seed: int = 0
) -> Sample | None:
    """The sample of the first sequence of a capture for each of `plans`; None if one query exceeds `MOST` bytes.

    Cost: one sequence's share of `fewkeys.compare`.
    """
    first = next(capture.calls(0)).rows(slice(0, 1))
    length = first.key.shape[2] if first.key_mask is None else int(first.key_mask.sum())
    each = capture.layers * capture.query_heads * length * (2 + len(plans) / 8)
    count = min(QUERIES, int(MOST // each), length)
    if not count:
        return None
    picks = tuple((2 * i + 1) * length // (2 * count) for i in range(count))
    parts_by_name: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for layer in range(capture.layers):
            call = next(capture.calls(layer)).rows(slice(0, 1))
            for name, tensor in _layer(call, plans, layer, torch.tensor(picks), seed).items():
                parts_by_name.setdefault(name, []).append(tensor)
    shown = tuple(tokens) if len(tokens) == length else ()
    stacked = {name: _join(name, [part.unsqueeze(0) for part in parts]) for name, parts in parts_by_name.items()}
    return Sample(shown, picks, {name: tensor for name, tensor in stacked.items() if tensor.shape[-1]})


def _layer(
    call: AttentionInputs, plans: Sequence[Plan | ModelPlan], layer: int, picks: Tensor, seed: int
) -> dict[str, Tensor]:
    """The tensors of one layer."""
    blocks_by_name: dict[str, list[Tensor]] = {}
    for block in blocks(call):
        truth = exact(block, 1.0)
        blocks_by_name.setdefault("exact", []).append(_units(truth.weights[0][:, picks]))
        group = block.query.shape[1] // block.key.shape[1]
        key_heads = slice(block.heads.start // group, block.heads.stop // group)
        for number, plan in enumerate(plans):
            head_plans = [plan] * block.key.shape[1] if isinstance(plan, Plan) else plan[layer][key_heads]
            inputs = block.checked(torch.Generator(block.query.device).manual_seed(seed))
            parts, order = [], []
            for head_plan, index, part in by_plan(inputs, [plan.never_exact() for plan in head_plans]):
                order.append((index[:, None] * group + torch.arange(group)).flatten())
                parts.append(_rows_of_plan(part, head_plan, truth.output[:, order[-1]], picks, seed))
            back = torch.cat(order).argsort()
            for name in parts[0]:
                joined = _join(name, [part[name] for part in parts])
                blocks_by_name.setdefault(f"{number}.{name}", []).append(joined[back])
    return {name: _join(name, parts) for name, parts in blocks_by_name.items()}


def _rows_of_plan(x: Inputs, plan: Plan, truth: Tensor, picks: Tensor, seed: int) -> dict[str, Tensor]:
    """Kept keys, errors and stand-ins of the queries `picks` under one plan; `truth` (1, H, N, Dv)."""
    choice = choose(plan, x)
    error = relative_error(run(choice).float(), truth)[0][:, picks]
    nothing = {"weight": error.new_zeros((*error.shape, 0)).short(), "label": error.new_zeros((len(error), 0)).short()}
    if plan.keep is None:
        return {"kept": torch.full((*error.shape, -(-x.keys // 8)), 255, dtype=torch.uint8), "error": error, **nothing}
    if x.generator is not None:
        x.generator.manual_seed(seed)
    (part,), _ = canonicalise(choice)
    problem = prepare(part, choice.plan)
    places = [place + problem.inputs.placeholders for place in picks.tolist()]
    kept = torch.cat([problem.graph.mask(place, place + 1)[0] for place in places], 1)
    return {"kept": _packed(kept), "error": error, **(nothing | _stand_ins(problem, kept, places))}


def _stand_ins(problem: Problem, kept: Tensor, places: Sequence[int]) -> dict[str, Tensor]:
    """The weights (H, Q, C) of the stand-ins, and the stand-in of each key (H, N) if all queries share it."""
    x, stand_ins = problem.inputs, problem.stand_ins
    if stand_ins is None:
        return {}
    if isinstance(stand_ins, StandIns):
        # The output equals the stand-ins' weights if stand-in c has the value e_c and every key the value zero.
        unit = torch.eye(stand_ins.count).expand(*stand_ins.key.shape[:2], -1, -1)
        alone = replace(stand_ins, value=unit, left=None, right=None, factor=None, bounds=None)
        value = unit.new_zeros((*x.value.shape[:3], stand_ins.count))
        weight = reference.attend_some(replace(problem, inputs=_valued(x, value), stand_ins=alone), places)[0]
        label = stand_ins.label.masked_fill(stand_ins.share <= 0, -1).short()
        return {"weight": _units(weight), "label": label[0].repeat_interleave(x.gqa_ratio, 0)}
    return _stand_ins_together(problem, kept, places)


def _stand_ins_together(problem: Problem, kept: Tensor, places: Sequence[int]) -> dict[str, Tensor]:
    """The total weight (H, Q, 1) of the stand-ins: 1 less the weight of the kept keys.

    A key has the value e_i if query i keeps it, and stand-ins have the value zero: the output is the kept weight.
    """
    x, stand_ins = problem.inputs, problem.stand_ins
    left = []
    for inner in range(x.gqa_ratio):
        marks = kept.unflatten(0, (x.kv_heads, x.gqa_ratio))[:, inner].mT.float().unsqueeze(0).contiguous()
        marked = replace(problem, inputs=_valued(x, marks), stand_ins=_worthless(stand_ins, marks))
        share = reference.attend_some(marked, places)[0].unflatten(0, (x.kv_heads, x.gqa_ratio))[:, inner]
        left.append(1 - share.diagonal(dim1=-2, dim2=-1))
    return {"weight": _units(torch.stack(left, 1).flatten(0, 1).unsqueeze(-1))}


def _valued(x: Inputs, value: Tensor) -> Inputs:
    """The same problem with other values."""
    return replace(x, value=value, _memory={})


def _worthless(stand_ins: Any, marks: Tensor) -> Any:
    """The same stand-ins with values of zero."""
    if isinstance(stand_ins, RangeStandIns):
        keys = stand_ins.totals[..., : stand_ins.head_dim]
        return replace(stand_ins, totals=pad(keys, (0, marks.shape[-1])))
    if isinstance(stand_ins, StandIns | CohortStandIns):
        value = marks.new_zeros((*stand_ins.key.shape[:-1], marks.shape[-1]))
        return replace(stand_ins, value=value, left=None, right=None, factor=None, bounds=None)
    if isinstance(stand_ins, BlockStandIns):
        states = stand_ins.states
        rows = pad(stand_ins.key, (0, marks.shape[-1]))
        return replace(stand_ins, states=States(rows, states.excess, states.size))
    return stand_ins


def _units(weights: Tensor) -> Tensor:
    return (weights.clamp(0, 1) * UNIT).round().short()


def _packed(flags: Tensor) -> Tensor:
    """Bool (..., N) as bytes (..., N / 8), rounded up: bit j % 8 of byte j // 8."""
    bits = pad(flags, (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8))
    packed: Tensor = (bits.to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return packed


def _join(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The parts joined along the heads. The last dimension is padded: weights by 0, labels by -1 (no stand-in)."""
    widest, value = max(part.shape[-1] for part in parts), -1 if name.endswith("label") else 0
    return torch.cat([pad(part, (0, widest - part.shape[-1]), value=value) for part in parts])
