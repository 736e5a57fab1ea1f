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
    for grid in sorted(names & {"grid_thw", "image_grid_thw"}):
        yield from _pieces(names, grid, sizes, draw)
    yield from _special(names, sizes, draw)


def _pieces(names: set[str], grid: str, sizes: dict[str, Any], draw: torch.Generator) -> Iterator[Inputs]:
    """Two images cut into pieces, all pieces in a row."""
    shape = torch.tensor([[1, 8, 8], [1, 8, 12]])
    count = int(shape.prod(1).sum())
    more = {"merge_sizes": torch.full((len(shape),), 2)} if "merge_sizes" in names else {}
    channels, piece = sizes.get("in_channels", sizes.get("num_channels", 3)), sizes.get("patch_size", 8)
    frames = sizes.get("temporal_patch_size", 2)
    to = "hidden_states" if "hidden_states" in names else "pixel_values"
    for wide in dict.fromkeys([channels * frames * piece**2, channels * piece**2, sizes.get("hidden_size", 32)]):
        yield {to: torch.randn(count, wide, generator=draw), grid: shape} | more
    yield {to: torch.randn(count, channels, piece, piece, generator=draw), grid: shape} | more


def _special(names: set[str], sizes: dict[str, Any], draw: torch.Generator) -> Iterator[Inputs]:
    """Inputs that few types have."""
    text = {"input_ids": tokens(draw, LENGTH)} if "input_ids" in names else {}
    text |= (
        {"attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64)} if text and "attention_mask" in names else {}
    )
    wide, piece = sizes.get("hidden_size", 32), sizes.get("patch_size", 8)
    if "spatial_shapes" in names:
        shapes, real = torch.tensor([[4, 4], [2, 8]]), torch.ones(BATCH, 16, dtype=torch.int64)
        pieces = torch.randn(BATCH, 16, 3 * piece**2, generator=draw) if isinstance(piece, int) else None
        if pieces is not None:
            yield text | {"pixel_values": pieces, "pixel_attention_mask": real, "spatial_shapes": shapes}
    if "pixel_position_ids" in names:
        place = torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(BATCH, -1, -1)
        yield {"pixel_values": torch.rand(BATCH, 36, 3 * piece**2, generator=draw), "pixel_position_ids": place}
    if "input_features_mask" in names or "audio_mel_mask" in names:
        for bins in dict.fromkeys([sizes.get("num_mel_bins", 16), sizes.get("input_feat_size", 128), 80, 128, 560]):
            steps = 2 * sizes.get("max_source_positions", 48)
            for rows in ((BATCH, bins, steps), (BATCH, steps, bins)):
                features, real = torch.randn(*rows, generator=draw), torch.ones(BATCH, steps, dtype=torch.int64)
                yield text | {"input_features": features, "input_features_mask": real}
                yield text | {"input_features": features, "input_features_mask": real > 0}
                yield {"audio_mel": features, "audio_mel_mask": real == 0}
    if "past_values_padding" in names:
        rows = {"past_values": torch.randn(BATCH, sizes.get("context_length", 32), generator=draw)}
        yield rows | {
            "past_values_padding": torch.zeros_like(rows["past_values"]),
            "freq": torch.zeros(BATCH, 1).long(),
        }
    if "bbox" in names:
        box = torch.tensor([3, 4, 20, 30]).expand(BATCH, LENGTH, 4)
        yield text | {"bbox": box}
        yield text | {"bbox": torch.rand(BATCH, LENGTH, 8, generator=draw)}
        yield text | {"bbox": box / 40, "decoder_input_ids": tokens(draw, 7)}
    if "visual_feats" in names:
        feats = torch.randn(BATCH, 6, sizes.get("visual_feat_dim", 2048), generator=draw)
        yield text | {"visual_feats": feats, "visual_pos": torch.rand(BATCH, 6, 4, generator=draw)}
    if "flattened_patches" in names:
        flat = torch.randn(BATCH, 20, sizes.get("patch_embed_hidden_size", 768) + 2, generator=draw)
        flat[..., :2] = torch.arange(1, 21)[:, None]
        yield {"flattened_patches": flat, "decoder_input_ids": tokens(draw, 7)}
    if "query_embeds" in names:
        seen = torch.randn(BATCH, 9, sizes.get("encoder_hidden_size", 32), generator=draw)
        yield {"query_embeds": torch.randn(BATCH, 4, wide, generator=draw), "encoder_hidden_states": seen}
    if "states" in names:
        steps = torch.arange(9).expand(BATCH, -1)
        rows = {"states": "state_dim", "actions": "act_dim"}
        given = {name: torch.randn(BATCH, 9, sizes.get(size, 4), generator=draw) for name, size in rows.items()}
        given |= {name: torch.randn(BATCH, 9, 1, generator=draw) for name in ("rewards", "returns_to_go")}
        yield given | {"timesteps": steps, "attention_mask": torch.ones(BATCH, 9, dtype=torch.int64)}
    if "inputs" in names:
        yield {"inputs": torch.randn(BATCH, LENGTH, sizes.get("d_model", wide), generator=draw)}
    if "latents" in names:
        yield {"latents": torch.randn(BATCH, wide, 12, generator=draw)}
        yield {"latents": torch.randn(BATCH, 12, wide, generator=draw)}


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
    for bands in dict.fromkeys([*bins, 16, 64, 80, 128, 160]):
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
    times = sizes.get("num_time_features", 0)
    rows = {"past_values": torch.randn(BATCH, past, generator=draw).abs()}
    rows["past_time_features"] = torch.randn(BATCH, past, times, generator=draw)
    rows["past_observed_mask"] = torch.ones(BATCH, past)
    ahead = sizes.get("prediction_length") or 6
    rows["future_values"] = torch.randn(BATCH, ahead, generator=draw).abs()
    rows["future_time_features"] = torch.randn(BATCH, ahead, times, generator=draw)
    yield {name: row for name, row in rows.items() if name in names}
