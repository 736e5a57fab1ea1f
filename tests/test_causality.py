"""Law 4: a causal plan never sees the future: changing token t leaves every earlier output bit-identical."""

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_PLANS, CAUSAL_SHAPES


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("shape", ["causal", "causal grouped", "causal padded", "causal with offset"])
@pytest.mark.parametrize("plan", CAUSAL_PLANS.values(), ids=CAUSAL_PLANS)
def test_future_tokens_do_not_matter(plan, shape, impl):
    shape = CAUSAL_SHAPES[shape]
    q, k, v = shape.draw(dtype=torch.float32)
    before = fk.attention(q, k, v, plan=plan, impl=impl, **shape.options)
    seen = False
    for token in (1, 63, 64, 65, 128, shape.keys - 1):
        later = token - shape.query_offset  # the first query that may see it
        changed_k, changed_v = k.clone(), v.clone()
        changed_k[:, :, token:] *= -3
        changed_v[:, :, token:] += 5
        after = fk.attention(q, changed_k, changed_v, plan=plan, impl=impl, **shape.options)
        assert torch.equal(before[:, :, : max(0, later)], after[:, :, : max(0, later)])
        seen |= not torch.equal(before, after)
    assert seen


@pytest.mark.parametrize("plan", CAUSAL_PLANS.values(), ids=CAUSAL_PLANS)
def test_graph_has_no_edge_into_the_future(plan):
    q, k, _ = CAUSAL_SHAPES["causal"].draw()
    mask = plan.keep.graph(q, k, is_causal=True).to_mask()
    assert not mask.triu(1).any()
    assert mask.any(-1).all()
