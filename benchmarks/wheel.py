"""The kernels of a wheel beside those that this machine's compiler makes: `make wheels`, `python benchmarks/wheel.py`.

A wheel's kernels are made by another compiler, Zig's. Milliseconds of an encoder's call (12 heads of 32, 2,048 tokens,
`fk.budget(64)`) and of a decoder's (3 heads of 64, 8,192 tokens, `fk.budget(256, is_causal=True)`): the fastest calls.
Each library runs in processes of its own, in turns. Writes benchmarks/results/wheel.json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.clock import clock
from fewkeys.core.files import write_whole
from fewkeys.native import build

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "wheel.json"
CALLS = {"encoder": ((12, 2048, 32), fk.budget(64)), "decoder": ((3, 8192, 64), fk.budget(256, is_causal=True))}
TURNS, REPEATS = 3, 30


@torch.no_grad()
def measure(name: str) -> float:
    """Milliseconds of a call by the library of this process."""
    shape, plan = CALLS[name]
    rows = torch.randn(3, 1, *shape, generator=torch.Generator().manual_seed(0)).unbind()

    def call() -> torch.Tensor:
        return fk.attention(*rows, plan=plan.never_exact(), is_causal=name == "decoder", impl="native")

    return min(clock(call, rows[0].device) for _ in range(REPEATS))


def of_library(folder: str) -> dict[str, float]:
    """All calls, in a process that takes its kernels from a folder of a wheel's libraries; "": that compiles them."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")} | ({} if folder else {build.SWITCH: "jit"})
    command = [sys.executable, __file__, "--measure", folder]
    return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", default=str(ROOT / "dist" / "libraries" / platform.machine()))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        build.LIBRARIES = Path(options.measure)
        print(json.dumps({name: measure(name) for name in CALLS}))
        return
    if not Path(options.libraries).is_dir():
        raise SystemExit(f"--libraries: expected a folder of libraries, got {options.libraries}; run make wheels")
    turns = [{"here": of_library(""), "wheel": of_library(options.libraries)} for _ in range(TURNS)]
    ms = {name: {way: min(turn[way][name] for turn in turns) for way in ("here", "wheel")} for name in CALLS}
    result = {"machine": machine(), "versions": versions(), "ms": ms}
    print(json.dumps(ms, indent=1))
    write_whole(RESULTS, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
