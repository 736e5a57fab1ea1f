"""Errors and work of every setting, then times of the settings that may be on a front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from experiments.peers.registry import OURS, PEERS
from experiments.peers.settings import Problem
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from fewkeys.core.clock import clock
from fewkeys.core.metrics import output_error

Row = dict[str, Any]
SEEDS = 3
"""Errors are means over 3 seeds for up to `LONG` queries, and of one seed beyond."""
LONG = 2048
SLACK = 1.5
"""A setting is not timed if another has less error and is faster even when its rough time is multiplied by this."""
MOST = 48
"""The most settings of a method that are timed."""
SLOWEST, ANY = 1.0, 500.0
"""A setting is not timed if its rough time exceeds both exact attention's and 500 ms."""


def answer(name: str, settings: dict[str, Any], x: Problem, seed: int = 0) -> Tensor:
    """The output of a row. `seed`: of its generator."""
    generator = torch.Generator().manual_seed(seed)
    return PEERS[name].attend(x.query, x.key, x.value, scale=x.scale, is_causal=False, generator=generator, **settings)


def exact(x: Problem) -> Tensor:
    """The reference: torch's fused attention."""
    return scaled_dot_product_attention(x.query, x.key, x.value, scale=x.scale)


def error_without_attention(x: Problem, truth: Tensor) -> float:
    """The error of the mean of all values, an answer that needs neither queries nor keys."""
    return output_error(x.value.mean(-2, keepdim=True).expand_as(truth), truth)


def judge(name: str, settings: dict[str, Any], x: Problem, truth: Tensor) -> Row:
    """Mean relative error, largest absolute error, a rough time of one call, and its work.

    Work counts the multiply-adds of matrix products for a query, selection included, in slots: one key is D + Dv of
    them. Kernels cannot be counted; their work is that of the same steps in torch.
    """
    errors, largest = [], []
    spent = None
    for seed in range(SEEDS if x.query.shape[2] <= LONG else 1):
        if seed == 0 and name != OURS:
            spent, out = work(name, settings, x)
        else:
            out = answer(name, settings, x, seed)
        errors.append(output_error(out, truth))
        largest.append(float((out - truth).abs().max()))
    return {
        "peer": name,
        "settings": settings,
        "error": sum(errors) / len(errors),
        "largest": sum(largest) / len(largest),
        "rough_ms": min(clock(lambda: answer(name, settings, x), x.query.device) for _ in range(2)),
        "work": spent,
        "ms": None,
    }


def work(name: str, settings: dict[str, Any], x: Problem) -> tuple[float, Tensor]:
    """Multiply-adds for a query in slots, as torch counts those of matrix products, and the output."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={fused: _fused, fused.default: _fused}) as counter:
        out = answer(name, settings, x)
    queries = x.query.shape[0] * x.query.shape[1] * x.query.shape[2]
    return counter.get_total_flops() / 2 / queries / (x.query.shape[-1] + x.value.shape[-1]), out


def _fused(q: Any, k: Any, v: Any, *more: Any, out_shape: Any = None, **named: Any) -> int:
    count: int = sdpa_flop_count(q, k, v)
    return count


def candidates(rows: Sequence[Row], exact_ms: float) -> list[Row]:
    """The rows to time: of every peer those that may be on its front, spread evenly over it."""
    chosen = []
    for name in dict.fromkeys(row["peer"] for row in rows):
        if PEERS[name].kind == "oracle":
            continue
        by_error = sorted((row for row in rows if row["peer"] == name), key=lambda row: row["error"])
        front = [
            row
            for place, row in enumerate(by_error)
            if not any(better["rough_ms"] * SLACK < row["rough_ms"] for better in by_error[:place])
        ]
        fast = [row for row in front if row["rough_ms"] < max(SLOWEST * exact_ms, ANY)]
        below = [row for row in fast if row["error"] < 1.0] or fast[:1]
        step = max(1.0, (len(below) - 1) / (MOST - 1))
        chosen += [below[round(place * step)] for place in range(min(MOST, len(below)))]
    return chosen


def time_all(rows: Sequence[Row], x: Problem, seconds: float, progress: Callable[[str], None]) -> tuple[float, int]:
    """Set each row's `ms`, the least of its turns; return that of exact attention and the number of turns.

    All take turns, exact attention first, until the seconds are over, at least three times.
    """
    times: list[list[float]] = [[] for _ in range(len(rows) + 1)]
    began, turn = perf_counter(), 0
    while turn < 3 or perf_counter() - began < seconds:
        for place, row in enumerate([None, *rows]):
            start = perf_counter()
            if row is None:
                exact(x)
            else:
                answer(row["peer"], row["settings"], x)
            times[place].append(1e3 * (perf_counter() - start))
        turn += 1
        progress(f"turn {turn}, {perf_counter() - began:.0f} s")
    for row, turns in zip(rows, times[1:], strict=True):
        row["ms"] = min(turns)
    return min(times[0]), turn
