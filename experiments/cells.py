"""What commands of experiments share: results that a stopped run goes on from, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import read_json, write_json

Cell = tuple[dict[str, Any], Callable[[], dict[str, Any]]]
"""What a figure is of, and the function that measures it."""
TOLERANCE = 0.03
"""The relative tolerance of the errors in `versions`: they have three digits, and processors round differently."""


def opened(folder: Path, file: str, rows: str = "cells", **settings: Any) -> dict[str, Any]:
    """The results in a file, or `settings` and an empty list of `rows` where there is none.

    Raises `ValueError` where the file has other settings.
    """
    if not (folder / file).is_file():
        return {**settings, rows: []}
    results: dict[str, Any] = read_json(folder, file)
    for name, value in settings.items():
        if results[name] != value:
            raise ValueError(f"--out: {folder} holds results of {name} {results[name]}; choose another folder")
    return results


def measure(cells: Iterable[Cell], results: dict[str, Any], folder: Path, file: str, **packages: str) -> None:
    """Measure the cells that `results` lacks. After each one, write the file and print a line.

    `packages`: versions of other packages that take part. Raises `ValueError` where the file has cells of older plans.
    """
    if results["cells"] and not is_of_todays_plans(results.get("versions", {})):
        raise ValueError(f"--out: {folder} holds results of older plans; choose another folder, or remove {file}")
    measured = [cell["of"] for cell in results["cells"]]
    for of, judge in cells:
        if of in measured:
            continue
        began = perf_counter()
        figures = judge()
        results["cells"].append({"of": of, **figures})
        results["versions"] = results.get("versions", {}) | versions() | packages
        write_json(folder, file, results | {"machine": machine()})
        shown = {name: round(value, 4) for name, value in figures.items() if isinstance(value, float | int)}
        print(f"{', '.join(map(str, of.values()))}: {shown} ({perf_counter() - began:.0f} s)", flush=True)


def is_of_todays_plans(named: Mapping[str, str]) -> bool:
    """Whether results with these versions have the errors of today's plans."""
    errors, today = ([float(number) for number in stamp.get("plans", "").split()] for stamp in (named, versions()))
    return len(errors) == len(today) and all(abs(a - b) <= TOLERANCE * b for a, b in zip(errors, today, strict=True))


def exit_code(run: Callable[[], object]) -> int:
    """0; 2 and one line on stderr where `run` raises `ValueError`."""
    try:
        run()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
