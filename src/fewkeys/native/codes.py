"""Codes of keys in two bits a number, and scans of them (`codes.h`, `code_scan.h`)."""

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import KernelArgs, sized, struct

LARGEST_CODED = 1024
"""The largest dimension of a head: sums of more numbers would not fit into 16 bits."""


def code_keys(key: Tensor, sign: Tensor, middle: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of keys (B, Hkv, N, D), float32 or bfloat16: packed (B, Hkv, G, W / 2, 16) and sigma (B, Hkv, 32 G)."""
    blocks, wide = -(-key.shape[2] // 32), len(sign)
    packed = key.new_empty((*key.shape[:2], blocks, wide // 2, 16), dtype=torch.uint8)
    sigma = key.new_empty((*key.shape[:2], blocks * 32), dtype=torch.int16)
    tensors = {"sign": sign, "middle": middle, "spread": spread, "packed": packed, "sigma": sigma}
    call("fewkeys_code_keys", struct("Coding")(**sized(key), **tensors, wide=wide, blocks=blocks), key.dtype)
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
    return struct("Scan")(**tensors, **sizes)


def best_codes(
    packed: Tensor, sigma: Tensor, query: Tensor, sign: Tensor, seen: Tensor, real: Tensor | None, count: int
) -> Tensor:
    """The places (B, Hq, Nq, count), int32, of the best keys of every query: `fewkeys.sketch.codes.best`."""
    index = query.new_empty((*query.shape[:3], count), dtype=torch.int32)
    args = scan(packed, sigma, query, sign, seen, real, count)
    args.index = index.data_ptr()
    call("fewkeys_scan_codes", args, query.dtype)
    return index
