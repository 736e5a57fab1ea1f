"""Laws 5 and 6: sequences and heads do not see each other, order means nothing without a window, seeds decide draws."""

import pytest
import torch

import fewkeys as fk
from cases import CASES, PLANS, SHAPES, SOME_PLANS

QUIET = {n: p for n, p in PLANS.items() if not CASES[n].draws}
ORDERLESS = {n: p for n, p in QUIET.items() if not CASES[n].by_position}


@pytest.mark.parametrize("plan", QUIET.values(), ids=QUIET)
def test_sequences_and_heads_stand_alone(plan):
    q, k, v = SHAPES["grouped"].draw()
    whole = fk.attention(q, k, v, plan=plan, impl="torch")
    for b in range(2):
        alone = fk.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], plan=plan, impl="torch")
        torch.testing.assert_close(whole[b : b + 1], alone, rtol=1e-9, atol=1e-10)
    for h in range(2):
        group = slice(3 * h, 3 * h + 3)
        alone = fk.attention(q[:, group], k[:, h : h + 1], v[:, h : h + 1], plan=plan, impl="torch")
        torch.testing.assert_close(whole[:, group], alone, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("plan", ORDERLESS.values(), ids=ORDERLESS)
def test_order_of_keys_and_queries_is_meaningless(plan):
    q, k, v = SHAPES["cross"].draw()
    g = torch.Generator().manual_seed(3)
    keys, queries = torch.randperm(90, generator=g), torch.randperm(37, generator=g)
    found = fk.attention(q, k, v, plan=plan, impl="torch")
    shuffled = fk.attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], plan=plan, impl="torch")
    torch.testing.assert_close(found[:, :, queries], shuffled, rtol=1e-8, atol=1e-9)


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


@pytest.mark.parametrize("plan", SOME_PLANS.values(), ids=SOME_PLANS)
def test_inputs_are_left_alone(plan):
    inputs = SHAPES["padded"].draw()
    copies = [x.clone() for x in inputs]
    fk.attention(*inputs, plan=plan, lengths=torch.tensor([70, 33]), impl="torch")
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
