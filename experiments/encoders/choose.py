"""Leave one model out: the rule that is best on all others, compared with the best rule for the one left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import exp, log
from typing import Any

from experiments.encoders.shares import RULES, Rule, cohorts_of

Place = tuple[str, int, int]
"""A model, a length and a number of slots."""
Measured = Mapping[str, Mapping[str, Sequence[float]]]
"""By place, as "MODEL LENGTH SLOTS", and plan: the mean error and that of the worst head."""

ALIKE = {"vit", "digits"}
"""Models of one kind, which are also left out together."""


def by_place(measured: Measured) -> dict[Place, dict[str, Sequence[float]]]:
    """The errors, with places as tuples."""
    apart = ((key.split(), dict(plans)) for key, plans in measured.items())
    return {(model, int(length), int(slots)): plans for (model, length, slots), plans in apart}


def mean_ratio(values: Sequence[float]) -> float:
    """Their geometric mean."""
    return exp(sum(map(log, values)) / len(values))


class Errors:
    """The errors of every rule at the places of every model, with the number of cohorts that the budget has there."""

    def __init__(self, measured: Measured) -> None:
        self._at = by_place(measured)
        tried = {slots: [rule.cell(slots, cohorts_of(slots)) for rule in RULES] for _, _, slots in self._at}
        everywhere = [i for i in range(len(RULES)) if all(cells[i] is not None for cells in tried.values())]
        self.rules = [RULES[i] for i in everywhere]
        """The rules that have a plan at every number of slots."""
        self._names = {slots: [str(cells[i]) for i in everywhere] for slots, cells in tried.items()}
        self.slots = sorted(tried)
        self.models = list(dict.fromkeys(place[0] for place in self._at))

    def of(self, rule: Rule, model: str) -> dict[tuple[int, int], Sequence[float]]:
        """By length and slots."""
        i = self.rules.index(rule)
        return {
            (length, slots): self._at[name, length, slots][self._names[slots][i]]
            for name, length, slots in self._at
            if name == model
        }

    def least(self, model: str) -> dict[tuple[int, int], tuple[float, float]]:
        """The least mean error and the least worst head of any rule, by length and slots."""
        each = [self.of(rule, model) for rule in self.rules]
        return {
            place: (min(errors[place][0] for errors in each), min(errors[place][1] for errors in each))
            for place in each[0]
        }

    @cached_property
    def excess(self) -> dict[str, dict[Rule, float]]:
        """By model and rule, the errors over the least ones: a geometric mean of mean errors and worst heads."""
        return {model: {rule: self._excess(rule, model) for rule in self.rules} for model in self.models}

    def _excess(self, rule: Rule, model: str) -> float:
        return self._above_least(self.of(rule, model), model)

    def _above_least(self, errors: Mapping[tuple[int, int], Sequence[float]], model: str) -> float:
        least = self.least(model)
        return mean_ratio([errors[place][k] / least[place][k] for place in errors for k in (0, 1)])

    def beside_best(self, rule: Rule, model: str) -> float:
        """The rule's excess over that of the best rule for the model."""
        return self.excess[model][rule] / min(self.excess[model].values())

    def budget_beside_best(self, model: str) -> float:
        """The excess of `fk.budget` over that of the best rule for the model."""
        errors = {place[1:]: plans["fk.budget"] for place, plans in self._at.items() if place[0] == model}
        return self._above_least(errors, model) / min(self.excess[model].values())

    def order(self, models: Sequence[str]) -> list[Rule]:
        """The rules, the best first: the one whose largest `beside_best` over these models is the least."""
        return sorted(self.rules, key=lambda rule: max(self.beside_best(rule, model) for model in models))


def conclusions(measured: Measured) -> dict[str, Any]:
    """For every model, and for those of one kind together: the rule chosen on the others, its errors over those of the
    best rule for that model, and over the best at each length and number of slots. Also the rule chosen on all.
    """
    errors = Errors(measured)
    if len(errors.models) < 2:
        raise ValueError(f"--models: expected two at least, got {', '.join(errors.models) or 'none'}")
    held_out = []
    apart = [(model, {model}) for model in errors.models]
    if set(errors.models) > ALIKE:
        apart += [(model, ALIKE) for model in sorted(ALIKE)]
    for model, without in apart:
        others = [name for name in errors.models if name not in without]
        rule, best_rule = (errors.order(names)[0] for names in (others, [model]))
        chosen, best, least = errors.of(rule, model), errors.of(best_rule, model), errors.least(model)
        ratios = {
            f"{kind} beside {name}": mean_ratio([chosen[place][k] / other[place][k] for place in chosen])
            for k, kind in enumerate(("error", "worst"))
            for name, other in (("best rule", best), ("best at each", least))
        }
        alike = ", ".join(sorted(without - {model}))
        rules = {"rule": str(rule), "best rule": str(best_rule)}
        held_out.append({"model": model, "and": alike, **rules, **_short(ratios)})
    order = errors.order(errors.models)
    rule = order[0]
    excess = {name: errors.beside_best(rule, name) for name in errors.models}
    numbers = {str(slots): str(rule.cell(slots, cohorts_of(slots))) for slots in errors.slots}
    next_best = {str(rule): max(errors.beside_best(rule, name) for name in errors.models) for rule in order[:10]}
    return {
        "held_out": held_out,
        "rule": str(rule),
        "excess": _short(excess),
        "excess of budget": _short({name: errors.budget_beside_best(name) for name in errors.models}),
        "cells": numbers,
        "next": _short(next_best),
    }


def _short(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}
