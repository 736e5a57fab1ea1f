"""Finds the compiled kernels and runs them.

A wheel has brought a library for every instruction set (`LIBRARIES`). Where there is none of the set wanted, the
machine's C++ compiler makes it, once, and it is kept for the next process.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from signal import SIGINT, default_int_handler, getsignal

import torch

from fewkeys.core.files import cache_folder, is_own, spare_folder
from fewkeys.native import sets
from fewkeys.native.sets import InstructionSet

LIBRARIES = Path(__file__).parent / "libraries"
"""Where a wheel has put its libraries."""
SWITCH, COUNT = "FEWKEYS_NATIVE", "FEWKEYS_COUNT"
DIGEST = hashlib.sha256().digest_size
"""Bytes that follow a library: its SHA-256."""
_DONE, _OUT_OF_MEMORY, _INTERRUPTED = range(3)
"""What a kernel returns, as `team.h` says."""
_ENDS: dict[int, type[BaseException]] = {_OUT_OF_MEMORY: MemoryError, _INTERRUPTED: KeyboardInterrupt}
_WHY = {_OUT_OF_MEMORY: "there is no memory for its buffers", _INTERRUPTED: "it was interrupted"}
_LOADING = threading.RLock()
PATIENCE = 300.0
"""Seconds that a compiler may take."""
_LOG = logging.getLogger("fewkeys")


def missing() -> str | None:
    """Why there are no compiled kernels, None where there are; compiles them if they never were.

    Raises `ValueError` where `FEWKEYS_ISA` names no instruction set of this machine, and `RuntimeError` where there are
    no kernels of the one it names.
    """
    found = _found()
    return found if isinstance(found, str) else None


def instruction_set() -> str | None:
    """The name of the instruction set that the kernels use, None where there are no kernels."""
    found = _found()
    return None if isinstance(found, str) else found.fewkeys_set().decode()


def place() -> Path | None:
    """The library that the kernels are in, None where there are no kernels."""
    found = _found()
    return None if isinstance(found, str) else Path(str(found._name))


def identity() -> str:
    """What tells these kernels from all others; "none" where there are none."""
    found = _found()
    return "none" if isinstance(found, str) else f"{instruction_set()}-{_digest(found)}"


@lru_cache
def _digest(library: ctypes.CDLL) -> str:
    return hashlib.sha256(Path(str(library._name)).read_bytes()).hexdigest()[:16]


def call(name: str, problem: ctypes.Structure, *dtypes: torch.dtype) -> None:
    """Run a kernel, where `missing()` is None. `dtypes`: what it reads, float32 or bfloat16.

    Raises `MemoryError` where its buffers cannot be had, and `KeyboardInterrupt` soon after Ctrl-C where that would be
    raised anyway: in the main thread, under Python's own handler. What it wrote until then is of no use.
    """
    library = _library()
    _compare_sizes(library, type(problem))
    kinds = (ctypes.c_int(dtype == torch.bfloat16) for dtype in dtypes)
    if threading.current_thread() is threading.main_thread() and getsignal(SIGINT) is default_int_handler:
        library.fewkeys_watch()
    outcome = getattr(library, name)(ctypes.byref(problem), *kinds, ctypes.c_int(torch.get_num_threads()))
    if outcome != _DONE:
        raise _ENDS.get(outcome, RuntimeError)(f"{name}: expected it to finish, but {_WHY.get(outcome, 'it failed')}")


def address(problem: ctypes.Structure) -> int:
    """Where a problem lies that another one points to."""
    _compare_sizes(_library(), type(problem))
    return ctypes.addressof(problem)


def counters() -> dict[str, int]:
    """`multiply_adds` of all kernels and `bytes` of all their buffers since the last time somebody asked.

    Only kernels that are compiled with `FEWKEYS_COUNT=1` in the environment count: they are slower.
    """
    library, found = _library(), (ctypes.c_int64(), ctypes.c_int64())
    if not hasattr(library, "fewkeys_take_counters"):
        raise RuntimeError(f"native.counters: expected kernels that count, got others; set {COUNT}=1")
    library.fewkeys_take_counters(*map(ctypes.byref, found))
    return dict(zip(("multiply_adds", "bytes"), (number.value for number in found), strict=True))


def _counting() -> bool:
    return os.environ.get(COUNT, "0") != "0"


def _library() -> ctypes.CDLL:
    found = _found()
    if isinstance(found, str):
        raise RuntimeError(f"compiled kernels: expected a library or a C++ compiler, got none that works: {found}")
    return found


def _found() -> ctypes.CDLL | str:
    """The library that the environment asks for, or why there is none; every kernel asks, so it must be quick."""
    return _load(os.environ.get(SWITCH), os.environ.get(sets.FORCED), _counting())


@lru_cache
def _compare_sizes(library: ctypes.CDLL, kind: type[ctypes.Structure]) -> None:
    """What Python declares under the name of a struct of `problems.h`, perhaps private, is as large as that."""
    for _, part, *_ in kind._fields_:
        if issubclass(part, ctypes.Structure):
            _compare_sizes(library, part)
    name, ours = kind.__name__.lstrip("_"), ctypes.sizeof(kind)
    size_of = library.fewkeys_sizeof
    size_of.restype, size_of.argtypes = ctypes.c_int64, (ctypes.c_char_p,)
    theirs = size_of(name.encode())
    if theirs != ours:
        told = f"one of {theirs} bytes" if theirs >= 0 else "none of this name"
        raise RuntimeError(f"compiled kernels: expected struct {name} of {ours} bytes as in Python, got {told}")


@lru_cache
def _load(switch: str | None, forced: str | None, counting: bool) -> ctypes.CDLL | str:
    if switch == "0":
        return f"{SWITCH}=0 turns them off"
    wanted = sets.chosen()
    if wanted is None:
        names = ", ".join(map(str, sets.SETS))
        return f"there are kernels for {names}, none of which this processor ({platform.machine()}) has"
    with _LOADING:
        shipped = LIBRARIES / f"{wanted}.so"
        if switch == "jit" or counting or not shipped.is_file():
            found = _made(wanted, counting)
        else:
            found = _opened(shipped, wanted) if _undamaged(shipped) else f"{shipped} is damaged; install fewkeys again"
    if isinstance(found, str) and forced:
        raise RuntimeError(f"{sets.FORCED}={wanted}: expected kernels of this set, got none ({found})")
    return found


def _opened(path: Path, wanted: InstructionSet) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.fewkeys_set.restype = ctypes.c_char_p
    if (found := library.fewkeys_set().decode()) != wanted.name:
        raise RuntimeError(f"compiled kernels: expected those of {wanted} in {path}, got those of {found}")
    library.fewkeys_lend(_threads())
    return library


def _threads() -> ctypes.c_void_p | None:
    """The entry of the OpenMP that torch runs on, wherever it comes from; None: kernels start threads themselves."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None


