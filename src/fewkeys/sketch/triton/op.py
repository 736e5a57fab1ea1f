"""Statistics, clusters and sums of keys on CUDA, as `fewkeys.sketch.backend.Kernels` says: how kernels are launched.

Kernels are the operators `fewkeys::survey_keys` and `fewkeys::label_sums`, so that torch can trace over them. Keys
(B, H, N, D) and values (B, H, N, Dv) are float32, bfloat16 or float16, everything else float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fewkeys.native.tensors import dense
from fewkeys.sketch.triton import kernels
from fewkeys.sketch.triton.tiles import power_of_two, precision

PROGRAMS = 512
"""Programs that sums over all keys are split among: a few for each processor of a large GPU."""


class KeysAndValues(NamedTuple):
    """Keys and values, and how far their batch entries, heads and rows stand apart."""

    key: Tensor
    value: Tensor | None
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]


class Seen(NamedTuple):
    """Form without its last row, in parts; that row (B, H, D); the shift; and where the statistics go."""

    root: Tensor | None = None
    query: Tensor | None = None
    shift: Tensor | None = None
    spread: Tensor | None = None
    importance: Tensor | None = None


class Clusters(NamedTuple):
    """Centres, in parts; their constants; where closeness and label go; a middle, and where distances from it go."""

    centre: Tensor | None = None
    constant: Tensor | None = None
    nearest: Tensor | None = None
    label: Tensor | None = None
    middle: Tensor | None = None
    square: Tensor | None = None


class Sizes(NamedTuple):
    """Numbers of things."""

    heads: int
    keys: int
    centres: int


def statistics(key: Tensor, form: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Spread and importance of the keys."""
    spread, importance, *_ = survey_keys(key, None, form, shift, None, None, None)
    return spread, importance


