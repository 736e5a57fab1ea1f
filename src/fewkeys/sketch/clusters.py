"""Clusters of keys that the head's own queries cannot tell apart.

Everything here is per sequence and key head, in float32 (float64 for float64 input), without gradient.

With queries `q` (scaled) of mean m and covariance C, taken as Gaussian, the *importance* of a centred key is
`g_j = log E_q exp(q . k_j) = m . k_j + k_j^T C k_j / 2`. Two keys are alike when their scores and their values are:
the features of key j are `[L^T k_j, v_j / rms(v)]` with `L L^T = E[q q^T]`, so that the squared distance of two keys
is the mean squared difference of their scores plus the relative squared difference of their values. Keys enter
Lloyd's steps with weight `exp(g_j / 2)`: what is attended to is described in more detail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.inputs import Inputs
from fewkeys.sketch.leverage import working

TILT = 0.5
"""Keys are weighted by `exp(TILT * g)`: halfway, on the log scale, between all alike and as the queries see them."""
LLOYD_STEPS = 3
LOWEST_LOG_WEIGHT = -8.0
QUERY_SAMPLE = 4096
KEYS_PER_CLUSTER = 32
"""Lloyd's steps use at most so many keys per cluster (every s-th key); all keys are assigned at the end."""


@dataclass(frozen=True, eq=False)
class QueryMoments:
    """Moments of the scaled queries that read one key head: mean (B, Hkv, 1, D), covariance (B, Hkv, D, D)."""

    mean: Tensor
    covariance: Tensor

    def log_mean_exp(self, rows: Tensor) -> Tensor:
        """`log E exp(q . x)` (B, Hkv, M) for Gaussian queries and rows x (B, Hkv, M, D)."""
        return (rows * (self.mean + 0.5 * rows @ self.covariance)).sum(-1)

    @property
    def second(self) -> Tensor:
        """`E[q q^T]`."""
        return self.covariance + self.mean.mT @ self.mean


@dataclass(frozen=True, eq=False)
class Clusters:
    """A partition of the real keys of every head.

    `member` (B, Hkv, Nk, C) tells the cluster of every key: 1 in one column, or equal shares where centres coincide;
    0 for padding. `importance` (B, Hkv, Nk), `distance` (B, Hkv, Nk): squared distance to the own centre.
    """

    member: Tensor
    importance: Tensor
    distance: Tensor


def query_moments(inputs: Inputs) -> QueryMoments:
    """Mean and covariance of the scaled queries, per key head; every s-th query once there are many."""
    return inputs.remember("query_moments", lambda: _query_moments(inputs))


def centred_keys(inputs: Inputs) -> Tensor:
    """Keys minus the mean real key, zero at padding: a common offset of all keys cancels in softmax."""
    return inputs.remember("centred_keys", lambda: centre(working(inputs.key.detach()), inputs.valid))


def importance(inputs: Inputs) -> Tensor:
    """`g_j = log E_q exp(q . k_j)` (B, Hkv, Nk) of the centred keys under Gaussian queries."""
    return inputs.remember("importance", lambda: query_moments(inputs).log_mean_exp(centred_keys(inputs)))


def clusters(inputs: Inputs, count: int) -> Clusters:
    """The keys in `count` clusters by weighted Lloyd steps. Cost O(n count (D + Dv)), no randomness."""
    with torch.no_grad():
        return inputs.remember(("clusters", count), lambda: _clusters(inputs, count))


