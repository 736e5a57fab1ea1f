"""Does it pay to choose each head's plan from its first call?

    python -m experiments.encoders.live --work out/encoders

In the first call, which is the first sequence, 8 queries of each head are answered exactly and by every plan of
`forms`. Each head then has the plan of least error, or is exact if its error is among the largest. Errors are those of
later sequences. The captures are those that `run.py` keeps in --work. The table is results/live.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from experiments.encoders.judge import Problem, problem
from experiments.encoders.models import ENCODERS, captured
from experiments.encoders.shares import Cell, cohorts_of
from torch import Tensor

import fewkeys as fk
from fewkeys.core.metrics import relative_error

QUERIES = 8
"""Queries of each head that are answered exactly in the first call."""
EXACT_HEADS = 12
"""One head of this many is moved to exact attention."""
PLACES = {"minilm": 512, "mpnet": 512, "whisper": 500, "albert": 512, "vit": 197}
"""The models and lengths: those with several sequences."""
RESULT = Path(__file__).parent / "results" / "live.md"
HEAD = (
    "| model | slots | budget | each head's form by 8 queries | by 64 queries | best form of later calls "
    "| 1 head of 12 exact, by 8 queries | budget of as many slots |",
    "| --- |" + " --- |" * 7,
)


def forms(slots: int) -> list[fk.Plan]:
    """The budget first; then no window, one of 3 roots, more means, and more outliers without a rank."""
    long, cohorts = int(3 * slots**0.5) | 1, cohorts_of(slots)
    cells = [
        Cell(slots // 2, 0, slots - slots // 2 - slots // 8 - 1, slots // 8, cohorts),
        Cell((slots - long) // 2, long, slots - long - (slots - long) // 2, 0, cohorts),
        Cell(slots // 4, slots // 8 | 1, slots - slots // 4 - (slots // 8 | 1) - slots // 8 - 1, slots // 8, cohorts),
        Cell(slots * 3 // 4, slots // 8 | 1, slots - slots * 3 // 4 - (slots // 8 | 1), 0, cohorts),
    ]
    return [fk.budget(slots).never_exact(), *(cell.plan() for cell in cells)]


def errors(x: Problem, plan: fk.Plan) -> Tensor:
    """The error of each judged query: (layers H, sequences, sample)."""
    call, draw = x.call, torch.Generator().manual_seed(0)
    output = fk.attention(call.query, call.key, call.value, plan=plan, **call.options(draw))[:, :, x.sample]
    return relative_error(output, x.exact).unflatten(0, (x.layers, -1)).transpose(1, 2).flatten(0, 1)


def row(name: str, slots: int, x: Problem) -> str:
    """One line of the table: mean error and worst head of later sequences."""
    every = torch.stack([errors(x, plan) for plan in forms(slots)])  # (forms, heads, sequences, sample)
    later, first = every[:, :, 1:].mean((2, 3)), every[:, :, 0]
    few = torch.randperm(first.shape[-1], generator=torch.Generator().manual_seed(1))[:QUERIES]
    estimated, whole = first[..., few].mean(-1), first.mean(-1)
    heads = torch.arange(later.shape[1])
    exact = later[0].clone()
    moved = max(1, len(heads) // EXACT_HEADS)
    exact[estimated[0].topk(moved).indices] = 0.0
    more = slots + (x.call.key.shape[2] - slots) * moved // len(heads)
    shown = [
        later[0],
        later[estimated.argmin(0), heads],
        later[whole.argmin(0), heads],
        later.amin(0),
        exact,
        errors(x, fk.budget(more).never_exact())[:, 1:].mean((1, 2)),
    ]
    cells = [f"{float(each.mean()):.3f}, {float(each.max()):.2f}" for each in shown]
    return f"| {name} | {slots} | " + " | ".join(cells) + f" ({more}) |"


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("out/encoders"), help="where run.py kept its captures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = list(HEAD)
    try:
        for name, length in PLACES.items():
            x = problem(captured(name, length, {}, options.work), ENCODERS[name].layers)
            lines += [row(name, slots, x) for slots in (32, 64)]
            print(*lines[-2:], sep="\n", file=sys.stderr)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    RESULT.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
