"""Clusters of keys that the head's own queries cannot tell apart.

Everything here is per sequence and key head, in float32 (float64 for float64 input), without gradient.

With queries `q` (scaled) of mean m and covariance C, taken as Gaussian, the *importance* of a centred key is
`g_j = log E_q exp(q . k_j) = m . k_j + k_j^T C k_j / 2`. Two keys are alike when their scores and their values are:
the features of key j are `[L^T k_j, v_j / rms(v)]` with `L L^T = E[q q^T]`, so that the squared distance of two keys
is the mean squared difference of their scores plus the relative squared difference of their values. Keys enter
Lloyd's steps with weight `exp(g_j / 2)`: what is attended to is described in more detail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import fewkeys.native as native
from fewkeys.core.derivatives import constants
from fewkeys.core.impl import Impl
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.sketch.backend import compiled, compiled_at_once
from fewkeys.sketch.gram import triangular_root
from fewkeys.sketch.sample import Subset, sample, sample_keys
from fewkeys.sketch.sums import label_sums

TILT = 0.5
"""Keys are weighted by `exp(TILT * g)`: halfway, on the log scale, between all alike and as the queries see them."""
RIDGE = 1e-6
"""Of a matrix's mean diagonal, added to all of it before it is factorised."""
LLOYD_STEPS = 2
LOWEST_LOG_WEIGHT = -8.0
NEAR = 1e-5
"""Squared distances from a centre below this part of that from the mean are taken for as much."""
QUERY_SAMPLE = 4096
PIECE = 2**18
"""Numbers held per thread where keys are taken piece by piece: about half the cache next to a core."""
KEYS_PER_CLUSTER, FEW_KEYS = 16, 512
"""Lloyd's steps use at most so many keys per cluster (every s-th key), down to half as many where these are more than
FEW_KEYS and a quarter of the sequence; all keys are assigned at the end.
"""


@dataclass(frozen=True, eq=False)
class QueryMoments:
    """Of the scaled queries that read one key head: mean m (B, Hkv, 1, D), `second` (B, Hkv, D, D): `E[q q^T]`."""

    mean: Tensor
    second: Tensor

    def log_mean_exp(self, rows: Tensor) -> Tensor:
        """`log E exp(q . x)` (B, Hkv, M) for Gaussian queries and rows x (B, Hkv, M, D)."""
        return _importance((rows @ self.second * rows).sum(-1), (rows * self.mean).sum(-1))

    @property
    def covariance(self) -> Tensor:
        """`E[q q^T] - m^T m`."""
        return self.second - self.mean.mT @ self.mean


@dataclass(frozen=True, eq=False)
class Frame:
    """How the queries of a head measure its keys and values.

    `mean` (B, Hkv, 1, D) and `value_mean` (B, Hkv, 1, Dv): the mean real key and value; `root` (B, Hkv, D, D): L, lower
    triangular; `unit` (B, Hkv, 1, 1): 1 / rms(v); `form` (B, Hkv, D + 1, D): the rows of L^T, and the mean query;
    `shift` (B, Hkv, D + 1, 1): what they give for the mean key.
    """

    mean: Tensor
    value_mean: Tensor
    root: Tensor
    unit: Tensor
    form: Tensor
    shift: Tensor


@dataclass(frozen=True, eq=False)
class KeyStatistics:
    """What the queries see of every key (B, Hkv, Nk).

    `spread`: the mean square `E (q . k_j)^2` of a centred key's score; `importance`: g_j.
    """

    spread: Tensor
    importance: Tensor


@dataclass(frozen=True, eq=False)
class Clusters:
    """A partition of the real keys of every head.

    `label` (B, Hkv, Nk), int64: the cluster of every key, the first of those whose centres coincide; padding's mean
    nothing. `distance` (B, Hkv, Nk): squared distance to the own centre. `importance` (B, Hkv, C): weighted mean
    importance of a cluster's keys.
    """

    label: Tensor
    distance: Tensor
    importance: Tensor


