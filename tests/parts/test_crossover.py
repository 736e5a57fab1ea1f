"""`impl="auto"`: exact attention where the lines of the machine say it is faster, only for plans that allow it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fewkeys as fk
from fewkeys import native
from fewkeys.core.validation import check_inputs
from fewkeys.cost import crossover
from fewkeys.cost.crossover import Line, exact_is_faster, expected
from fewkeys.cost.operations import exact_operations, plan_operations

PLAN = fk.budget(32)


def problem(n, heads=1, dim=16, keys=None):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, count, dim, generator=g) for count in (n, keys or n, keys or n)]


@pytest.fixture
def lines(monkeypatch):
    """A machine on which exact attention takes 1 ms per 10^6 pairs and a plan 1 ms per 1,000 keys and queries."""

    def measured(exact=(0.0, 1e-6), prepare=(0.5, 0.5e-3), attend=(0.5, 0.5e-3)):
        monkeypatch.setattr(crossover, "_exact_line", lambda setting: Line(*exact))
        monkeypatch.setattr(crossover, "_plan_lines", lambda setting, plan: (Line(*prepare), Line(*attend)))

    measured()
    return measured


@pytest.mark.parametrize(("n", "runs"), [(1000, "exact"), (3000, "plan")])
def test_auto_goes_the_way_the_lines_say(lines, n, runs):
    q, k, v = problem(n)
    found = fk.attention(q, k, v, plan=PLAN)
    truth = {"exact": fk.attention(q, k, v), "plan": fk.attention(q, k, v, plan=PLAN, impl="torch")}
    assert torch.equal(found, truth[runs])
    assert not torch.equal(truth["exact"], truth["plan"])
    told = fk.explain(q, k, v, plan=PLAN)
    assert told.runs == runs
    assert (told.exact_ms, told.plan_ms) == pytest.approx((n**2 / 1e6, 1 + n / 1000))
    assert "ms for exact attention" in str(told)


def test_the_plan_is_taken_only_where_it_is_clearly_faster(lines):
    n = 3000
    for ms, faster in ((0.84, False), (0.86, True)):  # of exact attention's 9 ms
        lines(prepare=(ms * 9, 0.0), attend=(0.0, 0.0))
        assert exact_is_faster(check_inputs(*problem(n)), PLAN) == faster


@given(heads=st.integers(1, 4), queries=st.integers(1, 50), keys=st.integers(1, 50), causal=st.booleans())
def test_time_counts_pairs_for_exact_attention_and_tokens_for_plans(heads, queries, keys, causal):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossover, "_exact_line", lambda setting: Line(3.0, 1.0))
        patch.setattr(crossover, "_plan_lines", lambda setting, plan: (Line(5.0, 1.0), Line(7.0, 1000.0)))
        q, k, v = problem(queries, heads, keys=keys)
        found = expected(
            check_inputs(q.repeat(2, 2, 1, 1), k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1), is_causal=causal), PLAN
        )
    assert found.exact == 3 + 4 * heads * queries * keys * (0.5 if causal else 1)
    assert found.plan == 12 + 2 * heads * keys + 4000 * heads * queries


def test_what_has_more_arithmetic_is_not_measured(monkeypatch):
    monkeypatch.setattr(crossover, "expected", None)
    q, k, v = problem(1, keys=4000)  # one decoded token: everything would be prepared for it
    assert exact_is_faster(check_inputs(q, k, v, query_offset=3999, is_causal=True), PLAN)
    assert fk.explain(q, k, v, plan=PLAN, query_offset=3999).runs == "exact"


def test_every_setting_is_measured_once(monkeypatch):
    crossover._exact_line.cache_clear()
    crossover._plan_lines.cache_clear()
    q, k, v = problem(3000)
    first = expected(check_inputs(q, k, v), PLAN)
    assert first.exact > 0
    assert first.plan > 0
    monkeypatch.setattr(crossover, "_best", None)
    assert expected(check_inputs(q, k, v), fk.budget(32)) == first
    with pytest.raises(TypeError):  # another head size is another setting
        expected(check_inputs(*problem(3000, dim=8)), PLAN)


def test_lines_go_through_their_points():
    line = crossover._through([(2.0, 5.0), (4.0, 9.0)])
    assert (line.at(2), line.at(4), line.at(6)) == (5, 9, 13)
    # Nothing takes less time for more work, or less than none: such points were disturbed.
    assert crossover._through([(2.0, 8.0), (4.0, 4.0)]) == Line(0.0, 1.0)
    assert crossover._through([(2.0, 1.0), (4.0, 9.0)]) == Line(0.0, 2.25)


def test_only_plans_that_allow_it_become_exact():
    q, k, v = problem(100)
    strict = replace(PLAN, exact_if_faster=False)
    assert torch.equal(fk.attention(q, k, v, plan=strict), fk.attention(q, k, v, plan=strict, impl="torch"))
    found = fk.attention(q, k, v, keep=fk.Window(5))
    assert torch.equal(found, fk.attention(q, k, v, keep=fk.Window(5), impl="torch"))
    assert not torch.equal(found, fk.attention(q, k, v))


@pytest.mark.parametrize(
    ("plan", "runs", "reason"),
    [
        (fk.Plan(), "exact", "keeps every key"),
        (fk.Plan(fk.KeyNorm(500)), "exact", "all there are"),
        (fk.Plan(fk.KeyNorm(5)), "plan", "exact_if_faster"),
        (fk.budget(64), "exact", "operations per query"),
    ],
)
def test_reasons_are_told(plan, runs, reason):
    told = fk.explain(*problem(100), plan=plan)
    assert told.runs == runs
    assert reason in str(told)
    assert str(told).startswith("runs exact attention" if runs == "exact" else "runs the plan")


def test_missing_kernels_are_told(monkeypatch):
    monkeypatch.setenv("FEWKEYS_NATIVE", "0")
    assert "no compiled kernels (FEWKEYS_NATIVE=0 turns them off)" in str(fk.explain(*problem(100), plan=PLAN))
    monkeypatch.delenv("FEWKEYS_NATIVE")
    monkeypatch.setattr(native, "missing", lambda: None)
    assert fk.explain(*problem(100), plan=PLAN).uncompiled is None


def test_one_plan_is_asked_for():
    with pytest.raises(TypeError, match=r"plan: expected a fewkeys.Plan, got list; ask for the plan of each head"):
        fk.explain(*problem(100), plan=[PLAN])


def test_operations_grow_as_they_should():
    plan, previous = fk.budget(64), None
    for n in (2048, 4096, 8192):
        inputs = check_inputs(*problem(n))
        now = exact_operations(inputs) * n, plan_operations(inputs, plan) * n
        if previous is not None:
            assert now[0] == pytest.approx(4 * previous[0])
            assert now[1] < 2.2 * previous[1]
        previous = now


@pytest.mark.parametrize("keep", [fk.TopK(8), fk.BestColumns(8)], ids=str)
def test_oracles_pay_for_scoring_every_pair(keep):
    inputs = check_inputs(*problem(512))
    assert plan_operations(inputs, fk.Plan(keep)) > 2 * 16 * 512  # scoring every pair


@pytest.mark.parametrize(("lasts", "calls"), [(1.0, 21), (5.0, 7), (100.0, 4)])
def test_short_measurements_are_repeated_and_the_fastest_counts(monkeypatch, lasts, calls):
    """All but the first, which a warm-up makes slow or a cache fast; the last is the undisturbed one."""
    clock, made = [0.0], []

    def call():
        made.append(None)
        clock[0] += 1e-3 * (lasts / 2 if len(made) == 1 else lasts if len(made) == calls else 1.001 * lasts)

    monkeypatch.setattr(crossover, "perf_counter", lambda: clock[0])
    assert crossover._best(call, torch.device("cpu")) == pytest.approx(lasts)
    assert len(made) == calls
