"""What a grouping must learn of a space: where the centroids lie, where the buckets begin."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

from fewkeys.measure.capture import AttentionInputs, Capture
from fewkeys.measure.score import problem_of
from fewkeys.predict.train import generator
from fewkeys.select.groupings import Edges
from fewkeys.select.projection import Centroids


def kind_of(capture: Capture) -> str:
    """The kind of attention: "causal", "cross" (queries are other tokens than keys) or "bidirectional"."""
    if capture.is_causal:
        return "causal"
    own = all(call.query.shape[2] == call.key.shape[2] and call.query_mask is None for call in capture.calls(0))
    return "bidirectional" if own else "cross"


def sample(capture: Capture, layer: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """At most `count` real queries (Hq, S, D) and keys (Hq, S, D) of a layer, at random places, float32."""
    reals = [_real(call) for call in capture.calls(layer)]
    places = []
    for side, name in enumerate(("queries", "keys")):
        total = sum(int(real[side].sum()) for real in reals)
        order = torch.randperm(total, generator=generator(seed, layer, name))[:count]
        places.append(order.sort().values)
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    first = [0, 0]
    for call, real in zip(capture.calls(layer), reals, strict=True):
        groups = call.query.shape[1] // call.key.shape[1]
        for side, tensor in enumerate((call.query, call.key)):
            flat = tensor.transpose(0, 1).flatten(1, 2)[:, real[side].flatten()]
            own = places[side] - first[side]
            own = own[(own >= 0) & (own < flat.shape[1])]
            rows[side].append(flat[:, own].float().repeat_interleave(groups if side else 1, 0))
            first[side] += flat.shape[1]
    return torch.cat(rows[0], 1), torch.cat(rows[1], 1)


def _real(call: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Which queries (B, Nq) and which keys (B, Nk) are real tokens."""
    x = problem_of(call)
    queries = x.valid_queries if call.query_mask is None else call.query_mask
    if queries is None:
        queries = torch.ones((x.batch, x.queries), dtype=torch.bool)
    keys = torch.ones((x.batch, x.keys), dtype=torch.bool) if x.valid is None else x.valid
    return queries, keys


def centroids(query: Tensor, key: Tensor, count: int, rounds: int, seed: int) -> Centroids:
    """k-means of queries and keys (H, S, r) together, head by head; round after round from other seeds.

    One thread, so that the same rows give the same bits on a machine.
    """
    if find_spec("sklearn") is None:
        raise ModuleNotFoundError("sklearn is needed for clusters and is not installed; pip install 'fewkeys[train]'")
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    heads = []
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters: some coincide
        for rows in torch.cat([query, key], 1).double().numpy():
            if len(rows) < count:
                raise ValueError(f"Clusters count: expected at most {len(rows)}, the tokens sampled, got {count}")
            fits = [KMeans(count, n_init=1, random_state=(seed + number) % 2**32).fit(rows) for number in range(rounds)]
            heads.append(torch.cat([torch.from_numpy(fit.cluster_centers_) for fit in fits]))
    return Centroids(torch.stack(heads).float())


def edges(query: Tensor, key: Tensor, beta: int) -> Edges:
    """The quantiles 1 / beta .. (beta - 1) / beta of every dimension of queries and of keys (H, S, r)."""
    at = torch.linspace(0, 1, beta + 1, dtype=torch.float64)[1:-1]
    found = [rows.double().quantile(at, 1).permute(1, 2, 0).float().contiguous() for rows in (query, key)]
    return Edges(found[0], found[1])
