"""Images and labels: MNIST files, scikit-learn's digits, and folders of images with one folder per class."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

MNIST_TRAIN = 8000
"""The first so many of the 10,000 images are for training, the rest for testing."""
IMAGENET = (0.5, 0.5, 0.5)
"""Mean and deviation of the channels that ViT checkpoints expect, where they do not say."""
SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}


class Images(Protocol):
    """A labelled set of images."""

    size: int

    def load(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels (B, C, H, W), normalised, and labels (B,)."""


@dataclass(frozen=True)
class Stored:
    """Images that fit in memory: pixels (N, C, H, W), labels (N,)."""

    pixels: Tensor
    labels: Tensor

    @property
    def size(self) -> int:
        return len(self.labels)

    def load(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.pixels[index], self.labels[index]


@dataclass(frozen=True)
class Filed:
    """Images read from their files when they are asked for."""

    paths: list[Path]
    labels: Tensor
    side: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.paths)

    def load(self, index: Tensor) -> tuple[Tensor, Tensor]:
        pixels = torch.stack([self._pixels(self.paths[i]) for i in index.tolist()])
        mean, deviation = (torch.tensor(v).view(1, -1, 1, 1) for v in (self.mean, self.deviation))
        return (pixels - mean) / deviation, self.labels[index]

    def _pixels(self, path: Path) -> Tensor:
        """The middle square of the image, (C, side, side) in [0, 1]."""
        import numpy as np
        from PIL import Image, ImageOps

        try:
            with Image.open(path) as file:
                image = ImageOps.fit(file.convert("RGB"), (self.side, self.side), Image.Resampling.BICUBIC)
        except OSError as error:
            raise ValueError(f"--folder: {path} cannot be read as an image ({error})") from None
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def shuffled(images: Images, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Pixels and labels batch by batch, in a new order; what does not fill a batch is left out."""
    order = torch.randperm(images.size, generator=generator)
    for index in order[: max(1, images.size // size) * size].split(size):
        yield images.load(index)


def mnist(folder: Path) -> tuple[Stored, Stored]:
    """Training and test images of the 10,000 in the IDX files of the MNIST test set."""
    pixels = _idx(folder / "t10k-images-idx3-ubyte.gz", 3).unsqueeze(1).float() / 255
    labels = _idx(folder / "t10k-labels-idx1-ubyte.gz", 1).long()
    if len(pixels) != len(labels) or len(labels) <= MNIST_TRAIN:
        raise ValueError(f"--folder: expected 10,000 images and labels, got {len(pixels)} and {len(labels)}")
    return _standardised(pixels, labels, torch.arange(len(labels)), MNIST_TRAIN)


def digits(seed: int) -> tuple[Stored, Stored]:
    """Three quarters of scikit-learn's 1,797 digits for training, the rest for testing, split by `seed`."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels, labels = torch.from_numpy(found.images).float().unsqueeze(1), torch.from_numpy(found.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return _standardised(pixels, labels, order, len(labels) * 3 // 4)


def image_folder(folder: Path, config: Any, model: str) -> tuple[Filed | None, Filed]:
    """Training images (None without FOLDER/train) and test images: FOLDER/val, or FOLDER itself.

    Labels are those of the checkpoint where it knows the folders' names, else the rank of the name, as ImageNet has it.
    """
    trained = folder / "train" if (folder / "train").is_dir() and (folder / "val").is_dir() else None
    test = folder / "val" if trained else folder
    mean, deviation = _normalisation(model)
    sets = [None if part is None else _files(part, config, mean, deviation) for part in (trained, test)]
    return sets[0], sets[1]  # type: ignore[return-value]


def _idx(path: Path, rank: int) -> Tensor:
    """An IDX file of bytes: a magic number, `rank` sizes, the entries."""
    import numpy as np

    try:
        data = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"--folder: expected {path.name} in {path.parent}, which is not there") from None
    except (OSError, EOFError) as error:
        raise ValueError(f"--folder: {path} cannot be unpacked ({error})") from None
    head = np.frombuffer(data[: 4 * (rank + 1)], dtype=">u4").astype(int)
    body = np.frombuffer(data, dtype=np.uint8, offset=min(len(data), 4 * (rank + 1)))
    if len(head) <= rank or head[0] != 0x800 + rank or body.size != head[1:].prod():
        raise ValueError(f"--folder: expected {path} to be an IDX file of bytes with {rank} dimensions")
    return torch.from_numpy(body.reshape(head[1:]).copy())


def _standardised(pixels: Tensor, labels: Tensor, order: Tensor, train: int) -> tuple[Stored, Stored]:
    first, second = order[:train], order[train:]
    mean, deviation = pixels[first].mean(), pixels[first].std()
    pixels = (pixels - mean) / deviation
    return Stored(pixels[first], labels[first]), Stored(pixels[second], labels[second])


def _files(folder: Path, config: Any, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Filed:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not names:
        raise ValueError(f"--folder: expected one folder per class in {folder}, got none")
    known = config.label2id or {}
    if all(name in known for name in names):
        label = {name: int(known[name]) for name in names}
    elif len(names) == config.num_labels:
        label = {name: rank for rank, name in enumerate(names)}
    else:
        raise ValueError(
            f"--folder: expected {config.num_labels} class folders, or folders named as the checkpoint's labels, "
            f"got {len(names)} in {folder}"
        )
    found = [(path, label[name]) for name in names for path in sorted((folder / name).iterdir())]
    found = [(path, own) for path, own in found if path.suffix.lower() in SUFFIXES]
    if not found:
        raise ValueError(f"--folder: expected images ({', '.join(sorted(SUFFIXES))}) in the folders of {folder}")
    if config.num_channels != 3:
        raise ValueError(f"--model: expected a checkpoint for 3 channels, got {config.num_channels}")
    side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    return Filed([path for path, _ in found], torch.tensor([own for _, own in found]), side, mean, deviation)


def _normalisation(model: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the channels, from the checkpoint's preprocessor_config.json."""
    from transformers.utils import cached_file

    found = cached_file(model, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    stated = json.loads(Path(found).read_text(encoding="utf-8")) if found else {}
    return tuple(stated.get("image_mean", IMAGENET)), tuple(stated.get("image_std", IMAGENET))
