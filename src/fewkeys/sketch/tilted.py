"""Sums over the keys that a cohort of queries does not keep, with the cohort's weights.

With the importance g_hj of key j for cohort h (`fewkeys.sketch.cohorts`) and its mean g_hc over cluster c, the weights
are `e_hj = exp(t (g_hj - g_hc))`, exponents clamped to +-2 (`rest.ClusterMeans` has the reason).
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewkeys.core.derivatives import constants, recomputed
from fewkeys.core.graph import Columns
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.totals import Totals
from fewkeys.native import kernels
from fewkeys.native.tensors import wants_gradient
from fewkeys.sketch.backend import compiled_at_once
from fewkeys.sketch.clusters import KeyClusters, frame, half_variance
from fewkeys.sketch.cohorts import Cohorts
from fewkeys.sketch.sums import sums_by_label

LARGEST_TILT = 2.0
"""No key outweighs another one of its cluster by more than e^4."""


class Tilted(NamedTuple):
    """Sums over the keys of every cluster that a cohort does not keep, with weights e_hj.

    Without gradient, (B, Hkv, H, C): `mass`; `energy`, of `k_j^T W k_j`; `size`, how many keys; `level`, g_hc. With
    gradient: `key` (B, Hkv, H, C, D), centred; `value` (B, Hkv, H, C, Dv); `together` (B, Hkv, D, Dv), of products of
    centred keys and values over all clusters and cohorts, or None.
    """

    mass: Tensor
    energy: Tensor
    size: Tensor
    key: Tensor
    value: Tensor
    level: Tensor
    together: Tensor | None


def tilted_sums(
    inputs: Inputs, cohorts: Cohorts, clusters: KeyClusters, lists: Columns, tilt: float, *, together: bool
) -> Tilted:
    """The sums without the keys on each cohort's list. Cost O(n H (D + Dv) + n D Dv)."""
    x, totals = inputs, inputs.whole.totals
    facts = {"real": x.valid, "label": clusters.label, "half_variance": half_variance(x, cohorts.within)}
    facts |= {"index": lists.index, "used": lists.used, "middle": frame(x).mean}
    facts |= {"mean": cohorts.mean, "filled": cohorts.filled}
    answer = _by_kernels if compiled_at_once(x) else _by_torch
    *by_cluster, level, products = answer(x.key, x.value, facts, clusters.count, together, tilt, totals)
    mass, energy, size, key, value = map(totals.sum, by_cluster)
    return Tilted(mass, energy, size, key, value, level, None if products is None else totals.sum(products))


def _by_torch(
    key: Tensor, value: Tensor, facts: dict[str, Any], count: int, together: bool, tilt: float, totals: Totals
) -> Tilted:
    """`facts`: "real" (B, Nk) or None; "label" and "half_variance" (B, Hkv, Nk); "middle", the mean key; "mean" and
    "filled" of `Cohorts`; "index" and "used" of the lists.
    """
    label, half_variance = facts["label"], facts["half_variance"].unsqueeze(-1)
    centred, values = working(key) - facts["middle"], working(value)
    columns = [torch.ones_like(half_variance), half_variance, centred, values]
    with constants():
        level, members = _levels(torch.cat(columns[:3], -1), facts, count, totals)
        e = _weights(centred, facts, tilt, level)
        listed = label.gather(-1, facts["index"].flatten(2)).view_as(facts["index"])
        size = members.unsqueeze(2) - torch.zeros_like(level).scatter_add(-1, listed, facts["used"].to(level.dtype))
    sums = sums_by_label(torch.cat(columns, -1), e, label, count)
    mass, half_energy, key_sum, value_sum = sums.split([part.shape[-1] for part in columns], -1)
    mass, energy = mass.detach().squeeze(-1), 2 * half_energy.detach().squeeze(-1)
    products = (centred * e.sum(2).unsqueeze(-1)).mT @ values if together else None
    return Tilted(mass, energy, size, key_sum, value_sum, level, products)


def _levels(rows: Tensor, facts: dict[str, Any], count: int, totals: Totals) -> tuple[Tensor, Tensor]:
    """g_hc (B, Hkv, H, C), and the real keys here, (B, Hkv, C), from `[1, k^T W k / 2, k]` (B, Hkv, N, 2 + D)."""
    ones = rows[..., 0]
    real = ones if facts["real"] is None else facts["real"][:, None] * ones
    here = sums_by_label(rows, real.unsqueeze(2), facts["label"], count).squeeze(2)
    sums = totals.sum(here)
    mean = sums[..., 1:] / sums[..., :1].clamp_min(1)
    return facts["mean"] @ mean[..., 1:].mT + mean[..., :1].mT, here[..., 0]


def _weights(centred: Tensor, facts: dict[str, Any], tilt: float, level: Tensor) -> Tensor:
    """e_hj (B, Hkv, H, Nk), zero for padding, for keys that the cohort keeps, and for empty cohorts."""
    label = facts["label"].unsqueeze(2).expand(-1, -1, facts["mean"].shape[2], -1)
    importance: Tensor = facts["mean"] @ centred.mT + facts["half_variance"].unsqueeze(2)
    e = importance.sub_(level.gather(-1, label)).mul_(tilt).clamp_(-LARGEST_TILT, LARGEST_TILT).exp_()
    if facts["real"] is not None:
        e.mul_(facts["real"][:, None, None])
    e.mul_((torch.arange(e.shape[2], device=e.device) < facts["filled"].unsqueeze(-1)).unsqueeze(-1))
    return e.scatter_reduce_(-1, facts["index"], (~facts["used"]).to(e.dtype), "prod")


def _by_kernels(
    key: Tensor, value: Tensor, facts: dict[str, Any], count: int, together: bool, tilt: float, totals: Totals
) -> Tilted:
    def kernel(key: Tensor, value: Tensor) -> Any:
        return kernels.tilt(key, value, facts, count, together, tilt=tilt, largest=LARGEST_TILT)

    if not wants_gradient(key, value):
        return Tilted(*kernel(key, value))
    by_torch = partial(_by_torch, facts=facts, count=count, together=together, tilt=tilt, totals=totals)
    return Tilted(*recomputed(kernel, by_torch, key, value, constant=(0, 1, 2, 5)))
