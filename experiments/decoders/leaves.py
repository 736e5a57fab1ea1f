"""What keys and values in int8 cost a decoder, and what they save.

    python experiments/decoders/leaves.py --model FOLDER [--gguf FILE] --text FILE [--length 2048] [--place 1/3]

One stretch of `--length` tokens, of which the second half is judged, with `fk.cache` in all layers. A line for each way
to hold keys: bytes of a token in the whole cache, codes and room for growing included; the ratio of perplexities and
the mean KL(exact || cache). Writes results/leaves.json beside this file.
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.decoders.decoder import load, options as decoder_options, read_text
from experiments.decoders.likelihood import Stretch, compared

import fewkeys as fk
from fewkeys.bench.machine import versions
from fewkeys.core.files import write_json

RESULTS = Path(__file__).parent / "results"


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = decoder_options(__doc__)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--place", type=Fraction, default=Fraction(0))
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model, options.gguf)
    stretch = Stretch(model, tokenizer, read_text(options.text), options.place, options.length)
    plan = fk.budget(options.slots, is_causal=True).never_exact()
    exact, rows = stretch.predict(), []
    for leaves in ("model", "int8"):
        cache = fk.cache(model, plan, leaves=leaves)
        figures = compared(exact, stretch.predict(cache), stretch.tokens[0, stretch.first + 1 :])
        rows.append({"leaves": leaves, "bytes": cache.memory() / options.length, **figures})
        print(json.dumps(rows[-1]), flush=True)
        cache.close()
    model_name = options.gguf or Path(options.model).name
    settings = {"model": model_name, "length": options.length, "place": str(options.place)}
    write_json(options.out, "leaves.json", {"of": settings, "rows": rows, "versions": versions()})


if __name__ == "__main__":
    main()
