"""Which candidate each head gets, under a budget of slots over all heads.

Every head begins with its cheapest candidate. Then the change that lowers the cost most per slot is made, again and
again: at any point the choice minimises `cost + price * slots`, so no other choice of as few slots costs less.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def within_slots(cost: Tensor, slots: Tensor, budget: float) -> Tensor:
    """The choice (H,) of candidates of small total cost whose slots are at most `budget` on average over heads.

    `cost`, `slots` (H, K). `ValueError` if the cheapest have too many slots.
    """
    *_, choice = _upgrades(cost, slots, budget)
    if (paid := _mean(slots, choice)) > budget:
        raise ValueError(f"slots: expected at least the {paid:g} of the cheapest plans")
    return choice


def within_error(cost: Tensor, slots: Tensor, error: Tensor, most: float) -> Tensor:
    """The choice (H,) of few slots whose `error` (H, K) is at most `most` on average over heads. Some candidate of each
    head has no error.
    """
    for objective in (cost, error):  # without effect on the predictions a head has no cost, whatever its error
        for choice in _upgrades(objective, slots, torch.inf):
            if _mean(error, choice) <= most:
                return choice
    return choice


def _upgrades(cost: Tensor, slots: Tensor, budget: float) -> Iterator[Tensor]:
    """The choices on the way, from the fewest slots up to `budget`. A change that does not fit gives way to others."""
    cost, slots = cost.double(), slots.double()
    choice = cost.where(slots == slots.amin(1, keepdim=True), torch.inf).argmin(1)
    while True:
        yield choice
        paid = _of_choice(slots, choice)
        gain, price, left = _of_choice(cost, choice) - cost, slots - paid, budget * len(paid) - paid.sum()
        gain_per_slot = torch.where((gain > 0) & (price <= left), gain / price.clamp_min(1e-9), 0.0)
        head, candidate = divmod(int(gain_per_slot.argmax()), cost.shape[1])
        if not gain_per_slot[head, candidate] > 0:
            return
        choice = choice.clone()
        choice[head] = candidate


def _of_choice(values: Tensor, choice: Tensor) -> Tensor:
    return values.gather(1, choice.unsqueeze(1))


def _mean(values: Tensor, choice: Tensor) -> float:
    return float(_of_choice(values, choice).double().mean())
