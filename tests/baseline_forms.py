"""Forms of problems that baselines are tried in, and graphs by their naive definition."""

from dataclasses import replace

import torch

from cases import Shape
from fewkeys.core.graph import visible
from fewkeys.core.validation import check_inputs
from fewkeys.papers import sparsefinder

SELF = Shape(queries=23, keys=23, head_dim=5)
FORMS = {
    "self": SELF,
    "padded": replace(SELF, lengths=(23, 8)),
    "grouped": replace(SELF, query_heads=4),
    "cross": replace(SELF, keys=31),
    "offset": replace(SELF, queries=21, query_offset=2),
    "causal": replace(SELF, is_causal=True),
    "causal padded": replace(SELF, lengths=(23, 8), is_causal=True),
    "causal offset": replace(SELF, queries=9, query_offset=14, is_causal=True),
}
BOTH_WAYS = {name: form for name, form in FORMS.items() if not form.is_causal}


def projection(heads=4, dim=5, rank=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return sparsefinder.Projection(*(torch.randn(heads, dim, rank, generator=g, dtype=torch.float64) for _ in range(2)))


def centroids(heads=2, count=4, rank=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return sparsefinder.Centroids(torch.randn(heads, count, rank, generator=g, dtype=torch.float64))


def inputs_of(form):
    return check_inputs(*form.draw(), **form.options)


def by_definition(form, edge):
    """The mask (B, Hq, Nq, Nk) of the visible pairs of positions for which `edge(b, i, j)`."""
    x = inputs_of(form)
    seen = visible(x, 0, form.queries).expand(form.batch, form.query_heads, -1, -1)
    pairs = [
        [[edge(b, i + form.query_offset, j) for j in range(form.keys)] for i in range(form.queries)]
        for b in range(form.batch)
    ]
    return torch.tensor(pairs, dtype=torch.bool)[:, None] & seen


def mask_of(keep, form, **options):
    q, k, _ = form.draw()
    return of_real_queries(keep.graph(q, k, **form.options, **options).to_mask(), form)


def of_real_queries(mask, form):
    """The mask without the edges of padded queries."""
    if form.lengths is None or form.queries != form.keys:
        return mask
    return mask & (torch.arange(form.queries) < torch.tensor(form.lengths)[:, None])[:, None, :, None]


def assert_same(mask, form, edge):
    assert torch.equal(mask, of_real_queries(by_definition(form, edge), form))


def raw(form):
    """Queries and keys of every query head, in loops' reach."""
    q, k, _ = form.draw()
    return q, k.repeat_interleave(form.query_heads // form.kv_heads, 1)


def real_counts(form):
    """Real queries and keys of every sequence."""
    keys = form.lengths or (form.keys,) * form.batch
    return [(n if form.queries == form.keys else form.queries, n) for n in keys]
