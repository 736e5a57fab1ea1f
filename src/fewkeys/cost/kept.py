"""Numbers measured on this machine, in the cache folder, so that all processes choose alike. They get old: machines
change, and other load may disturb a measurement.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fewkeys.core.files import cache_folder, read_json, write_json
from fewkeys.core.records import digest
from fewkeys.core.version import VERSION
from fewkeys.native.sets import processor

Numbers = tuple[tuple[float, ...], ...]
LASTS = {True: 30 * 86400, False: 3600}
"""Seconds after which reliable (True) and disturbed (False) numbers are old."""


def kept(what: Mapping[str, Any], measure: Callable[[], tuple[Numbers, bool]]) -> Numbers | None:
    """The numbers kept under `what` (JSON values) for this machine and version; measured if there are none.

    `measure` also returns whether they are reliable. None, without a measurement, if the folder cannot be written.
    """
    facts = {"fewkeys": VERSION, "torch": torch.__version__, "processor": digest(processor()), **what}
    folder, name = cache_folder() / "measured", f"{digest(facts)}.json"
    try:
        if (numbers := _read(folder, name)) is not None:
            return numbers
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return None
        numbers, sound = measure()
        if (first := _read(folder, name)) is not None:  # another process measured, too, and uses them
            return first
        write_json(folder, name, {"of": facts, "numbers": numbers, "sound": sound, "at": time.time()})
    except (OSError, RuntimeError):
        return None
    return numbers


def _read(folder: Path, name: str) -> Numbers | None:
    """The numbers of a file; None if there is none, or it is old or damaged."""
    try:
        data = read_json(folder, name)
        is_new = 0 <= time.time() - data["at"] < LASTS[data["sound"]]
        return tuple(tuple(map(float, row)) for row in data["numbers"]) if is_new else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
