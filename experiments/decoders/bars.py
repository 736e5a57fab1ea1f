"""Exact attention estimated from a plan's keys and a sample of the others, with an error bar for every query.

A query keeps the keys K. Of the others that it sees, m are drawn with replacement, key j with probability p_j. With
`w_j = exp(s_j)`,

    r_i = w / p of the i-th draw        Z = sum_K w_j + mean_i r_i        o = (sum_K w_j v_j + mean_i r_i v_i) / Z

Numerator and Z are unbiased. With o* the exact output, `o - o* = (mean_i y_i - E y) / Z` for `y = r (v - o*)`. The bar
assumes that this mean is within `h(y) = t S(y) / sqrt(m) + c B(y) / m` of its expectation:

* t S / sqrt(m), S^2 the trace of the sample's covariance, t Student's quantile: of all normal vectors with one trace,
  those along a line are farthest out (Szekely and Bakirov, 2003);
* c B / m, c = log(1 / (1 - confidence)): all keys that were never drawn have a probability below c / m, except in 1 of
  1 / (1 - confidence) samples. B bounds |y|: p_j is proportional to the root mean square of w_j under the errors of its
  code (random_codes.py), so w / p is about at most the sum of these.

o* is not known, but S(y) <= S(x) + |o - o*| S(r) for `x = r (v - o)`, and so for B. Hence

    |o - o*| <= h(x) / (Z - h(r)).

The bar is computed n times, after 64, 128, .. draws, each time at the confidence 1 - (1 - confidence) / n.
"""

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from experiments.decoders.random_codes import RandomCodes
from torch import Tensor

from fewkeys.core.extent import rescaled
from fewkeys.core.graph import Graph, visible
from fewkeys.core.precision import full_precision, working
from fewkeys.core.validation import Options, check_count, check_real
from fewkeys.core.weights import Softmax, positive
from fewkeys.core.work import at_once
from fewkeys.execute.problem import select
from fewkeys.flow import checked, choose, run
from fewkeys.guard.interval import student
from fewkeys.plan import Plan

FIRST = 64
"""Draws before the first bar."""


@dataclass(frozen=True, eq=False)
class ErrorBars:
    """Estimates of exact attention, with error bars.

    `output` (B, Hq, Nq, Dv). For each query (B, Hq, Nq): `error`, the bar on `|output - exact| / |exact|`, infinite if
    the sample gives none; `reached`, bool: whether it is as small as asked for; `drawn`, int32: keys drawn.
    """

    output: Tensor
    error: Tensor
    reached: Tensor
    drawn: Tensor


