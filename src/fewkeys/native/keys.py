"""The queries' metric on keys (`frame.h`), sums of keys (`keys.h`) and their clusters (`lloyd.h`); without gradient.

Keys (B, H, N, D) and values (B, H, N, Dv) are float32 or bfloat16, everything else float32; `tensors.suits` them.
"""

import torch
from torch import Tensor

from fewkeys.native.build import IndefiniteError, call
from fewkeys.native.tensors import alike, sized, struct


def label_sums(key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int) -> Tensor:
    """`sum_{j: label_j = c} share_j [k_j, v_j]` (B, H, count, D + Dv) for labels and shares (B, H, N)."""
    return _sums(key, value, {"label": label, "share": share}, count)


def sums_and_products(
    key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int, middle: Tensor
) -> tuple[Tensor, Tensor]:
    """`label_sums`, and in the same pass `sum_j share_j (k_j - middle) v_j^T` (B, H, D, Dv); middle (B, H, 1, D)."""
    products = share.new_zeros((*key.shape[:2], key.shape[3], value.shape[3]))
    tensors = {"label": label, "share": share, "middle": middle, "products": products}
    return _sums(key, value, tensors, count), products


def _sums(key: Tensor, value: Tensor, tensors: dict[str, Tensor], count: int) -> Tensor:
    key, value = alike(key, value)
    sums = tensors["share"].new_zeros((*key.shape[:2], count, key.shape[3] + value.shape[3]))
    call("fewkeys_label_sums", struct("Sums")(**sized(key, value), **tensors, sums=sums, count=count), key.dtype)
    return sums


def frame(
    query: Tensor, key: Tensor, value: Tensor, asked: Tensor, real: Tensor, *, scale: float, ridge: float
) -> dict[str, Tensor] | None:
    """`mean_query` and `second` of `sketch.clusters.QueryMoments`, and the other fields of `Frame`, by name.

    Of a sample of the queries (B, Hq, M, D); `asked` (B) of them count, and `real` (B) of the keys. None if rounding
    made a matrix indefinite.
    """
    query, key, value = alike(query, key, value)
    batch, heads, _, dim = key.shape
    shapes = {"mean_query": (1, dim), "second": (dim, dim), "mean": (1, dim), "value_mean": (1, value.shape[3])}
    shapes |= {"unit": (1, 1), "root": (dim, dim), "form": (dim + 1, dim), "shift": (dim + 1, 1)}
    output = {name: asked.new_empty((batch, heads, *shape)) for name, shape in shapes.items()}
    args = struct("Framed")(
        **sized(key, value),
        **output,
        asked=asked,
        real=real,
        query=query,
        gqa_ratio=query.shape[1] // heads,
        queries=query.shape[2],
        scale=scale,
        ridge=ridge,
    )
    try:
        call("fewkeys_frame", args, key.dtype)
    except IndefiniteError:
        return None
    return output


def cluster(
    key: Tensor,
    value: Tensor,
    sample: tuple[Tensor, Tensor, Tensor | None],
    seen: dict[str, Tensor],
    *,
    count: int,
    steps: int,
    tilt: float,
    lowest: float,
    near: float,
) -> tuple[Tensor, ...]:
    """`count` clusters around centres that Lloyd's steps find, as `sketch.clusters` describes them.

    `sample`: sampled keys and values, and which of them count, (B, M) or None: all. `seen`: `form` and `shift` of
    `sketch.clusters.Frame`, `middle` (B, H, 1, Dv), the mean value, and `unit` (B, H, 1, 1).

    Returns:
        Label, squared distance to the own centre, spread and importance of every key, all (B, H, N); the mean
        importance of every cluster (B, H, count).
    """
    *rows, real = sample
    key, value, sample_key, sample_value = alike(key, value, *rows)
    form = seen["form"]
    distance, spread, importance = form.new_empty((3, *key.shape[:3])).unbind()
    label = torch.empty_like(distance, dtype=torch.int64)
    cluster_importance, constant = form.new_empty((2, *key.shape[:2], count)).unbind()
    args = struct("Clustered")(
        **sized(key, value),
        **seen,
        steps=steps,
        tilt=tilt,
        lowest=lowest,
        near=near,
        sample_key=sample_key,
        sample_value=sample_value,
        real=real,
        sampled=sample_key.shape[2],
        count=count,
        cluster_importance=cluster_importance,
        centre=form.new_empty((*constant.shape, key.shape[3] + value.shape[3])),
        constant=constant,
        label=label,
        distance=distance,
        spread=spread,
        importance=importance,
    )
    call("fewkeys_cluster", args, key.dtype)
    return label, distance, spread, importance, cluster_importance
