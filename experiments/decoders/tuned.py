"""Slots where a decoder feels them: a plan for every head, tuned on text and on retrieval, saved for `evidence.py`.

    python experiments/decoders/tuned.py --model FOLDER [--gguf FILE] --text FILE --slots 256 --out DIR

What counts are the judged words of prompts of `tasks.py` (`--seeds`, which `evidence.py` must not be given) and one in
16 tokens of a stretch of the text, which begins at `--place`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.decoders.decoder import load, options, read_text
from experiments.decoders.tasks import TASKS, Maker

import fewkeys as fk
from fewkeys.cli.progress import progress

EVERY = 16


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = options(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="plain or .gz")
    parser.add_argument("--out", type=Path, required=True, help="folder for model_plan.json")
    parser.add_argument("--slots", type=int, default=256, help="on average over heads")
    parser.add_argument("--length", type=int, default=2048, help="tokens")
    parser.add_argument("--place", type=Fraction, default=Fraction(1, 8), help="of the stretch, as a share of the text")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=["many needles", "variable tracking"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[100], help="of the prompts")
    given = parser.parse_args(arguments)
    model, tokenizer = load(given.model, given.gguf)
    text = read_text(given.text)
    maker = Maker(tokenizer, text)

    def batches() -> Iterator[dict[str, Any]]:
        start = int(given.place * len(text))
        tokens = tokenizer(text[start : start + 8 * given.length], return_tensors="pt").input_ids[:, : given.length]
        yield _labelled(tokens, list(range(1, tokens.shape[1], EVERY)))
        for task in given.tasks:
            for seed in given.seeds:
                prompt = TASKS[task](maker, given.length, seed)
                yield _labelled(prompt.tokens, [one.place for one in prompt.judged])

    with progress() as step:
        step(0, 1, "gradients")
        captured = fk.capture(model, batches(), gradients=True)
        plan = fk.tune(captured, given.slots, directory=given.out / ".tuning", progress=step)
    plan = replace(plan, record={**plan.record, "model": given.gguf or Path(given.model).name})
    plan.save_pretrained(given.out)
    print({name: value for name, value in plan.record.items() if name != "weights"})
    return 0


def _labelled(tokens: Tensor, places: list[int]) -> dict[str, Any]:
    """A batch of which these tokens count."""
    labels = torch.full_like(tokens, -100)
    labels[:, places] = tokens[:, places]
    return {"input_ids": tokens, "labels": labels}


if __name__ == "__main__":
    sys.exit(main())
