"""The inputs on which rivals are compared: queries, keys, values and a scale, drawn or captured.

minilm: all layers and heads of all-MiniLM-L6-v2 on 512 tokens; minilm-4096, minilm-16384: four heads of its middle
layer, sequences of 512 joined end to end. normal-N: independent normal numbers, WildCat's benchmark, with 4 heads for
its 32. t2t-N: the N-token stage of T2T-ViT's first blocks on a photograph; biggan: the shape of BigGAN's attention,
64 x 64 queries, a quarter as many keys, scale 1. The weights of these two are not available: projections are random,
and scores are stretched to a standard deviation of 2, so that attention is about as sharp as MiniLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import layer_norm, max_pool2d, unfold

from fewkeys.core.tensor_files import loaded

SHARPNESS = 2.0


@dataclass(frozen=True, eq=False)
class Problem:
    """query (B, H, N, D), key (B, H, M, D), value (B, H, M, Dv)."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


def load(name: str, text: Path | None, work: Path) -> Problem:
    """The problem of that name, stored in the folder `work` at the first call. `text`: what MiniLM reads; None: the
    demo's text.
    """
    if name not in SETTINGS:
        raise ValueError(f"--setting: expected one of {', '.join(SETTINGS)}, got {name}")
    path = work / f"{name}{'' if text is None else '-' + text.name}.safetensors"
    if not path.is_file():
        made = SETTINGS[name](text)
        work.mkdir(parents=True, exist_ok=True)
        parts = {"query": made.query, "key": made.key, "value": made.value, "scale": torch.tensor(made.scale)}
        save_file({part: tensor.float().contiguous() for part, tensor in parts.items()}, path)
    stored = loaded(path)
    return Problem(stored["query"], stored["key"], stored["value"], float(stored["scale"]))


def _minilm(text: Path | None, sequences: int, length: int | None) -> Problem:
    """All layers as a batch on one sequence; with `length`, four heads of the middle layer on that many tokens."""
    from experiments.decoders.decoder import read_text

    import fewkeys as fk
    import fewkeys.demo as demo
    from fewkeys.bench.long_inputs import captured_inputs
    from fewkeys.integrations.text import batches
    from fewkeys.integrations.transformers import load_model

    model, tokenizer = load_model(str(demo.model_folder()))
    tokens = batches([read_text(text or demo.TEXT)], tokenizer, sequences=sequences, length=512)
    capture = fk.capture(model, [{"input_ids": ids} for ids in tokens])
    if length is not None:
        draw = captured_inputs(capture, dtype=torch.float32)
        return Problem(*draw(length, 4))
    calls = [next(iter(capture.calls(layer))) for layer in range(capture.layers)]
    query, key, value = (torch.cat([getattr(call, part) for call in calls]) for part in ("query", "key", "value"))
    return Problem(query, key, value, calls[0].scale)


def _normal(text: Path | None, length: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    return Problem(*(torch.randn(1, 4, length, 64, generator=generator) for _ in range(3)), 64**-0.5)


def _photograph(size: int) -> Tensor:
    """A photograph that comes with scikit-learn, (1, 3, size, size), from 0 to 1."""
    from sklearn.datasets import load_sample_image

    picture = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)[None, :, :, 100:527] / 255.0
    return torch.nn.functional.interpolate(picture, (size, size), mode="bilinear", antialias=True)


def _projected(x: Tensor, heads: int, generator: torch.Generator) -> Tensor:
    """Tokens (1, N, C) by random weights: (1, heads, N, 64)."""
    weight = torch.randn(heads, x.shape[-1], 64, generator=generator) * x.shape[-1] ** -0.5
    return layer_norm(x, x.shape[-1:])[:, None] @ weight


def _sharpened(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Problem:
    """Queries stretched until a query's scores have a standard deviation of `SHARPNESS`, on average."""
    spread = (scale * query @ key.mT).std(-1).mean((-2, -1), keepdim=True)[..., None]
    return Problem(query * SHARPNESS / spread.view(*spread.shape[:2], 1, 1), key, value, scale)


def _t2t(text: Path | None, tokens: int) -> Problem:
    """Soft splits of T2T-ViT: 7 x 7 patches every 4 pixels; of the first stage's output, 3 x 3 every 2."""
    generator = torch.Generator().manual_seed(0)
    split = unfold(_photograph(224), 7, stride=4, padding=2).mT
    first = [_projected(split, 1, generator) for _ in range(3)]
    problem = _sharpened(first[0], first[1], first[2], 64**-0.5)
    if tokens == 3136:
        return problem
    exact = torch.nn.functional.scaled_dot_product_attention(problem.query, problem.key, problem.value)
    again = unfold((exact + problem.value)[0].mT.reshape(1, 64, 56, 56), 3, stride=2, padding=1).mT
    second = [_projected(again, 1, generator) for _ in range(3)]
    return _sharpened(second[0], second[1], second[2], 64**-0.5)


def _biggan(text: Path | None) -> Problem:
    generator = torch.Generator().manual_seed(0)
    maps = unfold(_photograph(64), 7, padding=3).mT
    query, key, value = (_projected(maps, 1, generator)[0] for _ in range(3))
    key, value = (max_pool2d(x.mT.reshape(1, 64, 64, 64), 2).flatten(2).mT for x in (key, value))
    return _sharpened(query[None], key[None], value[None], 1.0)


SETTINGS: dict[str, Callable[[Path | None], Problem]] = {
    "minilm": partial(_minilm, sequences=1, length=None),
    "minilm-4096": partial(_minilm, sequences=8, length=4096),
    "minilm-16384": partial(_minilm, sequences=32, length=16384),
    **{f"normal-{length}": partial(_normal, length=length) for length in (1024, 4096)},
    "t2t-3136": partial(_t2t, tokens=3136),
    "t2t-784": partial(_t2t, tokens=784),
    "biggan": _biggan,
}
