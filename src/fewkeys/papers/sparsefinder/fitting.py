"""Fitting groupings to a space: centroids of clusters and edges of buckets."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fewkeys.captures.capture import AttentionInputs, Capture
from fewkeys.papers.sparsefinder.space import Centroids, Edges, Joined, nearest
from fewkeys.papers.sparsefinder.train import generator, gold_graph, pieces
from fewkeys.tuning.score import problem_of


def sample(capture: Capture, layer: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """At most `count` random real queries (Hq, S, D) and keys (Hq, S, D) of a layer, float32."""
    reals = [_real(call) for call in capture.calls(layer)]
    places = []
    for side, name in enumerate(("queries", "keys")):
        total = sum(int(real[side].sum()) for real in reals)
        order = torch.randperm(total, generator=generator(seed, layer, name))[:count]
        places.append(order.sort().values)
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    first = [0, 0]
    for call, real in zip(capture.calls(layer), reals, strict=True):
        gqa_ratio = call.query.shape[1] // call.key.shape[1]
        for side, tensor in enumerate((call.query, call.key)):
            flat = tensor.transpose(0, 1).flatten(1, 2)[:, real[side].flatten()]
            places_here = places[side] - first[side]
            places_here = places_here[(places_here >= 0) & (places_here < flat.shape[1])]
            rows[side].append(flat[:, places_here].float().repeat_interleave(gqa_ratio if side else 1, 0))
            first[side] += flat.shape[1]
    return torch.cat(rows[0], 1), torch.cat(rows[1], 1)


def _real(call: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Masks of the queries (B, Nq) and of the keys (B, Nk) that are real tokens."""
    x = problem_of(call)
    queries = x.valid_queries if call.query_mask is None else call.query_mask
    if queries is None:
        queries = torch.ones((x.batch, x.queries), dtype=torch.bool)
    keys = torch.ones((x.batch, x.keys), dtype=torch.bool) if x.valid is None else x.valid
    return queries, keys


def gold_edges(capture: Capture, layer: int, alpha: float, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The queries (Hq, S, D) and the keys (Hq, S, D) of at most `count` random gold edges of every head, float32.

    All heads get the same number. Cost O(n^2 D), memory 2^24 pairs.
    """
    draw, rank = generator(seed, layer, "edges"), torch.empty(capture.query_heads, 0)
    ends_so_far = [torch.empty(capture.query_heads, 0, capture.head_dim) for _ in range(2)]
    for call in capture.calls(layer):
        for piece in pieces(call, slice(None)):
            query, key, gold, _ = gold_graph(piece, alpha)
            # The edges with the largest random numbers so far are a uniform sample without replacement.
            number = torch.rand(gold.shape, generator=draw).masked_fill_(~gold, -1.0).transpose(0, 1).flatten(1)
            top = number.topk(min(count, number.shape[1]), -1)
            rest, at_key = top.indices // gold.shape[3], top.indices % gold.shape[3]
            sequence, at_query = rest // gold.shape[2], rest % gold.shape[2]
            head = torch.arange(gold.shape[1])[:, None]
            ends = query[sequence, head, at_query], key[sequence, head, at_key]
            ends_so_far = [torch.cat([old, new], 1) for old, new in zip(ends_so_far, ends, strict=True)]
            rank = torch.cat([rank, top.values], 1)
            rank, order = rank.sort(dim=-1, descending=True, stable=True)
            rank = rank[:, :count]
            ends_so_far = [rows.gather(1, order[:, :count, None].expand(-1, -1, rows.shape[2])) for rows in ends_so_far]
    least = int((rank >= 0).sum(-1).min())
    return ends_so_far[0][:, :least], ends_so_far[1][:, :least]


def joined(
    query: Tensor, key: Tensor, edges: tuple[Tensor, Tensor], clusters: tuple[Tensor, Tensor], lift: float
) -> Joined:
    """The pairs of clusters (H, C, r) to join, from samples of tokens (H, S, r) and of gold edges' ends (H, E, r)."""
    query_clusters, key_clusters = clusters
    heads, count, _ = query_clusters.shape

    def sizes(rows: Tensor, places: Tensor) -> Tensor:
        return one_hot(nearest(rows[None], places)[0, ..., 0], count).double().mean(1)

    ends = [nearest(rows[None], places)[0, ..., 0] for rows, places in zip(edges, clusters, strict=True)]
    cell = ends[0] * count + ends[1]
    gold = torch.zeros(heads, count * count, dtype=torch.float64)
    gold.scatter_add_(1, cell, torch.full_like(cell, 1.0, dtype=torch.float64) / max(1, cell.shape[1]))
    part = (sizes(query, query_clusters).unsqueeze(2) * sizes(key, key_clusters).unsqueeze(1)).flatten(1)
    lifts = gold / part.clamp_min(1e-12)
    pairs = (lifts >= lift) | (lifts == lifts.amax(1, keepdim=True))
    return Joined(query_clusters, key_clusters, pairs.view(heads, count, count))


def centroids(rows: Tensor, count: int, rounds: int, seed: int) -> Centroids:
    """k-means of rows (H, S, r), head by head, with another seed for each round.

    One thread, so that a machine gives the same bits for the same rows.
    """
    if find_spec("sklearn") is None:
        raise ModuleNotFoundError("sklearn is needed for clusters and is not installed; pip install 'fewkeys[train]'")
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    heads = []
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters: some coincide
        for tokens in rows.double().numpy():
            if len(tokens) < count:
                raise ValueError(f"count: expected at most {len(tokens)} clusters, the tokens sampled, got {count}")
            fits = [
                KMeans(count, n_init=1, random_state=(seed + number) % 2**32).fit(tokens) for number in range(rounds)
            ]
            heads.append(torch.cat([torch.from_numpy(fit.cluster_centers_) for fit in fits]))
    return Centroids(torch.stack(heads).float())


def edges(query: Tensor, key: Tensor, beta: int) -> Edges:
    """The quantiles 1 / beta .. (beta - 1) / beta of every dimension of queries and of keys (H, S, r)."""
    at = torch.linspace(0, 1, beta + 1, dtype=torch.float64)[1:-1]
    quantiles = [rows.double().quantile(at, 1).permute(1, 2, 0).float().contiguous() for rows in (query, key)]
    return Edges(quantiles[0], quantiles[1])
