"""Machine translation with 1.5-entmax, its attention replaced by predicted graphs at test time.

    python experiments/sparsefinder/mt.py --data multi30k --target de --out experiments/sparsefinder/results/en-de

Trains a small encoder-decoder, fits Sparsefinder on the queries and keys of its encoder, its decoder and its
cross-attention, and compares the graphs of all methods with the gold graphs on the test split: recall against sparsity,
and BLEU where the attention of the encoder or of the decoder is replaced. `--data` is a folder with line-aligned files
`{train,val,test}*.{en,de}`, plain or .gz; `--dataset NAME:CONFIGURATION` takes one of `datasets` instead. Finished
steps are in --work; a stopped run goes on.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.sparsefinder import mt_data, mt_model, report, study
from experiments.sparsefinder.mt_data import Pairs
from experiments.sparsefinder.mt_judge import Judge
from experiments.sparsefinder.score import fronts

from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import read_json, write_json
from fewkeys.integrations.loading import quiet

PARTS = ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class Settings:
    """What is trained and judged."""

    vocabulary: int = 6000
    layers: int = 3
    steps: int = 3000
    batch: int = 128
    rate: float = 2e-3
    fit: study.Fit = field(default_factory=study.Fit)
    fit_pairs: int = 3000
    test_pairs: int = 1000
    graph_pairs: int = 300  # of the test split, for recall and sparsity
    every: int = 3  # BLEU for every so many values of a sweep


QUICK = Settings(600, 2, 2, 16, 2e-3, study.Fit(epochs=1, sample=256), 60, 20, 20, 10)
"""For a look at whether everything runs; the figures mean nothing."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--data", type=Path, help="folder of line-aligned text files")
    place.add_argument("--dataset", help="name, or NAME:CONFIGURATION, of a data set of the package datasets")
    parser.add_argument("--source", default="en", help="language translated from")
    parser.add_argument("--target", default="de", help="language translated into")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, table.md and figure.png")
    parser.add_argument(
        "--work", type=Path, default=Path("out/sparsefinder"), help="folder for models and finished steps"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of an hour; the figures mean nothing")
    given = parser.parse_args(arguments)
    try:
        _run(given, QUICK if given.quick else Settings())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(given: argparse.Namespace, settings: Settings) -> None:
    pair = f"{given.source}-{given.target}"
    if given.data is not None:
        splits = mt_data.read_folder(given.data, given.source, given.target)
    else:
        splits = mt_data.read_dataset(given.dataset, given.source, given.target)
    work = given.work / pair
    stated = {"pair": pair, "settings": asdict(settings), "train": len(splits["train"].source)}
    if (work / "run.json").is_file() and read_json(work, "run.json") != stated:
        raise ValueError(f"--work: {work} holds a run of other settings; choose another folder")
    write_json(work, "run.json", stated)
    tokenizer = mt_data.train_tokenizer(splits["train"], settings.vocabulary)
    model = _model(len(tokenizer), tokenizer, splits["train"], settings, work)
    test = splits["test"].first(settings.test_pairs)
    batch = partial(mt_data.even_batches, tokenizer)
    found, own = {}, {}
    for part in PARTS:
        say = study.said(_say, part)
        fit = (splits["train"].first(settings.fit_pairs), splits["val"].first(settings.fit_pairs // 10))
        learned = study.learn(
            model, part, *([b.inputs for b in batch(pairs, part)] for pairs in fit), settings.fit, work / part, say
        )
        own[part] = learned.families(settings.fit, blocks=False)
        inputs = [b.inputs for b in batch(test.first(settings.graph_pairs), part)]
        found[part] = study.points(model, part, inputs, own[part], work / part, say)
        learned.save(work / part)
    judge = Judge(model, tokenizer, test, own, work, _say)
    results = {
        **stated,
        "points": {part: [asdict(point) for point in fronts(points)] for part, points in found.items()},
        "task": judge.sweep(found, settings.every),
        "versions": versions(),
        "machine": machine(),
    }
    write_json(given.out, "results.json", results)
    report.write(results, given.out)
    _say(report.table(results))


def _model(vocabulary: int, tokenizer: Any, pairs: Pairs, settings: Settings, work: Path) -> Any:
    from transformers import MarianMTModel

    if not (work / "model" / "model.safetensors").is_file():
        model = mt_model.new_model(vocabulary, settings.layers)
        stream = mt_data.stream(tokenizer, pairs, settings.batch, torch.Generator().manual_seed(0))
        mt_model.train(model, stream, settings.steps, settings.rate, study.said(_say, "training"))
        with quiet():
            model.save_pretrained(work / "model")
    with quiet():
        return MarianMTModel.from_pretrained(work / "model").eval()


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