@full_precision()
@torch.no_grad()
def error_bars(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    *,
    error: float = 0.05,
    confidence: float = 0.95,
    most: int = 512,
    **options: Unpack[Options],
) -> ErrorBars:
    """Estimate exact attention from a plan's keys and a sample of the others, with an error bar for every query.

        bars = error_bars(query, key, value, fk.budget(256, is_causal=True), error=0.05, is_causal=True)

    Every query attends to the plan's keys and, in place of its stand-ins, to keys drawn from the others: 64, 128, ..
    until its bar is at most `error` or `most` are drawn. A bar bounds `|output - exact| / |exact|`, apart from
    rounding, with probability `confidence` or more over the draws and the rotation of the codes. Keys and values must
    not depend on these: pass a generator with a secret seed if an adversary may choose keys.
    README.md has the measured coverage.

    Args:
        query, key, value: as in `fewkeys.attention`, without gradient.
        plan: one with `Softmax()`. It runs also where exact attention is faster. If it keeps every key, bars are zero.
        error, confidence: the relative error to reach; the confidence of every bar, in (0, 1).
        most: the most draws of a query, at least 2.
        **options: those of `fewkeys.attention` but `distance_bias`. `generator`: of the plan's randomness, the
            rotation and the draws; default: fixed seeds.

    Raises `TypeError` or `ValueError` for malformed input, and whatever the plan refuses.

    Cost O(N D^2) for the codes; per query O(n D) to scan them, as for exact scores, and O((kept + drawn) (D + Dv)).
    Exact attention is faster.
    """
    check_real("error", error, above=0.0)
    check_real("confidence", confidence, above=0.0, below=1.0)
    check_count("most", most, least=2)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a fewkeys.Plan, got {type(plan).__name__}; pass the plan of one head")
    if not isinstance(plan.weights, Softmax):
        raise ValueError(f"plan: expected one with Softmax(), got {plan.weights}; draws are by weights of softmax")
    if options.get("distance_bias") is not None:
        raise ValueError("distance_bias: expected None, got a table; codes contain no distances, so leave it out")
    choice = choose(plan.never_exact(), checked(query, key, value, **options))
    for name, rows in {"query": query, "key": key, "value": value}.items():
        if rows.requires_grad:
            raise ValueError(f"{name}: expected no gradient, which error bars do not have; pass {name}.detach()")
    if choice.is_exact:
        output, zero = run(choice), query.new_zeros(query.shape[:3], dtype=torch.float32)
        return ErrorBars(output, zero, zero == 0, zero.int())
    x, restore = rescaled(choice.inputs.clear())
    graph = select(x, plan)
    # Without a generator the seed is one that no plan uses.
    generator = torch.Generator("cpu").manual_seed(0xBA25) if x.generator is None else x.generator
    sampled = _Sampled(graph, generator, error, 1 - confidence, most)
    x = graph.inputs
    per_query = x.batch * x.query_heads * (4 * x.keys + most * (x.head_dim + 2 * x.value_dim))
    step = max(1, at_once(x.query) // per_query)
    parts = [sampled.attend(start, min(x.queries, start + step)) for start in range(x.placeholders, x.queries, step)]
    output, bar, drawn = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return ErrorBars(restore(output), bar.float(), bar <= error, drawn)


class _Sampled:
    """Attention to kept and drawn keys; keys and values (B Hkv, N, .)."""

    def __init__(self, graph: Graph, generator: torch.Generator, error: float, miss: float, most: int) -> None:
        x = graph.inputs
        self.graph, self.generator, self.error = graph, generator, error
        self.codes = RandomCodes.of(x.key, x.valid, generator)
        self.key, self.value = working(x.key).flatten(0, 1), working(x.value).flatten(0, 1)
        self.length = self.value.norm(dim=-1)
        self.counts = [*(FIRST << i for i in range(most.bit_length()) if FIRST << i < most), most]
        self.miss = miss / len(self.counts)

    def attend(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Output (B, Hq, M, Dv), bar and number of draws (B, Hq, M) of queries start .. stop - 1."""
        x = self.graph.inputs
        query = working(x.grouped_query()[:, :, :, start:stop].flatten(2, 3)) * x.scale
        kept = self.graph.mask(start, stop)
        free = (visible(x, start, stop) & ~kept).flatten(0, 2)
        log_weight = self.codes.log_weights(query).flatten(0, 2).masked_fill(~free, -torch.inf)
        head = torch.arange(len(self.key), device=query.device).repeat_interleave(query.shape[2])
        query = query.flatten(0, 2)
        top, kept_weight, kept_sum = self._of_kept(query, head, kept.flatten(0, 2))
        place, log_chance, log_total = self._draw(log_weight)
        longest = (self.length[head] * free).amax(-1)
        output, bar = kept_sum / positive(kept_weight).unsqueeze(-1), torch.zeros_like(kept_weight)
        drawn = torch.zeros_like(kept_weight, dtype=torch.int32)
        live = free.any(-1).nonzero().squeeze(-1)
        for count in self.counts:
            if not len(live):
                break
            score, values = self._read(query[live], head[live], place[live, :count])
            log_ratio = score - log_chance[live, :count]
            # In units of the largest weight or ratio of a query.
            shift = torch.maximum(top[live], log_ratio.amax(-1))
            ratio, unit = (log_ratio - shift.unsqueeze(-1)).exp(), (top[live] - shift).exp()
            total = kept_weight[live] * unit + ratio.mean(-1)
            drawn_sum = ((ratio / count).unsqueeze(-2) @ values).squeeze(-2)
            estimate = (kept_sum[live] * unit.unsqueeze(-1) + drawn_sum) / total.unsqueeze(-1)
            length, largest_ratio = estimate.norm(dim=-1), (log_total[live] - shift).exp()
            deviation = (ratio.unsqueeze(-1) * (values - estimate.unsqueeze(-2))).var(-2).sum(-1).sqrt()
            of_sum = half_width(deviation, largest_ratio * (longest[live] + length), count, self.miss)
            of_total = half_width(ratio.std(-1), largest_ratio, count, self.miss)
            radius = _quotient(of_sum, total - of_total)
            output[live], bar[live], drawn[live] = estimate, _quotient(radius, length - radius), count
            live = live[bar[live] > self.error]
        shape = (x.batch, x.query_heads, stop - start)
        return output.view(*shape, -1), bar.view(shape), drawn.view(shape)

    def _of_kept(self, query: Tensor, head: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the keys (R, N) that R queries keep: the largest score `top` (R,), and in units of exp(top) the sums of
        weights (R,) and of weighted values (R, Dv).
        """
        used, place = kept.byte().topk(max(1, int(kept.sum(-1).max())), -1)
        score, values = self._read(query, head, place)
        score = score.masked_fill(used == 0, -torch.inf)
        top = score.amax(-1)
        weight = (score - top.masked_fill(top == -torch.inf, 0.0).unsqueeze(-1)).exp()
        return top, weight.sum(-1), (weight.unsqueeze(-2) @ values).squeeze(-2)

    def _read(self, query: Tensor, head: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (R, C) and values (R, C, Dv), float64, of the keys at `place` (R, C) of R queries."""
        head = head.unsqueeze(-1)
        score = (self.key[head, place] @ query.unsqueeze(-1)).squeeze(-1)
        return score.double(), self.value[head, place].double()

    def _draw(self, log: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys (R, most) drawn by weights exp(log), `log` (R, N); the logarithms of their chances and of the sum."""
        top = log.amax(-1, keepdim=True)
        log = log.sub(top.masked_fill(top == -torch.inf, 0.0)).double()
        below = log.exp().cumsum(-1)
        shape = (len(log), self.counts[-1])  # all rows draw as often: a row's draws do not depend on others
        uniform = torch.rand(shape, generator=self.generator, dtype=torch.float64, device=self.generator.device)
        # A product that rounds up to the whole sum would draw the last key, which may be hidden.
        place = torch.searchsorted(below, uniform.to(log.device) * (1 - 2**-50) * below[:, -1:], right=True)
        place = place.clamp_max(log.shape[-1] - 1)
        log_sum = below[:, -1].log()
        return place, log.gather(-1, place) - log_sum.unsqueeze(-1), log_sum + top.squeeze(-1)


def half_width(deviation: Tensor, bound: Tensor, count: int, miss: float) -> Tensor:
    """h: how far the mean of `count` vectors, no longer than `bound`, is from its expectation, but for a probability
    `miss`; deviation: S.
    """
    width: Tensor = student(1 - miss, count - 1) / count**0.5 * deviation - math.log(miss) / count * bound
    return width


def _quotient(part: Tensor, whole: Tensor) -> Tensor:
    """`part / whole`, infinite where `whole` is not positive; zero where `part` is."""
    quotient: Tensor = torch.where(part == 0, 0.0, part / whole.clamp_min(0.0))
    return quotient.nan_to_num(torch.inf, torch.inf)
