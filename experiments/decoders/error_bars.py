"""How often the bars of bars.py hold, on the heads of a decoder and on keys made to break them.

    python experiments/decoders/error_bars.py --model FOLDER [--gguf FILE] --text FILE

The queries, keys and values of every layer are those of the exact model. Each of four stretches of queries in the
second half of the text gets its bars several times, with other draws and rotations. Errors are relative to exact
attention. Writes `results/error-bars.json` beside this file.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.decoders.bars import error_bars
from experiments.decoders.decoder import load, options as decoder_options, read_text
from experiments.decoders.hard_keys import HARD
from experiments.decoders.likelihood import Stretch

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.files import write_json
from fewkeys.core.metrics import relative_error
from fewkeys.integrations.interface import attach

ERRORS = (0.05, 0.1)
ROUNDING = 1e-5
QUERIES = 16
"""Queries in a stretch."""
STRETCHES = 4


def main() -> None:
    parser = decoder_options(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="plain or .gz")
    parser.add_argument("--length", type=int, default=2048, help="tokens")
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 128])
    parser.add_argument("--repeats", type=int, default=10, help="how often each query gets a bar")
    parser.add_argument("--trials", type=int, default=1000, help="draws of each kind of hard keys")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    try:
        model, tokenizer = load(options.model, options.gguf)
        stretch = Stretch(model, tokenizer, read_text(options.text), Fraction(1, 3), options.length)
    except ValueError as error:
        sys.exit(f"error_bars: {error}")
    measured = Measured(options.length, options.slots, options.repeats)
    detach = attach(model, measured).detach
    try:
        with torch.no_grad():
            model(stretch.tokens, use_cache=False, logits_to_keep=1)
    finally:
        detach()
    heads = [{"slots": slots, "error": error, **measured.row(slots, error)} for slots, error in measured.seen]
    hard = []
    for name, case in HARD.items():
        for error in (*ERRORS, 0.3):
            hard.append({"keys": name, "error": error, **case().missed(options.trials, error=error)})
            print(hard[-1], flush=True)
    settings = {"model": options.gguf or Path(options.model).name, "text": options.text.name, "confidence": 0.95}
    settings |= {name: getattr(options, name) for name in ("length", "repeats", "trials")}
    record = {"settings": settings, "heads": heads, "hard": hard}
    write_json(options.out, "error-bars.json", record | {"versions": versions(), "machine": machine()})


class Measured:
    """Answers by exact attention, and records the bars of each layer and the errors that they bound."""

    def __init__(self, length: int, slots: list[int], repeats: int) -> None:
        self.slots, self.repeats = slots, repeats
        step = length // 2 // STRETCHES
        self.starts = range(length // 2 + step - QUERIES, length, step)
        self.seen: dict[tuple[int, float], list[dict[str, Tensor]]] = defaultdict(list)

    def __call__(self, layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        rows = (inputs.key, inputs.value)
        exact = fk.attention(inputs.query, *rows, **inputs.options())
        options = {"is_causal": True, "scale": inputs.scale}
        for slots in self.slots:
            plan = fk.budget(slots, is_causal=True)
            for start in self.starts:
                stretch = slice(start, start + QUERIES)
                query, truth = inputs.query[:, :, stretch], exact[:, :, stretch]
                output = fk.attention(query, *rows, plan=plan.never_exact(), query_offset=start, **options)
                of_plan = relative_error(output, truth)
                for error in ERRORS:
                    for repeat in range(self.repeats):
                        generator = torch.Generator().manual_seed(repeat + self.repeats * (start + 10**5 * layer))
                        bars = error_bars(
                            query, *rows, plan, error=error, query_offset=start, generator=generator, **options
                        )
                        off = relative_error(bars.output, truth)
                        judged = {"off": off, "bar": bars.error, "reached": bars.reached, "drawn": bars.drawn.float()}
                        judged |= {"plan": of_plan, "layer": torch.full_like(off, layer)}
                        self.seen[slots, error].append(judged)
        print(f"layer {layer}", {key: round(self.row(*key)["covered"], 4) for key in self.seen}, flush=True)
        return exact

    def row(self, slots: int, error: float) -> dict[str, Any]:
        """Shares and means over all bars. Each layer has its own heads."""
        parts = self.seen[slots, error]
        # (heads, bars): all stretches and repeats of a head side by side.
        by_head = {
            name: torch.cat(
                [
                    torch.cat([part[name][0] for part in parts if int(part["layer"].flatten()[0]) == layer], -1)
                    for layer in sorted({int(part["layer"].flatten()[0]) for part in parts})
                ]
            ).double()
            for name in parts[0]
        }
        covered = (by_head["off"] <= by_head["bar"] + ROUNDING).double()
        reached = by_head["reached"] > 0
        return {
            "bars": covered.numel(),
            "covered": float(covered.mean()),
            "worst_head": float(covered.mean(-1).min()),
            "covered_if_reached": float(covered[reached].mean()),
            "above_error_if_reached": float((by_head["off"][reached] > error).double().mean()),
            "reached": float(reached.double().mean()),
            "drawn": float(by_head["drawn"].mean()),
            "median_bar": float(by_head["bar"].median()),
            "median_off": float(by_head["off"].median()),
            "mean_off": float(by_head["off"].mean()),
            "mean_off_of_plan": float(by_head["plan"].mean()),
        }


if __name__ == "__main__":
    main()
