"""Captures of random attention, and its definition."""

import torch

from fewkeys.captures.capture import AttentionInputs
from fewkeys.captures.writer import CaptureWriter


def captured(
    layers=2,
    batches=2,
    size=3,
    heads=4,
    kv_heads=2,
    length=40,
    dim=8,
    causal=False,
    lengths=None,
    seed=0,
    directory=None,
    gradients=None,
    bias=None,
):
    """Random attention with a common offset of the keys and a few large keys. gradients: their size."""
    draw = torch.Generator().manual_seed(seed)
    writer = CaptureWriter(directory, "random")
    for _ in range(batches):
        for _ in range(layers):
            query = torch.randn(size, heads, length, dim, generator=draw) * 1.5
            key = torch.randn(size, kv_heads, length, dim, generator=draw) + 1.0
            key[:, :, ::9] *= 2.0
            value = torch.randn(size, kv_heads, length, dim, generator=draw)
            mask = None if lengths is None else torch.arange(length) < torch.tensor(lengths)[:, None]
            writer.write(AttentionInputs(query, key, value, dim**-0.5, causal, mask, distance_bias=bias))
        if gradients is not None:
            writer.write_gradients(
                [torch.randn(size, heads, length, dim, generator=draw) * gradients for _ in range(layers)]
            )
        writer.end_batch()
    return writer.finish()


def dense(call):
    """Exact weights and output in float64: the definition."""
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (call.key, call.value))
    scores = call.query.double() @ key.mT * call.scale
    if call.is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    return weights, weights @ value
