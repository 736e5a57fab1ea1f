"""One plan of a comparison: its output, its edges and its time on one block of attention."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fewkeys.call import attention
from fewkeys.core.clock import clock
from fewkeys.core.graph import Graph, visible
from fewkeys.core.impl import Impl
from fewkeys.core.metrics import relative_error
from fewkeys.execute import dispatch
from fewkeys.execute.problem import prepare
from fewkeys.flow import Choice, by_plan, canonicalise, choose, run
from fewkeys.judge.exact import Block, Exact
from fewkeys.judge.result import Sample
from fewkeys.judge.tally import Tally
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan

QUERIES, HEADS = 4, 512
"""Queries of a sample in models of up to so many heads; larger models have fewer, but at least one."""
HEAVIEST = 16
"""Keys of a query in a sample."""


class HeaviestKeys:
    """The heaviest keys of a few queries of the first sequence, as the page shows them."""

    queries: Tensor
    newest: Tensor

    def __init__(self, layers: int, heads: int) -> None:
        self.count = max(1, min(QUERIES, HEADS // (layers * heads)))
        self.sample = Sample([], [[] for _ in range(layers)], [[] for _ in range(layers)])

    def add(self, layer: int, truth: Exact) -> None:
        """Add those of a block that begins with the first sequence."""
        weights = truth.weights[0]
        length = weights.shape[1]
        count = min(self.count, length)
        self.queries = torch.arange(1, 2 * count, 2, device=weights.device) * length // (2 * count)
        largest, self.newest = weights[:, self.queries].topk(min(HEAVIEST, weights.shape[2]))
        self.sample.queries[:] = self.queries.tolist()
        self.sample.keys[layer].extend(self.newest.tolist())
        self.sample.weights[layer].extend(largest.double().round(decimals=4).tolist())

    def kept(self, edges: Tensor) -> list[str]:
        """For each head of the block added last, a flag for each of its keys: whether `edges` (H, N, Nk) have it."""
        flags = edges[:, self.queries].gather(2, self.newest)
        return ["".join(map(str, head)) for head in flags.flatten(1).int().tolist()]


@dataclass
class Entry:
    """One plan of a comparison. `reason`: why it was left out, if it was."""

    name: str
    budget: int | None
    plan: Plan | ModelPlan
    tally: Tally
    reason: str | None = None
    ms: list[float] = field(default_factory=list)
    exact_ms: list[float] = field(default_factory=list)
    effect: dict[str, float] = field(default_factory=dict)
    kept: list[list[str]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """As in `Row`."""
        if isinstance(self.plan, ModelPlan):
            return "method"
        return "exact" if self.plan.keep is None else "oracle" if self.plan.keep.is_oracle else "method"

    def plans(self, layer: int, block: Block) -> Sequence[Plan]:
        """The plan of each key head of a block, or one for all, without `exact_if_faster`."""
        plans = [self.plan] if isinstance(self.plan, Plan) else self.plan[layer]
        if len(plans) > 1:
            first = block.heads.start * block.key.shape[1] // block.query.shape[1]
            plans = plans[first : first + block.key.shape[1]]
        return [plan.never_exact() for plan in plans]

    def generator(self, where: str, device: torch.device) -> torch.Generator:
        """A generator seeded by `where` (which begins with the seed) and this row."""
        return torch.Generator(device).manual_seed(zlib.crc32(f"{where}/{self.name}/{self.budget}".encode()))


def judge_block(
    entry: Entry, layer: int, block: Block, truth: Exact, where: str, impl: Impl, keys: HeaviestKeys | None
) -> None:
    """Add the errors of an entry's plan on one block to its tally. keys: for blocks with the first sequence."""
    generator = entry.generator(where, block.query.device)
    inputs = block.checked(generator, impl)
    output = torch.empty_like(truth.output)
    edges = torch.empty_like(truth.heavy)
    price = output.new_zeros(inputs.query_heads)
    for plan, heads, part in by_plan(inputs, entry.plans(layer, block)):
        generator.manual_seed(generator.initial_seed())
        part_output, graph = answer(choose(plan, part))
        output[:, heads] = part_output.float()
        edges[:, heads] = graph.mask(graph.inputs.placeholders, graph.inputs.queries)
        price[heads] = plan.rest.slots(part.head_dim, part.value_dim)
    if not bool(output.isfinite().all()):
        raise ValueError(f"the output is not finite in layer {layer}; nothing can be measured")
    mass, slots = (truth.weights * edges).sum(-1), edges.sum(-1)
    # A head that keeps every key has no stand-ins to pay for.
    seen = visible(inputs, 0, inputs.queries).sum(-1)
    slots = slots + price.unsqueeze(-1) * (slots < seen).any(-1, keepdim=True).any(0)
    errors = relative_error(output, truth.output)
    entry.tally.add(layer, block.heads, errors, mass, slots, truth.heavy, truth.heavy & edges)
    if keys is not None:
        entry.kept[layer] += keys.kept(edges[0])


def answer(choice: Choice) -> tuple[Tensor, Graph]:
    """The output of a choice, and its edges, on inputs without padding."""
    if choice.is_exact:
        return run(choice), Graph.full(choice.inputs)
    (part,), restore = canonicalise(choice)
    problem = prepare(part, choice.plan)
    return restore([dispatch.attend(problem)]), problem.graph


def time_block(entry: Entry, layer: int, block: Block, where: str, repeats: int, impl: Impl) -> None:
    """Time the plan and exact attention in turns, so that other load affects both. First runs count, too."""
    mask, device, rows = _mask(block), block.query.device, (block.query, block.key, block.value)
    causal = block.is_causal and mask is None

    def run_exact() -> Tensor:
        return scaled_dot_product_attention(*rows, attn_mask=mask, is_causal=causal, scale=block.scale, enable_gqa=True)

    def run_plan() -> Tensor:
        options = block.options(entry.generator(where, device), impl)
        return attention(*rows, plan=entry.plans(layer, block), **options)

    for _ in range(repeats):
        entry.exact_ms.append(clock(run_exact, device))
        entry.ms.append(clock(run_plan, device))


def _mask(block: Block) -> Tensor | None:
    """The mask that a model makes once for all layers: distance biases, and causality if queries are offset."""
    x = block.checked()
    seen = visible(x, 0, x.queries)
    if x.bias is not None:
        return x.bias.of(x.offset, x.offset + x.queries, x.keys).to(x.query.dtype).masked_fill(~seen, -torch.inf)
    # The fused causal kernel needs query 0 at key 0.
    return seen if x.is_causal and x.offset else None
