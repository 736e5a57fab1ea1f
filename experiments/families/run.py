"""Try every family and write docs/families.md and its results: `python -m experiments.families.run`, a minute."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from experiments.families.models import FAMILIES, Family
from experiments.families.trial import COLUMNS, trial

RESULTS = Path(__file__).parent / "results" / "families.json"
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
KINDS = {
    "encoder": "Encoders",
    "decoder": "Decoders",
    "both": "Encoder-decoders (the plan in the encoder, the rest exact)",
    "vision": "Images",
    "sound": "Sounds",
}
HEAD = """# Families of models

Made by `python -m experiments.families.run`: a tiny random model of every family (transformers {version}). Its output
under an exact plan must be its own, and under `fewkeys.budget` another one, all finite. The table says what runs and is
right, not how good a plan is for a trained model; `fewkeys compare` says that.

- **apply**: the model's output under `fewkeys.apply`, with padding. **generate**: greedy, under `apply`.
  **cache**: greedy, by `fewkeys.cache`. **train**: gradients are finite.
- Layers with a window of their own keep it (ModernBERT, Mistral, Qwen2, Gemma, OLMo, Cohere, gpt-oss); "windows": all
  layers are such.
- Where scores are capped (Gemma 2, T5Gemma), plans need `budget(slots, is_causal=True, memory="constant")`, or
  `ClusterMeans` without a first-order term, as here for T5Gemma: the other stand-ins are defined for softmax alone.
- A bias of the distance is part of the score. ALiBi (BLOOM, MPT, Falcon) is one more dimension of queries and keys, so
  that every plan knows it. T5's and MPNet's table is exact on kept keys; a stand-in has the logarithm of the mean of
  exp(bias) over the keys that it speaks for, as the query sees them. Plans need a window and lists that all queries
  share, with `ClusterMeans` or nothing beside them: `budget(slots)` runs without cohorts. Captures
  hold the table, so that `compare`, `tune` and spot checks know it, too; trees and causal stand-ins are refused, with
  the reason. T5's decoder is tuned among windows, sinks and leverage.
- A number in brackets points to the reason, below the table: the first part of what the error says.

{yes} of {all} families run `apply`; {wrong} are wrong.
"""


def title(family: Family) -> str:
    """How the table calls a family."""
    return family.label or family.name


def page(found: dict[str, dict[str, str | None]]) -> str:
    """The page, from the results."""
    reasons: dict[str, int] = {}

    def cell(said: str | None) -> str:
        if said is None or said.startswith("yes"):
            return {None: "", "yes": "yes"}.get(said, "windows")
        return f"no [{reasons.setdefault(said.removeprefix('no: '), len(reasons) + 1)}]"

    yes = sum((row["apply"] or "").startswith("yes") for row in found.values())
    wrong = sum("WRONG" in (said or "") for row in found.values() for said in row.values())
    parts = [HEAD.format(version=transformers.__version__, yes=yes, all=len(found), wrong=wrong)]
    for kind, heading in KINDS.items():
        parts += [f"\n## {heading}\n", f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        for family in FAMILIES:
            if family.kind == kind:
                row = found[key(family)]
                parts.append(f"| {title(family)} | {' | '.join(cell(row[column]) for column in COLUMNS)} |")
    parts.append("\n## Why not\n")
    parts += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(parts) + "\n"


def key(family: Family) -> str:
    """The name of a family among the results."""
    return f"{family.kind}/{title(family)}"


def main() -> None:
    torch.set_num_threads(1)
    found = {key(family): trial(family) for family in FAMILIES}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"transformers": transformers.__version__, "families": found}, indent=1) + "\n")
    PAGE.write_text(page(found))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
