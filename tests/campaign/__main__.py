"""Runs the parts for a time, with seeds that count up from one; results as JSON, and as a table.

    make campaign                                      # an hour
    python -m campaign --minutes 1 --parts files,kills
    python -m campaign --parts kernels --seed 4711     # one seed again

The part `kernels, sanitized` (`--parts sanitized`) is `kernels` compiled under address and undefined-behaviour
sanitizers, which takes a minute; it is left out where no part is named, unless `--sanitize` asks for it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SANITIZE = "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
SANITIZED = "kernels, sanitized"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--parts", default="")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--sanitize", action="store_true", help="the sanitized kernels, too")
    parser.add_argument("--out", type=Path, help="where the JSON goes; parts that it has already stay there")
    arguments = parser.parse_args()

    from campaign.parts import PARTS, SHARES, promise_of

    names = [SANITIZED if name == "sanitized" else name for name in arguments.parts.split(",") if name]
    names = names or [*PARTS, *[SANITIZED] * arguments.sanitize]
    results = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    shares = sum(SHARES.get(name, 1) for name in names)
    for name in names:
        minutes = arguments.minutes * SHARES.get(name, 1) / shares
        first, only = (arguments.first, False) if arguments.seed is None else (arguments.seed, True)
        tried, failed = (sanitized if name == SANITIZED else count_up(PARTS[name]()))(first, minutes, only)
        promise = promise_of("kernels" if name == SANITIZED else name)
        seeds = [first, first + tried - 1]
        results[name] = {
            "promise": promise,
            "tried": tried,
            "minutes": round(minutes, 2),
            "seeds": seeds,
            "failed": failed,
        }
        print(f"{name:20} tried {tried:7} failed {len(failed):3}  {failed[:1] or ''}", flush=True)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return any(results[name]["failed"] for name in names)


def wrong_with(part, seed):
    """What a part says of a seed; an error that it does not expect is a failure, too."""
    try:
        return part(seed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def count_up(part):
    """Tries seeds from the first on, until the time is over: how many, and those that failed."""

    def run(first, minutes, only):
        tried, failed, end = 0, [], time.monotonic() + 60 * minutes
        while not tried or (not only and time.monotonic() < end):
            seed = first + tried
            wrong = wrong_with(part, seed)
            tried += 1
            failed += [] if wrong is None else [{"seed": seed, "what": wrong}]
        return tried, failed

    return run


def sanitized(first, minutes, only):
    """The same of `kernels`, in processes that have the sanitizers' library, which end at the first fault."""
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    tried, failed, end = 0, [], None
    with tempfile.TemporaryDirectory() as folder:
        compiler, said = Path(folder) / "compiler", Path(folder) / "said"  # what stands last decides: -O1 is quick
        compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {SANITIZE}\n')
        compiler.chmod(0o755)
        env = os.environ | {
            "LD_PRELOAD": runtime.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0",
            "CXX": str(compiler),
            "FEWKEYS_CACHE": folder,
        }
        while not tried or (not only and time.monotonic() < end):
            # The first seed stands alone: compiling the kernels for it is not counted.
            left, alone = 0.0 if end is None else (end - time.monotonic()) / 60, only or end is None
            code = (
                f"from campaign.__main__ import run_again; run_again({first + tried}, {left}, {alone}, {str(said)!r})"
            )
            process = subprocess.run(
                [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True, check=False
            )
            last, wrong = json.loads(said.read_text())
            tried, failed = last - first + 1, failed + wrong
            if process.returncode:
                lines = [line for line in process.stderr.splitlines() if "rror" in line]
                failed.append({"seed": last, "what": lines[0] if lines else f"exit code {process.returncode}"})
            end = end or time.monotonic() + 60 * minutes
    return tried, failed


def run_again(first, minutes, only, path):
    """Tries seeds of `kernels`, and says at every moment in a file at which it is, and what has failed."""
    from campaign.kernels import kernels

    failed = []

    def part(seed):
        Path(path).write_text(json.dumps([seed, failed]))
        if (wrong := wrong_with(kernels, seed)) is not None:
            failed.append({"seed": seed, "what": wrong})
            Path(path).write_text(json.dumps([seed, failed]))

    count_up(part)(first, minutes, only)


if __name__ == "__main__":
    sys.exit(main())
