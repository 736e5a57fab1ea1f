"""Compiled kernels of causal plans: the past moves on as torch moves it."""

from dataclasses import replace

import pytest
import torch

import fewkeys as fk
from fewkeys import native
from fewkeys.core.graph import Columns, Graph
from fewkeys.core.validation import check_inputs
from fewkeys.execute import native as native_plans
from fewkeys.execute import reference
from fewkeys.execute.problem import Problem
from fewkeys.past import native as past_native
from fewkeys.past.evicted import Evicted
from fewkeys.past.scan import Scan, States
from fewkeys.past.state import State
from fewkeys.past.tokens import Stretch
from fewkeys.rest import BlockStandIns
from native_cases import CLOSE, needs_compiler, without

pytestmark = needs_compiler


def test_one_list_beside_means_of_the_past_serves_all_queries():
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(1, 2, 10, 8, generator=g), *torch.randn(2, 1, 2, 40, 8, generator=g)
    x = check_inputs(q, k, v, is_causal=True, query_offset=25)
    index = torch.arange(28, 33).expand(1, 2, -1)
    graph = Graph(x, columns=Columns.shared(index, index != 30, 10))
    rows = torch.randn(1, 2, 1, 3, 16, generator=g)
    means = BlockStandIns(States(rows, torch.zeros(1, 2, 1, 3), torch.ones(1, 2, 1, 3)), 8)
    problem = Problem(x, graph, means, fk.Softmax())
    assert native_plans.unsupported(problem) is None
    actual, want = native_plans.attend(problem), reference.attend(problem)
    torch.testing.assert_close(actual, want, **CLOSE[torch.float32])