def pieces(heads: int, rows: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Some heads, or some rows of one, at a time: as many as keep `width` numbers per row near the processor."""
    most = PIECE * torch.get_num_threads()
    some = max(1, most // max(1, rows * width))
    step = max(1, most // width if some == 1 else rows)
    for head in range(0, heads, some):
        for start in range(0, rows, step):
            yield slice(head, head + some), slice(start, start + step)


def query_moments(inputs: Inputs) -> QueryMoments:
    """Mean and covariance of the scaled queries, per key head; every s-th query once there are many."""
    with constants():
        return inputs.remember("query_moments", lambda: _query_moments(inputs))


def frame(inputs: Inputs) -> Frame:
    """Means of keys and values, and the units of the features. Cost O(n (D + Dv))."""
    with constants():
        return inputs.remember("frame", lambda: _frame(inputs))


def key_statistics(inputs: Inputs) -> KeyStatistics:
    """Importance and score spread of every key; clusters bring them along. Cost O(n D^2)."""
    with constants():
        return inputs.remember("key_statistics", lambda: KeyStatistics(*_seen(inputs, frame(inputs))))


def clusters(inputs: Inputs, count: int) -> Clusters:
    """The keys in `count` clusters by weighted Lloyd steps. Cost O(n count (D + Dv)), no randomness."""
    with constants():
        return inputs.remember(("clusters", count), lambda: _clusters(inputs, count))


@dataclass(frozen=True, eq=False)
class _Asked:
    """Queries that statistics are taken of: `rows` (B, Hq, M, D), zero where they are not real, of which `count` are
    those of a key head, (B, 1, 1, 1) or for all sequences.
    """

    rows: Tensor
    count: Tensor | int


def _asked(inputs: Inputs) -> _Asked:
    """Every s-th of the real queries."""
    query, real, whole = inputs.query.detach(), inputs.valid_queries, inputs.whole
    if real is None:
        stride = max(1, whole.queries // QUERY_SAMPLE)
        rows = query[:, :, -whole.first_query % stride :: stride]
        return _Asked(rows, -(-whole.queries // stride) * inputs.gqa_ratio)
    some, chosen = sample(real, QUERY_SAMPLE)
    return _Asked(some.take(query), (chosen.sum(-1)[:, None, None, None] * inputs.gqa_ratio).clamp_min(1))


def _query_moments(inputs: Inputs) -> QueryMoments:
    asked, scale = _asked(inputs), inputs.scale
    rows = working(asked.rows.unflatten(1, (inputs.kv_heads, inputs.gqa_ratio))).flatten(2, 3)
    total, square = (inputs.whole.totals.sum(part) for part in (rows.sum(-2, keepdim=True), rows.mT @ rows))
    return QueryMoments(scale * total / asked.count, scale**2 * square / asked.count)


def _frame(inputs: Inputs) -> Frame:
    key, value = inputs.key.detach(), inputs.value.detach()
    if compiled_at_once(inputs, key, value):
        found = _compiled_frame(inputs, key, value)
        if found is not None:
            return found
    moments = query_moments(inputs)
    second = moments.second
    root = triangular_root(second, RIDGE)
    totals, dtype, count = inputs.whole.totals, second.dtype, second.new_full((1, 1, 1), inputs.whole.keys)
    if inputs.valid is not None:
        count = inputs.valid.sum(-1)[:, None, None].clamp_min(1)
    square = torch.linalg.vector_norm(value.flatten(2), dim=-1, keepdim=True, dtype=dtype).square()
    sums = (*(rows.sum(-2, keepdim=True, dtype=dtype) for rows in (key, value)), square)
    key_sum, value_sum, square = (totals.sum(part) for part in sums)
    key_mean, value_mean, square = key_sum / count.unsqueeze(-1), value_sum / count.unsqueeze(-1), square / count
    square = square.unsqueeze(-1) - value_mean.square().sum(-1, keepdim=True)
    unit = square.clamp_min(torch.finfo(square.dtype).tiny).rsqrt()
    form = torch.cat([root.mT, moments.mean], 2)
    return Frame(key_mean, value_mean, root, unit, form, form @ key_mean.mT)


def _compiled_frame(inputs: Inputs, key: Tensor, value: Tensor) -> Frame | None:
    """The same in one pass, with the queries' moments, unless a root of theirs has to be mended."""
    asked = _asked(inputs)
    real = [inputs.keys] * inputs.batch if inputs.valid is None else inputs.valid.sum(-1).clamp_min(1).tolist()
    count = asked.count
    some = [count] * inputs.batch if isinstance(count, int) else count.flatten().tolist()
    counts = torch.tensor([some, real], dtype=torch.float32, device="cpu")
    found = native.frame(asked.rows, key, value, *counts, scale=inputs.scale, ridge=RIDGE)
    if found is None:
        return None
    moments = QueryMoments(found.pop("mean_query"), found.pop("second"))
    inputs.remember("query_moments", lambda: moments)
    return Frame(**found)


def _seen(inputs: Inputs, known: Frame) -> tuple[Tensor, Tensor]:
    """Spread and importance of every key."""
    key, form, shift = inputs.key.detach(), known.form, known.shift
    if compiled(inputs.impl, key, form):
        return native.statistics(key, form, shift)
    key = working(key)
    spread = key.new_empty(key.shape[:3])
    flat = [rows.flatten(0, 1) for rows in (key, known.root, known.mean @ known.root, spread)]
    for own, rows in pieces(flat[0].shape[0], flat[0].shape[1], key.shape[-1]):
        flat[3][own, rows] = torch.linalg.vector_norm((flat[0][own, rows] @ flat[1][own]).sub_(flat[2][own]), dim=-1)
    spread.square_()
    return spread, _importance(spread, (key @ form[:, :, -1:].mT).squeeze(-1) - shift[:, :, -1])


def _importance(spread: Tensor, along: Tensor) -> Tensor:
    """`m . k + k^T C k / 2` where `k^T C k = E (q . k)^2 - (m . k)^2`."""
    return along + 0.5 * (spread - along.square())


def _clusters(inputs: Inputs, count: int) -> Clusters:
    known, some = frame(inputs), sample_keys(inputs, *_sampled(count))
    key, value = inputs.key.detach(), inputs.value.detach()
    if compiled_at_once(inputs, key, value, known.form):
        given = {"form": known.form, "shift": known.shift, "middle": known.value_mean, "unit": known.unit}
        how = {"tilt": TILT, "lowest": LOWEST_LOG_WEIGHT, "near": NEAR}
        rows = some.take(key), some.take(value), some.real
        found = native.cluster(key, value, rows, given, count=count, steps=LLOYD_STEPS, **how)
        label, distance, spread, seen, importance = found
        inputs.remember("key_statistics", lambda: KeyStatistics(spread, seen))
        return Clusters(label, distance, importance)
    centres, importance = _lloyd(inputs, known, some, count)
    # x . c - |c|^2 / 2 for features x, straight from keys and values: the features of all keys are never written down.
    on_key = centres[..., : inputs.head_dim] @ known.root.mT
    on_value = known.unit * centres[..., inputs.head_dim :]
    constant = -0.5 * centres.square().sum(-1, keepdim=True)
    constant = constant - on_key @ known.mean.mT - on_value @ known.value_mean.mT
    spread, nearest, square, label = _survey(inputs, known, torch.cat([on_key, on_value], -1), constant)
    energy = spread + square * known.unit.square().squeeze(-1)
    # Of a key that is its own centre, rounding alone would be left, which the logarithm makes much of.
    return Clusters(label, (energy - 2 * nearest).maximum(NEAR * energy), importance)


def _sampled(count: int) -> tuple[int, int]:
    """About how many keys Lloyd's steps look at, at least and at most."""
    most = KEYS_PER_CLUSTER * count
    return min(most, max(most // 2, FEW_KEYS)), most


def _survey(inputs: Inputs, known: Frame, centre: Tensor, constant: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Spread, largest closeness as `_nearest` has it, `|v - mean|^2` and label of every key (B, H, N).

    The statistics of the keys are remembered.
    """
    key, value, middle = inputs.key.detach(), inputs.value.detach(), known.value_mean
    if compiled(inputs.impl, key, value, centre):
        found = native.survey(key, value, known.form, known.shift, centre, constant, middle)
        spread, importance, nearest, square, label = found
        inputs.remember("key_statistics", lambda: KeyStatistics(spread, importance))
        return spread, nearest, square, label
    nearest, label = _nearest(key, value, centre, constant, inputs.impl)
    value = working(value)
    square = torch.linalg.vector_norm(value, dim=-1).square() - 2 * (value @ middle.mT).squeeze(-1)
    return key_statistics(inputs).spread, nearest, square + middle.square().sum(-1), label


def _nearest(key: Tensor, value: Tensor, centre: Tensor, constant: Tensor, impl: Impl) -> tuple[Tensor, Tensor]:
    """The largest `[k, v] . centre_c + constant_c` of every key (B, H, N), and the first such c.

    centre (B, H, C, D + Dv), constant (B, H, C, 1).
    """
    if compiled(impl, key, value, centre):
        return native.assign(key, value, centre, constant)
    key, value = working(key), working(value)
    nearest = key.new_empty(key.shape[:3]).flatten(0, 1)
    label = torch.empty_like(nearest, dtype=torch.int64)
    centre, constant = centre.flatten(0, 1).mT, constant.flatten(0, 1).mT
    on_key, on_value = centre.split([key.shape[-1], value.shape[-1]], 1)
    for own, rows in pieces(nearest.shape[0], nearest.shape[1], centre.shape[-1]):
        closeness = torch.baddbmm(constant[own], key.flatten(0, 1)[own, rows], on_key[own])
        closeness.baddbmm_(value.flatten(0, 1)[own, rows], on_value[own])
        nearest[own, rows], label[own, rows] = closeness.max(-1)
    return nearest.unflatten(0, key.shape[:2]), label.unflatten(0, key.shape[:2])


def _lloyd(inputs: Inputs, known: Frame, some: Subset, count: int) -> tuple[Tensor, Tensor]:
    """Centres (B, Hkv, C, D + Dv) in feature space, and the mean importance of their keys (B, Hkv, C)."""
    totals, form, impl = inputs.whole.totals, known.form, inputs.impl
    key, value = (working(some.take(rows.detach())) for rows in (inputs.key, inputs.value))
    seen = (key @ form.mT).sub_(known.mean @ form.mT)
    on_query, on_value = seen[..., :-1], (value * known.unit).sub_(known.value_mean * known.unit)
    importance = _importance(torch.linalg.vector_norm(on_query, dim=-1).square(), seen[..., -1])
    scores, hidden = importance, None
    if some.real is not None:
        hidden = ~some.real[:, None].expand(-1, key.shape[1], -1)
        scores = scores.masked_fill(hidden, -torch.inf)
    top = totals.max(largest(scores))
    weight = (TILT * (scores - top.masked_fill(top == -torch.inf, 0.0))).clamp_min(LOWEST_LOG_WEIGHT).exp()
    if hidden is not None:
        weight = weight.masked_fill(hidden, 0.0)
        on_query, on_value = (rows.masked_fill(hidden.unsqueeze(-1), 0.0) for rows in (on_query, on_value))
    # The sample is small: where there are several processes, all take the same steps on all of it.
    parts = (totals.rows(part) for part in (on_query, on_value, importance, weight, scores))
    on_query, on_value, importance, weight, scores = parts
    first = _seeds(scores, count)
    places = first.unsqueeze(-1)
    centres = torch.cat([x.gather(-2, places.expand(-1, -1, -1, x.shape[-1])) for x in (on_query, on_value)], -1)
    mean_importance = importance.gather(-1, first)
    for _ in range(LLOYD_STEPS):
        half = -0.5 * centres.square().sum(-1, keepdim=True)
        _, label = _nearest(on_query, on_value, centres, half, impl)
        total = torch.cat(label_sums(on_query, on_value, label, weight, count, impl), -1)
        mass, along = (
            weight.new_zeros(first.shape).scatter_add_(-1, label, part) for part in (weight, weight * importance)
        )
        least = mass.clamp_min(torch.finfo(mass.dtype).tiny)
        centres = torch.where((mass > 0).unsqueeze(-1), total / least.unsqueeze(-1), centres)
        mean_importance = torch.where(mass > 0, along / least, mean_importance)
    return centres, mean_importance


def largest(scores: Tensor) -> Tensor:
    """The largest of each row (..., 1); -inf of none."""
    if not scores.shape[-1]:
        return scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    return scores.amax(-1, keepdim=True)


def _seeds(scores: Tensor, count: int) -> Tensor:
    """Rows to start from (B, H, count), a quarter the most important and the others at equal steps of importance rank.

    Ranks, not positions: the result does not depend on the order of the keys.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)  # among equals the first, as in the kernels
    head = count // 4
    last = (scores > -torch.inf).sum(-1, keepdim=True).clamp_min(1) - 1
    step, parts = torch.arange(count - head, device=scores.device), max(1, count - head - 1)
    tail = head + (2 * (last - head).clamp_min(0) * step + parts) // (2 * parts)
    rank = torch.cat([torch.arange(head, device=scores.device).expand(*last.shape[:-1], -1), tail], -1)
    return order.gather(-1, rank.minimum(last))


def clustering_operations(inputs: Inputs, count: int) -> dict[str, float]:
    """Operations per key, for `Work.shared`: Lloyd's steps on a sample, one assignment and the sums over all keys."""
    used = min(1.0, _sampled(count)[1] / inputs.keys)
    operations = (LLOYD_STEPS * used + 1) * 4 * count * (inputs.head_dim + inputs.value_dim)
    return {f"{count} clusters": operations}
