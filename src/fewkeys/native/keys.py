"""Statistics, clusters and sums of keys in one pass each (`keys.h`), Lloyd's steps (`lloyd.h`), stand-ins of clusters
(`stand_ins.h`); without gradient.

Keys (B, H, N, D) and values (B, H, N, Dv) are float32 or bfloat16, everything else float32; `tensors.suits` them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, alike, pointers, struct


def statistics(key: Tensor, form: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Spread and importance of the keys, as `survey` says."""
    spread, importance = form.new_empty((2, *key.shape[:3])).unbind()
    _survey(key, key[..., :0], form=form, shift=shift, spread=spread, importance=importance)
    return spread, importance


def assign(key: Tensor, value: Tensor, centre: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """The largest closeness of every key and its label, as `survey` says."""
    nearest = centre.new_empty(key.shape[:3])
    label = torch.empty_like(nearest, dtype=torch.int64)
    _survey(key, value, centre=centre, constant=constant, nearest=nearest, label=label)
    return nearest, label


def survey(
    key: Tensor, value: Tensor, form: Tensor, shift: Tensor, centre: Tensor, constant: Tensor, middle: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the queries see of every key, and its cluster; keys and values are read once.

    With `form` (B, H, D + 1, D), the rows of L^T, L lower triangular, and the mean query, and `shift` (B, H, D + 1, 1),
    what they give for the mean key: `x = form k - shift`, the *spread* `s = x_1^2 + .. + x_D^2` and the *importance*
    `x_(D+1) + (s - x_(D+1)^2) / 2`. With centres (B, H, C, D + Dv) and constants (B, H, C, 1): the largest *closeness*
    `[k, v] . centre_c + constant_c`, and the first c that attains it. With `middle` (B, H, 1, Dv): `|v - middle|^2`.

    Returns:
        Spread, importance, closeness and squared distance, all float32, and label, int64: (B, H, N) each.
    """
    spread, importance, nearest, square = form.new_empty((4, *key.shape[:3])).unbind()
    label = torch.empty_like(nearest, dtype=torch.int64)
    seen = {"form": form, "shift": shift, "spread": spread, "importance": importance}
    clusters = {"centre": centre, "constant": constant, "nearest": nearest, "label": label}
    _survey(key, value, **seen, **clusters, middle=middle, square=square)
    return spread, importance, nearest, square, label


def _survey(key: Tensor, value: Tensor, **parts: Tensor) -> None:
    """Read what is given of the parts, and write those that are asked for by it."""
    key, value = alike(key, value)
    held = {name: part.contiguous() for name, part in parts.items()}
    count = held["centre"].shape[2] if "centre" in held else 0
    call("fewkeys_survey", struct("Survey")(**_rows(key, value), **pointers(held), count=count), key.dtype)


def label_sums(key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int) -> Tensor:
    """`sum_{j: label_j = c} share_j [k_j, v_j]` (B, H, count, D + Dv) for labels and shares (B, H, N)."""
    return _sums(key, value, label, share, count, {})


def sums_and_products(
    key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int, middle: Tensor
) -> tuple[Tensor, Tensor]:
    """`label_sums`, and in the same pass `sum_j share_j (k_j - middle) v_j^T` (B, H, D, Dv); middle (B, H, 1, D)."""
    products = share.new_zeros((*key.shape[:2], key.shape[3], value.shape[3]))
    return _sums(key, value, label, share, count, {"middle": middle.contiguous(), "products": products}), products


def _sums(
    key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int, others: dict[str, Tensor | None]
) -> Tensor:
    (key, value), label, share = alike(key, value), label.contiguous(), share.contiguous()
    sums = share.new_zeros((*key.shape[:2], count, key.shape[3] + value.shape[3]))
    held = pointers({"label": label, "share": share, "sums": sums, **others})
    call("fewkeys_label_sums", struct("Sums")(**_rows(key, value), **held, count=count), key.dtype)
    return sums


def totals(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`sum_j k_j` (B, H, 1, D), `sum_j v_j` (B, H, 1, Dv) and `sum_j |v_j|^2` (B, H, 1), all float32."""
    key, value = alike(key, value)
    dim, value_dim = key.shape[3], value.shape[3]
    found = key.new_zeros((*key.shape[:2], dim + value_dim), dtype=torch.float32)
    square = found.new_zeros((*key.shape[:2], 1))
    told = struct("Totals")(**_rows(key, value), **pointers({"sums": found, "square": square}))
    call("fewkeys_totals", told, key.dtype)
    key_sum, value_sum = found.unsqueeze(2).split([dim, value_dim], -1)
    return key_sum, value_sum, square


def lloyd(
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    seen: dict[str, Tensor],
    *,
    count: int,
    steps: int,
    tilt: float,
    lowest: float,
) -> tuple[Tensor, Tensor]:
    """`count` centres (B, H, count, D + Dv) of sampled keys and values, and their mean importance (B, H, count).

    `real` (B, N): the keys that count. `seen`: `form` and `shift` as `survey` has them, the mean value `middle`
    (B, H, 1, Dv), and `unit` (B, H, 1, 1). The steps are those that `sketch.clusters` describes.
    """
    key, value = alike(key, value)
    held: dict[str, Tensor | None] = {name: part.contiguous() for name, part in seen.items()}
    centre = seen["form"].new_empty((*key.shape[:2], count, key.shape[3] + value.shape[3]))
    importance = centre.new_empty(centre.shape[:3])
    held |= {"real": None if real is None else real.contiguous(), "centre": centre, "importance": importance}
    numbers = {"count": count, "steps": steps, "tilt": tilt, "lowest": lowest}
    call("fewkeys_lloyd", struct("Lloyd")(**_rows(key, value), **pointers(held), **numbers), key.dtype)
    return centre, importance


def represent(given: dict[str, Tensor], start: Tensor, steps: int, **numbers: float) -> dict[str, Tensor]:
    """`key`, `value`, `bias`, `factor`, `left`, `right` and `bounds` of stand-ins, as `rest.base.StandIns` has them.

    `given`: what `Represented` reads, in float32. start (r, Dv): rows that the subspace of the values is sought from in
    so many steps.
    """
    held = {name: part.contiguous() for name, part in (given | {"start": start}).items()}
    (*heads, count, dim), value_dim, rank = held["key_sum"].shape, held["value_sum"].shape[-1], start.shape[0]
    shapes = {"key": (count, dim), "value": (count, value_dim), "bias": (count,), "factor": (count,)}
    shapes |= {"left": (dim, rank), "right": (rank, value_dim), "bounds": (2, rank)}
    found = {name: start.new_empty((*heads, *shape)) for name, shape in shapes.items()}
    sizes = {"heads": math.prod(heads), "keys": held["label"].shape[-1], "count": count, "dim": dim, "rank": rank}
    told = struct("Represented")(**pointers(held | found), **sizes, value_dim=value_dim, steps=steps, **numbers)
    call("fewkeys_represent", told)
    return found


def _rows(key: Tensor, value: Tensor) -> dict[str, Any]:
    """Where keys and values lie, and their sizes."""
    batch, heads, keys, dim = key.shape
    sizes = {"batch": batch, "heads": heads, "keys": keys, "dim": dim, "value_dim": value.shape[3]}
    return {"key": Rows.of(key), "value": Rows.of(value), **sizes}
