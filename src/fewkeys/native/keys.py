"""The queries' metric on keys (`frame.h`) and their clusters (`lloyd.h`); without gradient.

Keys (B, H, N, D) and values (B, H, N, Dv) are float32 or bfloat16, everything else float32; `tensors.suits` them.
"""

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import alike, sized, struct


def frame(
    query: Tensor, key: Tensor, value: Tensor, asked: Tensor, real: Tensor, **numbers: float
) -> dict[str, Tensor]:
    """`mean_query` and `second` of `sketch.clusters.QueryMoments`, `covariance`, and the fields of `Frame`, by name.

    Of a sample of the queries (B, Hq, M, D); `asked` (B) of them count, and `real` (B) of the keys. `numbers`: fields
    of `Framed`. Raises `IndefiniteError` if rounding made a matrix indefinite.
    """
    query, key, value = alike(query, key, value)
    batch, heads, _, dim = key.shape
    shapes = {
        "mean_query": (1, dim),
        "second": (dim, dim),
        "covariance": (dim, dim),
        "mean": (1, dim),
        "value_mean": (1, value.shape[3]),
    }
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
) -> tuple[Tensor, Tensor, Tensor]:
    """`count` clusters around centres that Lloyd's steps find, as `sketch.clusters` describes them.

    `sample`: sampled keys and values, and which of them count, (B, M) or None: all. `seen`: `form` and `shift` of
    `sketch.clusters.Frame`, `middle` (B, H, 1, Dv), the mean value, and `unit` (B, H, 1, 1). `numbers`: fields of
    `Clustered`.

    Returns:
        Of every key (B, H, N): its cluster, the squared distance from the centre, and `clusters.half_variance`.
    """
    *rows, real = sample
    key, value, sample_key, sample_value = alike(key, value, *rows)
    new = seen["form"].new_empty
    label, distance, half = (new(key.shape[:3], dtype=dtype) for dtype in (torch.int64, torch.float32, torch.float32))
    constant, centre = new((*key.shape[:2], count)), new((*key.shape[:2], count, key.shape[3] + value.shape[3]))
    tensors = {**seen, "sample_key": sample_key, "sample_value": sample_value, "real": real, "label": label}
    tensors |= {"distance": distance, "half_variance": half, "centre": centre, "constant": constant}
    sizes = {"sampled": sample_key.shape[2], "count": count}
    call("fewkeys_cluster", struct("Clustered")(**sized(key, value), **tensors, **sizes, **numbers), key.dtype)
    return label, distance, half