def _made(wanted: InstructionSet, counting: bool) -> ctypes.CDLL | str:
    compiler = sets.compiler()
    if compiler is None:
        looked_for = ", ".join(sets.COMPILERS)
        return f"no C++ compiler ({looked_for}) is installed; set {sets.COMPILER} to one, or install a wheel"
    try:
        name = f"kernels-{_fingerprint(compiler, wanted, counting)}.so"
        kept = next((path for folder in _folders() if _whole(path := folder / name)), None)
        if kept is not None:
            return _opened(kept, wanted)
        path = _place(name)
        with _alone(path):
            if not _whole(path):  # by now another process may have compiled it
                _compile(compiler, wanted, path, counting)
            return _opened(path, wanted)
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return f"{shlex.join(compiler)} failed: {told.strip().splitlines()[0] if told.strip() else error}"


def _whole(path: Path) -> bool:
    """Whether a library is what was compiled, by a user who may run code here."""
    return path.is_file() and is_own(path) and _undamaged(path)


def _undamaged(path: Path) -> bool:
    """A truncated library would end the process that loads it."""
    library, digest = (held := path.read_bytes())[:-DIGEST], held[-DIGEST:]
    return hashlib.sha256(library).digest() == digest


def _flags(counting: bool) -> tuple[str, ...]:
    return ("-DFEWKEYS_COUNT",) if counting else ()


def _fingerprint(compiler: list[str], wanted: InstructionSet, counting: bool) -> str:
    """Everything that decides what comes out: sources, wherever they lie, compiler, flags."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=PATIENCE)  # noqa: S603 - the user's compiler
    told = [version.stdout, *compiler, *sets.FLAGS, *wanted.options, *_flags(counting)]
    digest = hashlib.sha256("\0".join(told).encode())
    for source in sets.SOURCES:
        digest.update((sets.HERE / source).read_bytes())
    return digest.hexdigest()[:16]


def _folders() -> list[Path]:
    """Where compiled kernels may be found."""
    return [cache_folder(), *([spare_folder()] if is_own(spare_folder()) else [])]


def _place(name: str) -> Path:
    """Where compiled kernels are to be kept: in the first folder that can be written; at worst for this process alone.

    A file of this name that is another user's is left alone.
    """
    for folder, mode in ((cache_folder(), 0o777), (spare_folder(), 0o700)):
        path = folder / name
        try:
            folder.mkdir(mode, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK) or (path.exists() and not is_own(path)):
                continue
            if folder != spare_folder() or is_own(folder):
                return path
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="fewkeys-")) / name


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait while another process compiles the same; a process that dies waits for nobody, and nobody for it."""
    try:
        import fcntl

        handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except (ImportError, OSError):  # no locks here: the last to be done wins
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile(compiler: list[str], wanted: InstructionSet, path: Path, counting: bool) -> None:
    """Written whole or not at all; a compiler that is stopped leaves nothing."""
    _LOG.warning(
        "compiling the kernels for %s with %s, once: 10 to 60 seconds; kept in %s", wanted, compiler[0], path.parent
    )
    handle, part = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        command = sets.command(compiler, wanted, part, *_flags(counting))
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)  # noqa: S603
        library = Path(part).read_bytes()
        Path(part).chmod(0o755)  # readable by others, who may share the folder
        Path(part).write_bytes(library + hashlib.sha256(library).digest())
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)
