"""What cohorts of queries see of the keys: those that each should keep, and sums with weights as each sees them.

With the importance g_hj of key j for cohort h (`fewkeys.sketch.cohorts`) and its mean g_hc over cluster c, the members
of a cluster weigh

    e_hj = exp(t (g_hj - g_hc)),   t = 0.8, exponents clamped to +-2:

the average that a query of the cohort takes, or nearly so. Cohorts are narrow, so t is nearer to one than where one
average must serve all queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fewkeys.native as native
from fewkeys.core.impl import COMPILED
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import working
from fewkeys.core.totals import Totals
from fewkeys.sketch.clusters import Clusters, frame
from fewkeys.sketch.cohorts import Cohorts, own_importance

TILT = 0.8
LARGEST_TILT = 2.0


@dataclass(frozen=True, eq=False)
class Tilted:
    """Sums over the keys of every cluster that a cohort does not keep, each key weighing e_hj.

    `mass` (B, Hkv, H, C), `energy` (the same: of `k_j^T W k_j`), both without gradient; `key` (B, Hkv, H, C, D): of
    centred keys; `value` (B, Hkv, H, C, Dv); `importance` (B, Hkv, H, C): g_hc, without gradient; `together`
    (B, Hkv, D, Dv): of products of centred keys and values, over all clusters and cohorts, or None.
    """

    mass: Tensor
    energy: Tensor
    key: Tensor
    value: Tensor
    importance: Tensor
    together: Tensor | None


def best(inputs: Inputs, known: Cohorts, offset: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For every cohort the `count` real keys of largest `m_h . k_j + offset_j`, offset (B, Hkv, Nk): places
    (B, Hkv, H, count), in order, and whether they are used. Cost O(n H D).
    """
    x, count = inputs, min(count, inputs.keys)
    if x.valid is not None:
        offset = offset.masked_fill(~x.valid[:, None], -torch.inf)
    if x.impl in COMPILED and native.readable(x.key, offset, known.mean):
        return native.best(x.key.detach(), known.mean, offset, count)
    top = (known.mean @ working(x.key.detach()).mT).add_(offset.unsqueeze(2)).topk(count, -1)
    index, order = top.indices.sort(-1)
    return index, (top.values > -torch.inf).gather(-1, order)


def tilted_sums(
    inputs: Inputs, known: Cohorts, found: Clusters, index: Tensor, used: Tensor, *, together: bool
) -> Tilted:
    """The sums where cohort h keeps the keys `index` (B, Hkv, H, S) that are `used`; products only if they are asked
    for. Gradients flow through keys and values, not through what they weigh. Cost O(n H (D + Dv) + n D Dv).
    """
    x, count, totals = inputs, found.importance.shape[-1], inputs.whole.totals
    told = {"label": found.label, "own": own_importance(x, known), "middle": frame(x).mean, "mean": known.mean}
    told |= {"index": index, "used": used, "filled": known.filled}
    compiled = x.shard is None and x.impl in COMPILED and native.readable(x.key, x.value, known.mean)
    given = (x.key, x.value, x.valid, told, count, together, compiled, totals)
    *sums, importance, products = _Sums.apply(*given)  # type: ignore[no-untyped-call]
    mass, energy, key, value = map(totals.sum, sums)
    return Tilted(mass, energy, key, value, importance, None if products is None else totals.sum(products))


def _levels(key: Tensor, real: Tensor | None, told: dict[str, Tensor], count: int, totals: Totals) -> Tensor:
    """g_hc: that of a cluster's mean key and mean `k^T W k / 2`."""
    label, own = told["label"], told["own"]
    there = torch.ones_like(own) if real is None else real[:, None].to(own.dtype).expand_as(own)
    size, quad = own.new_zeros((2, *own.shape[:2], count)).unbind()
    size.scatter_add_(-1, label, there)
    quad.scatter_add_(-1, label, there * own)
    where, total = label.unsqueeze(-1).expand_as(key), own.new_zeros((*size.shape, key.shape[-1]))
    total.scatter_add_(2, where, (working(key) - told["middle"]) * there.unsqueeze(-1))
    size, quad, total = (totals.sum(part) for part in (size, quad, total))
    size = size.clamp_min(1)
    return told["mean"] @ (total / size.unsqueeze(-1)).mT + (quad / size).unsqueeze(2)


