"""A wheel where nothing can be compiled, against this tree: `make wheels`, then `python benchmarks/wheel.py WHEEL`.

The wheel is unpacked by pip into an empty folder and runs with this Python's torch, an empty cache and a PATH that
leads nowhere; this tree runs as it is installed. A process for each, in which the first call of
`budget(192, cohorts=1)` at 1,024 tokens, 4 heads of 64, is timed, nine more, and then exact attention and the plan in
turns at 16,384 tokens. Times are medians but for first calls, the ratio that of the ratios turn by turn. Writes
benchmarks/results/wheel.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from fewkeys.core.files import write_whole

RESULTS = Path(__file__).parent / "results" / "wheel.json"
COMPILERS = ("g++", "gcc", "c++", "cc", "clang++", "clang", "zig")
TURNS = 7


def measure() -> dict[str, Any]:
    """What one process finds."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import fewkeys as fk
    from fewkeys.bench.machine import machine, versions
    from fewkeys.core.clock import clock
    from fewkeys.native.build import place

    plan = fk.budget(192, cohorts=1).never_exact()

    def timed(attend: Any, *tensors: Any) -> float:
        return clock(lambda: attend(*tensors), torch.device("cpu"))

    def ours(q: Any, k: Any, v: Any) -> Any:
        return fk.attention(q, k, v, plan=plan, impl="native")

    g = torch.Generator().manual_seed(0)
    short = torch.randn(3, 1, 4, 1024, 64, generator=g)
    exact_first = timed(scaled_dot_product_attention, *short)
    calls = [timed(ours, *short) for _ in range(10)]
    long = torch.randn(3, 1, 4, 16384, 64, generator=g)
    timed(ours, *long)
    turns = [(timed(scaled_dot_product_attention, *long), timed(ours, *long)) for _ in range(TURNS)]
    exact, own = (median(each) for each in zip(*turns, strict=True))
    return {
        "compilers": [name for name in COMPILERS if shutil.which(name)],
        "library": place().name,
        "exact_first_ms": exact_first,
        "first_ms": calls[0],
        "later_ms": median(calls[1:]),
        "exact_ms": exact,
        "ms": own,
        "ratio": median(a / b for a, b in turns),
        "machine": machine(),
        "versions": versions(),
    }


def child(**environment: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", "there"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure()))
        return
    with tempfile.TemporaryDirectory() as folder:
        install = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{folder}/site", given.wheel)
        subprocess.run(install, check=True)
        here = {
            "PYTHONPATH": f"{folder}/site",
            "PATH": "",
            "CXX": "",
            "HOME": folder,
            "FEWKEYS_CACHE": f"{folder}/cache",
        }
        result = {"wheel": child(**os.environ | here), "this tree": child(**os.environ)}
    for name, own in result.items():
        print(name, json.dumps({key: value for key, value in own.items() if key not in ("machine", "versions")}))
    write_whole(RESULTS, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
