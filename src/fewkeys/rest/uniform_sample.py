"""A random sample of the keys that are not kept."""

from dataclasses import dataclass

import torch

from fewkeys.core.graph import Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import take
from fewkeys.core.weights import Weights
from fewkeys.core.work import PER_SORTED, Work
from fewkeys.rest.base import CountedRest, StandIns, unkept
from fewkeys.select.base import Selector
from fewkeys.select.controls import uniform


@dataclass(frozen=True)
class UniformSample(CountedRest):
    """`count` keys drawn uniformly from those not kept, each weighted by the size of its share.

    The keys that no shared column keeps are put in random order and dealt into `count` shares of (almost) equal size;
    the first key of each stands in for it. The estimate of `sum_j f(s_ij) v_j` is unbiased for queries that keep no
    further keys, and exact for at most `count` such keys.

    Slots: count. Draws from the call's `generator` (default: seed 0). Gradients flow through the sampled keys and
    values. Not causal. Source: the residual of HyperAttention (arXiv 2310.05869).
    """

    def work(self, inputs: Inputs, keep: Selector) -> Work:
        # The draw, the order and the ranks.
        return Work(float(self.count), 3 * PER_SORTED)

    def prepare(self, inputs: Inputs, graph: Graph, weights: Weights) -> StandIns:
        free, count = unkept(inputs, graph), min(self.count, inputs.keys)
        priority = uniform(inputs, free.shape).to(free.dtype).masked_fill(free == 0, torch.inf)
        order = priority.argsort(-1)
        share, index = order.argsort(-1) % count, order[..., :count]
        size = free.new_zeros(index.shape).scatter_add_(-1, share, free).unsqueeze(2)
        key, value = (take(rows, index).unsqueeze(2) for rows in (inputs.key, inputs.value))
        return StandIns(key, value, mass=size, size=size, label=share)
