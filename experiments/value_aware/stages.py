"""Training, one stage per model and kernel: each finished stage is kept in the work folder and never repeated."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from experiments.value_aware import models
from experiments.value_aware.data import Batch, following, masked, token_ids, windows

import fewkeys as fk
from fewkeys.core.files import read_json, write_json
from fewkeys.core.weights import Weights
from fewkeys.integrations.loading import quiet

KERNELS: Mapping[str, Weights] = {"softmax": fk.Softmax(), "elu": fk.weights.Elu(), "relu": fk.weights.Relu()}
"""exp(x), elu(x) + 1 and max(0, x)."""
MODELS = ("encoder", "lm")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Everything that decides a trained model or a figure, beside the text."""

    length: int = 128
    batch: int = 16
    head_steps: int = 200  # of the encoder with softmax, from a new head
    kernel_steps: int = 150  # of the encoder with each kernel, from the model before
    lm_steps: int = 450
    mask_share: float = 0.25  # of the encoder's tokens, in training and in the test
    sequences: int = 32  # for errors of the model
    error_sequences: int = 4  # for errors of the output
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # r; Dv + 1 is always added
    gap_sizes: tuple[int, ...] = (2, 4, 8, 16)  # r at which the quick solvers are held against the best


def prepare(settings: Settings, checkpoint: Path | None, train: str, work: Path, say: Say) -> None:
    """Train whatever the work folder lacks: the tokenizer of the language model, and every model with every kernel."""
    keeper = Keeper(work)
    if not keeper.has("lm-tokenizer"):
        keeper.keep("lm-tokenizer", models.train_tokenizer(train), {})
    for name in KERNELS:
        _encoder(settings, checkpoint, train, keeper, name, say)
    for name in KERNELS:
        _language_model(settings, train, keeper, name, say)


class Keeper:
    """Finished stages as folders of safetensors and JSON, moved into place whole."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def has(self, stage: str) -> bool:
        return (self.work / stage).is_dir()

    def keep(self, stage: str, thing: Any, record: Mapping[str, Any]) -> None:
        draft = self.work / f".{stage}"
        shutil.rmtree(draft, ignore_errors=True)
        with quiet():
            thing.save_pretrained(draft)
        write_json(draft, "record.json", record)
        draft.rename(self.work / stage)

    def record(self, stage: str) -> dict[str, Any]:
        """What was noted when the stage was finished."""
        found: dict[str, Any] = read_json(self.work / stage, "record.json")
        return found

    def model(self, stage: str) -> Any:
        from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

        kind = AutoModelForCausalLM if stage.startswith("lm") else AutoModelForMaskedLM
        with quiet():
            return kind.from_pretrained(self.work / stage, use_safetensors=True, local_files_only=True).eval()

    def tokenizer(self, stage: str) -> Any:
        from transformers import AutoTokenizer

        with quiet():
            return AutoTokenizer.from_pretrained(self.work / stage, local_files_only=True)


def _encoder(settings: Settings, checkpoint: Path | None, text: str, keeper: Keeper, kernel: str, say: Say) -> None:
    """The encoder with one kernel, fine-tuned from the encoder that learned its head (or came with one)."""
    if keeper.has(f"encoder-{kernel}"):
        return
    model, tokenizer = models.load_encoder(checkpoint)
    if checkpoint is None:
        if not keeper.has("encoder-head"):
            batches = _masked_batches(settings, text, tokenizer, 0)
            _train(keeper, "encoder-head", model, batches, "softmax", settings.head_steps, 5e-4, say)
        model = keeper.model("encoder-head")
    if not keeper.has("encoder-tokenizer"):
        keeper.keep("encoder-tokenizer", tokenizer, {})
    batches = _masked_batches(settings, text, tokenizer, 1)
    _train(keeper, f"encoder-{kernel}", model, batches, kernel, settings.kernel_steps, 3e-4, say)


def _masked_batches(settings: Settings, text: str, tokenizer: Any, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    with quiet():
        ids = token_ids(text, tokenizer)
    rows = windows(ids, settings.length - 2, settings.batch, generator)
    return (masked(part, tokenizer, settings.mask_share, generator) for part in rows)


def _language_model(settings: Settings, text: str, keeper: Keeper, kernel: str, say: Say) -> None:
    if keeper.has(f"lm-{kernel}"):
        return
    ids = token_ids(text, keeper.tokenizer("lm-tokenizer"))
    rows = windows(ids, settings.length, settings.batch, torch.Generator().manual_seed(2))
    model = models.new_language_model(settings.length)
    _train(keeper, f"lm-{kernel}", model, map(following, rows), kernel, settings.lm_steps, 3e-3, say)


def _train(
    keeper: Keeper, stage: str, model: Any, batches: Iterator[Batch], kernel: str, steps: int, rate: float, say: Say
) -> None:
    losses = models.train(model, batches, KERNELS[kernel], steps, rate, lambda text: say(f"{stage}: {text}"))
    last = losses[-max(1, len(losses) // 10) :]
    keeper.keep(stage, model, {"steps": steps, "rate": rate, "final_training_loss": sum(last) / len(last)})
