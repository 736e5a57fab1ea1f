"""Law 4: a causal plan never sees the future: changing token t leaves every earlier output bit-identical.

Groups that later keys join or leave are the exception: the size of a group decides in which order the fast executor
adds, and so the last bits. The graph, and the reference, are bit-identical there too.
"""

import pytest
import torch

from cases import CASES, CAUSAL_PLANS, CAUSAL_SHAPES
from executors import FORMS, WAYS, runs


def tokens(shape, way):
    """Where the future begins: at edges of tiles, blocks and lanes, and beside them; every other one, in turns."""
    near = (63, 64, 65, 128, 129) if way.impl != "native" else (15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 128, 129)
    return [1, *[*(token for token in near if token < shape.keys - 1), shape.keys - 1][WAYS.index(way) % 2 :: 2]]


@pytest.mark.parametrize(
    ("name", "form", "way"),
    runs(CAUSAL_PLANS, ["causal", "causal grouped", "causal padded", "causal with offset"]),
)
def test_future_tokens_do_not_matter(name, form, way):
    plan, shape = CAUSAL_PLANS[name], FORMS[form]
    last_bits = 1e-6 if way.impl == "torch" and CASES[name].regroups else 0.0
    q, k, v = shape.draw(dtype=way.dtype)
    before = way.attend(q, k, v, plan=plan, **shape.options)
    seen = False
    for token in tokens(shape, way):
        later = token - shape.query_offset  # the first query that may see it
        changed_k, changed_v = k.clone(), v.clone()
        changed_k[:, :, token:] *= -3
        changed_v[:, :, token:] += 5
        after = way.attend(q, changed_k, changed_v, plan=plan, **shape.options)
        earlier = slice(0, max(0, later))
        torch.testing.assert_close(after[:, :, earlier], before[:, :, earlier], rtol=0, atol=last_bits)
        seen |= not torch.equal(before, after)
    assert seen


@pytest.mark.parametrize("plan", CAUSAL_PLANS.values(), ids=CAUSAL_PLANS)
def test_graph_has_no_edge_into_the_future(plan):
    q, k, _ = CAUSAL_SHAPES["causal"].draw()
    mask = plan.keep.graph(q, k, is_causal=True).to_mask()
    assert not mask.triu(1).any()
    assert mask.any(-1).all()


@pytest.mark.parametrize("name", [name for name in CAUSAL_PLANS if CASES[name].regroups])
def test_future_keys_change_no_earlier_edge(name):
    q, k, _ = CAUSAL_SHAPES["causal"].draw()
    before = CAUSAL_PLANS[name].keep.graph(q, k, is_causal=True).to_mask()
    k[:, :, 64:] *= -3
    after = CAUSAL_PLANS[name].keep.graph(q, k, is_causal=True).to_mask()
    assert torch.equal(before[:, :, :64], after[:, :, :64])
    assert not torch.equal(before, after)
