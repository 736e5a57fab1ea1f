"""The input of every executor: all choices are made, only attention is left to compute."""

from dataclasses import dataclass, replace

import torch

from fewkeys.core.derivatives import constants
from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.weights import Softmax, Weights
from fewkeys.plan import Plan
from fewkeys.rest.base import AnyStandIns, StandIns


@dataclass(frozen=True, eq=False)
class Problem:
    """Queries, keys and values; edges between them; stand-ins for the other keys; how scores become weights."""

    inputs: Inputs
    graph: Graph
    stand_ins: AnyStandIns | None
    weights: Weights

    @property
    def by_cohort(self) -> bool:
        """Whether cohorts of queries have lists of their own."""
        return self.graph.columns is not None and self.graph.columns.place is not None

    @property
    def unbiased(self) -> str | None:
        """Why a bias of distances is not supported; None where it is."""
        graph, columns = self.graph, self.graph.columns
        if graph.extra is not None or graph.scan is not None:
            return "expected a plan whose queries keep a window and lists, got extra edges or a scan"
        if self.stand_ins is None or self.by_cohort:
            return None
        if not isinstance(self.stand_ins, StandIns) or (columns is not None and columns.blocks > 1):
            return "expected stand-ins that serve all queries, got some by blocks"
        return None if isinstance(self.weights, Softmax) else f"expected Softmax() with stand-ins, got {self.weights}"


def prepare(inputs: Inputs, plan: Plan) -> Problem:
    """The problem of a plan."""
    graph = select(inputs, plan)
    x = graph.inputs
    problem = Problem(x, graph, plan.rest.prepare(x, graph, plan.weights), plan.weights)
    if x.bias is not None and (reason := problem.unbiased) is not None:
        fix = "Window, Sinks and Leverage with Drop()" if x.is_causal else "budget(slots), its parts, or Drop()"
        raise ValueError(f"distance_bias: {reason}; use {fix}")
    return problem


def select(inputs: Inputs, plan: Plan) -> Graph:
    """The keys that the plan keeps.

    Stand-ins that are built block by block begin at the first token, and so do the inputs of the graph.
    """
    if plan.keep is None:
        raise ValueError("plan: expected one that chooses keys, got exact attention")
    if plan.rest.needs_causal and inputs.offset:
        pasts = [past.recent for part in plan.keep.parts if (past := part.remembered) is not None]
        reach = max((recent.size * recent.blocks for recent in pasts if recent is not None), default=0)
        inputs = inputs.from_start(reach)
    with constants():
        graph = plan.keep.select(inputs)
    # Executors trust a graph. A rule from elsewhere may give a band in the future, and list padding.
    x, band, columns = graph.inputs, graph.band, graph.columns
    if x.is_causal and band is not None and band[1] > 0:
        graph = replace(graph, band=(band[0], 0))
    if x.valid is not None and columns is not None:
        sequence = torch.arange(x.batch, device=columns.index.device)[:, None, None, None]
        graph = replace(graph, columns=replace(columns, used=columns.used & x.valid[sequence, columns.index]))
    return graph
