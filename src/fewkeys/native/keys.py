"""The queries' metric on keys (`frame.h`), sums of keys (`keys.h`) and their clusters (`lloyd.h`); without gradient.

Keys (B, H, N, D) and values (B, H, N, Dv) are float32 or bfloat16, everything else float32; `tensors.suits` them.
"""

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import alike, sized, struct


def label_sums(
    key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int, middle: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`sketch.sums.label_sums` in one pass."""
    key, value = alike(key, value)
    sums = share.new_zeros((*key.shape[:2], count, key.shape[3] + value.shape[3]))
    products = None if middle is None else share.new_zeros((*key.shape[:2], key.shape[3], value.shape[3]))
    tensors = {"label": label, "share": share, "sums": sums, "middle": middle, "products": products}
    call("fewkeys_label_sums", struct("Sums")(**sized(key, value), **tensors, count=count), key.dtype)
    return sums, products


def frame(
    query: Tensor, key: Tensor, value: Tensor, asked: Tensor, real: Tensor, **numbers: float
) -> dict[str, Tensor]:
    """`mean_query` and `second` of `sketch.clusters.QueryMoments`, and the other fields of `Frame`, by name.

    Of a sample of the queries (B, Hq, M, D); `asked` (B) of them count, and `real` (B) of the keys. `numbers`: fields
    of `Framed`. Raises `IndefiniteError` if rounding made a matrix indefinite.
    """
    query, key, value = alike(query, key, value)
    batch, heads, _, dim = key.shape
    shapes = {"mean_query": (1, dim), "second": (dim, dim), "mean": (1, dim), "value_mean": (1, value.shape[3])}
    shapes |= {"unit": (1, 1), "root": (dim, dim), "form": (dim + 1, dim), "shift": (dim + 1, 1)}
    output = {name: asked.new_empty((batch, heads, *shape)) for name, shape in shapes.items()}
    tensors = {"query": query, "asked": asked, "real": real, **output}
    sizes = {"gqa_ratio": query.shape[1] // heads, "queries": query.shape[2]}
    call("fewkeys_frame", struct("Framed")(**sized(key, value), **tensors, **sizes, **numbers), key.dtype)
    return output


def cluster(
    key: Tensor,
    value: Tensor,
    sample: tuple[Tensor, Tensor, Tensor | None],
    seen: dict[str, Tensor],
    count: int,
    **numbers: float,
) -> tuple[Tensor, ...]:
    """`count` clusters around centres that Lloyd's steps find, as `sketch.clusters` describes them.

    `sample`: sampled keys and values, and which of them count, (B, M) or None: all. `seen`: `form` and `shift` of
    `sketch.clusters.Frame`, `middle` (B, H, 1, Dv), the mean value, and `unit` (B, H, 1, 1). `numbers`: fields of
    `Clustered`.

    Returns:
        Label, squared distance to the own centre, spread and importance of every key, all (B, H, N); the mean
        importance of every cluster (B, H, count).
    """
    *rows, real = sample
    key, value, sample_key, sample_value = alike(key, value, *rows)
    new = seen["form"].new_empty
    distance, spread, importance = new((3, *key.shape[:3])).unbind()
    label = torch.empty_like(distance, dtype=torch.int64)
    cluster_importance, constant = new((2, *key.shape[:2], count)).unbind()
    centre = new((*constant.shape, key.shape[3] + value.shape[3]))
    tensors = {**seen, "sample_key": sample_key, "sample_value": sample_value, "real": real, "label": label}
    tensors |= {"distance": distance, "spread": spread, "importance": importance}
    tensors |= {"cluster_importance": cluster_importance, "centre": centre, "constant": constant}
    sizes = {"sampled": sample_key.shape[2], "count": count}
    call("fewkeys_cluster", struct("Clustered")(**sized(key, value), **tensors, **sizes, **numbers), key.dtype)
    return label, distance, spread, importance, cluster_importance
