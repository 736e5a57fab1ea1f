"""What keys and values in int8 cost a decoder, and what they save.

    python experiments/decoders/leaves.py --model FOLDER [--gguf FILE] --text FILE [--length 2048] [--place 1/3]

One stretch of `--length` tokens; its second half is judged. A line for each way to hold keys: bytes of a token in
the stream of one layer, and in all that a cache holds, codes and room for growing included; by head and layer, mean and
worst relative error of the output against keys that are held as they come, and the mean against exact attention, on
what exact attention is given;
perplexity over that of exact attention, and the mean over tokens of KL(exact || cache), with a cache in all layers.
Writes results/leaves.json beside this file.
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.decoders.decoder import load, read_text
from experiments.decoders.decoder import options as decoder_options
from experiments.decoders.likelihood import Stretch

import fewkeys as fk
from fewkeys.bench.machine import versions
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.files import write_json
from fewkeys.integrations.interface import attach

RESULTS = Path(__file__).parent / "results"
WAYS = (None, "int8")


def main() -> None:
    parser = decoder_options(__doc__)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--place", type=Fraction, default=Fraction(0))
    parser.add_argument("--slots", type=int, default=256)
    options = parser.parse_args()
    model, tokenizer = load(options.model, options.gguf)
    length = options.length
    tokens = Stretch(model, tokenizer, read_text(options.text), options.place, length).tokens
    plan, half = fk.budget(options.slots, is_causal=True).never_exact(), length // 2
    told = tokens[0, half + 1 :, None]

    @torch.no_grad()
    def likelihood(**more: object) -> Tensor:
        return model(tokens, **more).logits[0, half:-1].float().log_softmax(-1)

    measured = Measured(plan, half)
    detach = attach(model, measured).detach
    exact = likelihood(use_cache=False)
    detach()
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        cache = fk.cache(model, plan, leaves=way)
        few = likelihood(past_key_values=cache)
        ratio = (exact - few).gather(1, told).mean().exp().item()
        apart = (exact.exp() * (exact - few)).sum(-1).mean().item()
        between, off = (torch.tensor(errors[way]) for errors in (measured.between, measured.off))
        row = {"leaves": way or "float32", "bytes": measured.bytes[way], "bytes_in_all": cache.memory() / length}
        row |= {"apart": between.mean().item(), "worst": between.max().item(), "error": off.mean().item()}
        rows.append(row | {"ratio": ratio, "kl": apart})
        print(json.dumps(rows[-1]), flush=True)
        cache.close()
    of = {"model": options.gguf or Path(options.model).name, "length": length, "place": str(options.place)}
    write_json(RESULTS, "leaves.json", {"of": of, "rows": rows, "versions": versions(with_transformers=True)})


class Measured:
    """Answers exactly, and notes by way, layer and head how far streams are from it and from each other."""

    def __init__(self, plan: fk.Plan, first: int) -> None:
        self.plan, self.first = plan, first
        self.between: dict[str | None, list[list[float]]] = {way: [] for way in WAYS}
        self.off: dict[str | None, list[list[float]]] = {way: [] for way in WAYS}
        self.bytes: dict[str | None, int] = {}

    def __call__(self, layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        query, key, value = inputs.query, inputs.key, inputs.value
        exact = fk.attention(query, key, value, **inputs.options())
        found = {}
        for way in WAYS:
            stream = fk.stream(self.plan, scale=inputs.scale, leaves=way)
            stream.append(key, value)
            found[way] = stream.attend(query)[:, :, self.first :]
            self.between[way].append(_error(found[way], found[None]))
            self.off[way].append(_error(found[way], exact[:, :, self.first :]))
            self.bytes[way] = stream.memory() // key.shape[2]
        return exact


def _error(approx: Tensor, exact: Tensor) -> list[float]:
    """By head, of one sequence."""
    return ((approx - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-12))[0].double().mean(-1).tolist()


if __name__ == "__main__":
    main()
