"""Masked language modelling with 1.5-entmax, its attention replaced by predicted graphs at test time.

    python experiments/sparsefinder/mlm.py --text wikitext.txt.gz --out experiments/sparsefinder/results/mlm

Gives all-MiniLM-L6-v2 (or the BERT-type encoder in --model) a masked-language-model head and trains it with dense
1.5-entmax on the text; fits Sparsefinder on its queries and keys; compares the graphs of all methods with the gold
graphs on the held-out end of the text, recall against sparsity, and accuracy and perplexity of masked tokens with the
attention of every layer replaced. Finished steps are in --work; a stopped run goes on. `--softmax` trains the model's
twin into --work, the same but for softmax in place of entmax, and ends there.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.sparsefinder import report, study
from experiments.sparsefinder.dense import dense_entmax
from experiments.sparsefinder.methods import Family
from experiments.sparsefinder.score import Point, fronts
from experiments.value_aware.data import Batch, masked, read, token_ids, windows
from experiments.value_aware.models import judge, load_encoder, logits
from torch import Tensor
from torch.nn.functional import cross_entropy

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import read_json, write_json
from fewkeys.integrations.loading import quiet
from fewkeys.select import Selector

WINDOW = 3
"""The window beside every method where the task is judged; of the family "window" every size is judged."""
LOSSES = (0.5, 1.0, 2.0, 5.0)
"""Points of accuracy that a method may cost in the table."""


@dataclass(frozen=True)
class Settings:
    """What is trained and judged."""

    length: int = 128
    batch: int = 16
    steps: int = 300
    rate: float = 5e-4
    mask_share: float = 0.15
    fit: study.Fit = field(default_factory=study.Fit)
    fit_windows: int = 320
    graph_windows: int = 16
    test_windows: int = 48
    every: int = 4


QUICK = Settings(32, 2, 2, 5e-4, 0.15, study.Fit(epochs=1, sample=256), 40, 2, 2, 10)
"""For a look at whether everything runs; the figures mean nothing."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", required=True, help="text file, plain or .gz; repeatable")
    parser.add_argument("--model", type=Path, help="folder of a BERT-type checkpoint with its tokenizer")
    parser.add_argument("--out", type=Path, help="folder for results.json, table.md and figure.png")
    parser.add_argument("--work", type=Path, default=Path("out/sparsefinder/mlm"), help="folder for finished steps")
    parser.add_argument("--softmax", action="store_true", help="only train the twin, with softmax: WORK/model")
    parser.add_argument("--quick", action="store_true", help="a minute instead of an hour; the figures mean nothing")
    given = parser.parse_args(arguments)
    if given.out is None and not given.softmax:
        parser.error("--out: expected a folder for results, got none")
    try:
        _run(given, QUICK if given.quick else Settings())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(given: argparse.Namespace, settings: Settings) -> None:
    learned, held = read(given.text)
    work = given.work
    stated = {"settings": asdict(settings), "model": given.model and given.model.name}
    stated |= {"softmax": True} if given.softmax else {}
    if (work / "run.json").is_file() and read_json(work, "run.json") != stated:
        raise ValueError(f"--work: {work} holds a run of other settings; choose another folder")
    write_json(work, "run.json", stated)
    model, tokenizer = _model(given.model, settings, learned, work, nullcontext if given.softmax else dense_entmax)
    if given.softmax:
        return
    with quiet():
        train, test = (_rows(text, tokenizer, settings) for text in (learned, held))
    if len(test) < settings.graph_windows or len(train) < settings.fit_windows * 1.1:
        raise ValueError(f"--text: expected more text, got {len(train)} windows to learn from and {len(test)} held out")
    fit = train[:: max(1, len(train) // (settings.fit_windows * 11 // 10))]
    say = study.said(_say, "encoder")
    split = settings.fit_windows
    batches = [_inputs(rows, tokenizer, settings) for rows in (fit[:split], fit[split : split + split // 10])]
    found = study.learn(model, None, *batches, settings.fit, work, say)
    own = found.families(settings.fit, blocks=True)
    points = study.points(model, None, _inputs(test[: settings.graph_windows], tokenizer, settings), own, work, say)
    found.save(work)
    batch = masked(test[: settings.test_windows], tokenizer, settings.mask_share, torch.Generator().manual_seed(7))
    results = {
        **stated,
        "points": {"encoder": [asdict(point) for point in fronts(points)]},
        "task": _task(model, batch, own, points, settings, work),
        "versions": versions(),
        "machine": machine(),
    }
    write_json(given.out, "results.json", results)
    report.write(results, given.out)
    _say(report.table(results))


def _model(
    folder: Path | None, settings: Settings, text: str, work: Path, attention: Callable[[Any], AbstractContextManager]
) -> tuple[Any, Any]:
    """The masked language model, trained under `attention(model)`, and its tokenizer."""
    from transformers import AutoModelForMaskedLM

    model, tokenizer = load_encoder(folder)
    if not (work / "model" / "model.safetensors").is_file():
        generator = torch.Generator().manual_seed(0)
        with quiet():
            ids = token_ids(text, tokenizer)
        optimiser = torch.optim.AdamW(model.parameters(), settings.rate, betas=(0.9, 0.98), weight_decay=0.01)
        warm = max(1, settings.steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda s: min((s + 1) / warm, max(0.0, (settings.steps - s) / (settings.steps - warm + 1)))
        )
        start, recent = perf_counter(), []
        with attention(model):
            for step, rows in zip(
                range(settings.steps), windows(ids, settings.length - 2, settings.batch, generator), strict=False
            ):
                batch = masked(rows, tokenizer, settings.mask_share, generator)
                loss = cross_entropy(*logits(model, batch))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimiser.step()
                schedule.step()
                optimiser.zero_grad(set_to_none=True)
                recent.append(float(loss.detach()))
                if step % 10 == 9:
                    mean = sum(recent[-10:]) / 10
                    _say(f"training: step {step + 1}/{settings.steps}, loss {mean:.3f}, {perf_counter() - start:.0f} s")
        with quiet():
            model.save_pretrained(work / "model")
            tokenizer.save_pretrained(work / "model")
    with quiet():
        return AutoModelForMaskedLM.from_pretrained(work / "model", local_files_only=True).eval(), tokenizer


def _rows(text: str, tokenizer: Any, settings: Settings) -> Tensor:
    """All of the text in windows (W, length - 2); the special tokens come later."""
    ids = token_ids(text, tokenizer)
    inside = settings.length - 2
    return ids[: len(ids) // inside * inside].view(-1, inside)


def _inputs(rows: Tensor, tokenizer: Any, settings: Settings) -> list[Mapping[str, Tensor]]:
    """Batches as the model sees them when it is judged: with masked tokens."""
    batch = masked(rows, tokenizer, settings.mask_share, torch.Generator().manual_seed(3))
    return [{"input_ids": ids} for ids in batch.ids.split(8)]


def _task(
    model: Any, batch: Batch, own: Mapping[str, Family], points: list[Point], settings: Settings, work: Path
) -> dict[str, Any]:
    """Accuracy and perplexity with full attention and with every `every`-th value of every family that is drawn."""
    done: dict[str, list[float]] = read_json(work, "task.json") if (work / "task.json").is_file() else {}
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers

    def judged(label: str, keep: list[Selector | None]) -> list[float]:
        if label not in done:
            plan = fk.ModelPlan(tuple((fk.Plan(own, weights=fk.weights.Entmax(study.ALPHA)),) * heads for own in keep))
            sums = torch.zeros(3, dtype=torch.float64)
            with fk.apply(model, plan, impl="reference"):
                for ids, labels in zip(batch.ids.split(16), batch.labels.split(16), strict=True):
                    found = judge(model, Batch(ids, labels))
                    sums += torch.tensor([sum(found[name]) for name in ("count", "right", "loss")])
            count, right, loss = sums.tolist()
            done[label] = [100 * right / count, math.exp(loss / count)]
            write_json(work, "task.json", done)
            _say(f"accuracy {done[label][0]:.2f} %, perplexity {done[label][1]:.2f}: {label}")
        return done[label]

    exact = judged("exact", [None] * layers)
    rows = []
    for point in points:
        if point.family not in report.LOOKS:
            continue
        family = own[point.family]
        number = [str(value) for value in family.values].index(point.value)
        if point.window != WINDOW and (point.family != "window" or not point.window):
            continue
        if number % settings.every:
            continue
        found = [family.make(layer, family.values[number]) for layer in range(layers)]
        near = fk.Window(point.window)
        keep: list[Selector | None] = [near if selector is None else selector | near for selector in found]
        score = judged(f"{point.family}/{point.value}/{point.window}", keep)
        rows.append({"replaced": "encoder", **asdict(point), "score": score[0], "perplexity": score[1]})
    return {
        "measure": "accuracy of masked tokens, %", "losses": LOSSES, "exact": exact[0], "perplexity": exact[1],
        "rows": rows,
    }  # fmt: skip


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
