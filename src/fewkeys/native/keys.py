"""How queries measure keys (`frame.h`), statistics and sums of keys in one pass each (`keys.h`), their clusters
(`lloyd.h`) and stand-ins of these (`stand_ins.h`); without gradient.

Keys (B, H, N, D) and values (B, H, N, Dv) are float32 or bfloat16, everything else float32; `tensors.suits` them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import Rows, alike, struct


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
    call("fewkeys_survey", struct("Survey")(**_rows(key, value), **held, count=count), key.dtype)


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
    held = {"label": label, "share": share, "sums": sums, **others}
    call("fewkeys_label_sums", struct("Sums")(**_rows(key, value), **held, count=count), key.dtype)
    return sums


def frame(
    query: Tensor, key: Tensor, value: Tensor, asked: Tensor, real: Tensor, *, scale: float, ridge: float
) -> dict[str, Tensor] | None:
    """`mean_query` and `second` of `sketch.clusters.QueryMoments`, and what `Frame` has beside them, by their names.

    Of a sample of the queries (B, Hq, M, D); `asked` (B) of them count, and `real` (B) of the keys. None where rounding
    has made a matrix indefinite.
    """
    query, key, value = alike(query, key, value)
    batch, heads, _, dim = key.shape
    shapes = {"mean_query": (1, dim), "second": (dim, dim), "mean": (1, dim), "value_mean": (1, value.shape[3])}
    shapes |= {"unit": (1, 1), "root": (dim, dim), "form": (dim + 1, dim), "shift": (dim + 1, 1)}
    found = {name: asked.new_empty((batch, heads, *shape)) for name, shape in shapes.items()}
    indefinite = ctypes.c_int64(0)
    told = struct("Framed")(
        **_rows(key, value),
        **(found | {"asked": asked, "real": real}),
        query=Rows.of(query),
        indefinite=ctypes.addressof(indefinite),
        gqa_ratio=query.shape[1] // heads,
        queries=query.shape[2],
        scale=scale,
        ridge=ridge,
    )
    call("fewkeys_frame", told, key.dtype)
    return None if indefinite.value else found


def cluster(
    key: Tensor,
    value: Tensor,
    some: tuple[Tensor, Tensor, Tensor | None],
    seen: dict[str, Tensor],
    *,
    count: int,
    steps: int,
    tilt: float,
    lowest: float,
    near: float,
) -> tuple[Tensor, ...]:
    """`count` clusters around centres that Lloyd's steps find, as `sketch.clusters` describes them.

    `some`: sampled keys and values, and which of them count, (B, M) or None: all. `seen`: `form`, `shift`, `middle` as
    `survey` has them, and `unit` (B, H, 1, 1).

    Returns:
        Label, squared distance to the own centre, spread and importance of every key, all (B, H, N); the mean
        importance of every cluster (B, H, count).
    """
    *rows, real = some
    real = None if real is None else real.contiguous()
    key, value, *rows = alike(key, value, *rows)
    held: dict[str, Tensor | None] = {name: part.contiguous() for name, part in seen.items()}
    form = seen["form"]
    distance, spread, importance, nearest, square = form.new_empty((5, *key.shape[:3])).unbind()
    label = torch.empty_like(nearest, dtype=torch.int64)
    own, constant = form.new_empty((2, *key.shape[:2], count)).unbind()
    centre = form.new_empty((*own.shape, key.shape[3] + value.shape[3]))
    held |= {"centre": centre, "constant": constant}
    lloyd = held | {"importance": own, "real": real}
    numbers = {"count": count, "steps": steps, "tilt": tilt, "lowest": lowest}
    found = {"spread": spread, "importance": importance, "nearest": nearest, "square": square, "label": label}
    survey = {name: part for name, part in held.items() if name != "unit"} | found
    told = struct("Clustered")(
        some=struct("Lloyd")(**_rows(*rows), **lloyd, **numbers),
        all=struct("Survey")(**_rows(key, value), **survey, count=count),
        distance=distance,
        near=near,
    )
    call("fewkeys_cluster", told, key.dtype)
    return label, distance, spread, importance, own


def represent(
    key: Tensor, value: Tensor, given: dict[str, Tensor | None], rank: int, steps: int, **numbers: float
) -> dict[str, Tensor]:
    """`key`, `value`, `bias` and `share` of stand-ins, as `rest.base.StandIns` has them; with a rank, `factor`, `left`,
    `right` and `bounds`, too.

    `given`: what `Represented` reads beside keys and values, by its names there, in float32, and `label` and `middle`
    of `Sums`. The subspace of the values is sought in so many steps.
    """
    key, value = alike(key, value)
    held = {name: None if part is None else part.contiguous() for name, part in given.items()}
    importance = held["cluster_importance"]
    if importance is None:
        raise ValueError("given: expected the importance of every cluster, got none")
    count, dim, value_dim = importance.shape[2], key.shape[3], value.shape[3]
    shapes = {"key": (count, dim), "value": (count, value_dim), "bias": (count,), "factor": (count,)}
    shapes |= {"left": (dim, rank), "right": (rank, value_dim), "bounds": (2, rank), "share": (key.shape[2],)}
    found = {name: importance.new_empty((*key.shape[:2], *shape)) for name, shape in shapes.items()}
    of = {"label": held.pop("label"), "middle": held.pop("middle"), "share": found["share"]}
    told = struct("Represented")(
        of=struct("Sums")(**_rows(key, value), **of, count=count),
        **(held | found),
        rank=rank,
        steps=steps,
        **numbers,
    )
    call("fewkeys_represent", told, key.dtype)
    return found if rank else {name: found[name] for name in ("key", "value", "bias", "share")}


def _rows(key: Tensor, value: Tensor) -> dict[str, Any]:
    """Where keys and values lie, and their sizes."""
    batch, heads, keys, dim = key.shape
    sizes = {"batch": batch, "heads": heads, "keys": keys, "dim": dim, "value_dim": value.shape[3]}
    return {"key": Rows.of(key), "value": Rows.of(value), **sizes}
