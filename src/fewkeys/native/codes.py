"""Scans of keys in two bits a number (`code_scan.h`)."""

from __future__ import annotations

import torch
from torch import Tensor

from fewkeys.native.build import call
from fewkeys.native.tensors import Told, pointers, struct

LARGEST_CODED = 1024
"""The largest dimension of a head: sums of more tables would not fit into 16 bits."""


def scan(
    packed: Tensor, sigma: Tensor, query: Tensor, seen: Tensor, real: Tensor | None, count: int
) -> tuple[Told, tuple[Tensor | None, ...]]:
    """What kernels are told of a scan, but where `index` goes, and what must live as long.

    packed (B, Hkv, G, P, 16) and sigma (B, Hkv, 32 G), the first of what may be larger buffers; query (B, Hq, Nq, D),
    int8; seen (Nq,), ascending; real (B, N) or None.
    """
    batch, heads, queries, dim = query.shape
    # Views may give a dimension of one entry any stride.
    apart = packed.stride(1 if packed.shape[1] > 1 else 0)
    held = {"query": query.contiguous(), "seen": seen.contiguous(), "real": None if real is None else real.contiguous()}
    told = struct("Scan")(
        **pointers({"packed": packed, "sigma": sigma, **held}),
        batch=batch,
        heads=heads,
        gqa_ratio=heads // packed.shape[1],
        queries=queries,
        keys=0 if real is None else real.shape[1],
        room=apart // packed.shape[3:].numel(),
        pairs=packed.shape[3],
        dim=dim,
        count=count,
    )
    return told, (packed, sigma, *held.values())


def best_codes(packed: Tensor, sigma: Tensor, query: Tensor, seen: Tensor, real: Tensor | None, count: int) -> Tensor:
    """The places (B, Hq, Nq, count), int32, of the best keys of every query: `fewkeys.sketch.codes.best`."""
    index = torch.empty((*query.shape[:3], count), dtype=torch.int32, device="cpu")
    told, _alive = scan(packed, sigma, query, seen, real, count)
    told.index = index.data_ptr()
    call("fewkeys_scan_codes", told)
    return index
