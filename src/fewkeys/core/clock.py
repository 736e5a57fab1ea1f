"""Timing that waits for work on a GPU."""

from collections.abc import Callable
from time import perf_counter

import torch


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds that `work` takes."""
    start = _now(device)
    work()
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * perf_counter()


def in_words(milliseconds: float) -> str:
    """The time with two significant figures, such as "0.012 ms" and "12,000 ms"."""
    return f"{float(f'{milliseconds:.2g}'):,.12g} ms"
