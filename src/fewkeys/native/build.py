"""Finds the compiled kernels and runs them.

A wheel contains a library for every instruction set (`LIBRARIES`). If it is missing, the machine's C++ compiler makes
it once, and it is kept in a folder that only this user can write.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fewkeys.core.files import cache_folder, write_whole
from fewkeys.native import sets
from fewkeys.native.sets import InstructionSet

LIBRARIES = Path(__file__).parent / "libraries"
SWITCH, COUNT = "FEWKEYS_NATIVE", "FEWKEYS_COUNT"


class IndefiniteError(ArithmeticError):
    """A matrix has no Cholesky factor."""


class LargeError(ArithmeticError):
    """A number exceeds the limit of a call."""


_FAILURES: dict[int, tuple[type[Exception], str]] = {
    1: (MemoryError, "there is no memory for its buffers"),
    2: (RuntimeError, "it failed"),
    3: (IndefiniteError, "rounding made a matrix indefinite"),
    4: (LargeError, "a number exceeds its limit"),
}
"""The error for each code that a kernel returns: `Outcome` of `team.h`."""
_LOADING, _recorder = threading.RLock(), threading.local()
Step = tuple[str, Any, *tuple[torch.dtype, ...]]
"""The arguments of `call`."""
_LOG = logging.getLogger("fewkeys")


class Kernels(NamedTuple):
    """A loaded library, its file and the SHA-256 of its bytes."""

    library: ctypes.CDLL
    place: Path
    digest: str


def missing() -> str | None:
    """The reason why there are no compiled kernels, or None. Compiles them if necessary.

    Raises `ValueError` if `FEWKEYS_ISA` names no instruction set of this machine, and `RuntimeError` if there are no
    kernels of the set that it names.
    """
    kernels = _kernels()
    return kernels if isinstance(kernels, str) else None


def instruction_set() -> str | None:
    """The name of the instruction set that the kernels use, None where there are no kernels."""
    kernels = _kernels()
    return None if isinstance(kernels, str) else kernels.library.fewkeys_set().decode()


def place() -> Path | None:
    """The file of the kernels, None where there is none."""
    kernels = _kernels()
    return None if isinstance(kernels, str) or not kernels.place.is_file() else kernels.place


def identity() -> str:
    """A name that differs between kernels; "none" where there are none."""
    kernels = _kernels()
    return "none" if isinstance(kernels, str) else f"{instruction_set()}-{kernels.digest[:16]}"


def call(name: str, problem: ctypes.Structure, *dtypes: torch.dtype) -> None:
    """Run a kernel, where `missing()` is None. `dtypes`: what it reads, float32 or bfloat16.

    Raises `MemoryError` if there is no memory for its buffers, `IndefiniteError` for a matrix without a Cholesky
    factor, and `LargeError` for a number above the limit in `problem`.
    """
    if (steps := getattr(_recorder, "steps", None)) is not None:
        steps.append((name, problem, *dtypes))
    repeat([(name, problem, *dtypes)])


def repeat(steps: Sequence[Step]) -> None:
    """Run kernels one after the other, as `call` does."""
    library, threads = _library(), ctypes.c_int(torch.get_num_threads())
    for name, problem, *dtypes in steps:
        kinds = (ctypes.c_int(dtype == torch.bfloat16) for dtype in dtypes)
        if outcome := getattr(library, name)(ctypes.byref(problem), *kinds, threads):
            error, reason = _FAILURES[outcome]
            raise error(f"{name}: expected it to finish, but {reason}")


@contextmanager
def recorded_steps() -> Iterator[list[Step]]:
    """The kernels that this thread runs inside, in order; not inside another one."""
    _recorder.steps = steps = list[Step]()
    try:
        yield steps
    finally:
        _recorder.steps = None


def counters() -> dict[str, int]:
    """`multiply_adds` of all kernels and `bytes` of their buffers since the last call, if `FEWKEYS_COUNT=1` is set."""
    library, numbers = _library(), (ctypes.c_int64(), ctypes.c_int64())
    if not hasattr(library, "fewkeys_take_counters"):
        raise RuntimeError(f"counters: expected kernels that count, got others; set {COUNT}=1")
    library.fewkeys_take_counters(*map(ctypes.byref, numbers))
    return dict(zip(("multiply_adds", "bytes"), (number.value for number in numbers), strict=True))


def _library() -> ctypes.CDLL:
    kernels = _kernels()
    if isinstance(kernels, str):
        raise RuntimeError(f"compiled kernels: expected a library or a C++ compiler, got none that works: {kernels}")
    return kernels.library


def _kernels() -> Kernels | str:
    """The kernels that the environment selects, or why there are none."""
    return _load(os.environ.get(SWITCH), os.environ.get(sets.FORCED), os.environ.get(COUNT, "0") != "0")


@lru_cache
def _load(switch: str | None, forced: str | None, counting: bool) -> Kernels | str:
    if switch == "0":
        return f"{SWITCH}=0 turns them off"
    wanted = sets.chosen()
    if wanted is None:
        names = ", ".join(map(str, sets.SETS))
        return f"there are kernels for {names}, none of which this processor ({platform.machine()}) has"
    shipped = LIBRARIES / f"{wanted}.so"
    with _LOADING:
        if switch == "jit" or counting or not shipped.is_file():
            # Kernels that count need not be fast, but compile fast.
            kernels = _made(wanted, ("-DFEWKEYS_COUNT", "-O0") if counting else ())
        else:
            kernels = _opened(shipped)
    if isinstance(kernels, str) and forced:
        raise RuntimeError(f"{sets.FORCED}={wanted}: expected kernels of this set, got none ({kernels})")
    return kernels


def _opened(place: Path) -> Kernels:
    library = ctypes.CDLL(str(place))
    library.fewkeys_set.restype = ctypes.c_char_p
    library.fewkeys_lend(_threads())
    return Kernels(library, place, hashlib.sha256(place.read_bytes()).hexdigest())


def _threads() -> ctypes.c_void_p | None:
    """The entry of torch's OpenMP; None: kernels start threads themselves."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None


