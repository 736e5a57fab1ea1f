"""Runs the parts for a time, with seeds that count up from one; results as JSON, and as a table.

    make campaign                                      # an hour
    python -m campaign --minutes 1 --parts files,kills
    python -m campaign --parts kernels --seed 4711     # one seed again

`--sanitize` compiles the kernels under address and undefined-behaviour sanitizers, for the part `kernels`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SANITIZE = "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--parts", default="")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    given = parser.parse_args()
    if given.sanitize and "asan" not in os.environ.get("LD_PRELOAD", ""):
        return sanitized()

    from campaign.parts import PARTS, SHARES, as_json, told

    names = given.parts.split(",") if given.parts else list(PARTS)
    results, shares = {}, sum(SHARES.get(name, 1) for name in names)
    for name in names:
        part, tried, failed = PARTS[name](), 0, []
        end = time.monotonic() + 60 * given.minutes * SHARES.get(name, 1) / shares
        while (given.seed is None and time.monotonic() < end) or not tried:
            seed = given.first + tried if given.seed is None else given.seed
            wrong = part(seed)
            tried += 1
            failed += [] if wrong is None else [{"seed": seed, "what": wrong}]
        key = f"{name}, sanitized" if given.sanitize else name
        results[key] = {"promise": told(name), "tried": tried, "seeds": [given.first, given.first + tried - 1]}
        results[key]["failed"] = failed
        print(f"{key:20} tried {tried:7} failed {len(failed):3}  {failed[:1] or ''}", flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(as_json({"minutes": given.minutes, "parts": results}))
    return any(result["failed"] for result in results.values())


def sanitized():
    """The same command in a process that has the sanitizers' library, and a cache of its own."""
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as cache:
        compiler = Path(cache) / "compiler"  # what stands last decides: -O1, which compiles in a minute
        compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {SANITIZE}\n')
        compiler.chmod(0o755)
        env = os.environ | {
            "LD_PRELOAD": runtime.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0",
            "CXX": str(compiler),
            "FEWKEYS_CACHE": cache,
        }
        return subprocess.run([sys.executable, "-m", "campaign", *sys.argv[1:]], env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
