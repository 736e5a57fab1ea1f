"""What each part of the stand-ins earns, and what was tried and did not.

    python experiments/value_aware/stand_ins.py --text FILE --out experiments/value_aware/results/stand_ins.json

Every row changes one part of `fewkeys.budget(64, cohorts=1)` on all-MiniLM-L6-v2 and reports the mean relative output
error on the second half of the text; the first half is for corrections that are learned. `stand_in_variants.py` has the
method with all its switches, dense and plain; the first thing this command does is check that, with no switch turned,
it is the plan of the library. Slots are the same in every row unless the row says otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from stand_in_variants import Settings, attend, calibrated

import fewkeys as fk
from fewkeys import demo
from fewkeys.bench.machine import machine, versions
from fewkeys.captures import Capture
from fewkeys.core.files import write_whole
from fewkeys.integrations import text
from fewkeys.integrations.transformers import capture, load_model

FULL = Settings()
ROWS = {
    "fewkeys.budget(64, cohorts=1)": {},
    "statistics: plain means (t = 0)": {"tilt": 0.0},
    "statistics: t = 0.3": {"tilt": 0.3},
    "statistics: t = 0.7": {"tilt": 0.7},
    "statistics: t = 1": {"tilt": 1.0},
    "features: scores only, no values": {"value_unit": 0.0},
    "features: values x 0.3": {"value_unit": 0.3},
    "features: values x 2": {"value_unit": 2.0},
    "clusters: keys weigh alike": {"weighted_clusters": False},
    "clusters: no Lloyd step": {"steps": 0},
    "clusters: 1 Lloyd step": {"steps": 1},
    "clusters: 6 Lloyd steps": {"steps": 6},
    "first order: none (8.8 slots fewer)": {"rank": 0},
    "first order: none, 8 means more": {"rank": 0, "means": 34},
    "first order: rank 4, 4 means more": {"rank": 4, "means": 30},
    "first order: rank 16, 8 outliers fewer": {"rank": 16, "outliers": 4},
    "first order: full rank (24 slots more)": {"rank": 32},
    "first order: without bounds": {"reach": torch.inf},
    "first order: one factor for all clusters": {"factors": False},
    "first order: around the mean, not the reference query": {"reference": False},
    "first order: subspace by exact eigenvectors": {"eigenvectors": True},
    "first order: a matrix per cluster (832 slots more)": {"pooled": False, "rank": 32},
    "second order of the score, clipped": {"second_order": True},
    "heavy: importance alone": {"heavy": "importance"},
    "heavy: distance alone": {"heavy": "distance"},
    "heavy: contribution e^g |v - v_c|": {"heavy": "contribution"},
    "heavy: centred leverage": {"heavy": "leverage"},
    "heavy: key norm (control)": {"heavy": "norm"},
    "heavy: random (control)": {"heavy": "random"},
    "heavy: none, 12 means more": {"outliers": 0, "means": 38},
    "window: none, 16 means more": {"window": 1, "means": 42},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", required=True, help="UTF-8 text; repeat to join files")
    parser.add_argument(
        "--sequences", type=int, default=8, help="sequences of 512 tokens: half to learn, half to judge"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    model, tokenizer = load_model(str(demo.model_folder()))
    batches = text.batches(
        [path.read_text(encoding="utf-8") for path in arguments.text],
        tokenizer,
        sequences=arguments.sequences,
        length=512,
    )
    rows = torch.cat(batches)
    half = len(rows) // 2
    learn, judge = (heads(capture(model, [part])) for part in (rows[:half], rows[half:]))
    check(judge)
    truth = [torch.softmax(q @ k.mT, -1) @ v for q, k, v in judge]
    oracle = mean_error([top(q, k, v, 64) for q, k, v in judge], truth)
    found = []
    for name, switches in ROWS.items():
        outputs = [attend(*layer, FULL.but(**switches))[0] for layer in judge]
        found.append({"name": name, "switches": switches, "error": mean_error(outputs, truth)})
        report(found[-1], oracle, found[0]["error"])
    for name, correct in calibrated(learn, FULL).items():
        outputs = [correct(number, *layer) for number, layer in enumerate(judge)]
        found.append({"name": f"learned offline: {name}", "switches": {}, "error": mean_error(outputs, truth)})
        report(found[-1], oracle, found[0]["error"])
    result = {
        "model": demo.NAME,
        "sequences": {"learn": half, "judge": len(rows) - half, "length": 512},
        "oracle_top_64": oracle,
        "rows": found,
        "machine": machine(),
        "versions": versions(),
    }
    write_whole(arguments.out, json.dumps(result, indent=1) + "\n")


def heads(taken: Capture) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Scaled queries, keys and values of every layer, (B H, N, D)."""
    found = []
    for layer in range(taken.layers):
        calls = list(taken.calls(layer))
        query = torch.cat([call.query * call.scale for call in calls])
        key, value = (torch.cat([getattr(call, name) for call in calls]) for name in ("key", "value"))
        found.append((query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)))
    return found


def check(layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Without switches the variants' code is the library's plan, but for heads with ties that rounding decides."""
    query, key, value = (x[:12, None] for x in layers[0])
    expected = fk.attention(query, key, value, plan=fk.budget(64, cohorts=1).never_exact(), scale=1.0)[:, 0]
    found = attend(query[:, 0], key[:, 0], value[:, 0], FULL)[0]
    gap = statistics.median(map(fk.metrics.output_error, found, expected))
    if gap > 1e-3:
        sys.exit(f"the variants are not fewkeys.budget(64, cohorts=1): they differ by {gap:.1e}")


def top(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, count: int) -> torch.Tensor:
    scores = query @ key.mT
    least = scores.topk(count).values[..., -1:]
    return scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ value


def mean_error(outputs: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    return sum(fk.metrics.output_error(a, b) for a, b in zip(outputs, truth, strict=True)) / len(truth)


def report(row: dict, oracle: float, full: float) -> None:
    ratio, change = row["error"] / oracle, row["error"] / full - 1
    print(f"{row['name']:56s} {row['error']:.4f}   {ratio:.3f} x oracle   {change:+.1%}", flush=True)


if __name__ == "__main__":
    main()
