"""Slots until a share of the mass is exact, beside fixed slots: output error, slots paid and mass kept, on a decoder.

    python experiments/trees/mass.py --model FOLDER [--gguf FILE] --text FILE [--length 1024] [--layers 3 12 21]

Queries, keys and values of some layers on the first tokens of a text (gzipped or plain). A line for each plan: slots
paid, mean relative error of the output, the share of the softmax mass that is truly on kept keys, and the share that
the plan says is, by its estimate or, certified, at least. Means over layers, heads and queries. Writes
results/mass.json beside this file.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.trees.decoder import load, read_text
from experiments.trees.decoder import options as decoder_options
from experiments.trees.likelihood import Stretch

import fewkeys as fk
from fewkeys.bench.machine import versions
from fewkeys.core.files import write_json
from fewkeys.core.metrics import relative_error
from fewkeys.core.validation import check_inputs
from fewkeys.execute import dispatch
from fewkeys.flow import prepare

RESULTS = Path(__file__).parent / "results"
FIXED = (96, 128, 160, 192, 224, 256)
MASS = (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)


def main() -> None:
    parser = decoder_options(__doc__)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 12, 21])
    options = parser.parse_args()
    model, tokenizer = load(options.model, options.gguf)
    stretch = Stretch(model, tokenizer, read_text(options.text), Fraction(0), options.length)
    capture = fk.capture(model, [{"input_ids": stretch.tokens}])
    plans = [fk.select.KeyTree(slots) for slots in FIXED] + [fk.select.KeyTree(256, mass) for mass in MASS]
    plans += [fk.select.KeyTree(256, 0.5, certified=True)]
    rows: list[dict[str, Any]] = []
    for keep in plans:
        found = [judge(keep, next(iter(capture.calls(layer)))) for layer in options.layers]
        slots, error, kept, told = (sum(part) / len(part) for part in zip(*found, strict=True))
        rows.append({"plan": asdict(keep), "slots": slots, "error": error, "mass": kept, "told": told})
        print(f"{keep}: {slots:.1f} slots, error {error:.3f}, mass kept {kept:.3f}, told {told:.3f}", flush=True)
    of = {"model": options.gguf or Path(options.model).name, "length": options.length, "layers": options.layers}
    write_json(RESULTS, "mass.json", {"of": of, "rows": rows, "versions": versions(with_transformers=True)})


@torch.no_grad()
def judge(keep: fk.select.KeyTree, call: object) -> tuple[float, float, float, float]:
    """What the plan of a layer pays, how far off it is, the mass that it keeps, and what it says of that."""
    query, key, value = (getattr(call, name).float() for name in ("query", "key", "value"))
    x = check_inputs(query, key, value, is_causal=True)
    problem = prepare(x, fk.Plan(keep, fk.rest.TreeMeans()))
    scores = query @ key.repeat_interleave(x.gqa_ratio, 1).mT * x.scale
    seen = torch.ones(x.queries, x.keys, dtype=torch.bool).tril()
    weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1)
    exact = weights @ value.repeat_interleave(x.gqa_ratio, 1)
    error = relative_error(dispatch.attend(problem), exact).mean().item()
    kept = (weights * problem.graph.to_mask()).sum(-1).mean().item()
    return problem.graph.slots(), error, kept, problem.graph.mean(problem.graph.descent.share())


if __name__ == "__main__":
    main()
