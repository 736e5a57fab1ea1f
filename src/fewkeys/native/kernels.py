"""The kernels, as functions of tensors; without gradient.

Keys (B, H, N, D) and values (B, H, N, Dv) are float32 or bfloat16, everything else float32, as `tensors.suits` checks.
"""

import ctypes
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fewkeys.core.validation import Rows as TensorRows, as_they_are
from fewkeys.native.build import call
from fewkeys.native.tensors import STRUCTS, KernelArgs, readable, sized, wants_gradient

LARGEST_SCRATCH = 2**26
_scratches: list[tuple[Any, StorageWeakRef]] = []
"""Memory of earlier calls, and whether tensors still use it."""
LARGEST_CODED = 1024
"""The largest dimension of a head: sums of more numbers would not fit into 16 bits."""


def largest_and_rows(
    query: Tensor, key: Tensor, value: Tensor, by_head: bool = False
) -> tuple[list[float], TensorRows]:
    """`core.validation.as_they_are` for queries (B, Hq, Nq, D), keys (B, Hkv, Nk, D) and values of one dtype: in one
    call of all threads, where torch makes three.

    by_head: the rows are copies that are contiguous head by head, unless gradients are needed. The kernel reads them in
    the order of tokens, as they are in models; torch copies head by head, and waits for memory at every row.
    """
    rows = query, key, value
    if torch.compiler.is_dynamo_compiling() or not readable(*rows):
        return as_they_are(*rows)
    fields = {**sized(key, value), "query": query, "queries": query.shape[2]}
    if by_head and not wants_gradient(*rows) and not all(part.is_contiguous() for part in rows):
        sizes = [part.numel() for part in rows]
        parts = _scratch(sum(sizes), query.dtype).split(sizes)
        query, key, value = rows = tuple(part.view(row.shape) for part, row in zip(parts, rows, strict=True))
        fields |= {"query_copy": query, "key_copy": key, "value_copy": value}
    numbers = (ctypes.c_float * 3)()
    call("fewkeys_extents", STRUCTS["Extents"](**fields, largest=ctypes.addressof(numbers)), query.dtype)
    return list(numbers), rows


def _scratch(count: int, dtype: torch.dtype) -> Tensor:
    """Memory of an earlier call that no tensor uses now, else new memory. The operating system must clear new pages:
    calls that copy 0.5 to 20 MB took a quarter longer without this.
    """
    size, buffer = count * dtype.itemsize, None
    with suppress(IndexError):  # once it is taken out, no other thread has it
        buffer, use = _scratches.pop()
        if len(buffer) < size or not use.expired():
            buffer = None
    if buffer is None:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu").numpy()
    scratch = torch.from_numpy(buffer)
    if len(buffer) <= LARGEST_SCRATCH and not _scratches:
        _scratches.append((buffer, StorageWeakRef(scratch.untyped_storage())))
    return scratch[:size].view(dtype)


