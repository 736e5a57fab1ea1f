"""Plans with lists and stand-ins for cohorts of queries, as plain problems: every cohort is a head of its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fewkeys.core.graph import Columns, Graph
from fewkeys.core.inputs import Inputs
from fewkeys.core.rows import take
from fewkeys.execute.problem import Problem


def takes(problem: Problem) -> bool:
    """Whether lists are of cohorts."""
    columns = problem.graph.columns
    return columns is not None and columns.place is not None


def plain(problem: Problem) -> Problem:
    """The problem with a head for every cohort, which has the cohort's queries and the keys that it keeps.

    The problem itself where lists are not of cohorts. Cost O(n D + H S (D + Dv)) for H lists of S keys.
    """
    x, columns = problem.inputs, problem.graph.columns
    if columns is None or columns.place is None:
        return problem
    query = take(x.grouped_query().flatten(2, 3), columns.place.clamp_min(0)).flatten(1, 2)
    key, value = (take(rows, columns.index).flatten(1, 2) for rows in (x.key, x.value))
    inputs = Inputs(query, key, value, x.scale, generator=x.generator, impl=x.impl)
    used = columns.used.flatten(1, 2)
    index = torch.arange(used.shape[-1], device=used.device).expand_as(used)
    return replace(problem, inputs=inputs, graph=Graph(inputs, columns=Columns.shared(index, used, inputs.queries)))


def restored(problem: Problem, output: Tensor) -> Tensor:
    """The output (B, Hq, Nq, Dv), from that of the plain problem. Queries of no cohort get zeros."""
    x, columns = problem.inputs, problem.graph.columns
    if columns is None or columns.place is None:
        return output
    many, places = x.gqa_ratio * x.queries, columns.place.flatten(2)
    # Where each query's output stands; behind the last one for queries of no cohort.
    back = torch.full((x.batch, x.kv_heads, many + 1), places.shape[2], device=places.device)
    back.scatter_(
        -1, places.masked_fill(places < 0, many), torch.arange(places.shape[2], device=places.device).expand_as(places)
    )
    found = output.unflatten(1, (x.kv_heads, -1)).flatten(2, 3)
    if bool((back[..., :many] == places.shape[2]).any()):
        found = pad(found, (0, 0, 0, 1))
    by_head: Tensor = take(found, back[..., :many]).unflatten(2, (x.gqa_ratio, x.queries))
    return by_head.flatten(1, 2)
