"""What groupings learn of a space: centroids, which of their clusters are joined, and edges of buckets."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fewkeys.captures.capture import Capture
from fewkeys.papers.sparsefinder.space import Edges, Joined, nearest
from fewkeys.papers.sparsefinder.train import generator, gold_graph, pieces


def sample(capture: Capture, layer: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """At most `count` random real queries and keys (Hq, S, D) of a layer, float32."""
    draw = generator(seed, layer, "tokens")
    queries, keys = (_Sample(count, capture.query_heads, capture.head_dim) for _ in range(2))
    for call in capture.calls(layer):
        for kept, rows, real in ((queries, call.query, call.real_queries), (keys, call.key, call.key_mask)):
            rows = rows.float().repeat_interleave(capture.query_heads // rows.shape[1], 1)
            number = torch.rand((rows.shape[0], rows.shape[2]), generator=draw)
            if real is not None:
                number.masked_fill_(~real, -1.0)
            kept.add(number.flatten().expand(capture.query_heads, -1), rows.transpose(0, 1).flatten(1, 2))
    return queries.rows(), keys.rows()


def gold_edges(capture: Capture, layer: int, alpha: float, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The queries and keys (Hq, S, D) of at most `count` random gold edges of every head, float32. Cost O(n^2 D)."""
    draw, ends = generator(seed, layer, "edges"), _Sample(count, capture.query_heads, 2 * capture.head_dim)
    for call in capture.calls(layer):
        for piece in pieces(call):
            query, key, gold, _ = gold_graph(piece, alpha)
            number = torch.rand(gold.shape, generator=draw).masked_fill_(~gold, -1.0).transpose(0, 1).flatten(1)
            top = number.topk(min(count, number.shape[1]), -1)
            sequence, at_query, at_key = torch.unravel_index(top.indices, (len(gold), *gold.shape[2:]))
            head = torch.arange(gold.shape[1])[:, None]
            ends.add(top.values, torch.cat([query[sequence, head, at_query], key[sequence, head, at_key]], -1))
    query_ends, key_ends = ends.rows().chunk(2, -1)
    return query_ends, key_ends


class _Sample:
    """The rows of every head with the largest random numbers: a uniform sample without replacement."""

    def __init__(self, count: int, heads: int, width: int) -> None:
        self.count, self._number, self._rows = count, torch.empty(heads, 0), torch.empty(heads, 0, width)

    def add(self, number: Tensor, rows: Tensor) -> None:
        """Rows (H, n, width) with random numbers (H, n), -1 to leave a row out."""
        number, order = torch.cat([self._number, number], 1).sort(dim=-1, descending=True, stable=True)
        index = order[:, : self.count, None].expand(-1, -1, rows.shape[2])
        self._number, self._rows = number[:, : self.count], torch.cat([self._rows, rows], 1).gather(1, index)

    def rows(self) -> Tensor:
        """The sample (H, S, width), S the least that a head has."""
        return self._rows[:, : int((self._number >= 0).sum(-1).min())]


def joined(tokens: Sequence[Tensor], ends: Sequence[Tensor], clusters: Sequence[Tensor], lift: float) -> Joined:
    """Joined clusters, from tokens (H, S, r), ends of gold edges (H, E, r) and centroids (H, C, r) of both sides."""
    heads, count, _ = clusters[0].shape

    def labels(rows: Sequence[Tensor]) -> list[Tensor]:
        return [nearest(part[None], places)[0, ..., 0] for part, places in zip(rows, clusters, strict=True)]

    shares = [one_hot(label, count).double().mean(1) for label in labels(tokens)]
    expected = (shares[0].unsqueeze(2) * shares[1].unsqueeze(1)).flatten(1)
    from_cluster, to_cluster = labels(ends)
    cell = from_cluster * count + to_cluster
    share = torch.full_like(cell, 1 / max(1, cell.shape[1]), dtype=torch.float64)
    gold = torch.zeros_like(expected).scatter_add_(1, cell, share)
    lifts = gold / expected.clamp_min(1e-12)
    pairs = (lifts >= lift) | (lifts >= (1 - 1e-9) * lifts.amax(1, keepdim=True))  # of equal ones all, up to rounding
    return Joined(clusters[0], clusters[1], pairs.view(heads, count, count))


def centroids(rows: Tensor, count: int, rounds: int, seed: int) -> Tensor:
    """k-means of rows (H, S, r) by head, another seed for each round: (H, rounds count, r)."""
    if find_spec("sklearn") is None:
        raise ModuleNotFoundError("sklearn is needed for clusters and is not installed; pip install 'fewkeys[train]'")
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    heads = []
    with threadpool_limits(limits=1), warnings.catch_warnings():  # one thread: the same bits everywhere
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters: some coincide
        for tokens in rows.double().numpy():
            if len(tokens) < count:
                raise ValueError(f"count: expected at most {len(tokens)} clusters, the tokens sampled, got {count}")
            seeds = [(seed + number) % 2**32 for number in range(rounds)]
            fits = [KMeans(count, n_init=1, random_state=state).fit(tokens) for state in seeds]
            heads.append(torch.cat([torch.from_numpy(fit.cluster_centers_) for fit in fits]))
    return torch.stack(heads).float()


def edges(query: Tensor, key: Tensor, beta: int) -> Edges:
    """The quantiles 1 / beta .. (beta - 1) / beta of every dimension of queries and keys (H, S, r)."""
    at = torch.linspace(0, 1, beta + 1, dtype=torch.float64, device=query.device)[1:-1]
    return Edges(*(rows.double().quantile(at, 1).permute(1, 2, 0).float().contiguous() for rows in (query, key)))
