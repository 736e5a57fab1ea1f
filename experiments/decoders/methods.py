"""The methods: how attention is answered, and what a query pays.

Every method gets a number of slots. What it pays is counted: the keys that it keeps, and all that it scores to find
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from experiments.causal.eviction import attention_so_far, unlikeness
from experiments.decoders.attend import ByRule, Rule
from experiments.decoders.rivals import Chosen, Evicting, Multipole, Quest

import fewkeys as fk
from fewkeys.integrations.interface import attach

EXACT, OURS = "exact", "fewkeys"
SINKS = 4
PLANS: dict[str, Callable[[int], fk.Plan]] = {
    OURS: lambda slots: fk.budget(slots, is_causal=True),
    "constant memory": lambda slots: fk.budget(slots, is_causal=True, memory="constant"),
    "sinks + window": lambda slots: fk.Plan(fk.Sinks(SINKS) | fk.Window(slots - SINKS)),
}
"""Plans: what a query pays does not depend on the data."""
RULES: dict[str, Callable[[int], Rule]] = {
    "oracle": lambda slots: Chosen(fk.TopK(slots)),
    "Quest": Quest,
    "Quest, scoring free": lambda slots: Quest(slots, free=True),
    "Multipole": Multipole,
    "Multipole, scoring free": lambda slots: Multipole(slots, free=True),
    "KeyDiff": lambda slots: Evicting(slots, unlikeness),
    "accumulated attention": lambda slots: Evicting(slots, attention_so_far),
    "key norm": lambda slots: Chosen(fk.Sinks(SINKS) | fk.select.KeyNorm(slots // 2 - SINKS) | fk.Window(slots // 2)),
    "random keys": lambda slots: Chosen(fk.Sinks(SINKS) | fk.RandomKeys(slots // 2 - SINKS) | fk.Window(slots // 2)),
}
"""Where a method chooses keys of the past, half of the slots are a window. The controls fail without the first keys."""
METHODS = (EXACT, *PLANS, *RULES)


@contextmanager
def replaced(model: Any, method: str, slots: int, tokens: int, first: int) -> Iterator[Callable[[], float]]:
    """The model with the attention of every layer replaced.

    Yields a function. After a forward of one sequence of `tokens` it returns the slots that queries from `first` on
    paid on average.
    """
    if method == EXACT:
        yield lambda: (first + tokens + 1) / 2
    elif method in PLANS:
        plan = PLANS[method](slots).never_exact()
        with fk.apply(model, plan):
            yield lambda: paid_by(plan, model.config, tokens, first)
    else:
        answer = ByRule(RULES[method](slots), first)
        detach = attach(model, answer).detach
        try:
            yield lambda: answer.paid
        finally:
            detach()


def paid_by(plan: fk.Plan, config: Any, tokens: int, first: int) -> float:
    """Slots that queries `first` .. `tokens - 1` of a model of this configuration pay on average, whatever the data."""
    if plan.keep is None:
        raise ValueError("plan: expected one that keeps some keys, got exact attention")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads // kv_heads, tokens, dim, generator=generator)
    key = torch.randn(1, 1, tokens, dim, generator=generator)
    graph = plan.keep.graph(query, key, is_causal=True)
    kept = sum(int(graph.mask(at, min(at + 512, tokens)).sum()) for at in range(first, tokens, 512))
    return plan.slots(kept / (query.shape[1] * (tokens - first)), dim, dim)
