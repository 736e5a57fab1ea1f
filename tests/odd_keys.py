"""Keys that break careless linear algebra."""

import torch


def keys(kind, n=120, d=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(1, 2, n, d, generator=g, dtype=torch.float64)
    if kind == "offset":
        k = k + 5
    elif kind == "rank deficient":
        k[..., d // 2 :] = k[..., : d - d // 2] @ torch.randn(d - d // 2, d - d // 2, generator=g, dtype=k.dtype)
    elif kind == "duplicates":
        k = k[:, :, :10].repeat(1, 1, 12, 1)
    elif kind == "heavy tail":
        k = k * torch.rand(1, 2, n, 1, generator=g, dtype=k.dtype) ** -2
    elif kind == "zeros":
        k[:, :, ::3] = 0
    elif kind == "few":
        k = k[:, :, :4]
    elif kind == "scales":
        k = k * torch.logspace(0, -5, d, dtype=k.dtype)
    return k


KINDS = ["plain", "offset", "rank deficient", "duplicates", "heavy tail", "zeros", "few", "scales"]


EXTREME = {
    "large values": (1, 1, 1e25, None),
    "largest values": (1, 1, 2e37, None),
    "large keys": (1, 1e19, 1, None),
    "large queries": (3e19, 1, 1, None),
    "large queries of small keys": (3e19, 1e-19, 1, None),
    "large keys for small queries": (1e-19, 1e19, 1e20, None),
    "all": (1e18, 1e18, 1e30, None),
    "small": (1e-25, 1e-25, 1e-30, None),
    "large scale": (1, 1, 1, 1e20),
    "large scale of small keys": (1, 1e-19, 1, 1e20),
    "small scale of large keys": (1, 1e30, 1, -1e-30),
}
"""By how much queries, keys and values are larger than usual, and the scale: exact attention is finite."""
