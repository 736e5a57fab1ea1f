"""Clusters of keys that the head's queries cannot distinguish, in working precision, without gradient.

The scaled queries q are taken as Gaussian, of mean m and covariance C. The *importance* of a centred key is
`g_j = log E_q exp(q . k_j) = m . k_j + k_j^T C k_j / 2`. The features of key j are `[L^T k_j, v_j / rms(v)]` with
`L L^T = E[q q^T]`: the squared distance of two keys is the mean squared difference of their scores plus the relative
squared difference of their values. Lloyd's steps weigh keys by `exp(g_j / 2)`: important keys get more clusters.
"""

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.rows import take
from fewkeys.core.totals import row_maximum
from fewkeys.core.work import at_once
from fewkeys.native import kernels
from fewkeys.native.build import IndefiniteError
from fewkeys.sketch.backend import compiled_at_once, statistic
from fewkeys.sketch.gram import triangular_root
from fewkeys.sketch.sample import Subset, sample, sample_keys
from fewkeys.sketch.sums import sums_by_label

TILT = 0.5
"""Keys weigh `exp(TILT * g)`: on the log scale halfway between equal weights and the queries' weights."""
RIDGE = 1e-6
"""The share of its mean diagonal that is added to a matrix's diagonal before factorising."""
LLOYD_STEPS = 2
LOWEST_LOG_WEIGHT = -8.0
NEAR = 1e-5
"""The least squared distance from a centre, relative to that from the mean: less is rounding."""
QUERY_SAMPLE = 4096
PIECE = 2**18
"""Numbers in one piece, for each thread: on a CPU about half of a core's cache."""
KEYS_PER_CLUSTER, FEW_KEYS = 16, 512
"""The most keys per cluster that Lloyd's steps use; half are enough if that is more than FEW_KEYS."""


@dataclass(frozen=True, eq=False)
class QueryMoments:
    """Of the scaled queries of a key head: `mean` m (B, Hkv, 1, D), `second` `E[q q^T]` (B, Hkv, D, D)."""

    mean: Tensor
    second: Tensor

    def log_mean_exp(self, rows: Tensor) -> Tensor:
        """`log E exp(q . x)` (B, Hkv, M) for rows x (B, Hkv, M, D)."""
        return _importance((rows @ self.second * rows).sum(-1), (rows * self.mean).sum(-1))


@dataclass(frozen=True, eq=False)
class Frame:
    """`mean` (B, Hkv, 1, D) and `value_mean` (B, Hkv, 1, Dv) of real keys; `root` (B, Hkv, D, D): L, lower triangular;
    `unit` (B, Hkv, 1, 1): 1 / rms(v); `form` (B, Hkv, D + 1, D): the rows of L^T, and the mean query; `shift`
    (B, Hkv, D + 1, 1): `form` times the mean key.
    """

    mean: Tensor
    value_mean: Tensor
    root: Tensor
    unit: Tensor
    form: Tensor
    shift: Tensor


@dataclass(frozen=True, eq=False)
class KeyClusters:
    """A partition of the real keys of every head into `count` clusters.

    `label` (B, Hkv, Nk), int64: the nearest, of equally near ones the first; undefined for padding. `distance`
    (B, Hkv, Nk): squared, to its centre.
    """

    label: Tensor
    distance: Tensor
    count: int


@statistic
def query_moments(inputs: Inputs) -> QueryMoments:
    """The moments of the queries; of every s-th, if `QUERY_SAMPLE` or more remain."""
    (sampled, count), scale = _query_sample(inputs), inputs.scale
    rows = working(sampled.unflatten(1, (inputs.kv_heads, inputs.gqa_ratio))).flatten(2, 3)
    total, square = (inputs.whole.totals.sum(part) for part in (rows.sum(-2, keepdim=True), rows.mT @ rows))
    return QueryMoments(scale * total / count, scale**2 * square / count)


@statistic
def query_covariance(inputs: Inputs) -> Tensor:
    """The covariance C (B, Hkv, D, D) of the scaled queries."""
    moments = query_moments(inputs)
    covariance = moments.second - moments.mean.mT @ moments.mean
    size, variance = (part.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] for part in (moments.second, covariance))
    # Equal queries have no covariance: what rounding leaves of the difference must not become one.
    return covariance.where(variance > 64 * torch.finfo(size.dtype).eps * size, 0.0)