def _made(wanted: InstructionSet, flags: tuple[str, ...]) -> Kernels | str:
    """Kernels from an earlier compilation with these flags besides the usual ones, else compiled now."""
    compiler = sets.compiler()
    if compiler is None:
        looked_for = ", ".join(sets.COMPILERS)
        return f"no C++ compiler ({looked_for}) is installed; set {sets.COMPILER} to one, or install a wheel"
    try:
        name, own = f"{_fingerprint(compiler, wanted, flags)}.so", _own_folder()
        if own is not None and (own / name).is_file():
            return _opened(own / name)
        what = f"compiling the kernels for {wanted} with {compiler[0]}"
        _LOG.warning("%s, once: 10 to 60 seconds; kept in %s", what, own or "no folder")
        with tempfile.TemporaryDirectory(prefix="fewkeys-") as folder:
            draft = Path(folder) / name
            command = sets.command(compiler, wanted, str(draft), *flags)
            subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
            if own is not None:
                with suppress(OSError):  # it cannot be written or is full: the next process compiles again
                    write_whole(own / name, draft.read_bytes(), mode=0o755)
                    return _opened(own / name)
            return _opened(draft)
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or str(error)
        return f"{shlex.join(compiler)} failed: {message.strip().splitlines()[0] if message.strip() else error}"


def _fingerprint(compiler: list[str], wanted: InstructionSet, flags: tuple[str, ...]) -> str:
    """A digest of everything that the library depends on: sources, compiler, flags."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True)  # noqa: S603 - the user's compiler
    parts = [version.stdout, *compiler, *sets.FLAGS, *wanted.options, *flags]
    sources = b"".join((sets.HERE / name).read_bytes() for name in sets.SOURCES)
    return hashlib.sha256("\0".join(parts).encode() + sources).hexdigest()[:16]


def _own_folder() -> Path | None:
    """The folder of kept kernels, made if missing; None if users other than this one and root can write it."""
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(0o755, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) != 0
    if hasattr(os, "getuid") and (is_open or status.st_uid not in (os.getuid(), 0)):  # modes mean nothing elsewhere
        return None
    return folder
