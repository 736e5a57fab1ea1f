"""Laws 5 and 6: sequences and heads do not see each other, order means nothing without a window, seeds decide draws."""

import pytest
import torch

import fewkeys as fk
from cases import CASES, CAUSAL_PLANS, PLANS, SHAPES, SOME_PLANS, Shape
from executors import FORMS, runs

QUIET = {n: p for n, p in PLANS.items() if not CASES[n].draws}
QUIET_CAUSAL = {n: p for n, p in CAUSAL_PLANS.items() if not CASES[n].draws}
ORDERLESS = {n: p for n, p in QUIET.items() if not CASES[n].by_position}


@pytest.mark.parametrize(("name", "form", "way"), runs(QUIET, ["grouped"]) + runs(QUIET_CAUSAL, ["causal grouped"]))
def test_sequences_and_heads_stand_alone(name, form, way):
    plan, shape = CASES[name].part, FORMS[form]
    q, k, v = shape.draw(dtype=way.dtype)
    whole = way.attend(q, k, v, plan=plan, **shape.options)
    ratio = shape.query_heads // shape.kv_heads
    for b, h in ((0, 1), (1, 0)):
        one, kv, group = slice(b, b + 1), slice(h, h + 1), slice(ratio * h, ratio * (h + 1))
        alone = way.attend(q[one, group], k[one, kv], v[one, kv], plan=plan, **shape.options)
        way.assert_close(whole[one, group], alone, times=2)


@pytest.mark.parametrize("offset", [0, 3])
def test_padding_of_others_moves_no_query(offset):
    """More queries than keys: those after the last key keep their places, whatever padding other sequences have."""
    query, key, value = Shape(batch=3, queries=30, keys=8, is_causal=True).draw()
    key_mask = torch.arange(8) < torch.tensor([[6], [8], [8]])
    key_mask[2, :2] = False
    options = {"keep": fk.Window(10), "is_causal": True, "query_offset": offset}
    whole = fk.attention(query, key, value, key_mask=key_mask, **options)
    for alone in torch.arange(3).split(1):
        part = fk.attention(query[alone], key[alone], value[alone], key_mask=key_mask[alone], **options)
        torch.testing.assert_close(whole[alone], part)


@pytest.mark.parametrize(("name", "form", "way"), runs(ORDERLESS, ["cross"]))
def test_order_of_keys_and_queries_is_meaningless(name, form, way):
    plan = PLANS[name]
    q, k, v = FORMS[form].draw(dtype=way.dtype)
    g = torch.Generator().manual_seed(3)
    keys, queries = (torch.randperm(rows.shape[2], generator=g) for rows in (k, q))
    actual = way.attend(q, k, v, plan=plan)
    shuffled = way.attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], plan=plan)
    way.assert_close(actual[:, :, queries], shuffled, times=2)


@pytest.mark.parametrize("name", [n for n in PLANS if CASES[n].draws])
def test_randomness_comes_only_from_the_generator(name):
    q, k, v = SHAPES["plain"].draw()

    def run(seed=None):
        g = None if seed is None else torch.Generator().manual_seed(seed)
        return fk.attention(q, k, v, plan=PLANS[name], generator=g, impl="torch")

    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    first = run(7)
    torch.manual_seed(2)
    assert torch.equal(first, run(7))
    assert torch.equal(run(), run(0))
    assert not torch.equal(first, run(8))
    torch.manual_seed(2)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(2)))
    torch.random.set_rng_state(state)


@pytest.mark.parametrize(("name", "form", "way"), runs(SOME_PLANS, ["padded"]))
def test_inputs_are_left_alone(name, form, way):
    inputs = FORMS[form].draw(dtype=way.dtype)
    copies = [x.clone() for x in inputs]
    way.attend(*inputs, plan=SOME_PLANS[name], **FORMS[form].options)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
