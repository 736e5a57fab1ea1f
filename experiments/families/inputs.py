"""Inputs for a small model of any type: tokens, images, sounds or series, by the names of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from experiments.families.build import FIRST_SPECIAL, LENGTH
from torch import Tensor, nn

Inputs = dict[str, Tensor]
BATCH = 2


def candidates(model: nn.Module) -> Iterator[Inputs]:
    """What the model may take, the likeliest first."""
    names = set(inspect.signature(model.forward).parameters)
    draw = torch.Generator().manual_seed(0)
    text = tokens(draw, LENGTH)
    written = {"decoder_input_ids": tokens(draw, 7)} if "decoder_input_ids" in names else {}
    sizes = _sizes(model.config)
    if "input_ids" in names:
        found = {"input_ids": text} | ({"attention_mask": torch.ones_like(text)} if "attention_mask" in names else {})
        yield found | written
        if "pixel_values" in names:
            for image in _images(sizes, draw):
                yield found | {"pixel_values": image} | written
        for name in ("input_features", "input_values"):
            if name in names:
                for sound in _sounds(name, sizes, draw):
                    yield found | {name: sound} | written
        if "bbox" in names:
            yield found | {"bbox": torch.zeros(BATCH, LENGTH, 4, dtype=torch.int64)} | written
    if "pixel_values" in names:
        for image in _images(sizes, draw):
            yield {"pixel_values": image} | written
        for image in _images(sizes, draw):
            yield {"pixel_values": image[:, None].expand(-1, sizes.get("num_frames", 4), -1, -1, -1).contiguous()}
    if "pixel_values_videos" in names:
        for image in _images(sizes, draw):
            frames = sizes.get("frames_per_clip", sizes.get("num_frames", 4))
            yield {"pixel_values_videos": image[:, None].expand(-1, frames, -1, -1, -1).contiguous()}
    for name in ("input_features", "input_values"):
        if name in names:
            for sound in _sounds(name, sizes, draw):
                yield {name: sound} | written
    if "inputs_embeds" in names or "hidden_states" in names:
        name = "inputs_embeds" if "inputs_embeds" in names else "hidden_states"
        yield {name: torch.randn(BATCH, LENGTH, sizes.get("hidden_size", 32), generator=draw)}
    if "past_values" in names:
        yield from _series(names, sizes, draw)


def tokens(draw: torch.Generator, length: int) -> Tensor:
    """Random ordinary tokens."""
    return torch.randint(3, FIRST_SPECIAL, (BATCH, length), generator=draw)


def _sizes(config: Any) -> dict[str, Any]:
    """All entries of a configuration and those inside it; the outer ones win."""
    found: dict[str, Any] = {}
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            found = _sizes(inner) | found
    return found | vars(config)


def _images(sizes: dict[str, Any], draw: torch.Generator) -> Iterator[Tensor]:
    size = sizes.get("image_size", 32)
    height, width = (size, size) if isinstance(size, int) else (tuple(size) if size else (32, 32))
    channels = sizes.get("num_channels", sizes.get("in_channels", 3))
    yield torch.randn(BATCH, channels if isinstance(channels, int) else 3, height, width, generator=draw)
    yield torch.randn(BATCH, 3, 64, 64, generator=draw)


def _sounds(name: str, sizes: dict[str, Any], draw: torch.Generator) -> Iterator[Tensor]:
    if name == "input_values":
        yield torch.randn(BATCH, 4000, generator=draw)
        yield torch.randn(BATCH, 1, 4000, generator=draw)
    keys = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim")
    bins = [sizes[key] for key in keys if sizes.get(key)]
    for bands in dict.fromkeys([*bins, 16, 80]):
        longest = 2 * sizes.get("max_source_positions", LENGTH)
        yield torch.randn(BATCH, bands, longest, generator=draw)
        yield torch.randn(BATCH, 2 * LENGTH, bands, generator=draw)
        if "max_length" in sizes:
            yield torch.randn(BATCH, sizes["max_length"], bands, generator=draw)


def _series(names: set[str], sizes: dict[str, Any], draw: torch.Generator) -> Iterator[Inputs]:
    length, channels = sizes.get("context_length", LENGTH), sizes.get("num_input_channels", 1)
    yield {"past_values": torch.randn(BATCH, length, channels, generator=draw)}
    yield {"past_values": torch.randn(BATCH, length, generator=draw)}
    past = length + max(sizes.get("lags_sequence") or [0])
    times = sizes.get("num_time_features", 0) or 1
    rows = {"past_values": torch.randn(BATCH, past, generator=draw).abs()}
    rows["past_time_features"] = torch.randn(BATCH, past, times, generator=draw)
    rows["past_observed_mask"] = torch.ones(BATCH, past)
    ahead = sizes.get("prediction_length") or 6
    rows["future_values"] = torch.randn(BATCH, ahead, generator=draw).abs()
    rows["future_time_features"] = torch.randn(BATCH, ahead, times, generator=draw)
    yield {name: row for name, row in rows.items() if name in names}