def assign(key: Tensor, value: Tensor, centre: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """The largest closeness of every key, and its label."""
    _, _, nearest, _, label = survey_keys(key, value, None, None, centre, constant, None)
    return nearest, label


def survey(
    key: Tensor, value: Tensor, form: Tensor, shift: Tensor, centre: Tensor, constant: Tensor, middle: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Spread, importance, closeness, distance from the middle, and label; keys and values are read once."""
    spread, importance, nearest, square, label = survey_keys(key, value, form, shift, centre, constant, middle)
    return spread, importance, nearest, square, label


def label_sums(key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int) -> Tensor:
    """`sum_{j: label_j = c} share_j [k_j, v_j]` (B, H, count, D + Dv)."""
    found: Tensor = add_by_label(key, value, label, share, count)
    return found


def _rows(key: Tensor, value: Tensor | None) -> KeysAndValues:
    key, value = dense(key), None if value is None else dense(value)
    return KeysAndValues(key, value, tuple(key.stride()[:3]), (0, 0, 0) if value is None else tuple(value.stride()[:3]))


def _parts(matrix: Tensor, count: int) -> Tensor:
    """(B, H, P, R, W): a matrix (B, H, R, W) whole, or in two parts of bfloat16 or three, which add up to it."""
    if count == 1:
        return matrix.contiguous().unsqueeze(2)
    parts = []
    for _ in range(count):
        parts.append(matrix.to(torch.bfloat16))
        matrix = matrix - parts[-1]
    return torch.stack(parts, 2)


def _options(rows: KeysAndValues) -> dict[str, Any]:
    """Constants that all kernels take."""
    dim, value_dim = rows.key.shape[3], 0 if rows.value is None else rows.value.shape[3]
    whole = rows.key.dtype == torch.float32
    constants = {"D": dim, "DV": value_dim, "BLOCK_D": power_of_two(dim), "BLOCK_V": power_of_two(value_dim)}
    # Two tiles of float32 rows in flight would not fit in the 99 KB of small GPUs.
    return constants | {"num_warps": 8 if whole or _is_wide(rows) else 4, "num_stages": 1 if whole else 2}


def _is_wide(rows: KeysAndValues) -> bool:
    return max(rows.key.shape[3], 0 if rows.value is None else rows.value.shape[3]) > 128


def _survey(key: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    value, form, shift, centre, constant, middle = others
    rows, whole = _rows(key, value), key.dtype == torch.float32
    found = _survey_shapes(key, *others)
    form_parts, centre_parts = (1, 1) if whole else (3, 2)
    seen, clusters, count = Seen(), Clusters(), 0
    if form is not None and shift is not None:
        root, query = _parts(form[:, :, :-1], form_parts), form[:, :, -1].contiguous()
        seen = Seen(root, query, shift.contiguous(), *found[:2])
    if centre is not None and constant is not None:
        where = (found[2], found[4], None if middle is None else middle.contiguous(), found[3])
        clusters, count = Clusters(_parts(centre, centre_parts), constant.contiguous(), *where), centre.shape[2]
    batch, heads, keys = key.shape[:3]
    # What fits in the 99 KB of small GPUs, and in registers.
    block_n = (32 if whole else 64) // (2 if _is_wide(rows) else 1)
    block_r = 32 if key.dtype == torch.bfloat16 else 16
    constants = {"BLOCK_N": block_n, "BLOCK_R": block_r, "PRECISION": precision()}
    constants |= {"FORM_PARTS": form_parts, "CENTRE_PARTS": centre_parts}
    with torch.cuda.device_of(key):
        kernels.survey[triton.cdiv(keys, block_n), batch * heads](
            rows, seen, clusters, Sizes(heads, keys, count), **constants, **_options(rows)
        )
    return found


def _survey_shapes(key: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Spread, importance, closeness, distance and label (B, H, N), empty where not asked for."""
    _, form, _, centre, _, middle = others
    asked = (form, form, centre, middle, centre)
    shapes = [(0,) if part is None else key.shape[:3] for part in asked]
    spread, importance, nearest, square = (key.new_empty(shape, dtype=torch.float32) for shape in shapes[:4])
    return spread, importance, nearest, square, key.new_empty(shapes[4], dtype=torch.int64)


def _label_sums(key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int) -> Tensor:
    rows = _rows(key, value)
    batch, heads, keys = key.shape[:3]
    narrow = key.dtype != torch.float32 and not _is_wide(rows)
    block_n = 32 if narrow else 16
    block_c = min(32 if _is_wide(rows) else 64, power_of_two(count))
    across = triton.cdiv(count, block_c)
    # Not by the size of the GPU: the order of sums, and so their rounding, is the same everywhere.
    tiles = triton.cdiv(keys, block_n)
    each = max(1, triton.cdiv(tiles, max(1, PROGRAMS // (across * batch * heads))))
    parts = triton.cdiv(tiles, each)
    sums = share.new_empty((parts, batch, heads, count, key.shape[3] + value.shape[3]))
    constants, owner = {"BLOCK_C": block_c, "BLOCK_N": block_n}, (label.contiguous(), share.contiguous())
    with torch.cuda.device_of(key):
        kernels.label_sums[across, parts, batch * heads](
            rows, *owner, Sizes(heads, keys, count), each, sums, **constants, **_options(rows)
        )
    return sums.sum(0)


def _label_sums_shape(key: Tensor, value: Tensor, label: Tensor, share: Tensor, count: int) -> Tensor:
    return share.new_empty((*key.shape[:2], count, key.shape[3] + value.shape[3]))


survey_keys = torch.library.custom_op(
    "fewkeys::survey_keys",
    _survey,
    mutates_args=(),
    schema="(Tensor key, Tensor? value, Tensor? form, Tensor? shift, Tensor? centre, Tensor? constant, Tensor? middle)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""Statistics where `form` and `shift` are given, closeness and label where `value`, `centre` and `constant` are, and
with them distances from `middle`.
"""
add_by_label = torch.library.custom_op(
    "fewkeys::label_sums",
    _label_sums,
    mutates_args=(),
    schema="(Tensor key, Tensor value, Tensor label, Tensor share, SymInt count) -> Tensor",
)
survey_keys.register_fake(_survey_shapes)
add_by_label.register_fake(_label_sums_shape)
