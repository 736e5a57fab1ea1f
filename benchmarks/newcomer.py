"""The newcomer's path, timed in an empty environment: install the wheel, compare, tune, apply, save, load.

    python benchmarks/newcomer.py

Builds the wheel of this tree, makes a new virtual environment and goes through the steps of the README in it:
`fewkeys compare`, `fewkeys tune`, and the tuned plan in a SentenceTransformer, saved and loaded. Stops at the first
step that fails. Prints the seconds of each step and writes benchmarks/results/newcomer.json. Needs a package index.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "newcomer.json"
LIMIT = 600.0
"""Seconds that the whole path may take."""

APPLIED = """
import json, torch
import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.demo import TEXT, model_folder
from sentence_transformers import SentenceTransformer

encoder = SentenceTransformer(str(model_folder()), device="cpu")
text = TEXT.read_text().split()
documents = [" ".join(text[i : i + 400]) for i in range(0, 2000, 400)]
exact = encoder.encode(documents, convert_to_tensor=True)
plan = fk.ModelPlan.from_pretrained("tuned")
plan.save_pretrained("plan")
with fk.apply(encoder, fk.ModelPlan.from_pretrained("plan")):
    few = encoder.encode(documents, convert_to_tensor=True)
cosine = float(torch.cosine_similarity(few, exact).mean())
assert fk.ModelPlan.from_pretrained("plan") == plan and 0.9 < cosine < 0.9999, cosine
results = {"cosine": cosine, "machine": machine(), "versions": versions(with_transformers=True)}
print(json.dumps(results))
"""


def timed(steps: dict[str, float], name: str, *command: object, at: Path) -> str:
    """Run one step; what it prints. SystemExit where it fails."""
    print(f"{name} ...", flush=True)
    start = perf_counter()
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, command)], cwd=at, env=environment, capture_output=True, text=True, check=False)
    steps[name] = round(perf_counter() - start, 1)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    print(f"{name}: {steps[name]} s", flush=True)
    return done.stdout


def path(folder: Path, sequences: int) -> dict[str, Any]:
    """The steps and their seconds, in a new folder."""
    steps: dict[str, float] = {}
    programs = folder / "environment" / "bin"
    timed(steps, "build the wheel", sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, ROOT, at=folder)
    timed(steps, "make an environment", sys.executable, "-m", "venv", "environment", at=folder)
    (wheel,) = folder.glob("fewkeys-*.whl")
    install = (programs / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    timed(steps, "install", *install, f"{wheel}[demo]", "sentence-transformers", at=folder)
    timed(steps, "compare", programs / "fewkeys", "compare", "--demo", "--slots", "64", "--out", "compared", at=folder)
    tune = ("tune", "--demo", "--sequences", sequences, "--out", "tuned")
    timed(steps, "tune", programs / "fewkeys", *tune, at=folder)
    applied = timed(steps, "apply, save, load", programs / "python", "-c", APPLIED, at=folder)
    return {"seconds": steps, "total": round(sum(steps.values()), 1), "tuned_on": sequences} | json.loads(
        applied.strip().splitlines()[-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=8, help="sequences of 512 tokens to tune on")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = path(Path(folder), options.sequences)
    print(f"in all {report['total']} s, cosine {report['cosine']:.3f}")
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    if report["total"] > LIMIT:
        raise SystemExit(f"expected at most {LIMIT:.0f} s")


if __name__ == "__main__":
    main()
