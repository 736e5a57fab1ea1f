"""LevAttention in vision transformers: selection at inference only, and training with it.

    python experiments/levattention/vit.py --data mnist --folder MNIST --out experiments/levattention/results
    python experiments/levattention/vit.py --data digits --out experiments/levattention/results
    python experiments/levattention/vit.py --data imagefolder --folder IMAGENET --model ID_OR_DIR --out OUT

Every finished run is a file OUT/vit-DATA/RUN.json, and what is there is not run again. The table OUT/vit-DATA.json and
the figure OUT/vit-DATA.png are made from these files at the end. Set OMP_NUM_THREADS to the cores that may be used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import vit_data
from vit_plans import PLANS, TRAINED
from vit_report import report
from vit_study import inference
from vit_train import Recipe, accuracy, train, vit

from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "hidden_dropout_prob": 0.0,
    "num_channels": 1,
    "num_labels": 10,
    "initializer_range": 0.1,
}
"""The model that a CPU trains in minutes. With the usual initialisation, 0.02, so narrow a model hardly starts."""


@dataclass(frozen=True)
class Setting:
    """What is run on a data set. `main` is the k at which everything is trained with every seed."""

    recipe: Recipe
    counts: tuple[int, ...]
    main: int
    model: dict[str, Any]
    seeds: int = 3
    other_seeds: int = 1


SETTINGS = {
    "mnist": Setting(Recipe(6), (16, 32, 64, 128), 32, {**SIZES, "image_size": 28, "patch_size": 2}, 3, 3),
    "digits": Setting(Recipe(12, batch=32), (8, 16, 32), 16, {**SIZES, "image_size": 8, "patch_size": 1}, 3, 3),
    "imagefolder": Setting(Recipe(90, batch=128, rate=1e-3), (16, 32, 64, 128), 32, {}),
}
WARM = 0.15


@dataclass(frozen=True)
class Run:
    """One model: trained with full attention (selector "softmax") or with a selection at top-k, tested the same way."""

    selector: str
    k: int | None
    seed: int
    warm: float = 0.0

    @property
    def name(self) -> str:
        words = [self.selector.replace(" + ", "+").replace(" ", "-")]
        words += [] if self.k is None else [str(self.k)]
        words += ["warm"] if self.warm else []
        return "-".join([*words, f"seed{self.seed}"])


def main() -> int:
    """Exit status 2 and one line on bad input."""
    options = _options()
    try:
        _run_all(options)
    except ValueError as error:
        print(f"vit.py: {error}", file=sys.stderr)
        return 2
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=SETTINGS, required=True)
    parser.add_argument("--folder", type=Path, help="mnist: the IDX .gz files; imagefolder: one folder per class")
    parser.add_argument("--model", help="imagefolder: a ViT checkpoint of transformers, a folder or a name on the hub")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", action="store_true", help="imagefolder: train from scratch too (FOLDER/train, /val)")
    parser.add_argument("--seeds", type=int, help="seeds of the softmax models and of the main k")
    parser.add_argument("--other-seeds", type=int, help="seeds of everything else that is trained")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoints", type=Path, help="keep the softmax-trained models in this folder")
    options = parser.parse_args()
    for name in ("seeds", "other_seeds", "epochs"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(options, name)}")
    if options.folder is None and options.data != "digits":
        parser.error(f"--folder: needed with --data {options.data}")
    if (options.model is None) == (options.data == "imagefolder"):
        parser.error("--model: expected with --data imagefolder, and only there")
    return options


def _runs(setting: Setting, train_too: bool, seeds: int, other_seeds: int) -> Iterator[Run]:
    """All runs, those first that the conclusions rest on."""
    for seed in range(seeds):
        yield Run("softmax", None, seed)
        yield from (Run(name, setting.main, seed) for name in TRAINED if train_too)
    if not train_too:
        return
    for seed in range(other_seeds):
        yield Run("leverage", setting.main, seed, WARM)
        yield Run("leverage + window", setting.main, seed)
    for k in setting.counts:
        if k != setting.main:
            yield from (Run(name, k, seed) for seed in range(other_seeds) for name in TRAINED)


def _run_all(options: argparse.Namespace) -> None:
    setting = SETTINGS[options.data]
    recipe = Recipe(**{**asdict(setting.recipe), **({"epochs": options.epochs} if options.epochs else {})})
    pretrained = options.data == "imagefolder"
    seeds = options.seeds or (1 if pretrained and not options.train else setting.seeds)
    runs = list(_runs(setting, options.train or not pretrained, seeds, options.other_seeds or setting.other_seeds))
    folder = options.out / f"vit-{options.data}"
    stated = {"recipe": asdict(recipe), "model": setting.model, "checkpoint": options.model, "train": options.train}
    for number, run in enumerate(runs):
        path = folder / f"{run.name}.json"
        if path.exists():
            if json.loads(path.read_text(encoding="utf-8"))["settings"] != stated:
                raise ValueError(f"--out: {path} was made with other settings; use another folder, or delete it")
            continue
        show = _Progress(f"[{number + 1}/{len(runs)}] {run.name}")
        where = {"machine": machine(), "versions": versions()}
        record = {**asdict(run), "settings": stated, **_one(run, options, setting, recipe, show), **where}
        write_json(
            folder,
            path.name,
            {**record, "machine": machine(), "versions": versions()},
        )
        show.finish(f"accuracy {record['accuracy']:.4f}")
    print(report(options.out, options.data, [folder / f"{run.name}.json" for run in runs]))


def _one(run: Run, options: argparse.Namespace, setting: Setting, recipe: Recipe, show: _Progress) -> dict[str, Any]:
    """Make, train and test one model."""
    if options.data == "imagefolder":
        return _one_of_checkpoint(run, options, setting, recipe, show)
    from transformers import ViTConfig

    training, test = vit_data.mnist(options.folder) if options.data == "mnist" else vit_data.digits(run.seed)
    model = vit(run.seed, ViTConfig(**setting.model)).to(options.device)
    return _trained(run, model, training, test, options, setting, recipe, show)


def _one_of_checkpoint(
    run: Run, options: argparse.Namespace, setting: Setting, recipe: Recipe, show: _Progress
) -> dict[str, Any]:
    """The checkpoint as it is; or, with --train, a model of its configuration trained from scratch."""
    from transformers import AutoConfig, AutoModelForImageClassification

    try:
        config = AutoConfig.from_pretrained(options.model)
        training, test = vit_data.image_folder(options.folder, config, options.model)
        if options.train:
            if training is None:
                raise ValueError("--train: expected the folders train and val in --folder")
            model = vit(run.seed, config).to(options.device)
            return _trained(run, model, training, test, options, setting, recipe, show)
        model = AutoModelForImageClassification.from_pretrained(options.model)
    except OSError as error:
        raise ValueError(f"--model: {options.model} cannot be loaded ({' '.join(str(error).split())[:200]})") from None
    model = model.eval().to(options.device)
    rows = inference(model, test, setting.counts, run.seed, show)
    return {"accuracy": accuracy(model, test, None, run.seed), "inference": rows}


def _trained(
    run: Run,
    model: Any,
    training: vit_data.Images,
    test: vit_data.Images,
    options: argparse.Namespace,
    setting: Setting,
    recipe: Recipe,
    show: _Progress,
) -> dict[str, Any]:
    plan = None if run.k is None else PLANS[run.selector](run.k)
    found = train(model, training, recipe, run.seed, plan=plan, warm=run.warm, report=show.epoch)
    found["accuracy"] = accuracy(model, test, plan, run.seed)
    if plan is None:
        if options.checkpoints is not None:
            model.save_pretrained(options.checkpoints / f"vit-{options.data}-{run.name}")
        found["inference"] = inference(model, test, setting.counts, run.seed, show)
    return found


class _Progress:
    """One line per run, rewritten where the output is a terminal."""

    def __init__(self, name: str) -> None:
        self.name, self.began, self.live = name, time.monotonic(), sys.stderr.isatty()

    def __call__(self, what: str) -> None:
        if self.live:
            print(f"\r\033[K{self.name}: {what}, {time.monotonic() - self.began:.0f} s", end="", file=sys.stderr)

    def epoch(self, number: int, loss: float) -> None:
        self(f"epoch {number}, loss {loss:.3f}")

    def finish(self, what: str) -> None:
        start = "\r\033[K" if self.live else ""
        print(f"{start}{self.name}: {what}, {time.monotonic() - self.began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
