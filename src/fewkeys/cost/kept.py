"""Numbers measured on this machine, kept in the cache folder, so that every process and every call reads the same.

They are measured again once they are old: machines change, and what was measured while others used one is of no worth.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fewkeys.core.files import cache_folder, write_whole
from fewkeys.core.trust import make_folder
from fewkeys.core.version import VERSION
from fewkeys.native.sets import processor

FOLDER = "measured"
Numbers = tuple[tuple[float, ...], ...]
LASTS = {True: 30 * 86400, False: 3600}
"""Seconds after which numbers are old: those that can be relied on, and others."""


def kept(what: Mapping[str, Any], measure: Callable[[], tuple[Numbers, bool]]) -> Numbers | None:
    """The numbers kept under `what` (JSON values) for this machine and version; measured where there are none yet.

    `measure` also tells whether they can be relied on; others are kept for an hour, to be measured again. Where several
    processes measure at once, the first to write wins and the others read what it wrote. A file that is damaged, old,
    or of something else, is measured anew. None, and nothing is measured, where nothing can be written.
    """
    told = json.loads(json.dumps({**_machine(), **what}))
    name = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:24]
    try:
        path = cache_folder() / FOLDER / f"{name}.json"
        found = _read(path, told)
        if found is None:
            make_folder(path.parent)
            if not os.access(path.parent, os.W_OK):
                return None
            numbers, sound = measure()
            text = json.dumps({"of": told, "numbers": numbers, "sound": sound, "at": time.time()}, indent=1)
            _write_first(path, told, text + "\n")
            found = _read(path, told)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    return found


def _read(path: Path, told: Mapping[str, Any]) -> Numbers | None:
    """The numbers of a file that says it is of the same, and is not old; None for all others."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["of"] != told or not 0 <= time.time() - data["at"] < LASTS[data["sound"]]:
            return None
        found = tuple(tuple(float(number) for number in row) for row in data["numbers"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if all(math.isfinite(number) and number >= 0 for row in found for number in row) else None


def _write_first(path: Path, told: Mapping[str, Any], text: str) -> None:
    """Write the file, whole, unless there is a good one by now: others may have read it already."""
    draft = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}")
    write_whole(draft, text)
    try:
        os.link(draft, path)
    except OSError:  # there is one, or a file system without links
        if _read(path, told) is None:
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@lru_cache(1)
def _machine() -> dict[str, str]:
    processors = hashlib.sha256(processor().encode()).hexdigest()[:16]
    return {"fewkeys": VERSION, "torch": torch.__version__, "processor": processors}
