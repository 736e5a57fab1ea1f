"""Puts compiled kernels into a wheel: a library for every instruction set of one kind of machine.

    python -m hatchling build -t wheel                          # for this machine, by its own compiler
    FEWKEYS_WHEEL=aarch64 python -m hatchling build -t wheel    # for x86_64 or aarch64, glibc 2.28 or newer, by Zig's

Without a compiler a wheel is pure. Zig's compiler (`pip install ziglang`) knows every glibc and links its own C++
library into what it makes. Editable installs get none: they compile at the first call.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WHEEL = "FEWKEYS_WHEEL"
GLIBC = "2.28"
FOLDER = "fewkeys/native/libraries"


class CompileKernels(BuildHookInterface):
    """Compiles the libraries before the wheel is packed."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries and the tag that says where they run."""
        sets, machine = _sets(Path(self.root)), os.environ.get(WHEEL, "")
        if version == "editable":
            return
        if machine and not sets.of_machine(machine):
            raise ValueError(f"{WHEEL}: expected x86_64 or aarch64, got {machine!r}")
        compiler = _zig(machine) if machine else sets.compiler()
        if compiler is None:
            self.app.display_warning("no C++ compiler: the wheel has no compiled kernels, and torch does their work")
            return
        folder = Path(self.directory) / "libraries" / (machine or "here")
        folder.mkdir(parents=True, exist_ok=True)
        sources = (*(sets.HERE / name for name in sets.SOURCES), Path(sets.__file__), Path(__file__))
        changed = max(path.stat().st_mtime for path in sources)
        todo = [one for one in sets.of_machine(machine) if not _newer(folder / f"{one}.so", changed)]
        if todo:
            self.app.display_info(f"compiling the kernels for {', '.join(map(str, todo))}")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            errors = pool.map(lambda one: _compile(sets, compiler, one, folder), todo)
        for one, error in zip(todo, errors, strict=True):
            if error and machine:
                raise RuntimeError(f"{one}: {error}")
            if error:
                self.app.display_warning(f"no kernels for {one}: {shlex.join(compiler)} cannot compile them")
        made = [path for one in sets.of_machine(machine) if _newer(path := folder / f"{one}.so", changed)]
        if made:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform(machine)}"
            build_data["force_include"].update({str(path): f"{FOLDER}/{path.name}" for path in made})


def _sets(root: Path) -> ModuleType:
    """`fewkeys.native.sets` without the package around it, which needs torch."""
    spec = importlib.util.spec_from_file_location("sets", root / "src/fewkeys/native/sets.py")
    if spec is None or spec.loader is None:
        raise RuntimeError("src/fewkeys/native/sets.py: expected a module, got none")
    sys.modules["sets"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _newer(path: Path, than: float) -> bool:
    return path.is_file() and path.stat().st_mtime > than


def _compile(sets: ModuleType, compiler: list[str], one: Any, folder: Path) -> str | None:
    """What went wrong. Linked by a command without the set's options: Zig makes a C++ library for whatever a command
    names, in a minute.
    """
    unit, draft = folder / f"{one}.o", folder / f"{one}.draft.so"
    compiled = [flag for flag in sets.command(compiler, one, str(unit), "-c") if flag != "-shared"]
    if "ziglang" in compiler:  # Zig spells processors so, and takes what to tune for as one
        compiled = [part.replace("x86-64-v", "x86_64_v") for part in compiled if part != "-mtune=generic"]
    for command in (compiled, [*compiler, *sets.FLAGS, "-s", str(unit), "-o", str(draft)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            return f"{shlex.join(command)} failed: {done.stderr}"
    unit.unlink()
    draft.replace(folder / f"{one}.so")
    return None


def _zig(machine: str) -> list[str]:
    return [sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.{GLIBC}"]


def _platform(machine: str) -> str:
    if machine:
        return f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
