"""fewkeys: plans of several slots, shares and cohorts, by its kernels or by torch alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from experiments.peers.parts import check_encoder
from torch import Tensor

import fewkeys as fk
from fewkeys.core.impl import Impl


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool, generator: torch.Generator,
    impl: Impl = "auto", **settings: int,
) -> Tensor:  # fmt: skip
    """A plan that never gives way to exact attention here."""
    check_encoder(is_causal)
    return fk.attention(q, k, v, plan=_plan(**settings), scale=scale, generator=generator, impl=impl)


def _plan(slots: int | None = None, means: int = 0, rank: int = 0, cohorts: int = 1) -> fk.Plan:
    """`fk.budget` with so many slots, or a cheaper plan: cluster means beside one outlier, without a window."""
    if slots is not None:
        return fk.budget(slots, cohorts=cohorts).never_exact()
    keep = fk.Outliers(1, means, cohorts=cohorts)
    return fk.Plan(keep, fk.ClusterMeans(means, rank, cohorts=cohorts))


def plain(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    """The same steps without kernels, like the rivals."""
    return attend(q, k, v, **more, impl="torch")


def grid(queries: int, keys: int, dim: int) -> list[dict[str, Any]]:
    """The settings to search."""
    sizes = [slots for slots in (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384) if slots <= keys // 2]
    groups = [cohorts for cohorts in (1, 2, 4, 8, 16, 32, 64) if 16 * cohorts <= queries]
    budgets = [{"slots": slots, "cohorts": cohorts} for slots, cohorts in product(sizes, groups)]
    shares = product((2, 4, 8, 16, 32), (0, 8, dim), (1, 2, 4))
    return budgets + [{"means": means, "rank": rank, "cohorts": cohorts} for means, rank, cohorts in shares]
