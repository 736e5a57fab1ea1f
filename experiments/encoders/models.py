"""The encoders, the inputs of each, and captures of their queries, keys and values."""

from __future__ import annotations

import re
import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from experiments.decoders.decoder import read_text
from torch import Tensor

import fewkeys as fk
from fewkeys.captures import Capture
from fewkeys.demo import model_folder
from fewkeys.integrations.loading import quiet
from fewkeys.integrations.text import batches
from fewkeys.integrations.transformers import load_model

STRETCHES = 2
"""Pieces of a text or a recording that each model reads."""
IMAGES = 32
HERE = Path(__file__).parent
TOKEN = re.compile(r"\[[^]]+]|Br|Cl|>>|%\d\d|.")
"""A token of a reaction in SMILES."""

Paths = Mapping[str, Path]
Inputs = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Encoder:
    """One model. `needs` names the files it reads; `read(paths, length)` gives the model and its batches.

    `layers` are those that are judged: heads of every depth, but not all, since time is limited.
    """

    title: str
    needs: tuple[str, ...]
    lengths: tuple[int, ...]
    layers: tuple[int, ...]
    read: Callable[[Paths, int], tuple[Any, Inputs]]
    part: Literal["encoder"] | None = None


def text(folder: str | None) -> Callable[[Paths, int], tuple[Any, Inputs]]:
    """A text encoder: one sequence of `length` tokens from the start of each of `STRETCHES` equal parts of the text."""

    def read(paths: Paths, length: int) -> tuple[Any, Inputs]:
        model, tokenizer = load_model(model_folder() if folder is None else paths[folder])
        words = read_text(paths["text"])
        size = len(words) // STRETCHES
        parts = [words[i * size : (i + 1) * size] for i in range(STRETCHES)]
        ids = [batches([part], tokenizer, sequences=1, length=length)[0] for part in parts]
        return model, [{"input_ids": torch.cat(ids)}]

    return read


def whisper(paths: Paths, length: int) -> tuple[Any, Inputs]:
    """Whisper's encoder on pieces of `length` frames of 20 ms, spread over a recording of 30 seconds.

    A shorter crop gets the first `length` positions, as in runtimes of Whisper with a shorter context.
    """
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    with quiet():
        model = WhisperForConditionalGeneration.from_pretrained(paths["whisper"], dtype=torch.float32).eval()
    features = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    with wave.open(str(paths["speech"])) as file:
        sound = torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16).float() / 32768
    mel = features(sound.numpy(), sampling_rate=16000, return_tensors="pt").input_features
    encoder = model.get_encoder()
    encoder.config.max_source_positions = length
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(encoder.embed_positions.weight[:length])
    frames = mel.shape[-1] // 2
    count = frames // length
    starts = [(frames - length) * i // max(1, count - 1) for i in range(count)]
    return model, [{"input_features": torch.cat([mel[..., 2 * i : 2 * (i + length)] for i in starts])}]


def vit(folder: str, data: Literal["mnist", "digits"]) -> Callable[[Paths, int], tuple[Any, Inputs]]:
    """A vision transformer on the last images of the test set that `experiments.levattention` tests it on."""

    def read(paths: Paths, length: int) -> tuple[Any, Inputs]:
        from experiments.levattention import vit_data
        from transformers import AutoModelForImageClassification

        with quiet():
            model = AutoModelForImageClassification.from_pretrained(paths[folder]).eval()
        images = (vit_data.mnist(paths["mnist"]) if data == "mnist" else vit_data.digits(0))[1]
        return model, [{"pixel_values": images.pixels[-IMAGES:]}]

    return read


def albert(paths: Paths, length: int) -> tuple[Any, Inputs]:
    """RXNMapper's ALBERT on mixtures: the reactants of several reactions, an arrow, their products."""
    from transformers import AlbertModel

    with quiet():
        model = AlbertModel.from_pretrained(paths["rxnmapper"]).eval()
    names = (paths["rxnmapper"] / "vocab.txt").read_text().splitlines()
    place = {name: i for i, name in enumerate(names)}
    lines = (HERE / "reactions.txt").read_text().split()
    rows = []
    for i in range(STRETCHES):
        order = [lines[(i * len(lines) // STRETCHES + j) % len(lines)] for j in range(len(lines))]
        count = next(n for n in range(1, len(order) + 1) if len(_mixture(order[:n])) >= length - 2)
        inside = [place.get(token, place["[UNK]"]) for token in _mixture(order[:count])[: length - 2]]
        rows.append([place["[CLS]"], *inside, place["[SEP]"]])
    return model, [{"input_ids": torch.tensor(rows)}]


def _mixture(reactions: list[str]) -> list[str]:
    """The tokens of all reactants and, behind the arrow, of all products."""
    sides = [line.split(">>") for line in reactions]
    return TOKEN.findall(">>".join(".".join(side[part] for side in sides) for part in (0, 1)))


ENCODERS = {
    "minilm": Encoder("all-MiniLM-L6-v2, English", ("text",), (128, 256, 512), tuple(range(6)), text(None)),
    "mpnet": Encoder(
        "all-mpnet-base-v2, English", ("mpnet", "text"), (128, 256, 512), (0, 2, 4, 6, 8, 11), text("mpnet")
    ),
    "twin": Encoder(
        "MiniLM trained to fill in masked words, English",
        ("twin", "text"),
        (128, 256, 512),
        tuple(range(6)),
        text("twin"),
    ),
    "whisper": Encoder(
        "Whisper-base's encoder, speech", ("whisper", "speech"), (500, 1000, 1500), tuple(range(6)), whisper, "encoder"
    ),
    "vit": Encoder("a vision transformer, MNIST", ("vit", "mnist"), (197,), tuple(range(3)), vit("vit", "mnist")),
    "digits": Encoder(
        "a vision transformer, small digits", ("digits",), (65,), tuple(range(3)), vit("digits", "digits")
    ),
    "albert": Encoder("RXNMapper's ALBERT, reactions", ("rxnmapper",), (128, 256, 512), (0, 2, 4, 6, 8, 11), albert),
}


def captured(name: str, length: int, paths: Paths, work: Path) -> Capture:
    """The capture of an encoder on inputs of this length, kept in the folder `work` once it is made.

    Raises `ValueError` where a file that the encoder needs is missing.
    """
    folder = work / f"{name}-{length}"
    if (folder / "capture.json").is_file():
        return Capture.load(folder)
    encoder = ENCODERS[name]
    if missing := [need for need in encoder.needs if need not in paths]:
        raise ValueError(f"--files: expected {', '.join(f'{need}=PATH' for need in missing)} for {name}")
    model, inputs = encoder.read(paths, length)
    work.mkdir(parents=True, exist_ok=True)
    return fk.capture(model, inputs, folder, part=encoder.part)
