"""Breaks the code in one place at a time, and sees whether the tests that must notice do.

    make broken                                     # all: forty minutes on two cores
    python -m broken.run "causal edge" scans        # those whose names have one of these words
    python -m broken.run --out broken/results.json

Each breakage is put into a copy of the package, its kernels compiled with little optimisation (the arithmetic is the
same), and its tests run on the copy, file by file. Before, all of them have to pass on a sound copy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from broken.breakages import BREAKAGES, Breakage, Law
from broken.promises import PROMISES
from fewkeys.native.sets import FORCED, possible

ROOT = Path(__file__).parents[2]
PATIENCE = 500
"""Seconds that a law may take."""
VERDICTS = {0: "missed", 1: "caught"}


class Copy:
    """A copy of the package, with newly compiled kernels or those of `cache`; `isa`: their instruction set."""

    def __init__(self, folder: str, isa: str, breakage: Breakage | None = None, cache: str | None = None) -> None:
        self.source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", self.source, ignore=shutil.ignore_patterns("__pycache__"))
        self.put("native/sets.py", '"-O3"', '"-O1"')
        if breakage is not None:
            self.put(breakage.file, breakage.find, breakage.put)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(self.source),
            "PYTHONDONTWRITEBYTECODE": "1",
            "FEWKEYS_CACHE": cache or str(Path(folder) / "cache"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
            **({FORCED: isa} if isa else {}),
        }

    def put(self, file: str, find: str, put: str) -> None:
        path = self.source / "fewkeys" / file
        text = path.read_text()
        if text.count(find) != 1:
            raise ValueError(f"{file}: expected {find!r} once, got it {text.count(find)} times")
        path.write_text(text.replace(find, put))

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )

    def compile(self) -> None:
        code = "from fewkeys.native import build as b; print(b.__file__, b.missing()); exit(b.missing() is not None)"
        done = self.python("-c", code)
        if done.returncode or not done.stdout.startswith(str(self.source)):
            raise RuntimeError(f"expected the copy to compile, got {done.stdout}{done.stderr}")

    def verdict(self, law: Law) -> str:
        """ "caught", "missed", or what else became of the tests."""
        file = f"tests/{law.path}"
        try:
            done = self.python("-m", "pytest", "-n0", "-x", "-p", "no:cacheprovider", file, "-k", law.chosen)
        except subprocess.TimeoutExpired:
            return "caught: it hangs"
        if done.returncode < 0:
            return f"caught: ended by signal {-done.returncode}"
        if done.returncode not in VERDICTS or " passed" not in done.stdout + " passed" * done.returncode:
            raise RuntimeError(f"{law}: expected tests, got {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return VERDICTS[done.returncode]


def judge(breakage: Breakage, cache: str) -> dict[str, object]:
    """What every law of a breakage says; `cache`: the kernels of a sound copy."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(folder, breakage.isa, breakage, cache if breakage.file.endswith(".py") else None)
        copy.compile()
        return {
            "name": breakage.name,
            "file": breakage.file,
            "laws": {f"{law.file}: {law.chosen}": copy.verdict(law) for law in breakage.laws},
        }


def check_sound(chosen: list[Breakage], cache: str) -> None:
    for isa in sorted({breakage.isa for breakage in chosen}):
        with tempfile.TemporaryDirectory() as folder:
            copy = Copy(folder, isa, cache=cache)
            copy.compile()
            for law in sorted({law for breakage in chosen if breakage.isa == isa for law in breakage.laws}):
                if (verdict := copy.verdict(law)) != "missed":
                    raise RuntimeError(f"{law} {isa}: expected it to pass on sound code, got {verdict}")


def main() -> int:
    """Print a line for every breakage and law; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only breakages whose names have one of these")
    parser.add_argument("--out", type=Path, help="also write the results as JSON; others that it has stay there")
    options = parser.parse_args()
    every = (*BREAKAGES, *PROMISES)
    runnable = ["", *map(str, possible())]
    chosen = [b for b in every if not options.words or any(word in b.name for word in options.words)]
    for breakage in (b for b in chosen if b.isa not in runnable):
        print(f"left out  {breakage.name}: this machine lacks {breakage.isa}")
    chosen = [b for b in chosen if b.isa in runnable]
    begun, actual = time.time(), []
    with tempfile.TemporaryDirectory() as cache:
        check_sound(chosen, cache)
        print(f"sound code passes ({time.time() - begun:.0f} s)", flush=True)
        for breakage in chosen:
            actual.append(judge(breakage, cache))
            for law, verdict in actual[-1]["laws"].items():
                print(f"{verdict:8} {breakage.name} [{breakage.file}] by {law}", flush=True)
    missed = sum(verdict == "missed" for row in actual for verdict in row["laws"].values())
    print(f"{len(actual)} breakages, {sum(len(row['laws']) for row in actual)} verdicts, {missed} missed")
    if options.out is not None:
        before = json.loads(options.out.read_text()) if options.out.exists() else []
        rows = {row["name"]: row for row in (*before, *actual)}
        options.out.write_text(json.dumps([rows[b.name] for b in every if b.name in rows], indent=2) + "\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
