"""Attention problems whose heavy entries are known: where selection by leverage must fail, and where it must work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.validation import check_count, check_real


@dataclass(frozen=True, eq=False)
class Problem:
    """One head: `query` (1, 1, M, D), `key` (1, 1, N, D), `value` (1, 1, N, D), float32; `relevant` (1, 1, N), bool.

    The value of every key is standard normal. `relevant` marks the keys that some query is about.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    relevant: Tensor


def random_signs(n: int, d: int, c: float = 1.0, *, generator: torch.Generator) -> Problem:
    """The counterexample to small universal sets for softmax: n keys with random entries +c or -c, and Q = K.

    A query's own key has the score `t c^2 d`, t the scale of attention. By Hoeffding's inequality and a union over
    all pairs, every other score is at most `t c^2 sqrt(2 d log(n^2 / (2 delta)))` with probability `1 - delta`, so

        A_ii >= 1 / (1 + (n - 1) exp(-t c^2 (d - sqrt(2 d log(n^2 / (2 delta))))))    for all i at once.

    Once `t c^2 d` is a few times log n and d a few times log n, the whole diagonal is heavy: all n keys are needed,
    one for each query, and k of them hold the share k / n. For weights `|s|^2` the diagonal is not heavy when n is
    large: about `d / (n + d)`, as it must be, since then the universal set has at most d / eps keys.

    Args:
        n: keys, and queries.
        d: dimensions.
        c: size of the entries, positive.
        generator: the source of randomness.

    Returns:
        `Problem`; every key is relevant.

    Raises:
        TypeError, ValueError: counts below 1, c not positive, `generator` not a generator.

    Source: LevAttention (arXiv 2410.05462), on softmax.
    """
    n, d = check_count("n", n), check_count("d", d)
    c = check_real("c", c, above=0.0)
    _check_generator(generator)
    key = c * (2.0 * torch.randint(2, (1, 1, n, d), generator=generator, device=generator.device) - 1)
    value = torch.randn(1, 1, n, d, generator=generator, device=generator.device)
    return Problem(key, key.clone(), value, torch.ones(1, 1, n, dtype=torch.bool, device=key.device))


def planted(
    n: int,
    d: int,
    relevant: int,
    queries: int,
    *,
    strength: float = 12.0,
    combine: int = 1,
    noise: float = 0.1,
    leak: float = 0.05,
    generator: torch.Generator,
) -> Problem:
    """Few relevant keys among many irrelevant ones, and queries that are noisy combinations of the relevant ones.

    The model is ours; the paper gives an outline. With r = `relevant` and all draws independent:

    - `e_1 .. e_d` is an orthonormal basis of uniform direction.
    - Relevant key a, for a = 1 .. r, is `e_a`. The r keys stand at random positions.
    - An irrelevant key is `sum_(b > r) g_b e_b + leak sum_(a <= r) g_a e_a`, g standard normal.
    - A query is `sqrt(d) (strength sum_(a in S) e_a + noise h)`: S a uniform set of `combine` relevant keys, h
      standard normal in d dimensions.

    So with the usual scale `1 / sqrt(d)` the score of a key in S is `strength + noise h_a`, and an irrelevant key's
    score has variance `noise^2 (d - r + r leak^2) + strength^2 combine leak^2`. Relevant keys are *shorter* than the
    others, of squared length 1 against d - r, so that their norm hides them. Their leverage score is at least
    `1 / (1 + leak^2 chi)` (take `y = e_a`), chi being chi-squared with n - r degrees of freedom, n on average; that of
    an irrelevant key is about chi-squared with d degrees, over n. So for large n leverage finds the relevant keys
    while `1 / leak^2` exceeds the largest of n such numbers, `d + 2 sqrt(d log n) + 2 log n`. The noise of the
    queries, which decides whether attention is heavy there at all, makes no difference to it.

    Args:
        n: keys in all.
        d: dimensions.
        relevant: relevant keys r, fewer than n and than d.
        queries: queries.
        strength: score of a relevant key, positive.
        combine: relevant keys in one query, at most r.
        noise: of the queries, not negative.
        leak: share of the irrelevant keys in the relevant directions, not negative.
        generator: the source of randomness.

    Returns:
        `Problem`, `relevant` marking the r keys.

    Raises:
        TypeError, ValueError: numbers outside these ranges, `generator` not a generator.
    """
    n, d, r = check_count("n", n), check_count("d", d), check_count("relevant", relevant)
    queries, combine = check_count("queries", queries), check_count("combine", combine)
    if r >= min(n, d):
        raise ValueError(f"relevant: expected fewer than n={n} and d={d}, got {r}")
    if combine > r:
        raise ValueError(f"combine: expected at most relevant={r}, got {combine}")
    strength = check_real("strength", strength, above=0.0)
    for name, number in (("noise", noise), ("leak", leak)):
        if check_real(name, number) < 0:
            raise ValueError(f"{name}: expected a number that is not negative, got {number}")
    _check_generator(generator)
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    basis = torch.linalg.qr(normal(d, d)).Q
    key = normal(n, d)
    key[:, :r] *= leak
    place = torch.randperm(n, generator=generator, device=device)[:r]
    key[place] = torch.eye(d, device=device)[:r]
    mark = torch.zeros(n, dtype=torch.bool, device=device)
    mark[place] = True
    wanted = torch.rand(queries, r, generator=generator, device=device).argsort(-1)[:, :combine]
    query = noise * normal(queries, d)
    query.scatter_add_(1, wanted, query.new_full(wanted.shape, strength))
    query = d**0.5 * query
    return Problem((query @ basis)[None, None], (key @ basis)[None, None], normal(1, 1, n, d), mark[None, None])


def _check_generator(generator: object) -> None:
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator: expected a torch.Generator, got {type(generator).__name__}; "
            "use torch.Generator().manual_seed(0)"
        )