def _weights(key: Tensor, real: Tensor | None, told: dict[str, Tensor], level: Tensor) -> Tensor:
    """e_hj (B, Hkv, H, Nk), zero for padding, for keys that the cohort keeps, and for cohorts of nobody."""
    label = told["label"].unsqueeze(2).expand(-1, -1, told["mean"].shape[2], -1)
    exponent = told["mean"] @ (working(key) - told["middle"]).mT + told["own"].unsqueeze(2)
    e = exponent.sub_(level.gather(-1, label)).mul_(TILT).clamp_(-LARGEST_TILT, LARGEST_TILT).exp_()
    if real is not None:
        e.mul_(real[:, None, None])
    e.mul_((torch.arange(e.shape[2], device=e.device) < told["filled"].unsqueeze(-1)).unsqueeze(-1))
    return e.scatter_reduce_(-1, told["index"], (~told["used"]).to(e.dtype), "prod")


class _Sums(torch.autograd.Function):
    """What `Tilted` has, in its order; the gradients are of keys and values, through sums and products."""

    @staticmethod
    def forward(
        ctx: Any,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        told: dict[str, Tensor],
        count: int,
        together: bool,
        compiled: bool,
        totals: Totals,
    ) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...]
        if compiled:
            found = native.tilt(key, value, {**told, "real": real}, count, together, tilt=TILT, largest=LARGEST_TILT)
        else:
            level, label = _levels(key, real, told, count, totals), told["label"]
            e = _weights(key, real, told, level)
            where = label.unsqueeze(2).expand_as(e)
            mass, energy = level.new_zeros((2, *level.shape)).unbind()
            mass.scatter_add_(-1, where, e)
            energy.scatter_add_(-1, where, e * (2 * told["own"]).unsqueeze(2))
            centred, values = working(key) - told["middle"], working(value)
            sums = [part.new_zeros((*level.shape, part.shape[-1])) for part in (centred, values)]
            for total, part in zip(sums, (centred, values), strict=True):
                to = label.unsqueeze(-1).expand_as(part)
                for h in range(e.shape[2]):
                    total[:, :, h].scatter_add_(2, to, part * e[:, :, h].unsqueeze(-1))
            products = (centred * e.sum(2).unsqueeze(-1)).mT @ values if together else None
            found = mass, energy, *sums, level, products
        ctx.save_for_backward(key, value, found[4], *told.values())
        ctx.real, ctx.names, ctx.compiled = real, tuple(told), compiled
        ctx.mark_non_differentiable(found[0], found[1], found[4])
        return found

    @staticmethod
    def backward(
        ctx: Any,
        _mass: Tensor,
        _energy: Tensor,
        to_key: Tensor,
        to_value: Tensor,
        _level: Tensor,
        products: Tensor | None,
    ) -> Any:
        key, value, level, *parts = ctx.saved_tensors
        told, coming = dict(zip(ctx.names, parts, strict=True)), (to_key, to_value, products)
        # Derivatives of the gradients go through torch's operations.
        if ctx.compiled and not torch.is_grad_enabled():
            given = {**told, "real": ctx.real, "level": level}
            found = native.tilt_back(key, value, given, coming, tilt=TILT, largest=LARGEST_TILT)
        else:
            found = _passed_on(key, value, _weights(key.detach(), ctx.real, told, level), told, coming)
        return (*(part.to(rows.dtype) for part, rows in zip(found, (key, value), strict=True)), *[None] * 6)


def _passed_on(
    key: Tensor, value: Tensor, e: Tensor, told: dict[str, Tensor], coming: tuple[Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values, one cohort after another."""
    label = told["label"].unsqueeze(-1)

    def spread(sums: Tensor) -> Tensor:
        where = label.expand(*e.shape[:2], e.shape[3], sums.shape[-1])
        found = sums.new_zeros(where.shape)
        for h in range(e.shape[2]):
            found = found + sums[:, :, h].gather(2, where) * e[:, :, h].unsqueeze(-1)
        return found

    (to_key, to_value), products = map(spread, coming[:2]), coming[2]
    if products is None:
        return to_key, to_value
    weight = e.sum(2).unsqueeze(-1)
    to_key = to_key + weight * (working(value) @ products.mT)
    return to_key, to_value + weight * ((working(key) - told["middle"]) @ products)
