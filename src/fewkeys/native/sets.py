"""Instruction sets: all of them, those that this machine can run, and how a library of each is compiled.

Each set has a library of its own from the same source. The build of a wheel loads this file alone, so it imports only
the standard library.
"""

import os
import platform
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FORCED = "FEWKEYS_ISA"
"""The environment variable that names the set to take instead of the highest."""
COMPILER, COMPILERS = "CXX", ("g++", "clang++", "c++")
"""The environment variable that names a compiler, and the names to look for where it is not set."""
HERE = Path(__file__).parent
SOURCES = tuple(sorted(path.name for path in HERE.iterdir() if path.suffix in (".cpp", ".h")))
FLAGS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *("-shared", "-fPIC", "-fvisibility=hidden", "-pthread"),
)


@dataclass(frozen=True)
class InstructionSet:
    """The instructions that a library may use, and the processor flags that it requires.

    Linux names no flag whose registers it does not save. Its consent to AMX is requested by the kernels
    (`byte_scores.h`).
    """

    name: str
    machine: str
    flags: frozenset[str]
    options: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni", "avx512vbmi", "avx512_vbmi2"}
_AMX = _VNNI | {"amx_int8", "amx_tile"}
# By default compilers use half of the widest vectors, and for some processors split every wide move.
_WIDE = ("-march=x86-64-v4", "-mtune=generic", "-mprefer-vector-width=512")
_BYTES = (*_WIDE, "-mavx512vnni", "-mavx512vbmi", "-mavx512vbmi2")
_MATRIX = (*_BYTES, "-mamx-tile", "-mamx-int8")

SETS = (
    InstructionSet("v2", "x86_64", _V2, ("-march=x86-64-v2", "-mtune=generic")),
    InstructionSet("v3", "x86_64", _V3, ("-march=x86-64-v3", "-mtune=generic")),
    InstructionSet("v4", "x86_64", _V4, _WIDE),
    InstructionSet("vnni", "x86_64", _VNNI, _BYTES),
    InstructionSet("amx", "x86_64", _AMX, _MATRIX),
    InstructionSet("neon", "aarch64", frozenset(), ()),  # every such processor has it
)
"""From the lowest to the highest, for every kind of machine."""


def of_machine(machine: str = "") -> tuple[InstructionSet, ...]:
    """The sets of a kind of machine; of this machine if none is named."""
    machine = machine or platform.machine()
    kind = {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    return tuple(isa for isa in SETS if isa.machine == kind)


def possible() -> tuple[InstructionSet, ...]:
    """The sets that this machine can run; the lowest if the system lists no processor flags."""
    flags, of_this_machine = _flags(), of_machine()
    return of_this_machine[:1] if flags is None else tuple(isa for isa in of_this_machine if isa.flags <= flags)


def chosen() -> InstructionSet | None:
    """The set to run: the one that `FEWKEYS_ISA` names, else the highest; None if this machine has none.

    Raises `ValueError` if `FEWKEYS_ISA` names a set that this machine cannot run.
    """
    candidates, name = possible(), os.environ.get(FORCED)
    if not name:
        return candidates[-1] if candidates else None
    for isa in candidates:
        if isa.name == name:
            return isa
    reason = "which this processor lacks" if name in map(str, SETS) else "which is no instruction set"
    raise ValueError(f"{FORCED}: expected one of {', '.join(map(str, candidates)) or 'none'}, got {name!r}, {reason}")


def compiler() -> list[str] | None:
    """The command of this machine's C++ compiler; None if there is none."""
    if named := os.environ.get(COMPILER):
        return shlex.split(named)
    path = next((path for path in map(shutil.which, COMPILERS) if path), None)
    return None if path is None else [path]


def command(compiler: Sequence[str], of: InstructionSet, into: str, *more: str) -> list[str]:
    """The command that compiles a library of a set."""
    named = f'-DFEWKEYS_SET="{of}"'
    return [*compiler, *FLAGS, *of.options, named, *more, str(HERE / "kernels.cpp"), "-o", into]


def processor() -> str:
    """A text that differs between processors of different instructions."""
    return "\n".join(cpuinfo("flags", "Features", "model name")[:2]) or platform.processor()


@lru_cache
def _flags() -> frozenset[str] | None:
    lines = cpuinfo("flags")
    return frozenset(lines[0].partition(":")[2].split()) if lines else None


def cpuinfo(*names: str) -> list[str]:
    """The lines of /proc/cpuinfo that begin with one of the names."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [line for line in lines if line.startswith(names)]