def frame(
    query: Tensor, key: Tensor, value: Tensor, asked: Tensor, real: Tensor, **numbers: float
) -> dict[str, Tensor]:
    """`mean_query` and `second` of `sketch.clusters.QueryMoments`, `covariance`, and the fields of `Frame`, by name.

    Of a sample of the queries (B, Hq, M, D); `asked` (B) of them count, and `real` (B) of the keys. `numbers`: fields
    of `Framed`. Raises `IndefiniteError` if rounding made a matrix indefinite.
    """
    batch, heads, _, dim = key.shape
    shapes = dict.fromkeys(("second", "covariance", "root"), (dim, dim)) | {"mean_query": (1, dim), "mean": (1, dim)}
    shapes |= {"value_mean": (1, value.shape[3]), "unit": (1, 1), "form": (dim + 1, dim), "shift": (dim + 1, 1)}
    output = {name: asked.new_empty((batch, heads, *shape)) for name, shape in shapes.items()}
    tensors = {"query": query, "asked": asked, "real": real, **output}
    sizes = {"gqa_ratio": query.shape[1] // heads, "queries": query.shape[2]}
    call("fewkeys_frame", STRUCTS["Framed"](**sized(key, value), **tensors, **sizes, **numbers), key.dtype)
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
    sample_key, sample_value, real = sample
    new = seen["form"].new_empty
    label, distance, half = (new(key.shape[:3], dtype=dtype) for dtype in (torch.int64, torch.float32, torch.float32))
    constant, centre = new((*key.shape[:2], count)), new((*key.shape[:2], count, key.shape[3] + value.shape[3]))
    tensors = {**seen, "sample_key": sample_key, "sample_value": sample_value, "real": real, "label": label}
    tensors |= {"distance": distance, "half_variance": half, "centre": centre, "constant": constant}
    sizes = {"sampled": sample_key.shape[2], "count": count}
    call("fewkeys_cluster", STRUCTS["Clustered"](**sized(key, value), **tensors, **sizes, **numbers), key.dtype)
    return label, distance, half


def halve(
    rows: Tensor, key: Tensor, real: Tensor | None, count: int, *, scale: float, **steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Places (B, H, count, M), means (B, H, count, F) and covariance (B, H, F, F) of float32 rows (B, H, m, F), times
    the scale, as `sketch.halves.split` and `described` have them. The metric is that of keys (B, H, M', F), of which
    `real` (B, M') count.
    """
    (batch, heads, total, dim), sets = rows.shape, rows.shape[:2]
    place = rows.new_empty((*sets, count, -(-total // count)), dtype=torch.int64)
    mean, within = rows.new_empty((*sets, count, dim)), rows.new_empty((*sets, dim, dim))
    tensors = {"rows": rows, "key": key, "real": real, "place": place, "mean": mean, "within": within}
    sizes = {"heads": batch * heads, "rows_each": total, "keys": key.shape[2], "dim": dim, "count": count}
    call("fewkeys_halve", STRUCTS["Halves"](**tensors, **sizes, **steps, scale=scale))
    return place, mean, within


def best(key: Tensor, facts: dict[str, Any], count: int, *, near: float, power: float) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best keys of every cohort: places (B, H', H, count), in order, which of them are used, and half the
    variance of every key's scores (B, H', N), as `select.outliers` has them. `facts`: fields of `Best`.
    """
    mean = facts["mean"]
    index, used = (mean.new_empty((*mean.shape[:3], count), dtype=dtype) for dtype in (torch.int64, torch.bool))
    half_variance = facts["half_variance"] if "half_variance" in facts else mean.new_empty(key.shape[:3])
    tensors = {**facts, "index": index, "used": used, "half_variance": half_variance}
    numbers = {"cohorts": mean.shape[2], "count": count, "near": near, "power": power}
    call("fewkeys_best", STRUCTS["Best"](**sized(key), **tensors, **numbers), key.dtype)
    return index, used, half_variance


def tilt(
    key: Tensor, value: Tensor, facts: dict[str, Any], count: int, together: bool, **numbers: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Mass, energy, size, key, value, level and, where it is asked for, `together` of `sketch.tilted.Tilted`, for
    `count` clusters. `facts` and `numbers`: fields of `Tilts`.
    """
    mean = facts["mean"]
    mass, energy, size, level = mean.new_empty((4, *mean.shape[:3], count)).unbind()
    key_sum, value_sum = (mean.new_empty((*level.shape, rows.shape[3])) for rows in (key, value))
    products = mean.new_empty((*mean.shape[:2], key.shape[3], value.shape[3])) if together else None
    sums = {"mass": mass, "energy": energy, "size": size, "key_sum": key_sum, "value_sum": value_sum, "level": level}
    tensors = {**facts, **sums, "together": products}
    sizes = {"cohorts": mean.shape[2], "kept": facts["index"].shape[3], "count": count}
    call("fewkeys_tilt", STRUCTS["Tilts"](**sized(key, value), **tensors, **sizes, **numbers), key.dtype)
    return mass, energy, size, key_sum, value_sum, level, products


def cohort_means(tensors: dict[str, Tensor], rank: int, steps: int, **numbers: float) -> dict[str, Tensor]:
    """`key`, `value` and `bias` of the stand-ins of every cohort, as `rest.base.StandIns` has them; with a rank,
    `factor`, `left`, `right` and `bounds`, too. `tensors`: fields of `StandIns` of `problems.h`. The sums `key`
    and `value` are overwritten.
    """
    key, value = tensors["key"], tensors["value"]
    batch, heads, cohorts, count, dim = key.shape
    value_dim = value.shape[4]
    shapes: dict[str, tuple[int, ...]] = {"bias": (count,)}
    if rank:
        shapes |= {"factor": (count,), "left": (dim, rank), "right": (rank, value_dim), "bounds": (2, rank)}
    output = {name: key.new_empty((batch, heads, cohorts, *shape)) for name, shape in shapes.items()}
    sizes = {"heads": batch * heads, "cohorts": cohorts, "count": count, "dim": dim, "value_dim": value_dim}
    args = STRUCTS["StandIns"](**tensors, **output, **sizes, rank=rank, steps=steps, **numbers)
    call("fewkeys_cohort_means", args)
    return output | {"key": key, "value": value}


def code_keys(key: Tensor, sign: Tensor, middle: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of keys (B, Hkv, N, D), float32 or bfloat16: packed (B, Hkv, G, W / 2, 16) and sigma (B, Hkv, 32 G)."""
    blocks, wide = -(-key.shape[2] // 32), len(sign)
    packed = key.new_empty((*key.shape[:2], blocks, wide // 2, 16), dtype=torch.uint8)
    sigma = key.new_empty((*key.shape[:2], blocks * 32), dtype=torch.int16)
    tensors = {"sign": sign, "middle": middle, "spread": spread, "packed": packed, "sigma": sigma}
    call("fewkeys_code_keys", STRUCTS["Coding"](**sized(key), **tensors, wide=wide, blocks=blocks), key.dtype)
    return packed, sigma


def scan(
    packed: Tensor, sigma: Tensor, query: Tensor, sign: Tensor, seen: Tensor, real: Tensor | None, count: int
) -> KernelArgs:
    """The arguments of a scan, but for `index`.

    packed (B, Hkv, G, W / 2, 16) and sigma (B, Hkv, 32 G), the first of what may be larger buffers; query
    (B, Hq, Nq, D); sign (W,); seen (Nq,), ascending; real (B, N) or None.
    """
    batch, heads, queries, dim = query.shape
    tensors = {"packed": packed, "sigma": sigma, "sign": sign, "seen": seen, "real": real, "query": query}
    sizes = {"heads": batch * heads, "gqa_ratio": heads // packed.shape[1], "queries": queries, "dim": dim}
    sizes |= {"keys": 0 if real is None else real.shape[1], "wide": len(sign), "count": count}
    return STRUCTS["Scan"](**tensors, **sizes)


def best_codes(
    packed: Tensor, sigma: Tensor, query: Tensor, sign: Tensor, seen: Tensor, real: Tensor | None, count: int
) -> Tensor:
    """The places (B, Hq, Nq, count), int32, of the best keys of every query: `fewkeys.sketch.codes.best`."""
    index = query.new_empty((*query.shape[:3], count), dtype=torch.int32)
    args = scan(packed, sigma, query, sign, seen, real, count)
    args.index = index.data_ptr()
    call("fewkeys_scan_codes", args, query.dtype)
    return index
