"""Loss against wall time of a transformer trained with `fk.budget` from first step to last, and with exact attention.

    python -m experiments.training.run --text FILE [--seconds S] [--work DIR] [--stop S]

An encoder of 4 layers and 4 heads of 32 predicts hidden words of 4,096 bytes of text. Both runs begin with the same
weights and read the same batches in the same order. The run that has spent less time takes the next step, so other
work on the machine slows both. Only steps are timed. The learning rate falls with the time spent. At regular times
both are judged on held-out text with exact attention, and the plan's run with its plan too: its last figure with
exact attention is that of a model whose plan is switched off after training.

`--work` keeps both runs, so that a stopped one goes on; `--stop`: stop after this many seconds, to go on later.
Writes results/training.json and training.png beside this file.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from time import perf_counter

import torch
from experiments.decoders.decoder import read_text
from experiments.training.model import Encoder, hidden, loss
from experiments.training.picture import save_picture
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import read_json, write_json

RESULTS = Path(__file__).parent / "results"
LENGTH, WIDTH, HEADS, LAYERS, SLOTS = 4096, 128, 4, 4, 64
RATE, WARM = 2e-3, 50
JUDGED, TIMES = 12, 10
"""Held-out sequences; how often each run is judged."""


class Run:
    """One model and its optimiser, with one kind of attention."""

    def __init__(self, plan: fk.Plan | None) -> None:
        self.plan = plan
        self.model = Encoder(WIDTH, HEADS, LAYERS, seed=0)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.01)
        self.steps, self.seconds, self.rows = 0, 0.0, list[dict[str, float]]()

    def step(self, text: Tensor, whole: float) -> None:
        """One step, on the stretch and the words drawn for its number. `whole`: seconds of the whole training."""
        began = perf_counter()
        stretch, symbols = drawn(text, self.steps)
        share = min(1.0, self.seconds / whole)
        for group in self.optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (self.steps + 1) / WARM) * (0.5 + 0.5 * math.cos(math.pi * share))
        loss(self.model, stretch, symbols, self.plan).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.steps += 1
        self.seconds += perf_counter() - began

    @torch.no_grad()
    def judge(self, text: Tensor) -> None:
        """Losses on held-out text, with exact attention and with the plan."""
        row = {"seconds": self.seconds, "steps": self.steps}
        for name, plan in (("exact", None), ("plan", self.plan)):
            losses = [loss(self.model, *drawn(text, -1 - place, place), plan) for place in range(JUDGED)]
            row[name] = float(torch.stack(losses).mean()) if name == "exact" or self.plan is not None else row["exact"]
        self.rows.append(row)

    def save(self, path: Path) -> None:
        tensors = {f"model.{name}": part for name, part in self.model.state_dict().items()}
        for number, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"state.{number}.{name}": part for name, part in state.items()}
        save_file({name: part.contiguous() for name, part in tensors.items()}, path.with_suffix(".safetensors"))
        write_json(path.parent, f"{path.name}.json", {"steps": self.steps, "seconds": self.seconds, "rows": self.rows})

    def load(self, path: Path) -> None:
        counts, tensors = read_json(path.parent, f"{path.name}.json"), load_file(path.with_suffix(".safetensors"))
        self.steps, self.seconds, self.rows = counts["steps"], counts["seconds"], counts["rows"]
        named = {name.removeprefix("model."): part for name, part in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(named)
        state: dict[int, dict[str, Tensor]] = {}
        for name, part in tensors.items():
            if name.startswith("state."):
                _, number, entry = name.split(".")
                state.setdefault(int(number), {})[entry] = part
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": state})


def drawn(text: Tensor, seed: int, place: int | None = None) -> tuple[Tensor, Tensor]:
    """A stretch (1, N), the `place`-th or a random one, and the same with words hidden."""
    generator = torch.Generator().manual_seed(seed + 2**40)
    start = int(torch.randint(len(text) - LENGTH, (), generator=generator)) if place is None else place * LENGTH
    stretch = text[None, start : start + LENGTH]
    return stretch, hidden(stretch, generator)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text", type=Path, required=True, help="what is learned, plain or .gz; its last tenth is held out"
    )
    parser.add_argument("--seconds", type=float, default=720.0, help="of steps, for each of the two")
    parser.add_argument("--stop", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--work", type=Path, default=Path("out/training"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        text = torch.tensor(list(read_text(options.text).encode()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if train(text, options.seconds, options.stop, options.work, options.out):
        save_picture(read_json(options.out, "training.json"), options.out / "training.png")
    return 0


def train(text: Tensor, whole: float, stop: float, work: Path, out: Path) -> bool:
    """Train both until each has spent `whole` seconds; false if `stop` seconds end first."""
    began, few = perf_counter(), fk.budget(SLOTS, cohorts=1).never_exact()
    runs = {"exact attention": Run(None), f"fk.budget({SLOTS}, cohorts=1)": Run(few)}
    work.mkdir(parents=True, exist_ok=True)
    paths = [work / f"{place}" for place in range(len(runs))]
    for path, run in zip(paths, runs.values(), strict=True):
        if path.with_suffix(".safetensors").is_file():
            run.load(path)
    last = max(len(text) * 9 // 10, LENGTH)
    seen, unseen = text[:last], text[last:]
    while any(run.seconds < whole for run in runs.values()):
        if perf_counter() - began > stop:
            return False
        run = min(runs.values(), key=lambda run: run.seconds)
        run.step(seen, whole)
        if run.seconds >= whole * (len(run.rows) + 1) / TIMES:
            run.judge(unseen)
            print(run.plan, run.rows[-1], flush=True)
            for path, each in zip(paths, runs.values(), strict=True):
                each.save(path)
    rows = {name: run.rows for name, run in runs.items()}
    sizes = {"length": LENGTH, "width": WIDTH, "heads": HEADS, "layers": LAYERS, "bytes": len(text)}
    out.mkdir(parents=True, exist_ok=True)
    write_json(out, "training.json", {"runs": rows, **sizes, "machine": machine(), "versions": versions()})
    return True


if __name__ == "__main__":
    sys.exit(main())
