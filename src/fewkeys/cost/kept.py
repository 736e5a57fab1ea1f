"""Numbers measured on this machine, in the cache folder, so that all processes choose alike. They get old: machines
change, and other load may disturb a measurement.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fewkeys.core.files import cache_folder, write_whole
from fewkeys.core.records import digest
from fewkeys.core.version import VERSION
from fewkeys.native.sets import processor

FOLDER = "measured"
Numbers = tuple[tuple[float, ...], ...]
LASTS = {True: 30 * 86400, False: 3600}
"""Seconds after which reliable (True) and disturbed (False) numbers are old."""


def kept(what: Mapping[str, Any], measure: Callable[[], tuple[Numbers, bool]]) -> Numbers | None:
    """The numbers kept under `what` (JSON values) for this machine and version; measured if there are none.

    `measure` also returns whether they are reliable. If several processes measure at once, all use the numbers of the
    first to write. None, without a measurement, if the folder cannot be written.
    """
    machine = {"fewkeys": VERSION, "torch": torch.__version__, "processor": digest(processor())}
    facts = json.loads(json.dumps({**machine, **what}))
    try:
        path = cache_folder() / FOLDER / f"{digest(facts)}.json"
        if (numbers := _read(path, facts)) is not None:
            return numbers
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            return None
        numbers, sound = measure()
        data = {"of": facts, "numbers": numbers, "sound": sound, "at": time.time()}
        _write_first(path, facts, json.dumps(data, indent=1) + "\n")
        return _read(path, facts)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None


def _read(path: Path, facts: Mapping[str, Any]) -> Numbers | None:
    """The numbers of a file for the same facts; None if there is none, or it is old or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["of"] != facts or not 0 <= time.time() - data["at"] < LASTS[data["sound"]]:
            return None
        numbers = tuple(tuple(float(number) for number in row) for row in data["numbers"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return numbers if all(math.isfinite(number) and number >= 0 for row in numbers for number in row) else None


def _write_first(path: Path, facts: Mapping[str, Any], text: str) -> None:
    """Write the file, unless another process has written a good one meanwhile."""
    draft = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}")
    write_whole(draft, text)
    try:
        os.link(draft, path)
    except OSError:  # the file exists, or the file system has no links
        if _read(path, facts) is None:
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
