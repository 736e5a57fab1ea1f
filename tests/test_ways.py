"""Which parts the compiled kernels answer, and why they leave the others to torch: so that none is lost in silence."""

import re

import pytest
import torch
from experiments.sparsefinder import baselines

import fewkeys as fk
from cases import CASES, CAUSAL_SHAPES, SHAPES
from executors import DTYPES, FORMS, WAYS, Way, runs, support, ways
from fewkeys.core.catalogue import listed
from fewkeys.core.validation import check_inputs
from fewkeys.execute.dispatch import EXECUTORS
from fewkeys.execute.problem import prepare
from fewkeys.papers import sparsefinder
from native_cases import needs_compiler

ROWS = "a list of keys for every query"
GROUPS = "extra edges"
BLOCKS = "lists by blocks"
LEFT_TO_TORCH = {
    fk.TopK: ROWS,
    sparsefinder.EntmaxSupport: ROWS,
    baselines.LowRankEntmax: ROWS,
    sparsefinder.GlobalTokens: GROUPS,
    baselines.Longformer: GROUPS,
    baselines.BigBird: GROUPS,
    baselines.Strided: GROUPS,
    baselines.Fixed: GROUPS,
    baselines.Reformer: GROUPS,
    baselines.SortedLSH: GROUPS,
    baselines.Routing: GROUPS,
    sparsefinder.Buckets: GROUPS,
    sparsefinder.Clusters: GROUPS,
    sparsefinder.ClusterPairs: GROUPS,
    sparsefinder.Distance: ROWS,
    sparsefinder.RandomEdges: ROWS,
    sparsefinder.BlockClusters: GROUPS,
    fk.select.RecentBlocks: BLOCKS,
    fk.rest.RunningMeans: BLOCKS,
}
"""Selectors and rests that no kernel answers under any case, and the reason that is given."""


def reasons(way):
    """By part: why the way cannot answer its cases, None for those that it can."""
    by_part = {}
    for case in CASES.values():
        plan = case.part
        shape = CAUSAL_SHAPES["causal grouped"] if plan.rest.needs_causal else SHAPES["grouped"]
        x = check_inputs(*shape.draw(dtype=torch.float32), **shape.options, impl="torch")
        reason = support(prepare(x, plan), way)
        for part in (*plan.parts, plan.rest):
            by_part.setdefault(type(part), []).append(reason)
    return by_part


@needs_compiler
@pytest.mark.parametrize("way", [way for way in WAYS if way.impl == "native"], ids=str)
def test_every_part_has_a_kernel_or_a_reason(way):
    by_part = reasons(way)
    assert set(by_part) == {*listed(fk.select.Selector, fk.rest.Rest).values()}
    lost = {kind for kind, message in by_part.items() if None not in message}
    assert lost == set(LEFT_TO_TORCH)
    for kind, reason in LEFT_TO_TORCH.items():
        # Other weights are refused before anything else is looked at, and a rest may stand beside a part that is.
        messages = [message for message in by_part[kind] if "weights" not in message]
        assert any(re.search(reason, message) for message in messages), (kind, messages)


@pytest.mark.parametrize("way", [way for way in WAYS if way.impl in ("reference", "torch")], ids=str)
def test_torch_and_the_reference_answer_everything(way):
    assert not any(reason for messages in reasons(way).values() for reason in messages)


def test_every_executor_is_among_the_ways():
    assert {way.impl for way in WAYS} == set(EXECUTORS)
    assert set(DTYPES) <= set(EXECUTORS)


@needs_compiler
@pytest.mark.parametrize("form", ["plain", "causal"])
def test_every_plan_is_run_in_float64_and_in_every_way_that_knows_it(form):
    """Whose turn it is never takes a plan out of a law altogether."""
    names = [n for n in CASES if not CASES[n].part.rest.needs_causal] if form == "plain" else list(CASES)
    if form == "causal":
        names = [n for n in names if CASES[n].part.rest.causal and CASES[n].part.keep.causal]
    forms = [form, "grouped" if form == "plain" else "causal grouped"]
    run = {(name, way) for name, _, way in (param.values for param in runs(names, forms))}
    for name in names:
        assert (name, Way("torch", torch.float64)) in run
        for way in ways(name, FORMS[form].is_causal):
            assert way.impl != "native" or (name, way) in run
