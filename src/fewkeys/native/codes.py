"""Codes of keys in two bits a number, and scans of them (`codes.h`, `code_scan.h`)."""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import KernelArgs, Rows, dense, struct

LARGEST_CODED = 1024
"""The largest dimension of a head: sums of more numbers would not fit into 16 bits."""


def code_keys(key: Tensor, sign: Tensor, middle: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of keys (B, Hkv, N, D), float32 or bfloat16: packed (B, Hkv, G, W / 2, 16) and sigma (B, Hkv, 32 G)."""
    key, blocks, wide = dense(key), -(-key.shape[2] // 32), len(sign)
    packed = torch.empty((*key.shape[:2], blocks, wide // 2, 16), dtype=torch.uint8, device="cpu")
    sigma = torch.empty((*key.shape[:2], blocks * 32), dtype=torch.int16, device="cpu")
    held = {"sign": sign, "middle": middle.contiguous(), "spread": spread.contiguous()}
    batch, heads, keys, dim = key.shape
    args = struct("Coding")(
        key=Rows.of(key),
        **{**held, "packed": packed, "sigma": sigma},
        batch=batch,
        heads=heads,
        keys=keys,
        dim=dim,
        wide=wide,
        blocks=blocks,
    )
    call("fewkeys_code_keys", args, key.dtype)
    return packed, sigma


def scan(
    packed: Tensor, sigma: Tensor, query: Tensor, sign: Tensor, seen: Tensor, real: Tensor | None, count: int
) -> tuple[KernelArgs, tuple[Tensor, ...]]:
    """The arguments of a scan, but for `index`, and the tensors that must live as long.

    packed (B, Hkv, G, W / 2, 16) and sigma (B, Hkv, 32 G), the first of what may be larger buffers; query
    (B, Hq, Nq, D), dense; sign (W,); seen (Nq,), ascending; real (B, N) or None.
    """
    batch, heads, queries, dim = query.shape
    # Views may give a dimension of one entry any stride.
    apart = packed.stride(1 if packed.shape[1] > 1 else 0)
    args = struct("Scan")(
        # Only their addresses: a kernel argument would copy tensors that are not contiguous.
        packed=packed.data_ptr(),
        sigma=sigma.data_ptr(),
        sign=sign,
        seen=seen,
        real=real,
        query=Rows.of(query),
        batch=batch,
        heads=heads,
        gqa_ratio=heads // packed.shape[1],
        queries=queries,
        keys=0 if real is None else real.shape[1],
        room=apart // packed.shape[3:].numel(),
        dim=dim,
        wide=len(sign),
        count=count,
    )
    return args, (packed, sigma, query)


def best_codes(
    packed: Tensor, sigma: Tensor, query: Tensor, sign: Tensor, seen: Tensor, real: Tensor | None, count: int
) -> Tensor:
    """The places (B, Hq, Nq, count), int32, of the best keys of every query: `fewkeys.sketch.codes.best`."""
    query = dense(query)
    index = torch.empty((*query.shape[:3], count), dtype=torch.int32, device="cpu")
    args, _alive = scan(packed, sigma, query, sign, seen, real, count)
    args.index = index.data_ptr()
    call("fewkeys_scan_codes", args, query.dtype)
    return index
