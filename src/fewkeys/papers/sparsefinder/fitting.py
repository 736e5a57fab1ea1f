"""Fitting groupings to a space: centroids of clusters and edges of buckets."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fewkeys.captures.capture import Capture
from fewkeys.papers.sparsefinder.space import Centroids, Edges, Joined, nearest
from fewkeys.papers.sparsefinder.train import generator, gold_graph, pieces
from fewkeys.tuning.score import problem_of


def sample(capture: Capture, layer: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """At most `count` random real queries (Hq, S, D) and keys (Hq, S, D) of a layer, float32."""
    draw = generator(seed, layer, "tokens")
    samples = [_Sample(capture, 1, count), _Sample(capture, 1, count)]
    for call in capture.calls(layer):
        x = problem_of(call)
        queries = x.valid_queries if call.query_mask is None else call.query_mask
        for held, rows, real in zip(samples, (call.query, call.key), (queries, x.valid), strict=True):
            rows = rows.float().repeat_interleave(capture.query_heads // rows.shape[1], 1)
            real = torch.ones((rows.shape[0], rows.shape[2]), dtype=torch.bool) if real is None else real
            number = torch.rand(real.shape, generator=draw).masked_fill_(~real, -1.0)
            held.take(number.flatten()[None].expand(capture.query_heads, -1), [rows.transpose(0, 1).flatten(1, 2)])
    return samples[0].rows()[0], samples[1].rows()[0]


def gold_edges(capture: Capture, layer: int, alpha: float, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The queries (Hq, S, D) and the keys (Hq, S, D) of at most `count` random gold edges of every head, float32.

    All heads get the same number. Cost O(n^2 D), memory 2^24 pairs.
    """
    draw, held = generator(seed, layer, "edges"), _Sample(capture, 2, count)
    for call in capture.calls(layer):
        for piece in pieces(call, slice(None)):
            query, key, gold, _ = gold_graph(piece, alpha)
            number = torch.rand(gold.shape, generator=draw).masked_fill_(~gold, -1.0).transpose(0, 1).flatten(1)
            top = number.topk(min(count, number.shape[1]), -1)
            rest, at_key = top.indices // gold.shape[3], top.indices % gold.shape[3]
            sequence, at_query = rest // gold.shape[2], rest % gold.shape[2]
            head = torch.arange(gold.shape[1])[:, None]
            held.take(top.values, [query[sequence, head, at_query], key[sequence, head, at_key]])
    query, key = held.rows()
    return query, key


class _Sample:
    """The rows of every head with the largest random numbers so far: a uniform sample without replacement."""

    def __init__(self, capture: Capture, kinds: int, count: int) -> None:
        self.count, self.number = count, torch.empty(capture.query_heads, 0)
        self.held = [torch.empty(capture.query_heads, 0, capture.head_dim) for _ in range(kinds)]

    def take(self, number: Tensor, rows: list[Tensor]) -> None:
        """Numbers (H, n), -1 for rows that do not count, of rows (H, n, D) of each kind."""
        self.number, order = torch.cat([self.number, number], 1).sort(dim=-1, descending=True, stable=True)
        self.number, order = self.number[:, : self.count], order[:, : self.count, None]
        pairs = zip(self.held, rows, strict=True)
        self.held = [torch.cat(pair, 1).gather(1, order.expand(-1, -1, pair[0].shape[2])) for pair in pairs]

    def rows(self) -> list[Tensor]:
        """As many (H, S, D) as all heads have."""
        least = int((self.number >= 0).sum(-1).min())
        return [rows[:, :least] for rows in self.held]


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
    pairs = (lifts >= lift) | (lifts >= (1 - 1e-9) * lifts.amax(1, keepdim=True))  # of equal ones all, up to rounding
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
