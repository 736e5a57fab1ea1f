"""Finds the compiled kernels and runs them.

A wheel contains a library for every instruction set (`LIBRARIES`). If it is missing, the machine's C++ compiler makes
it once, and it is kept in a folder that only this user can write. The bytes that were checked are loaded, not a path
whose file another user could change after the check.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from signal import SIGINT, default_int_handler, getsignal
from typing import Any

import torch

from fewkeys.core.files import cache_folder, spare_folder, write_whole
from fewkeys.core.trust import is_trusted, make_folder, read_own, read_trusted
from fewkeys.native import sets
from fewkeys.native.sets import InstructionSet

LIBRARIES = Path(__file__).parent / "libraries"
SWITCH, COUNT = "FEWKEYS_NATIVE", "FEWKEYS_COUNT"
DIGEST = hashlib.sha256().digest_size
"""The number of bytes after a library: its SHA-256."""


class IndefiniteError(ArithmeticError):
    """A matrix has no Cholesky factor."""


class LargeError(ArithmeticError):
    """A number exceeds the limit of a call."""


_FAILURES: dict[int, tuple[type[BaseException], str]] = {
    1: (MemoryError, "there is no memory for its buffers"),
    2: (KeyboardInterrupt, "it was interrupted"),
    3: (RuntimeError, "it failed"),
    4: (IndefiniteError, "rounding made a matrix indefinite"),
    5: (LargeError, "a number exceeds its limit"),
}
"""The error for each code that a kernel returns: `Outcome` of `team.h`."""
_LOADING, _recorder = threading.RLock(), threading.local()
Step = tuple[str, Any, *tuple[torch.dtype, ...]]
"""The arguments of `call`."""
PATIENCE = 300.0
"""Seconds that a compiler may take."""
WAIT = 120.0
"""Seconds to wait for another process that compiles the same kernels."""
_LOG = logging.getLogger("fewkeys")


@dataclass(frozen=True, eq=False)
class Kernels:
    """A loaded library, the file of its bytes (None: they are in no file), and their SHA-256."""

    library: ctypes.CDLL
    place: Path | None
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
    return None if isinstance(kernels, str) else kernels.place


def identity() -> str:
    """A name that differs between kernels; "none" where there are none."""
    kernels = _kernels()
    return "none" if isinstance(kernels, str) else f"{instruction_set()}-{kernels.digest[:16]}"


def call(name: str, problem: ctypes.Structure, *dtypes: torch.dtype) -> None:
    """Run a kernel, where `missing()` is None. `dtypes`: what it reads, float32 or bfloat16.

    Raises `MemoryError` if there is no memory for its buffers, and `KeyboardInterrupt` soon after Ctrl-C in the main
    thread, if Python's own handler is installed. Its outputs are then incomplete. Raises `IndefiniteError` for a matrix
    without a Cholesky factor, and `LargeError` for a number above the limit in `problem`.
    """
    if (steps := getattr(_recorder, "steps", None)) is not None:
        steps.append((name, problem, *dtypes))
    repeat([(name, problem, *dtypes)])


def repeat(steps: Sequence[Step]) -> None:
    """Run kernels one after the other, as `call` does."""
    library, threads = _library(), ctypes.c_int(torch.get_num_threads())
    is_watched = threading.current_thread() is threading.main_thread() and getsignal(SIGINT) is default_int_handler
    for name, problem, *dtypes in steps:
        kinds = (ctypes.c_int(dtype == torch.bfloat16) for dtype in dtypes)
        if is_watched:
            library.fewkeys_watch()
        if outcome := getattr(library, name)(ctypes.byref(problem), *kinds, threads):
            error, reason = _FAILURES[outcome]
            raise error(f"{name}: expected it to finish, but {reason}")


@contextmanager
def recorded_steps() -> Iterator[list[Step]]:
    """The kernels that this thread runs inside, in order."""
    before, steps = getattr(_recorder, "steps", None), list[Step]()
    _recorder.steps = steps
    try:
        yield steps
    finally:
        _recorder.steps = before


def counters() -> dict[str, int]:
    """`multiply_adds` of all kernels and `bytes` of their buffers since the last call, if `FEWKEYS_COUNT=1` is set."""
    library, numbers = _library(), (ctypes.c_int64(), ctypes.c_int64())
    if not hasattr(library, "fewkeys_take_counters"):
        raise RuntimeError(f"native.counters: expected kernels that count, got others; set {COUNT}=1")
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
    with _LOADING:
        shipped = LIBRARIES / f"{wanted}.so"
        if switch == "jit" or counting or not shipped.is_file():
            # Kernels that count need not be fast, but compile fast.
            kernels = _made(wanted, ("-DFEWKEYS_COUNT", "-O0") if counting else ())
        else:
            library = _intact(shipped.read_bytes())
            damage = f"{shipped} is damaged; install fewkeys again"
            kernels = damage if library is None else _opened(library, shipped, wanted)
    if isinstance(kernels, str) and forced:
        raise RuntimeError(f"{sets.FORCED}={wanted}: expected kernels of this set, got none ({kernels})")
    return kernels


def _opened(data: bytes, place: Path | None, wanted: InstructionSet) -> Kernels:
    library = _load_bytes(data)
    library.fewkeys_set.restype = ctypes.c_char_p
    if (name := library.fewkeys_set().decode()) != wanted.name:
        raise RuntimeError(f"compiled kernels: expected those of {wanted} in {place}, got those of {name}")
    library.fewkeys_lend(_threads())
    return Kernels(library, place, hashlib.sha256(data).hexdigest())


def _load_bytes(data: bytes) -> ctypes.CDLL:
    """The library of exactly these bytes, from memory if the system can, else from a private copy."""
    try:
        descriptor = os.memfd_create("fewkeys-kernels")
    except (AttributeError, OSError):  # not Linux
        with tempfile.TemporaryDirectory(prefix="fewkeys-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "kernels.so"
            path.write_bytes(data)
            return ctypes.CDLL(str(path))
    with open(descriptor, "wb", closefd=False) as memory:
        memory.write(data)
    # The descriptor stays open: the loader would take a library of the same path for this one.
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}")


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
        name = f"kernels-{_fingerprint(compiler, wanted, flags)}.so"
        for folder in (cache_folder(), spare_folder()):
            if kernels := _kept(folder / name, wanted):
                return kernels
        keep_in = _folder_to_keep()
        if keep_in is None:
            return _opened(_compile(compiler, wanted, flags, "no folder"), None, wanted)
        path = keep_in / name
        with _alone(path):
            if kernels := _kept(path, wanted):  # by now another process may have compiled it
                return kernels
            library = _compile(compiler, wanted, flags, str(keep_in))
            with suppress(OSError):  # the disk is full: the next process compiles again
                write_whole(path, library + hashlib.sha256(library).digest(), mode=0o755)
            return _opened(library, path, wanted)
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or str(error)
        return f"{shlex.join(compiler)} failed: {message.strip().splitlines()[0] if message.strip() else error}"


def _kept(path: Path, wanted: InstructionSet) -> Kernels | None:
    """Kernels from a file that only this user could have written; None if it is missing or damaged."""
    library = _intact(read_trusted(path) or b"")
    return None if library is None else _opened(library, path, wanted)


def _intact(file: bytes) -> bytes | None:
    """The library that a file holds before its SHA-256. None if the two differ: loading it could end the process."""
    library, digest = file[:-DIGEST], file[-DIGEST:]
    return library if hashlib.sha256(library).digest() == digest else None


def _fingerprint(compiler: list[str], wanted: InstructionSet, flags: tuple[str, ...]) -> str:
    """A digest of everything that the library depends on: sources, compiler, flags."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=PATIENCE)  # noqa: S603 - the user's compiler
    parts = [version.stdout, *compiler, *sets.FLAGS, *wanted.options, *flags]
    sources = b"".join((sets.HERE / name).read_bytes() for name in sets.SOURCES)
    return hashlib.sha256("\0".join(parts).encode() + sources).hexdigest()[:16]


def _folder_to_keep() -> Path | None:
    """The first folder that only this user can write; made if it is missing."""
    for folder in (cache_folder(), spare_folder()):
        with suppress(OSError):
            make_folder(folder)
            if is_trusted(folder) and os.access(folder, os.W_OK):
                return folder
    return None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait up to `WAIT` seconds while another process compiles the same; then compile it, too."""
    try:
        import fcntl

        handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except (ImportError, OSError):  # there are no locks here
        yield
        return
    try:
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(handle)


def _compile(compiler: list[str], wanted: InstructionSet, flags: tuple[str, ...], kept_in: str) -> bytes:
    """The library, compiled in a temporary folder of this process."""
    _LOG.warning(
        "compiling the kernels for %s with %s, once: 10 to 60 seconds; kept in %s", wanted, compiler[0], kept_in
    )
    with tempfile.TemporaryDirectory(prefix="fewkeys-") as folder:
        path = Path(folder) / "kernels.so"
        command = sets.command(compiler, wanted, str(path), *flags)
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE, umask=0o077)  # noqa: S603
        library = read_own(path)
    if library is None:
        raise OSError(f"expected a library in {folder} that only this user may write, got none")
    return library
