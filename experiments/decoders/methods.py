"""The rows: who answers attention, and what a query pays.

Every method is asked for a number of slots; what it pays, kept keys and everything it scores to find them, is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from experiments.causal.eviction import attention_so_far, unlikeness
from experiments.decoders.attend import ByRule, Rule
from experiments.decoders.rivals import Chosen, Evicting, Multipole, Quest

import fewkeys as fk
from fewkeys.integrations.interface import attach

EXACT, OURS = "exact", "fewkeys"
TUNED = {"fewkeys, tuned": "tuned-{}"}
"""The folders of the plans that `tuned.py` has found, by their slots."""
TUNED_PLANS = Path(__file__).parent / "results"
SINKS = 4


def _tuned(folder: str, slots: int) -> fk.ModelPlan:
    return fk.ModelPlan.from_pretrained(TUNED_PLANS / folder.format(slots))


PLANS: dict[str, Callable[[int], fk.Plan | fk.ModelPlan]] = {
    OURS: lambda slots: fk.budget(slots, is_causal=True),
    **{name: partial(_tuned, folder) for name, folder in TUNED.items()},
    "constant memory": lambda slots: fk.budget(slots, is_causal=True, memory="constant"),
    "sinks + window": lambda slots: fk.Plan(fk.Sinks(SINKS) | fk.Window(slots - SINKS)),
}
"""Plans whose queries pay as many slots whatever the data."""
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
"""Half of the slots are a window where a method chooses keys of the past; without sinks the controls say nothing."""
METHODS = (EXACT, *PLANS, *RULES)
UNTUNED = tuple(method for method in METHODS if method not in TUNED)


@contextmanager
def replaced(model: Any, method: str, slots: int, tokens: int, first: int) -> Iterator[Callable[[], float]]:
    """The model with the attention of every layer replaced.

    What is yielded gives, after a forward of one sequence of `tokens`, the slots that queries from `first` on paid.
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


def paid_by(plan: fk.Plan | fk.ModelPlan, config: Any, tokens: int, first: int) -> float:
    """Slots that queries `first` .. `tokens - 1` of a model with this configuration pay on average, by any data."""
    if isinstance(plan, fk.ModelPlan):
        counts = Counter(own for layer in plan for own in layer)
        total = sum(count * paid_by(own, config, tokens, first) for own, count in counts.items())
        return total / counts.total()
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
