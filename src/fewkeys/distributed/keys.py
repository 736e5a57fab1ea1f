"""Statistics of keys whose token axis is split over ranks.

Of other ranks' keys, scores need the Gram matrix alone, a sum over keys: D x D numbers, however many keys there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from fewkeys.core.precision import working
from fewkeys.core.totals import Totals
from fewkeys.core.validation import check_finite, check_real, check_tensor
from fewkeys.distributed.communicator import Communicator, communicator
from fewkeys.sketch.leverage import ROUNDING, leverage_bounds


def leverage_scores(key: Tensor, *, group: dist.ProcessGroup | Communicator | None = None) -> Tensor:
    """The scores of this rank's keys among the keys of all ranks.

    A collective: all ranks of the group call it, with the same arguments apart from `key`.

    Args:
        key: (B, H, N_local, D), this rank's shard of the token axis, shards in rank order. N_local may differ between
            ranks and be 0 on some.
        group: a process group, or a `Communicator`, which sets the timeout and counts bytes; None: the default group.

    Returns:
        (B, H, N_local), float64 for float64 input, else float32: the scores of one process but for rounding
        (docs/distributed.md). Bytes sent by a rank do not depend on the number of tokens: about 1 KB, and two
        all-reduces of `8 B H D^2`. Cost O(N_local D^2).

    Raises:
        TypeError, ValueError: on every rank, if arguments of one are malformed or arguments differ.
        RuntimeError: no process group, or a rank failed or did not answer within the timeout.

    Source: LevAttention (arXiv 2410.05462), distributed setting; `fewkeys.papers.levattention.shard_scores` has other
    powers.
    """
    rows, bounds = of_shard("leverage_scores", key, group, leverage_bounds)
    return bounds.to(rows.dtype)


def universal_set(key: Tensor, eps: float, *, group: dist.ProcessGroup | Communicator | None = None) -> Tensor:
    """The keys of this rank that belong to the universal set of all ranks' keys. A collective.

    The set holds every attention entry >= `eps` under weights `|s|^2`, for every possible query.

    Args:
        key, group: as in `leverage_scores` here.
        eps: the smallest entry that must not be missed, in (0, 1).

    Returns:
        bool (B, H, N_local). Over all ranks at most `rank / eps` keys per head. Bytes, cost and errors as
        `leverage_scores`.

    Source: LevAttention (arXiv 2410.05462), section 2 and the distributed setting.
    """
    _, bounds = of_shard("universal_set", key, group, leverage_bounds, eps=eps)
    return bounds >= eps * (1 - ROUNDING)


def of_shard(
    call: str,
    key: Tensor,
    group: dist.ProcessGroup | Communicator | None,
    bounds: Callable[[Tensor, Totals], Tensor],
    **numbers: float,
) -> tuple[Tensor, Tensor]:
    """This rank's keys and their `bounds`, float64, once all ranks agree on the arguments of `call`, `numbers` among
    them: positive, `eps` below 1.
    """
    comm = communicator(group)
    with comm.checking(call):
        check_tensor("key", occupied(key))
        check_finite(key=key)
        limits = {"eps": {"below": 1.0}}
        same = {name: check_real(name, n, above=0.0, **limits.get(name, {})) for name, n in numbers.items()}
    check_tokens(comm.agree(call, {**described(key), **same}, key.shape[2]))
    rows = working(key).detach()
    return rows, bounds(rows, comm)


def described(key: Tensor) -> dict[str, object]:
    """What ranks must agree on about their keys."""
    batch, heads, _, size = key.shape
    return {"key (batch, heads, dim)": [batch, heads, size], "key dtype": str(key.dtype), "key device": key.device.type}


def occupied(tensor: object) -> object:
    """One token of zeros for a tensor without tokens, which checks refuse; anything else as it is."""
    if isinstance(tensor, Tensor) and tensor.ndim == 4 and tensor.shape[2] == 0:
        return tensor.new_zeros((*tensor.shape[:2], 1, tensor.shape[3]))
    return tensor


def check_tokens(tokens: Sequence[int]) -> None:
    """Raise `ValueError` where all shards are empty."""
    if not any(tokens):
        raise ValueError("key: expected at least one token on some rank, got none on any")
