"""Causal plans on the queries, keys and values of a real encoder, against each query's own best keys.

    python experiments/causal/encoder.py --text wikitext.txt.gz --out experiments/causal/results

all-MiniLM-L6-v2 reads texts of 512 tokens; its queries, keys and values of every layer and head are attended to under a
causal mask, one text at a time, and 16 texts one after the other as one sequence of 8,192 tokens. The error is that of
the output, relative, mean over the last 256 queries, heads and layers; slots are those of `--slots`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.value_aware.data import read, token_ids
from torch import Tensor

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json
from fewkeys.demo import model_folder
from fewkeys.integrations.transformers import load_model

LENGTH, TEXTS, LAST = 512, 16, 256


def plans(slots: int) -> dict[str, fk.Plan]:
    """The rows, at so many slots per query."""
    half = slots // 2
    return {
        "fewkeys": fk.budget(slots, is_causal=True, memory="constant"),
        "each query's best keys (oracle)": fk.Plan(fk.TopK(slots)),
        "sinks + window": fk.Plan(fk.Sinks(4) | fk.Window(slots - 4)),
        "leverage + window": fk.Plan(fk.select.Leverage(half, centre=True) | fk.Window(half)),
        "key norm + window": fk.Plan(fk.select.KeyNorm(half) | fk.Window(half)),
        "random + window": fk.Plan(fk.RandomKeys(half) | fk.Window(half)),
    }


def last(problem: tuple[Tensor, Tensor, Tensor], scale: float, plan: fk.Plan) -> Tensor:
    """The outputs of the last queries; oracles and exact attention compute no others."""
    query, key, value = problem
    n = key.shape[2]
    first = n - LAST if plan.keep is None or plan.keep.is_oracle else 0
    found = fk.attention(
        query[:, :, first:], key, value, plan=plan.never_exact(), is_causal=True, query_offset=first, scale=scale
    )
    return found[:, :, -LAST:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", required=True, help="text file, plain or .gz; repeatable")
    parser.add_argument("--out", type=Path, required=True, help="folder for encoder.json")
    parser.add_argument("--slots", type=int, default=96)
    options = parser.parse_args()
    model, tokenizer = load_model(model_folder())
    ids = token_ids(read(options.text)[0], tokenizer)
    inside = LENGTH - 2
    rows = ids[: TEXTS * inside].view(TEXTS, inside)
    ends = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id]).expand(TEXTS, 2)
    capture = fk.capture(model, [torch.cat([ends[:, :1], rows, ends[:, 1:]], 1)])
    results = {}
    for length, texts in ((LENGTH, "one text"), (LENGTH * TEXTS, f"{TEXTS} texts in a row")):
        errors = dict.fromkeys(plans(options.slots), 0.0)
        for layer in range(capture.layers):
            call = next(capture.calls(layer))
            parts = (call.query, call.key, call.value)
            if length > LENGTH:
                parts = tuple(part.transpose(0, 1).flatten(1, 2).unsqueeze(0) for part in parts)
            exact = last(parts, call.scale, fk.Plan())
            for name, plan in plans(options.slots).items():
                error = fk.metrics.output_error(last(parts, call.scale, plan), exact)
                errors[name] += error / capture.layers
        oracle = errors["each query's best keys (oracle)"]
        results[str(length)] = {name: {"error": e, "of the oracle": e / oracle} for name, e in errors.items()}
        print(f"{length} tokens, {texts}, {options.slots} slots")
        for name, error in errors.items():
            print(f"  {name:34}{error:7.3f}{error / oracle:7.2f} of the oracle", flush=True)
    where = {"machine": machine(), "versions": versions()}
    write_json(options.out, "encoder.json", {"slots": options.slots, "results": results, **where})
    return 0


if __name__ == "__main__":
    sys.exit(main())
