"""Retrieval where some layers of a decoder pay for more slots than the others, at the same mean.

    python experiments/trees/by_layer.py --model FOLDER [--gguf FILE] --text FILE --heavy 5 6 7 8 17 18 --slots 512 192

`--heavy` names the layers that pay the first number; 0 slots are exact attention. Prints the scores of every task of
`tasks.py`, and the mean.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.trees.decoder import load, read_text
from experiments.trees.tasks import TASKS, Maker, score

import fewkeys as fk


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face decoder")
    parser.add_argument("--gguf", help="its file of quantised weights, if it has no others")
    parser.add_argument("--text", type=Path, required=True, help="plain or .gz")
    parser.add_argument("--heavy", type=int, nargs="*", default=[], help="layers")
    parser.add_argument("--slots", type=int, nargs=2, default=[512, 192], help="of those layers, and of all others")
    parser.add_argument("--length", type=int, default=2048, help="tokens")
    given = parser.parse_args(arguments)
    model, tokenizer = load(given.model, given.gguf)
    maker = Maker(tokenizer, read_text(given.text))
    slots = [given.slots[layer not in given.heavy] for layer in range(model.config.num_hidden_layers)]
    print(f"{sum(slots) / len(slots):.0f} slots on average")
    plans = [fk.budget(own, is_causal=True).always() if own else fk.Plan() for own in slots]
    plan = fk.ModelPlan.of(dict(enumerate(plans)))
    for task, make in TASKS.items():
        prompt = make(maker, given.length, 0)
        with torch.no_grad(), fk.apply(model, plan):
            logits = model(prompt.tokens, use_cache=False, logits_to_keep=prompt.tokens.shape[1] - prompt.first).logits
        found = score(logits[0], prompt)
        print(
            f"{task}: {found['right']} / {found['answers']} right, log-likelihood {found['likelihood']:.3f}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
