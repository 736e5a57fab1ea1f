"""Selectors with random learned tensors, for every shape; and captures with planted clusters."""

from dataclasses import replace

import torch

from fewkeys.captures.capture import AttentionInputs
from fewkeys.captures.writer import CaptureWriter
from fewkeys.papers import sparsefinder
from fewkeys.papers.sparsefinder import Edges, Joined

GROUPINGS = {
    "distance": sparsefinder.Distance(2.5),
    "equal buckets": sparsefinder.Buckets(5),
    "uniform buckets": sparsefinder.Buckets(6, "uniform"),
    "clusters": sparsefinder.Clusters(6),
    "nearest two clusters": sparsefinder.Clusters(6, top=2),
    "rounds of clusters": sparsefinder.Clusters(7, rounds=2),
    "pairs of clusters": sparsefinder.ClusterPairs(5, 1.0),
}


def predicted(grouping, heads, dim, *, rank=3, edges=False, raw=False, seed=0):
    """A selector whose projection, centroids and edges are random."""
    g = torch.Generator().manual_seed(seed)
    project = None
    if raw:
        rank = dim
    else:
        project = sparsefinder.Projection(*(torch.randn(heads, dim, rank, generator=g) * dim**-0.5 for _ in range(2)))
    fitted = None
    if isinstance(grouping, sparsefinder.Clusters):
        fitted = sparsefinder.Centroids(torch.randn(heads, grouping.count * grouping.rounds, rank, generator=g))
    elif isinstance(grouping, sparsefinder.ClusterPairs):
        query_centroids, key_centroids = (torch.randn(heads, grouping.count, rank, generator=g) for _ in range(2))
        pairs = torch.rand(heads, grouping.count, grouping.count, generator=g) < 0.3
        fitted = Joined(query_centroids, key_centroids, pairs)
    elif edges and isinstance(grouping, sparsefinder.Buckets) and grouping.kind == "equal_size":
        fitted = Edges(*(torch.randn(heads, rank, grouping.beta - 1, generator=g).sort(-1).values for _ in range(2)))
    return replace(grouping, project=project, fitted=fitted)


def for_shape(name, shape, seed=0):
    """The selector of this name for a shape of `cases.py`."""
    return predicted(GROUPINGS[name], shape.query_heads, shape.head_dim, edges=shape.is_causal, seed=seed)


def planted(layers=1, batches=4, size=4, heads=2, kv_heads=2, length=24, dim=16, causal=False, lengths=None, seed=0):
    """Queries attend to the keys of their own of 4 places in a plane, which lies among louder dimensions of noise."""
    g = torch.Generator().manual_seed(seed)
    planes = torch.linalg.qr(torch.randn(layers, kv_heads, dim, dim, generator=g)).Q
    places = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]) * 3
    writer = CaptureWriter(None, "planted")
    for _ in range(batches):
        for layer in range(layers):
            tensors = []
            for count in (heads, kv_heads):
                noise = torch.randn(size, count, length, dim, generator=g)
                noise[..., :2] = places[torch.randint(4, (size, count, length), generator=g)] + 0.3 * noise[..., :2]
                # The scores hardly see the noise: only one of the two sides has it in each dimension.
                noise[..., 2::2] *= 0.0 if count == heads and not tensors else 3.0
                noise[..., 3::2] *= 3.0 if count == heads and not tensors else 0.0
                tensors.append(noise @ planes[layer].repeat_interleave(count // kv_heads, 0).mT)
            query, key = tensors
            mask = None if lengths is None else torch.arange(length) < torch.tensor(lengths)[:, None]
            writer.write(AttentionInputs(query, key, key.clone(), 1.0, causal, mask))
        writer.end_batch()
    return writer.finish()
