"""Which candidate each head gets, under a budget of slots over all heads."""

from collections.abc import Callable

import torch
from torch import Tensor

HALVINGS = 100


def within_slots(cost: Tensor, slots: Tensor, budget: float) -> Tensor:
    """The choice (H,) of candidates of small total cost whose slots are at most `budget` on average over heads.

    `cost`, `slots` (H, K); an infinite cost is no candidate. Minimises `cost + price * slots` for each head at the
    lowest price that the budget allows (the optimum among all choices of that many slots), and spends what is left
    where it gains most per slot. `ValueError` if the cheapest have too many slots.
    """
    cost, slots = cost.double(), slots.double()
    _, choice = _bisect(cost, slots, lambda choice: _mean(slots, choice) <= budget)
    if (paid := _mean(slots, choice)) > budget:
        raise ValueError(f"slots: expected at least the {paid:g} of the cheapest plans")
    return _spend(cost, slots, choice, budget)


def within_error(cost: Tensor, slots: Tensor, error: Tensor, most: float) -> Tensor:
    """The choice (H,) of few slots whose `error` (H, K) is at most `most` on average over heads: it minimises
    `cost + price * slots` at the highest price that the error allows. Some candidate of each head has no error.
    """
    for objective in (cost, error):  # without effect on the predictions a head has no cost, whatever its error
        choice, _ = _bisect(objective.double(), slots.double(), lambda choice: _mean(error, choice) > most)
        if _mean(error, choice) <= most:
            break
    return choice


def _bisect(cost: Tensor, slots: Tensor, is_dear: Callable[[Tensor], bool]) -> tuple[Tensor, Tensor]:
    """The choices at the highest price per slot that is not dear, and at the lowest one that is."""
    finite = cost.isfinite()
    gaps = slots[finite].unique().diff()
    least = float(gaps.min()) if gaps.numel() else 1.0
    slots = slots.where(finite, 0.0)  # a price of zero times infinite slots is no number
    # At the highest price every head takes the fewest slots.
    low, high = 0.0, float(cost[finite].max() - cost[finite].min()) / least + 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_dear((cost + middle * slots).argmin(1)) else (middle, high)
    return (cost + low * slots).argmin(1), (cost + high * slots).argmin(1)


def _of_choice(values: Tensor, choice: Tensor) -> Tensor:
    return values.gather(1, choice.unsqueeze(1))


def _mean(values: Tensor, choice: Tensor) -> float:
    return float(_of_choice(values, choice).double().mean())


def _spend(cost: Tensor, slots: Tensor, choice: Tensor, budget: float) -> Tensor:
    """Upgrade heads one at a time, the best gain per slot first, while the budget holds."""
    choice = choice.clone()
    left = budget * choice.numel() - float(_of_choice(slots, choice).sum())
    while True:
        gain = _of_choice(cost, choice) - cost
        price = slots - _of_choice(slots, choice)
        gain_per_slot = torch.where((gain > 0) & (price <= left), gain / price.clamp_min(1e-9), 0.0)
        if not float(gain_per_slot.max()) > 0:
            return choice
        head, candidate = divmod(int(gain_per_slot.argmax()), cost.shape[1])
        left -= float(price[head, candidate])
        choice[head] = candidate