def _query_sample(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Every s-th real query (B, Hq, M, D), filled up with zeros, and their number (B, 1, 1, 1) for a key head."""
    real, whole = inputs.valid_queries, inputs.whole
    stride = max(1, whole.queries // QUERY_SAMPLE)
    subset = Subset(slice(-whole.first_query % stride, None, stride)) if real is None else sample(real, QUERY_SAMPLE)
    count = _count(inputs, subset.real, -(-whole.queries // stride), inputs.gqa_ratio)
    return subset.take(inputs.query.detach()), count


def _count(inputs: Inputs, real: Tensor | None, every: int, times: int = 1) -> Tensor:
    """(B, 1, 1, 1): `times` how many are `real` (B, N), None: `every` one; at least 1."""
    if real is None:  # kernels read float32, and calls are recorded that convert nothing
        return torch.full((inputs.batch, 1, 1, 1), every * times, dtype=torch.float32, device=inputs.query.device)
    return (times * real.sum(-1)[:, None, None, None]).clamp_min(1)


@statistic
def half_variance(inputs: Inputs, covariance: Tensor) -> Tensor:
    """`k_j^T C k_j / 2` (B, Hkv, Nk) of the centred keys."""
    centred = working(inputs.key.detach()) - frame(inputs).mean
    return 0.5 * (centred @ covariance).mul_(centred).sum(-1)


@statistic
def frame(inputs: Inputs) -> Frame:
    """The metric of the queries on the keys, and the units of the values. Cost O(n (D + Dv))."""
    key, value = inputs.key.detach(), inputs.value.detach()
    if compiled_at_once(inputs):
        with suppress(IndefiniteError):  # torch mends the matrix
            return _compiled_frame(inputs, key, value)
    moments = query_moments(inputs)
    second, root = moments.second, triangular_root(moments.second, RIDGE)
    dtype, count = second.dtype, _count(inputs, inputs.valid, inputs.whole.keys)
    square = torch.linalg.vector_norm(value.flatten(2), dim=-1, dtype=dtype).square()[..., None, None]
    sums = (*(rows.sum(-2, keepdim=True, dtype=dtype) for rows in (key, value)), square)
    mean, value_mean, mean_square = (inputs.whole.totals.sum(part) / count for part in sums)
    variance = mean_square - value_mean.square().sum(-1, keepdim=True)
    unit = variance.clamp_min(torch.finfo(dtype).tiny).rsqrt()
    form = torch.cat([root.mT, moments.mean], 2)
    return Frame(mean, value_mean, root, unit, form, form @ mean.mT)


def _compiled_frame(inputs: Inputs, key: Tensor, value: Tensor) -> Frame:
    """The frame and the query moments by a kernel."""
    queries, asked = _query_sample(inputs)
    counts = (count.flatten().float() for count in (asked, _count(inputs, inputs.valid, inputs.keys)))
    statistics = kernels.frame(queries, key, value, *counts, scale=inputs.scale, ridge=RIDGE)
    moments = QueryMoments(statistics.pop("mean_query"), statistics.pop("second"))
    covariance = statistics.pop("covariance")
    inputs.remember((query_moments,), lambda: moments)
    inputs.remember((query_covariance,), lambda: covariance)
    return Frame(**statistics)


def _importance(spread: Tensor, on_mean: Tensor) -> Tensor:
    """`m . k + k^T C k / 2` where `k^T C k = E (q . k)^2 - (m . k)^2`; `on_mean`: m . k."""
    return on_mean + 0.5 * (spread - on_mean.square())


@statistic
def clusters(inputs: Inputs, count: int) -> KeyClusters:
    """`count` clusters by weighted Lloyd steps, without randomness. Cost O(n count (D + Dv))."""
    units, subset = frame(inputs), sample_keys(inputs, *_sampled(count))
    key, value = inputs.key.detach(), inputs.value.detach()
    if compiled_at_once(inputs):
        tensors = {"form": units.form, "shift": units.shift, "middle": units.value_mean, "unit": units.unit}
        numbers = {"tilt": TILT, "lowest": LOWEST_LOG_WEIGHT, "near": NEAR}
        rows = subset.take(key), subset.take(value), subset.real
        label, distance, half = kernels.cluster(key, value, rows, tensors, count=count, steps=LLOYD_STEPS, **numbers)
        inputs.remember((half_variance, query_covariance(inputs)), lambda: half)
        return KeyClusters(label, distance, count)
    centres = _lloyd(inputs, units, subset, count)
    # x . c - |c|^2 / 2 for features x from keys and values: no tensor has the features of all keys.
    on_key = centres[..., : inputs.head_dim] @ units.root.mT
    on_value = units.unit * centres[..., inputs.head_dim :]
    constant = -0.5 * centres.square().sum(-1, keepdim=True)
    constant = constant - on_key @ units.mean.mT - on_value @ units.value_mean.mT
    nearest, label = _nearest(key, value, torch.cat([on_key, on_value], -1), constant)
    on_query = (working(key) @ units.root).sub_(units.mean @ units.root)
    energy = torch.linalg.vector_norm(on_query, dim=-1).square_()
    energy += (working(value) - units.value_mean).mul_(units.unit).square_().sum(-1)
    # Of a key that is its own centre the distance would be rounding error, whose logarithm is large.
    return KeyClusters(label, (energy - 2 * nearest).maximum(NEAR * energy), count)


def _sampled(count: int) -> tuple[int, int]:
    """About how many keys Lloyd's steps use, at least and at most."""
    most = KEYS_PER_CLUSTER * count
    return min(most, max(most // 2, FEW_KEYS)), most


def _nearest(key: Tensor, value: Tensor, centre: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """The largest `[k, v] . centre_c + constant_c` (B, H, N), centre (B, H, C, D + Dv), and the first such c."""
    sizes, rows, values = key.shape[:2], working(key).flatten(0, 1), working(value).flatten(0, 1)
    nearest = rows.new_empty(rows.shape[:2])
    label = torch.empty_like(nearest, dtype=torch.int64)
    centre, constant = centre.flatten(0, 1).mT, constant.flatten(0, 1).mT
    on_key, on_value = centre.split([key.shape[-1], value.shape[-1]], 1)
    (heads, keys), count = nearest.shape, constant.shape[2]
    most = PIECE * torch.get_num_threads() if rows.device.type == "cpu" else at_once(rows)
    heads_at_once = max(1, most // max(1, keys * count))
    step = max(1, most // count if heads_at_once == 1 else keys)
    for head in range(0, heads, heads_at_once):
        part = slice(head, head + heads_at_once)
        for start in range(0, keys, step):
            piece = part, slice(start, start + step)
            closeness = torch.baddbmm(constant[part], rows[piece], on_key[part])
            nearest[piece], label[piece] = closeness.baddbmm_(values[piece], on_value[part]).max(-1)
    return nearest.unflatten(0, sizes), label.unflatten(0, sizes)


def _lloyd(inputs: Inputs, frame: Frame, subset: Subset, count: int) -> Tensor:
    """Centres (B, Hkv, C, D + Dv) in feature space."""
    totals = inputs.whole.totals
    key, value = (working(subset.take(rows.detach())) for rows in (inputs.key, inputs.value))
    products = (key @ frame.form.mT).sub_(frame.shift.mT)
    on_query, on_value = products[..., :-1], (value * frame.unit).sub_(frame.value_mean * frame.unit)
    hidden = ~subset.real[:, None] if subset.real is not None else key.new_zeros((), dtype=torch.bool)
    importance = _importance(torch.linalg.vector_norm(on_query, dim=-1).square(), products[..., -1])
    importance = importance.masked_fill(hidden, -torch.inf)
    top = totals.max(row_maximum(importance))
    weight = (TILT * (importance - top.masked_fill(top == -torch.inf, 0.0))).clamp_min(LOWEST_LOG_WEIGHT).exp()
    weight = weight.masked_fill(hidden, 0.0)
    # The sample is small: each of several processes takes the same steps on all of it.
    on_query, on_value, weight, importance = map(totals.rows, (on_query, on_value, weight, importance))
    first, features = _seeds(importance, count), torch.cat([on_query, on_value], -1)
    centres = take(features, first)
    for _ in range(LLOYD_STEPS):
        half = -0.5 * centres.square().sum(-1, keepdim=True)
        _, label = _nearest(on_query, on_value, centres, half)
        total = sums_by_label(features, weight.unsqueeze(2), label, count).squeeze(2)
        mass = weight.new_zeros(first.shape).scatter_add_(-1, label, weight).unsqueeze(-1)
        centres = torch.where(mass > 0, total / mass.clamp_min(torch.finfo(mass.dtype).tiny), centres)
    return centres


def _seeds(scores: Tensor, count: int) -> Tensor:
    """The first centres (B, H, count): a quarter are the most important keys, the others at equal steps of rank."""
    order = scores.argsort(dim=-1, descending=True, stable=True)  # stable, as in the kernels
    head = count // 4
    last = (scores > -torch.inf).sum(-1, keepdim=True).clamp_min(1) - 1
    step, parts = torch.arange(count - head, device=scores.device), max(1, count - head - 1)
    tail = head + (2 * (last - head).clamp_min(0) * step + parts) // (2 * parts)
    rank = torch.cat([torch.arange(head, device=scores.device).expand(*last.shape[:-1], -1), tail], -1)
    return order.gather(-1, rank.minimum(last))


def clustering_operations(inputs: Inputs, count: int) -> dict[str, float]:
    """For `Work.shared`: Lloyd's steps on the sample, the assignment and the sums of all keys."""
    used = min(1.0, _sampled(count)[1] / inputs.keys)
    return {f"{count} clusters": (LLOYD_STEPS * used + 1) * 4 * count * (inputs.head_dim + inputs.value_dim)}
