"""Whole models, exactly and under plans: `python benchmarks/models.py --model minilm --lengths 512,1024`.

What `fewkeys bench --whole` times (`fewkeys.integrations.whole`), length by length into one JSON: encoders under
`budget(64)`, the decoder's prefill under `budget(256)`. Rows that are not measured keep what the JSON says of them.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_whole
from fewkeys.integrations.whole import DECODERS, SHAPES, time_model

RESULTS = Path(__file__).parent / "results" / "models.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--lengths", default="512,1024,2048,4096", metavar="N,...")
    given = parser.parse_args()
    plan = fk.budget(256, is_causal=True) if given.model in DECODERS else fk.budget(64)
    for length in map(int, given.lengths.split(",")):
        row = asdict(time_model(given.model, plan, length))
        print(json.dumps(row), flush=True)
        result = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"models": {}}
        own = result["models"].setdefault(given.model, {"plan": str(plan), "rows": []})
        others = [other for other in own["rows"] if other["length"] != length]
        own["rows"] = sorted([*others, row], key=lambda one: one["length"])
        result |= {"machine": machine(), "versions": versions(with_transformers=True)}
        write_whole(RESULTS, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
