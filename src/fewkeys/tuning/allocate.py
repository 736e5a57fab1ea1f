"""Which candidate each head gets, under a budget of slots over all heads."""

from __future__ import annotations

import torch
from torch import Tensor

HALVINGS = 100


def within_slots(cost: Tensor, slots: Tensor, budget: float) -> Tensor:
    """The choice (H,) of candidates of small total cost whose slots are at most `budget` on average over heads.

    `cost` and `slots` (H, K); a cost of infinity is no candidate. Minimises `cost + price * slots` for each head, at
    the lowest price that the budget allows (the optimum among all choices of that many slots), and spends what is left
    where it gains most per slot. Deterministic. Raises `ValueError` where even the cheapest are too many slots.
    """
    cost, slots = cost.double(), slots.double()
    low, high = 0.0, _dearest(cost, slots)
    if _paid(slots, _at(cost, slots, high)) > budget:
        raise ValueError(f"slots: expected at least the {_paid(slots, _at(cost, slots, high)):g} of the cheapest plans")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _paid(slots, _at(cost, slots, middle)) <= budget else (middle, high)
    return _spend(cost, slots, _at(cost, slots, high), budget)


def within_error(cost: Tensor, slots: Tensor, error: Tensor, most: float) -> Tensor:
    """The choice (H,) of few slots whose `error` (H, K) is at most `most` on average over heads.

    Minimises `cost + price * slots` at the highest price that the error allows. There must be candidates without
    error.
    """
    cost, slots = cost.double(), slots.double()
    low, high = 0.0, _dearest(cost, slots)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        good = float(_taken(error, _at(cost, slots, middle)).double().mean()) <= most
        low, high = (middle, high) if good else (low, middle)
    return _at(cost, slots, low)


def _taken(values: Tensor, choice: Tensor) -> Tensor:
    return values.gather(1, choice.unsqueeze(1)).squeeze(1)


def _paid(slots: Tensor, choice: Tensor) -> float:
    return float(_taken(slots, choice).mean())


def _at(cost: Tensor, slots: Tensor, price: float) -> Tensor:
    return (cost + price * slots).argmin(1)


def _dearest(cost: Tensor, slots: Tensor) -> float:
    """A price at which every head takes the fewest slots."""
    real = cost.isfinite()
    gaps = slots[real].unique().diff()
    least = float(gaps.min()) if gaps.numel() else 1.0
    return float(cost[real].max() - cost[real].min()) / least + 1.0


def _spend(cost: Tensor, slots: Tensor, choice: Tensor, budget: float) -> Tensor:
    """Upgrade heads one at a time, the best gain per slot first, while the budget holds."""
    choice = choice.clone()
    left = budget * choice.numel() - float(_taken(slots, choice).sum())
    while True:
        gain = _taken(cost, choice).unsqueeze(1) - cost
        price = slots - _taken(slots, choice).unsqueeze(1)
        value = torch.where((gain > 0) & (price <= left), gain / price.clamp_min(1e-9), 0.0)
        best = int(value.argmax())
        if not float(value.flatten()[best]) > 0:
            return choice
        head, taken = divmod(best, cost.shape[1])
        left -= float(price[head, taken])
        choice[head] = taken
