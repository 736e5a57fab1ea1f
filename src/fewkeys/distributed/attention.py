"""Attention over token shards: local queries, and the kept keys of all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from fewkeys.core.extent import needs_rescaling, rescaled
from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs, Shard
from fewkeys.core.precision import full_precision, working, working_dtype
from fewkeys.core.validation import check_inputs, largest_entries
from fewkeys.core.weights import Softmax, Weights
from fewkeys.distributed import cohorts
from fewkeys.distributed.cohorts import no_output
from fewkeys.distributed.communicator import Communicator, communicator
from fewkeys.distributed.keys import check_tokens, described, occupied
from fewkeys.distributed.selection import rows_at, select
from fewkeys.execute import dispatch
from fewkeys.execute.problem import Problem
from fewkeys.flow import attend
from fewkeys.plan import Plan
from fewkeys.rest import ClusterMeans, Drop, Rest
from fewkeys.select import Outliers, Selector, Window
from fewkeys.select.base import Sharded


@full_precision()
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    keep: Selector,
    rest: Rest | None = None,
    weights: Weights | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
) -> Tensor:
    """`fewkeys.attention` on a sequence whose tokens are split over ranks: this rank's queries.

    Every rank scores its own keys and offers its best; all ranks cut the union to the budget; its keys and values (of
    a `KeyScan`: all) are gathered; local queries attend to them. A collective: only tensors differ between ranks.

    Args:
        query: (B, Hq, Nq_local, D), this rank's queries; Nq_local may be 0. Beside a `Window`, and under causality,
            as many as keys.
        key: (B, Hkv, N_local, D), as in `leverage_scores`. Hq is a multiple of Hkv.
        value: (B, Hkv, N_local, Dv).
        keep: `Leverage`, `KeyNorm` or `RandomKeys` (drawn with seed 0), alone; or `Outliers`, with or without a
            `Window`; or `KeyScan`, for which every rank gathers all keys and values.
        rest: `Drop()`, the default; `ClusterMeans` beside `Outliers`; `BlockMeans` beside `KeyScan`.
        weights, scale: as in `fewkeys.attention`.
        is_causal: a query sees itself and the tokens before it on all ranks. Needs `KeyScan`.
        group: as in `leverage_scores`.

    Returns:
        (B, Hq, Nq_local, Dv) in the input's dtype: the output of one process but for rounding (docs/distributed.md).
        Gradients of the sum of all ranks' losses flow to these queries, and to kept keys and values on the ranks that
        own them. The backward pass is a collective, too.

        Bytes sent by a rank of R with `keep=Leverage(c)`: two all-reduces of `8 B Hkv D^2`, `(R - 1) 16 B Hkv c` for
        scores and positions, and an all-reduce of `B Hkv c (D + Dv)` numbers for keys and values, one more backward.
        None of this grows with the number of tokens. Cost O(N_local D^2 + Nq_local |keep| (D + Dv)).

    Raises:
        TypeError, ValueError, RuntimeError: as `leverage_scores`, and for a selector or rest that does not work over
            ranks.

    Source: LevAttention (arXiv 2410.05462), distributed setting.
    """
    comm, call = communicator(group), "attention"
    with comm.checking(call):
        plan = Plan(keep, rest or Drop(), weights or Softmax())
        rule = _rule(plan, is_causal)
        inputs = _check(query, key, value, is_causal, scale)
        plan.check(inputs)
        if (is_causal or cohorts.band(plan)) and inputs.queries != inputs.keys:
            raise ValueError(f"query: expected {inputs.keys} tokens like key, got {inputs.queries}")
    same = {
        **described(inputs.key),
        "query (heads)": inputs.query_heads,
        "value (dim)": inputs.value_dim,
        "keep, rest, weights": str((plan.keep, plan.rest, plan.weights)),
        "scale": inputs.scale,
        "is_causal": is_causal,
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
    }
    wants = torch.is_grad_enabled() and (inputs.key.requires_grad or inputs.value.requires_grad)
    largest = largest_entries(inputs.query, inputs.key, inputs.value)
    facts = comm.agree(call, same, [inputs.keys, inputs.queries, wants, *largest])
    tokens, asked, wanted, *entries = zip(*facts, strict=True)
    check_tokens(tokens)
    first, first_query = sum(tokens[: comm.rank]), sum(asked[: comm.rank])
    inputs = replace(
        inputs,
        # With a gradient if any rank wants one: every rank takes part in the backward pass.
        key=inputs.key.detach().requires_grad_() if any(wanted) and not inputs.key.requires_grad else inputs.key,
        shard=Shard(comm, first, sum(tokens), first_query, sum(asked)),
    )
    if not any(asked):
        return no_output(inputs, inputs.key, inputs.value)
    # Every rank rescales if one must: a score is of a query and a key of any two ranks.
    is_large = needs_rescaling([*map(max, entries)], inputs.scale, inputs.head_dim, working_dtype(inputs.key.dtype))
    x, restore = rescaled(replace(inputs, needs_rescaling=True)) if is_large else (inputs, lambda output: output)
    if isinstance(rule, Outliers):
        return restore(cohorts.attend(x, plan, rule, tokens, comm.rank))
    return restore(_by_scan(x, plan) if rule is None else _by_list(x, plan, rule))


def _rule(plan: Plan, is_causal: bool) -> Outliers | Sharded | None:
    """The rule of a plan: `Outliers`, beside windows; or one that scores keys; None for a scan, beside rules that read
    no queries.
    """
    if plan.scanned and all(part.scanned or part.beside_cohorts or part.sharded for part in plan.parts):
        return None
    rules = [part for part in plan.parts if not isinstance(part, Window)]
    if len(rules) == 1 and not (plan.scanned or is_causal):
        if isinstance(rules[0], Outliers) and isinstance(plan.rest, ClusterMeans | Drop):
            return rules[0]
        if len(plan.parts) == 1 and plan.rest == Drop() and rules[0].sharded is not None:
            return rules[0].sharded
    raise ValueError(
        "keep, rest: expected what works over ranks, KeyScan alone or beside Window, Sinks or rules that score keys; "
        "without causality Outliers, with Window and ClusterMeans, or Leverage, KeyNorm or RandomKeys alone; got "
        f"{plan}{', is_causal=True' if is_causal else ''}; use budget(slots)"
    )


def _check(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Inputs:
    """The problem of this rank, which may have no queries or no keys."""
    have_tokens = isinstance(key, Tensor) and isinstance(value, Tensor) and key.ndim == value.ndim == 4
    if have_tokens and key.shape[2] != value.shape[2]:
        raise ValueError(f"value: expected {key.shape[2]} tokens like key, got {value.shape[2]}")
    inputs = check_inputs(occupied(query), occupied(key), occupied(value), is_causal=is_causal, scale=scale)
    # The tensors themselves, which may be empty, so that gradients flow; kernels do not read lazily negated signs.
    return replace(inputs, query=query.resolve_neg(), key=key.resolve_neg(), value=value.resolve_neg())


def _by_scan(inputs: Inputs, plan: Plan) -> Tensor:
    """The output of this rank's queries, which choose among the gathered keys of all ranks."""
    rows = inputs.whole.totals.rows(torch.cat([inputs.key, inputs.value], -1))
    if not inputs.queries:
        return no_output(inputs, rows)
    key, value = rows.split([inputs.head_dim, inputs.value_dim], -1)
    return attend(Inputs(inputs.query, key, value, inputs.scale, inputs.is_causal, inputs.whole.first_query), plan)


def _by_list(inputs: Inputs, plan: Plan, rule: Sharded) -> Tensor:
    """The output of this rank's queries over the kept keys of all ranks."""
    with torch.no_grad():
        position, used = select(inputs, rule)
    rows = rows_at(inputs, torch.cat([working(inputs.key), working(inputs.value)], -1), position)
    if not inputs.queries:
        return no_output(inputs, rows)
    key, value = rows.split([inputs.head_dim, inputs.value_dim], -1)
    kept = Inputs(inputs.query, key, value, inputs.scale)
    columns = Columns.shared(torch.arange(kept.keys, device=key.device).expand_as(used), used, kept.queries)
    return dispatch.attend(Problem(kept, Graph(kept, columns=columns), None, plan.weights)).to(inputs.query.dtype)
