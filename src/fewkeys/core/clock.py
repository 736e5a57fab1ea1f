"""Timing that waits for work on a GPU, and whether other programs disturb it."""

import sys
from collections.abc import Callable
from time import perf_counter

import torch

PREEMPTED = 60.0
"""Preemptions a second of each thread that show other programs: 20 to 40 on a quiet machine, and about 90 with one
program beside as many threads as there are processors.
"""


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds that `work` takes."""
    start = _now(device)
    work()
    return _now(device) - start


class Watch:
    """Whether other programs have used the processors since its creation."""

    def __init__(self) -> None:
        self._start, self._count = perf_counter(), preemptions()

    @property
    def is_disturbed(self) -> bool:
        seconds = perf_counter() - self._start
        return preemptions() - self._count > PREEMPTED * torch.get_num_threads() * max(0.1, seconds)


def preemptions() -> int:
    """How often the system has taken a processor from this process; 0 where it does not tell."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * perf_counter()


def in_words(milliseconds: float) -> str:
    """The time with two significant figures, such as "0.012 ms" and "12,000 ms"."""
    return f"{float(f'{milliseconds:.2g}'):,.12g} ms"
