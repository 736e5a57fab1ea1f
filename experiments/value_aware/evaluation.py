"""Errors of the output and of the model, for one trained model with one kernel."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from experiments.value_aware.data import Batch
from experiments.value_aware.methods import METHODS, Call, aware, solver
from experiments.value_aware.models import judge
from experiments.value_aware.skew import entropy, gini, top_mass
from torch import Tensor, nn

import fewkeys as fk
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.metrics import relative_error
from fewkeys.core.weights import Weights
from fewkeys.integrations.interface import attach, attention_modules

SUBSET = 6
"""Every so many heads are solved with the best solver too, to learn what the quick ones miss."""


def model_error(model: Any, kernel: Weights, batch: Batch, method: str, r: int) -> dict[str, list[float]]:
    """Per sequence, what `judge` counts, with every layer answered by `method`."""
    generator = seeded(method, r)
    with _answered(model, lambda layer, call: METHODS[method](call, r), kernel, generator):
        return judge(model, batch)


def exact_error(model: Any, kernel: Weights, batch: Batch) -> dict[str, list[float]]:
    """The same with exact attention."""
    with fk.apply(model, fk.Plan(weights=kernel)):
        return judge(model, batch)


def output_errors(
    model: Any, kernel: Weights, batch: Batch, cells: Sequence[tuple[str, int]], say: Callable[[str], None]
) -> dict[str, dict[int, list[list[float]]]]:
    """`|o~ - o| / |o|`, mean over queries and heads, by method, r, layer and sequence: every layer has exact inputs."""
    found: dict[str, dict[int, list[list[float]]]] = {method: {} for method, _ in cells}
    layers = len(attention_modules(model))

    def answer(layer: int, call: Call) -> Tensor:
        say(f"output error, layer {layer + 1}/{layers}")
        for method, r in cells:
            call.generator.manual_seed(_seed(method, r, layer))
            error = relative_error(METHODS[method](call, r), call.output).mean((1, 2))
            found[method].setdefault(r, []).append(error.tolist())
        return call.output

    with _answered(model, answer, kernel, torch.Generator()):
        judge(model, batch)
    return found


def skew(model: Any, kernel: Weights, batch: Batch) -> dict[str, float]:
    """How unequal the exact weights are, mean over rows that see at least half of the sequence, heads and layers."""
    sums: dict[str, list[float]] = {}

    def answer(layer: int, call: Call) -> Tensor:
        weights = call.weights[:, :, call.weights.shape[2] // 2 - 1 :] if call.inputs.is_causal else call.weights
        for name, value in (
            ("top-1 mass", top_mass(weights, 1)),
            ("top-8 mass", top_mass(weights, 8)),
            ("keys in use (exp entropy)", entropy(weights).exp()),
            ("gini", gini(weights)),
            ("rows without weight", (weights.sum(-1) == 0).float()),
        ):
            # Where a kernel vanishes on a whole row there are no weights that could be unequal.
            sums.setdefault(name, []).append(float(value.nanmean()))
        return call.output

    with _answered(model, answer, kernel, torch.Generator()):
        judge(model, batch)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def solver_gap(model: Any, kernel: Weights, batch: Batch, sizes: Sequence[int]) -> dict[int, dict[str, float]]:
    """Mean output error by the solver in use and by "auto", on every `SUBSET`-th head of one sequence."""
    sums: dict[int, dict[str, list[float]]] = {r: {"in use": [], "auto": []} for r in sizes}

    def answer(layer: int, call: Call) -> Tensor:
        part = _heads(call, layer % SUBSET)
        for r in sizes:
            for name, method in (("in use", solver(r)), ("auto", "auto")):
                sums[r][name] += relative_error(aware(part, r, method), part.output).flatten().tolist()
        return call.output

    with _answered(model, answer, kernel, torch.Generator()):
        judge(model, Batch(batch.ids[:1], batch.labels[:1]))
    return {r: {name: sum(values) / len(values) for name, values in row.items()} for r, row in sums.items()}


def seeded(method: str, r: int) -> torch.Generator:
    """The randomness of one cell, whatever ran before it."""
    return torch.Generator().manual_seed(_seed(method, r, 0))


def _seed(method: str, r: int, layer: int) -> int:
    return zlib.crc32(f"{method}/{r}/{layer}".encode())


def _heads(call: Call, first: int) -> Call:
    some = slice(first, None, SUBSET)
    tensors = (call.scores, call.weights, call.key, call.value)
    return Call(call.inputs, call.kernel, call.generator, *(tensor[:, some] for tensor in tensors))


@contextmanager
def _answered(
    model: Any, answer: Callable[[int, Call], Tensor], kernel: Weights, generator: torch.Generator
) -> Iterator[None]:
    def attend(layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        return answer(layer, Call.of(inputs, kernel, generator))

    detach = attach(model, attend).detach
    try:
        yield
    finally:
        detach()
