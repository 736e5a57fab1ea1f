"""Decoders with few slots: perplexity of text and recall of pairs against the size of the cache, by method.

    python experiments/causal/run.py --text wikitext.txt.gz --out experiments/causal/results

Trains a language model of 2,048 tokens of context on the text and another on associative recall, both small, then
replaces the attention of every layer by each method at each number of slots. `--model DIR` judges a decoder-only
checkpoint of transformers on the text instead of the one trained here. Finished models and figures are in --work; a
stopped run goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds `experiments`

from experiments.causal.figure import save_figure, table
from experiments.causal.methods import METHODS, replaced
from experiments.causal.models import CONTEXT, recall_model, text_model, train
from experiments.causal.recall import Stage, draw, sequences
from experiments.value_aware.data import Batch, following, read, token_ids, windows
from experiments.value_aware.models import train_tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import read_json, write_json, write_whole
from fewkeys.integrations.loading import quiet

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What is trained and judged."""

    context: int = CONTEXT
    steps: int = 500
    batch: int = 2
    rate: float = 1.5e-3
    sequences: int = 8
    recall: tuple[tuple[Stage, float], ...] = (
        (Stage(32, 4, 12, 64, 1500), 1e-3),
        (Stage(96, 16, 32, 32, 500), 1e-3),
        (Stage(320, 32, 64, 8, 500), 1e-3),
        (Stage(1024, 48, 64, 2, 400), 5e-4),
        (Stage(2048, 64, 64, 2, 300), 5e-4),
    )
    recall_batches: int = 8
    slots: tuple[int, ...] = (64, 128, 256, 512)


QUICK = Settings(
    context=128,
    steps=2,
    batch=1,
    sequences=1,
    recall=((Stage(64, 4, 4, 2, 2), 1e-3),),
    recall_batches=1,
    slots=(32,),
)
"""For a look at whether everything runs; the figures mean nothing."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", required=True, help="text file, plain or .gz; repeatable")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, table.md and figure.png")
    parser.add_argument("--work", type=Path, default=Path("out/causal"), help="folder for models and finished figures")
    parser.add_argument("--model", type=Path, help="folder of a decoder-only checkpoint to judge on the text")
    parser.add_argument("--quick", action="store_true", help="seconds instead of an hour; the figures mean nothing")
    given = parser.parse_args(arguments)
    try:
        _run(given, QUICK if given.quick else Settings())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(given: argparse.Namespace, settings: Settings) -> None:
    learned, held = read(given.text)
    stated = {"settings": json.loads(json.dumps(asdict(settings))), "model": given.model and given.model.name}
    if (given.work / "run.json").is_file() and read_json(given.work, "run.json") != stated:
        raise ValueError(f"--work: {given.work} holds a run of other settings; choose another folder")
    write_json(given.work, "run.json", stated)
    model, tokenizer = _text_model(given, settings, learned)
    rows = token_ids(held, tokenizer)
    count = min(settings.sequences, len(rows) // settings.context)
    if not count:
        raise ValueError(f"--text: expected {settings.context} held-out tokens, got {len(rows)}; give more text")
    batches = [following(row[None]) for row in rows[: count * settings.context].view(count, -1)]
    text = _judge("text", model, batches, settings, given.work)
    generator = torch.Generator().manual_seed(7)
    last = settings.recall[-1][0]
    asked = [draw(last, generator) for _ in range(settings.recall_batches)]
    recall = _judge("recall", _recall_model(given.work, settings), asked, settings, given.work)
    results = {
        **stated,
        "tokens": {"learned": len(token_ids(learned, tokenizer)), "judged": count * settings.context},
        "text": text,
        "recall": recall,
        "versions": versions(),
        "machine": machine(),
    }
    write_json(given.out, "results.json", results)
    write_whole(given.out / "table.md", table(results))
    save_figure(results, given.out / "figure.png")
    _say(table(results))


def _text_model(given: argparse.Namespace, settings: Settings, learned: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    if given.model is not None:
        with quiet():
            try:
                tokenizer = AutoTokenizer.from_pretrained(given.model, local_files_only=True)
                return AutoModelForCausalLM.from_pretrained(given.model, local_files_only=True).eval(), tokenizer
            except OSError as error:
                raise ValueError(f"--model: cannot load {given.model} ({str(error).splitlines()[0]})") from None
    tokenizer, folder = train_tokenizer(learned), given.work / "text-model"
    if (folder / "model.safetensors").is_file():
        return LlamaForCausalLM.from_pretrained(folder).eval(), tokenizer
    model, generator = text_model(len(tokenizer)), torch.Generator().manual_seed(0)
    stream = windows(token_ids(learned, tokenizer), settings.context, settings.batch, generator)
    train(model, (following(rows) for rows in stream), settings.steps, settings.rate, partial(_say_of, "text"))
    model.save_pretrained(folder)
    return model, tokenizer


def _recall_model(work: Path, settings: Settings) -> Any:
    from transformers import LlamaForCausalLM

    folder = work / "recall-model"
    if (folder / "model.safetensors").is_file():
        return LlamaForCausalLM.from_pretrained(folder).eval()
    model, generator = recall_model(), torch.Generator().manual_seed(0)
    for stage, rate in settings.recall:
        say = partial(_say_of, f"recall over {stage.length} tokens")
        train(model, sequences(stage, generator), stage.steps, rate, say)
    model.save_pretrained(folder)
    return model


def _judge(name: str, model: Any, batches: list[Batch], settings: Settings, work: Path) -> list[dict[str, Any]]:
    """One row per method and number of slots, in the second half of the sequences, where caches are full."""
    rows = []
    for method in METHODS:
        for slots in settings.slots if method != "exact" else (0,):
            file = f"{name}-{method.replace(' ', '-').replace('+', 'and')}-{slots}.json"
            if not (work / file).is_file():
                sums = torch.zeros(3, dtype=torch.float64)
                with replaced(model, method, slots):
                    for batch in batches:
                        sums += _score(model, batch)
                total, right, loss = sums.tolist()
                row = {"method": method, "slots": slots, "accuracy": right / total, "loss": loss / total}
                write_json(work, file, {**row, "perplexity": math.exp(min(loss / total, 50.0)), "predictions": total})
                _say(f"{name}, {method}, {slots} slots: accuracy {right / total:.4f}, loss {loss / total:.4f}")
            rows.append(read_json(work, file))
    return rows


@torch.no_grad()
def _score(model: Any, batch: Batch) -> Tensor:
    """Number of predictions, number of right ones, sum of losses."""
    half = batch.ids.shape[1] // 2
    logits = model(batch.ids, use_cache=False).logits[:, half:].flatten(0, 1)
    labels = batch.labels[:, half:].flatten()
    logits, labels = logits[labels >= 0], labels[labels >= 0]
    loss = cross_entropy(logits, labels, reduction="sum")
    return torch.stack([torch.tensor(float(len(labels))), (logits.argmax(-1) == labels).sum(), loss]).double()


def _say_of(what: str, text: str) -> None:
    _say(f"{what}: {text}")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