def _query_moments(inputs: Inputs) -> QueryMoments:
    stride = max(1, inputs.queries // QUERY_SAMPLE)
    query = working(inputs.grouped_query()[..., ::stride, :].detach()) * inputs.scale
    real = inputs.valid_queries
    if real is None:
        size: Tensor | float = float(query.shape[2] * query.shape[3])
        rows = query.flatten(2, 3)
        mean = rows.sum(-2, keepdim=True) / size
        spread = rows - mean
    else:
        flag = real[:, None, None, ::stride, None]
        size = (flag.sum((2, 3), keepdim=True) * query.shape[2]).squeeze(2).clamp_min(1).to(query.dtype)
        rows = (query * flag).flatten(2, 3)
        mean = rows.sum(-2, keepdim=True) / size
        spread = ((query - mean.unsqueeze(2)) * flag).flatten(2, 3)
    return QueryMoments(mean, spread.mT @ spread / size)


def centre(rows: Tensor, valid: Tensor | None) -> Tensor:
    """Rows (B, H, N, D) minus their mean over the real ones; the others become zero."""
    if valid is None:
        return rows - rows.mean(-2, keepdim=True)
    real = valid[:, None, :, None]
    return (rows - rows.sum(-2, keepdim=True) / real.sum(-2, keepdim=True).clamp_min(1)).masked_fill(~real, 0.0)


def _features(inputs: Inputs) -> Tensor:
    second = query_moments(inputs).second
    size = second.shape[-1]
    ridge = 1e-6 * second.diagonal(dim1=-2, dim2=-1).mean(-1) + torch.finfo(second.dtype).tiny
    root = torch.linalg.cholesky(second + ridge[..., None, None] * torch.eye(size, device=second.device))
    values = centre(working(inputs.value.detach()), inputs.valid)
    square = values.square().sum((-2, -1), keepdim=True)
    keys = float(inputs.keys) if inputs.valid is None else inputs.valid.sum(-1)[:, None, None, None]
    rms = (square / keys).sqrt().clamp_min(torch.finfo(square.dtype).tiny)
    return torch.cat([centred_keys(inputs) @ root, values / rms], -1)


def _clusters(inputs: Inputs, count: int) -> Clusters:
    features, scores = _features(inputs), importance(inputs)
    if inputs.valid is not None:
        scores = scores.masked_fill(~inputs.valid[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weight = (TILT * (scores - top.masked_fill(top == -torch.inf, 0.0))).clamp_min(LOWEST_LOG_WEIGHT).exp()
    if inputs.valid is not None:
        weight = weight.masked_fill(~inputs.valid[:, None], 0.0)
    centres = _lloyd(features, weight, scores, count)
    member, nearest = _assign(features, centres)
    member = member / member.sum(-1, keepdim=True)
    if inputs.valid is not None:
        member = member.masked_fill(~inputs.valid[:, None, :, None], 0.0)
    distance = (features.square().sum(-1) - 2 * nearest).clamp_min(0.0)
    return Clusters(member, importance(inputs), distance)


def _lloyd(features: Tensor, weight: Tensor, scores: Tensor, count: int) -> Tensor:
    stride = max(1, features.shape[-2] // (KEYS_PER_CLUSTER * count))
    features, weight, scores = features[..., ::stride, :], weight[..., ::stride], scores[..., ::stride]
    centres = _seeds(features, scores, count)
    weighted = torch.cat([features, torch.ones_like(features[..., :1])], -1) * weight.unsqueeze(-1)
    for _ in range(LLOYD_STEPS):
        total = _assign(features, centres)[0].mT @ weighted
        mass = total[..., -1:]
        centres = torch.where(mass > 0, total[..., :-1] / mass.clamp_min(torch.finfo(mass.dtype).tiny), centres)
    return centres


def _seeds(features: Tensor, scores: Tensor, count: int) -> Tensor:
    """Centres to start from, a quarter at the most important keys and the others at equal steps of importance rank.

    Ranks, not positions: the result does not depend on the order of the keys.
    """
    order = scores.argsort(dim=-1, descending=True)
    head = count // 4
    last = (scores > -torch.inf).sum(-1, keepdim=True).clamp_min(1) - 1
    step = torch.linspace(0, 1, count - head, device=scores.device, dtype=scores.dtype)
    tail = head + ((last - head).clamp_min(0) * step).round().long()
    rank = torch.cat([torch.arange(head, device=scores.device).expand(*last.shape[:-1], -1), tail], -1)
    index = order.gather(-1, rank.minimum(last))
    return features.gather(-2, index.unsqueeze(-1).expand(-1, -1, -1, features.shape[-1]))


def _assign(features: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Which centre is nearest (ones; several where centres coincide), and `x . c - |c|^2 / 2` for it."""
    closeness = features @ centres.mT
    closeness -= 0.5 * centres.square().sum(-1).unsqueeze(-2)
    nearest = closeness.amax(-1, keepdim=True)
    return (closeness == nearest).to(features.dtype), nearest.squeeze(-1)