def made_past(places, dim, value_dim, seed=0):
    """A past of some keys: half of the places are free."""
    key, value = torch.zeros(2, 3, 1, dim), torch.zeros(2, 3, 1, value_dim)
    past = State.empty(places, key, value)
    g = torch.Generator().manual_seed(seed)
    key, value = (
        torch.randn(2, 3, places // 2, dim, generator=g),
        torch.randn(2, 3, places // 2, value_dim, generator=g),
    )
    real = torch.ones(2, 3, places // 2, dtype=torch.bool)
    summary = past.summary.absorb(key, value, real, past.queries.moments(), tilted=True)
    return replace(past, summary=summary, queries=past.queries.add(torch.randn(2, 3, 2, 9, dim, generator=g)))


def in_order(stand_ins):
    """Rows, excess and size by the first number of the rows: equal masses, as counts often are, leave places open."""
    rows, excess, size = stand_ins.rows, stand_ins.excess, stand_ins.size
    order = rows[..., 0].masked_fill(size == 0, torch.inf).argsort(-1)
    by_row = order.unsqueeze(-1).expand_as(rows)
    return rows.gather(-2, by_row), excess.gather(-1, order), size.gather(-1, order)


@pytest.mark.parametrize("tilted", [True, False])
@pytest.mark.parametrize("answers", ["all", "some"])
@pytest.mark.parametrize(
    ("places", "leaving", "dim", "value_dim", "spread"),
    [(6, 16, 8, 5, 1), (40, 7, 16, 16, 1), (9, 33, 3, 20, 1), (50, 4, 8, 8, 1), (12, 9, 8, 8, 8)],
)
def test_the_past_moves_on_as_torch_moves_it(places, leaving, dim, value_dim, spread, answers, tilted):
    g = torch.Generator().manual_seed(places)
    steps, size = 6, 4
    query = torch.randn(2, 6, steps * size, dim, generator=g)
    key, value = spread * torch.randn(2, 3, 200, dim, generator=g), torch.randn(2, 3, 200, value_dim, generator=g)
    index = torch.rand(2, 3, 200, generator=g).argsort(-1)[..., : steps * leaving].unflatten(-1, (steps, leaving))
    real = torch.rand(2, 3, steps, leaving, generator=g) < 0.8
    real[:, :, 2] = False
    answered = torch.rand(2, steps * size, generator=g) < 0.7 if answers == "some" else None
    past = made_past(places, dim, value_dim)

    def call():
        return Scan(past, query, answered, 0.4, Evicted(key, value, index, real), tilted).run()

    assert native.suits(past.summary.rows, query, key)
    (fast, moved), (slow, want) = call(), without(call)
    pairs = [*zip(in_order(fast), in_order(slow), strict=True)]
    pairs += zip(in_order(moved.summary), in_order(want.summary), strict=True)
    pairs += [(getattr(moved.summary.seen, name), part) for name, part in vars(want.summary.seen).items()]
    pairs += [(getattr(moved.queries, name), part) for name, part in vars(want.queries).items()]
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(fast.rows[:, :, -1], moved.summary.rows)
    assert not fast.excess[fast.size == 1].any()  # to the last bit: who never met anybody is the key itself
    assert torch.equal(fast.rows[:, :, 0], past.summary.rows)  # which did not move itself


def a_scan(key, value, places):
    """Steps of 16 keys (1, 2, 80, D)."""
    query = torch.randn(1, 2, 80, key.shape[-1], generator=torch.Generator().manual_seed(0))
    index = torch.arange(80).view(5, 16).expand(1, 2, -1, -1)
    return Scan(
        State.empty(places, key, value),
        query,
        None,
        0.3,
        Evicted(key, value, index, torch.ones_like(index, dtype=torch.bool)),
        True,
    )


def test_values_without_any_spread():
    key = torch.randn(1, 2, 80, 8, generator=torch.Generator().manual_seed(1))
    scan = a_scan(key, torch.ones(1, 2, 80, 4), 10)
    fast, slow = scan.run()[0], without(scan.run)[0]
    assert (fast.rows[..., 8:] - 1)[fast.size > 0].abs().max() < 1e-5
    torch.testing.assert_close(fast.excess, slow.excess, rtol=1e-3, atol=1e-3)


def test_no_key_is_lost_where_costs_overflow():
    """Keys are longer than float32's squares reach: costs are infinite or no numbers."""
    key, value = torch.randn(2, 1, 2, 80, 8, generator=torch.Generator().manual_seed(1))
    factor = torch.where(torch.arange(80).view(-1, 1) % 2 == 0, 3e19, 1.0)
    for keys in (factor * key, 3e19 * key):
        sizes = a_scan(keys, value, 10).run()[0].size
        assert sizes.sum(-1).eq(torch.arange(6) * 16).all()


def test_step_by_step_is_all_at_once():
    """To the last bit, as a stream must go on as a sequence does; also in lower precision."""
    g = torch.Generator().manual_seed(0)
    for dtype in CLOSE:
        query, key, value = (torch.randn(2, 3, 80, 8, generator=g).to(dtype) for _ in range(3))
        index = torch.arange(80).view(5, 16).expand(2, 3, -1, -1)
        real = torch.ones_like(index, dtype=torch.bool)
        states, whole = Scan(made_past(10, 8, 8), query, None, 0.3, Evicted(key, value, index, real), True).run()
        past = made_past(10, 8, 8)
        for step in range(5):
            part = slice(16 * step, 16 * step + 16)
            rows = Evicted.at_once(Stretch(0, key[:, :, part].float(), value[:, :, part].float()).tokens())
            _, past = Scan(past, query[:, :, part].float() * 0.3, None, 1.0, rows, True).run()
            assert torch.equal(states.rows[:, :, step + 1], past.summary.rows)
            assert torch.equal(states.excess[:, :, step + 1], past.summary.excess)
        assert torch.equal(whole.queries.square, past.queries.square)


def test_the_switch_says_what_runs(monkeypatch):
    calls, scan = [], past_native.scan
    monkeypatch.setattr(past_native, "scan", lambda *arguments: calls.append(arguments) or scan(*arguments))
    key, value = torch.randn(2, 1, 2, 80, 8, generator=torch.Generator().manual_seed(1))
    one = a_scan(key, value, 10)
    actual = {impl: replace(one, impl=impl).run()[0] for impl in ("auto", "native", "torch", "reference")}
    assert len(calls) == 2
    assert torch.equal(actual["auto"].rows, actual["native"].rows)
    assert torch.equal(actual["torch"].rows, without(one.run)[0].rows)
    with pytest.raises(ValueError, match=r"^impl='native': .*float64"):
        replace(a_scan(key.double(), value.double(), 10), impl="native").run()
    with pytest.raises(ValueError, match=r"^impl='native': FEWKEYS_NATIVE=0"):
        without(replace(one, impl="native").run)
