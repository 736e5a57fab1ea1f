"""`fewkeys.budget(64, cohorts=1)` with switches: dense and plain, one head after another in a batch of heads.

Queries are scaled, everything is (H, N, D). The maths is that of docs/method.md; a switch that is not turned leaves it
so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.select.outliers import PAIR
from fewkeys.sketch.clusters import NEAR
from fewkeys.sketch.gram import top_subspace
from fewkeys.sketch.leverage import leverage_scores

Layer = tuple[Tensor, Tensor, Tensor]
CLAMP = 2.0


@dataclass(frozen=True)
class Settings:
    """One number or switch for each choice of the method; the defaults are the library's."""

    outliers: int = 12
    window: int = 17
    means: int = 26
    rank: int = 8
    reach: float = 0.25
    tilt: float = 0.5
    value_unit: float = 1.0
    weighted_clusters: bool = True
    steps: int = 2
    factors: bool = True
    reference: bool = True
    pooled: bool = True
    eigenvectors: bool = False
    second_order: bool = False
    heavy: str = "outliers"

    def but(self, **changes: object) -> Settings:
        return replace(self, **changes)


def attend(query: Tensor, key: Tensor, value: Tensor, s: Settings, mass: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """The output (H, N, Dv), and the first-order part of it; `mass` is added to the log of every stand-in's weight."""
    middle = query.mean(-2, keepdim=True)
    covariance = (query - middle).mT @ (query - middle) / query.shape[-2]
    second = covariance + middle.mT @ middle
    eye = torch.eye(key.shape[-1])
    root = torch.linalg.cholesky(second + 1e-6 * second.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * eye)
    k, v = key - key.mean(-2, keepdim=True), value - value.mean(-2, keepdim=True)
    unit = s.value_unit / v.square().sum(-1).mean(-1).sqrt()[:, None, None]
    features = torch.cat([k @ root, v * unit], -1)
    along = (k @ middle.mT).squeeze(-1)
    spread = (k @ root).square().sum(-1)
    variance = spread - along.square()
    importance = along + 0.5 * variance

    member, distance = _clusters(features, importance, s)
    cluster_importance = (importance.unsqueeze(-2) @ member).squeeze(-2) / member.sum(-2).clamp_min(1)
    kept = _heavy(key, k, v, importance, distance, member, s)
    place = torch.arange(key.shape[-2])
    near = (place[:, None] - place).abs() <= (s.window - 1) // 2
    keep = near | kept.unsqueeze(-2)

    t = s.tilt
    e = (t * (importance - (member @ cluster_importance.unsqueeze(-1)).squeeze(-1))).clamp(-CLAMP, CLAMP).exp()
    weight = member * (e * ~kept).unsqueeze(-1)
    total = weight.sum(-2).clamp_min(1e-30).unsqueeze(-1)
    mean_key, mean_value = weight.mT @ k / total, weight.mT @ value / total
    log_mean = (mean_key * (middle + 0.5 * mean_key @ covariance)).sum(-1)
    bias = (t * (cluster_importance - log_mean)).clamp(-CLAMP, CLAMP) if t else torch.zeros_like(cluster_importance)
    own = member * (~kept).unsqueeze(-1)
    left = total.mT * ((~keep).float() @ own) / own.sum(-2, keepdim=True).clamp_min(1)
    stand_in = query @ mean_key.mT + bias.unsqueeze(-2) + left.log() + mass
    off_key, off_value = k - own @ mean_key, value - own @ mean_value
    if s.second_order:
        stand_in = stand_in + _second_order(query, off_key, weight / total.mT).clamp(max=1.0)
    scores = torch.cat([(query @ k.mT).masked_fill(~keep, -torch.inf), stand_in], -1)
    shares = scores.softmax(-1)
    on_keys, on_means = shares[..., : key.shape[-2]], shares[..., key.shape[-2] :]
    plain = on_keys @ value + on_means @ mean_value
    if not s.rank:
        return plain, torch.zeros_like(plain)
    centre = t * (middle + mean_key @ covariance) if s.reference else torch.zeros_like(mean_key)
    if not s.pooled:
        moved = torch.zeros_like(plain)
        for c in range(s.means):
            slope = (off_key * weight[..., c : c + 1]).mT @ off_value / total[:, c : c + 1]
            moved += on_means[..., c : c + 1] * ((query - centre[:, c : c + 1]) @ slope)
        return plain + moved, moved
    slope = (off_key * weight.sum(-1, keepdim=True)).mT @ off_value / weight.sum((-2, -1))[:, None, None]
    left_factor, right_factor = _cut(slope, covariance, s)
    around, reach = t * middle @ left_factor, s.reach * v.square().sum(-1).mean(-1).sqrt()[:, None, None]

    def moves(rows: Tensor) -> Tensor:
        return (rows @ left_factor - around).clamp(-reach, reach) @ right_factor

    on_mean = ((mean_key @ covariance) * mean_key).sum(-1)
    factor = _factors(weight, total, variance, on_mean) if s.factors else torch.ones_like(total[..., 0])
    moved = (on_means @ factor.unsqueeze(-1)) * moves(query) - on_means @ (factor.unsqueeze(-1) * moves(centre))
    return plain + moved, moved


def _clusters(features: Tensor, importance: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    """Membership (H, N, C), squared distance to the own centre (H, N)."""
    top = importance.amax(-1, keepdim=True)
    weight = (0.5 * (importance - top)).clamp_min(-8.0).exp() if s.weighted_clusters else torch.ones_like(importance)
    order = importance.argsort(-1, descending=True)
    head, last = s.means // 4, importance.shape[-1] - 1
    tail = head + ((last - head) * torch.linspace(0, 1, s.means - head)).round().long()
    seeds = order[:, torch.cat([torch.arange(head), tail]).clamp_max(last)]
    centres = features.gather(-2, seeds.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
    for _ in range(s.steps):
        member = _nearest(features, centres) * weight.unsqueeze(-1)
        size = member.sum(-2).unsqueeze(-1)
        centres = torch.where(size > 0, member.mT @ features / size.clamp_min(1e-30), centres)
    member = _nearest(features, centres)
    return member, (features - member @ centres).square().sum(-1)


def _nearest(features: Tensor, centres: Tensor) -> Tensor:
    closeness = features @ centres.mT - 0.5 * centres.square().sum(-1).unsqueeze(-2)
    return torch.nn.functional.one_hot(closeness.argmax(-1), centres.shape[-2]).float()


def _heavy(
    key: Tensor, k: Tensor, v: Tensor, importance: Tensor, distance: Tensor, member: Tensor, s: Settings
) -> Tensor:
    """The keys that every query keeps, bool (H, N)."""
    if not s.outliers:
        return torch.zeros_like(importance, dtype=torch.bool)
    size = member.sum(-2).clamp_min(1).unsqueeze(-1)
    away = (v - member @ (member.mT @ v / size)).square().sum(-1)
    scores = {
        "outliers": lambda: importance + PAIR * distance.maximum(NEAR * distance.amax(-1, keepdim=True)).log(),
        "importance": lambda: importance,
        "distance": lambda: distance,
        "contribution": lambda: 2 * importance + away.clamp_min(1e-30).log(),
        "leverage": lambda: leverage_scores(k.unsqueeze(0)).squeeze(0),
        "norm": lambda: key.square().sum(-1),
        "random": lambda: torch.rand(importance.shape, generator=torch.Generator().manual_seed(0)),
    }[s.heavy]()
    return torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, scores.topk(s.outliers).indices, True)


def _cut(slope: Tensor, covariance: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    """Two factors of the slope cut to `rank` in the queries' metric: onto the leading right eigenvectors of S^T C S."""
    if s.rank >= slope.shape[-1]:
        return slope, torch.eye(slope.shape[-1])
    matrix = slope.mT @ covariance @ slope
    vectors = torch.linalg.eigh(matrix).eigenvectors[..., -s.rank :] if s.eigenvectors else top_subspace(matrix, s.rank)
    return slope @ vectors, vectors.mT


def _factors(weight: Tensor, total: Tensor, variance: Tensor, of_mean: Tensor) -> Tensor:
    """sqrt(spread of a cluster / mean spread), at most 2; `variance` of the scores of keys, `of_mean` of their mean."""
    mass = total.squeeze(-1)
    inside = ((weight.mT @ variance.unsqueeze(-1)).squeeze(-1) / mass - of_mean).clamp_min(0.0)
    mean = (inside * mass).sum(-1, keepdim=True) / mass.sum(-1, keepdim=True)
    return (inside / mean.clamp_min(1e-30)).sqrt().clamp_max(2.0)


def _second_order(query: Tensor, off_key: Tensor, share: Tensor) -> Tensor:
    """`q^T C_c q / 2` for the covariance of each cluster's keys, (H, N, C)."""
    found = []
    for c in range(share.shape[-1]):
        rows = off_key * share[..., c : c + 1].sqrt()
        found.append(0.5 * (query @ rows.mT).square().sum(-1))
    return torch.stack(found, -1)


def calibrated(learn: list[Layer], s: Settings) -> dict[str, Callable[..., Tensor]]:
    """Corrections of each head learned on other text, by name: functions of (layer, query, key, value)."""
    truth = [torch.softmax(q @ k.mT, -1) @ v for q, k, v in learn]
    heads = 12
    shifts, scales = torch.linspace(-0.6, 0.6, 13), torch.linspace(0.0, 2.0, 9)
    best_shift, best_scale, maps = [], [], []
    for layer, exact in zip(learn, truth, strict=True):
        errors = torch.stack([_by_head(attend(*layer, s, shift)[0], exact, heads) for shift in shifts])
        best_shift.append(shifts[errors.argmin(0)])
        output, moved = attend(*layer, s)
        errors = torch.stack([_by_head(output + (scale - 1) * moved, exact, heads) for scale in scales])
        best_scale.append(scales[errors.argmin(0)])
        maps.append(_ridge(layer[0], output, exact, heads))

    def spread(per_head: Tensor, query: Tensor) -> Tensor:
        return per_head.repeat(len(query) // heads)[:, None, None]

    def shifted(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, s, spread(best_shift[number], query))[0]

    def scaled(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, moved = attend(query, key, value, s)
        return output + (spread(best_scale[number], query) - 1) * moved

    def mapped(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = attend(query, key, value, s)[0]
        matrix = maps[number].repeat(len(query) // heads, 1, 1)
        return output + _inputs(query, output) @ matrix

    return {
        "mass of the stand-ins, one number a head": shifted,
        "size of the first-order term, one number a head": scaled,
        "linear map of (query, output), 65 x 32 numbers a head": mapped,
    }


def _by_head(output: Tensor, exact: Tensor, heads: int) -> Tensor:
    error = ((output - exact).norm(dim=-1) / exact.norm(dim=-1)).mean(-1)
    return error.view(-1, heads).mean(0)


def _inputs(query: Tensor, output: Tensor) -> Tensor:
    return torch.cat([query, output, torch.ones_like(query[..., :1])], -1)


def _ridge(query: Tensor, output: Tensor, exact: Tensor, heads: int) -> Tensor:
    """The linear map (heads, D + Dv + 1, Dv) that best predicts what is missing, queries weighted by 1 / |exact|."""
    size = exact.norm(dim=-1, keepdim=True)
    rows, missing = _inputs(query, output) / size, (exact - output) / size

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, heads)).transpose(0, 1).flatten(1, 2)

    a, b = by_head(rows), by_head(missing)
    matrix = a.mT @ a
    ridge = 1e-3 * matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(matrix.shape[-1])
    return torch.linalg.solve(matrix + ridge, a.mT @ b)
