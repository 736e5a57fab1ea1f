"""The machine of a measurement: enough to judge timings, without the user's name and the date."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fewkeys.native as native
from fewkeys.core.version import VERSION


def machine() -> dict[str, Any]:
    """The processor's name, its cores and the threads in use, the operating system, the CPU kernels."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "kernels": native.missing() or f"compiled for {native.instruction_set()}",
    }


def versions(*, with_transformers: bool = False) -> dict[str, str]:
    """Versions of fewkeys, python, torch and, on request, transformers."""
    numbers = {"fewkeys": VERSION, "python": platform.python_version(), "torch": torch.__version__}
    return {**numbers, "transformers": _version("transformers")} if with_transformers else numbers


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
