"""A plan's error, estimated from a few queries that are answered exactly.

The real queries of a sequence are cut into strata of almost equal length, and one query is drawn from each (Cochran,
Sampling Techniques, 3rd ed. 1977, section 5A.12): errors that change along the text add little to the variance.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewkeys.core.extent import FINITE, rescaled
from fewkeys.core.gaps import kept_places
from fewkeys.core.inputs import Inputs
from fewkeys.core.metrics import relative_error
from fewkeys.core.precision import full_precision, working
from fewkeys.core.rows import marked_places, take
from fewkeys.core.validation import check_drawn_once
from fewkeys.core.weights import Weights
from fewkeys.core.work import at_once

GROUP = 8
"""Neighbouring strata that share an estimate of the variance."""


@dataclass(frozen=True, eq=False)
class Estimates:
    """Estimates of the mean errors of P populations of queries: the heads of a call, sequence by sequence.

    (P,): the number `count` of queries, how many were `drawn`, the numbers of their `heads`, int64, the estimates
    `mean` and their third central moments `third`. variance (P, G): the share of each group of strata in the variance
    of `mean`; freedom (G,): the groups' degrees of freedom. On the CPU, float64.
    """

    count: Tensor
    drawn: Tensor
    heads: Tensor
    mean: Tensor
    variance: Tensor
    third: Tensor
    freedom: Tensor


@dataclass(frozen=True, eq=False)
class QuerySample:
    """Queries drawn for an exact answer: their positions `index` (B, Hq, m), and the number `size` (B, m) of queries in
    each stratum. A sequence of at most m real queries is drawn whole: sizes of one, then padding of size zero.
    """

    index: Tensor
    size: Tensor

    @property
    def count(self) -> Tensor:
        """(B,): the real queries of each sequence."""
        return self.size.sum(-1)

    def mean(self, errors: Tensor) -> Tensor:
        """`sum_s (N_s / N) e_s` (B, Hq) of the sample's errors (B, Hq, m), float64: unbiased for the mean."""
        return (self._drawn_errors(errors) * self._weight.unsqueeze(1)).sum(-1)

    def estimates(self, errors: Tensor, heads: Tensor | None = None) -> Estimates:
        """The mean error of each sequence and head, from the errors (B, Hq, m), with moments around the true mean.

        A stratum of N_s > 1 queries adds `(N_s / N)^2 S^2` to the variance, `S^2` the sample variance of its group of
        about `GROUP` strata, on average at least the true variance, since it holds that of the strata's means. It adds
        `(N_s / N)^3 (1 - 1 / N_s) (1 - 2 / N_s) K` to the third moment, K the group's third k-statistic: right on
        average for errors in random order.

        heads: (Hq,) their numbers in the model.
        """
        strata = self.size.shape[-1]
        groups = max(1, strata // GROUP)
        group = torch.arange(strata, device=self.size.device) * groups // strata
        member = torch.nn.functional.one_hot(group, groups).to(errors.dtype)
        width = member.sum(0)
        mean, errors = self.mean(errors), self._drawn_errors(errors)
        centred = errors - (errors @ member / width)[..., group]
        square = centred**2 @ member / (width - 1)
        cube = centred**3 @ member * width / ((width - 1) * (width - 2)).clamp_min(1)
        size = self.size.clamp_min(1).double()
        of_square = self._weight.square().masked_fill(self.size <= 1, 0.0) @ member
        of_cube = (self._weight**3 * (1 - 1 / size) * (1 - 2 / size)) @ member
        variance, third = square * of_square.unsqueeze(1), (cube * of_cube.unsqueeze(1)).sum(-1)
        counts = (number.unsqueeze(-1).expand_as(mean) for number in (self.count, (self.size > 0).sum(-1)))
        count, drawn, mean, variance, third = (
            rows.to("cpu", torch.float64).flatten(0, 1) for rows in (*counts, mean, variance, third)
        )
        heads = (torch.arange(errors.shape[1]) if heads is None else heads.cpu()).repeat(len(errors))
        return Estimates(count, drawn, heads, mean, variance, third, freedom=(width - 1).to("cpu", torch.float64))

    @property
    def _weight(self) -> Tensor:
        """(B, m), float64: the share of each stratum in its sequence's queries."""
        return self.size.double() / self.count.clamp_min(1).unsqueeze(-1)

    def _drawn_errors(self, errors: Tensor) -> Tensor:
        return errors.masked_fill((self.size == 0).unsqueeze(1), 0.0)


def draw(inputs: Inputs, places: Tensor) -> QuerySample:
    """One query from each of m strata, at the relative place in it given by `places` in [0, 1), broadcastable to
    (B, Hq, m).
    """
    real, m = _real_queries(inputs), places.shape[-1]
    count = real.sum(-1, keepdim=True)
    step = torch.arange(m + 1, device=real.device)
    edge = torch.where(count > m, step * count // m, torch.minimum(step, count))
    size = edge.diff()
    rank = (edge[:, None, :-1] + (places * size.unsqueeze(1)).long()).clamp_max(inputs.queries - 1)
    order = marked_places(real, least=inputs.queries).unsqueeze(1)
    order, rank = (numbers.expand(-1, inputs.query_heads, -1) for numbers in (order, rank))
    return QuerySample(order.gather(-1, rank), size)


def _real_queries(inputs: Inputs) -> Tensor:
    """(B, Nq): the queries of real tokens that see a key."""
    x = inputs
    if x.valid is None:
        return torch.ones((x.batch, x.queries), dtype=torch.bool, device=x.query.device)
    seen = x.valid.any(-1, keepdim=True).expand(-1, x.queries)
    if x.is_causal:
        first = x.valid.to(torch.uint8).argmax(-1, keepdim=True)
        seen = seen & (first <= torch.arange(x.queries, device=first.device) + x.offset)
        if (kept := kept_places(x)) is not None:
            seen = seen & kept[1]
    return seen if x.valid_queries is None else seen & x.valid_queries


def exact_rows(inputs: Inputs, weights: Weights, index: Tensor) -> Tensor:
    """Exact attention (B, Hq, m, Dv) of the queries at `index` (B, Hq, m), in float32 or float64.

    Cost O(B Hq m Nk (D + Dv)); memory O(B Hkv Nk (D + Dv)).
    """
    x = replace(inputs, query=working(inputs.query), key=working(inputs.key), value=working(inputs.value), _memory={})
    x, restore = rescaled(x.clear(), FINITE)
    query = (take(x.query, index) * x.scale).reshape(x.batch, x.kv_heads, -1, x.head_dim)
    places = index.reshape(x.batch, x.kv_heads, -1)
    heads = torch.arange(x.query_heads, device=index.device).repeat_interleave(index.shape[2]).view(x.kv_heads, -1)
    key, value = x.key.mT, x.value
    step = max(1, at_once(x.query) // (x.batch * x.kv_heads * x.keys))
    parts = []
    for rows, place, head in zip(query.split(step, 2), places.split(step, 2), heads.split(step, 1), strict=True):
        scores = rows @ key
        if x.bias is not None:
            scores = scores + x.bias.rows(head, place + x.offset, x.keys)
        if x.is_causal:
            future = torch.arange(x.keys, device=index.device) > place.unsqueeze(-1) + x.offset
            scores = scores.masked_fill(future, -torch.inf)
        if x.valid is not None:
            scores = scores.masked_fill(~x.valid[:, None, None], -torch.inf)
        parts.append(weights.normalised(scores) @ value)
    return restore(torch.cat(parts, 2).reshape(*index.shape, x.value_dim))


@torch.no_grad()
@full_precision()
def sampled_errors(
    inputs: Inputs, weights: Weights, output: Tensor, shape: tuple[int, ...], generator: torch.Generator | None
) -> tuple[QuerySample, Tensor]:
    """A sample at random places of this shape, and the errors of `output` there (B, Hq, m), float64."""
    check_drawn_once(generator)
    if generator is None:  # no plan uses this seed: the sample must not depend on a plan's random keys
        generator = torch.Generator("cpu").manual_seed(0x5A3B1E)
    places = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
    sample = draw(inputs, places.to(output.device))
    return sample, relative_error(take(output, sample.index), exact_rows(inputs, weights, sample.index)).double()
