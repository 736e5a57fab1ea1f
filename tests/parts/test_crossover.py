"""`impl="auto"`: exact attention where the lines of the machine say it is faster, only for plans that allow it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.checkpoint import checkpoint

import fewkeys as fk
from fewkeys import explanation, flow
from fewkeys.core.inputs import Inputs
from fewkeys.core.validation import check_inputs
from fewkeys.cost import crossover, kept
from fewkeys.cost.crossover import Line, exact_is_faster, expected
from fewkeys.cost.operations import exact_operations, plan_operations
from fewkeys.execute import exact
from fewkeys.execute.native import recorded
from fewkeys.native import build
from native_cases import needs_compiler

PLAN = fk.budget(32)


def problem(n, heads=1, dim=16, keys=None):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, count, dim, generator=g) for count in (n, keys or n, keys or n)]


@pytest.fixture
def lines(monkeypatch):
    """A machine on which exact attention takes 1 ms per 10^6 pairs and a plan 1 ms per 1,000 keys and queries."""

    def measured(exact=(0.0, 1e-6), prepare=(0.5, 0.5e-3), attend=(0.5, 0.5e-3)):
        monkeypatch.setattr(crossover, "_lines", lambda setting, plan: (Line(*exact), Line(*prepare), Line(*attend)))

    measured()
    return measured


@pytest.mark.parametrize(("n", "runs"), [(1000, "exact"), (3000, "plan")])
def test_auto_goes_the_way_the_lines_say(lines, n, runs):
    q, k, v = problem(n)
    actual = fk.attention(q, k, v, plan=PLAN)
    truth = {"exact": fk.attention(q, k, v), "plan": fk.attention(q, k, v, plan=PLAN, impl="native")}
    assert torch.equal(actual, truth[runs])
    assert not torch.equal(truth["exact"], truth["plan"])
    explanation = fk.explain(q, k, v, plan=PLAN)
    assert explanation.runs == runs
    assert (explanation.exact_ms, explanation.plan_ms) == pytest.approx((n**2 / 1e6, 1 + n / 1000))
    assert "ms for exact attention" in str(explanation)


def test_the_plan_is_taken_only_where_it_is_clearly_faster(lines):
    n = 3000
    for ms, faster in ((0.89, False), (0.91, True)):  # of exact attention's 9 ms
        lines(prepare=(ms * 9, 0.0), attend=(0.0, 0.0))
        assert exact_is_faster(check_inputs(*problem(n)), PLAN) == faster


@given(
    heads=st.integers(1, 4),
    queries=st.integers(1, 50),
    keys=st.integers(1, 50),
    causal=st.booleans(),
    offset=st.integers(0, 60),
)
def test_time_counts_pairs_for_exact_attention_and_tokens_for_plans(heads, queries, keys, causal, offset):
    with pytest.MonkeyPatch.context() as patch:
        lines = (Line(3.0, 1.0), Line(5.0, 1.0), Line(7.0, 1000.0))
        patch.setattr(crossover, "_lines", lambda setting, plan: lines)
        patch.setattr(crossover, "exact_operations", lambda x: math.inf)
        q, k, v = problem(queries, heads, keys=keys)
        tensors = (q.repeat(2, 2, 1, 1), k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1))
        inputs = check_inputs(*tensors, is_causal=causal, query_offset=offset)
        actual = expected(inputs, PLAN)
    pairs = int(torch.ones(queries, keys).tril(offset).sum()) if causal else queries * keys
    assert actual.exact == pytest.approx(2 * (3 + 2 * heads * pairs))
    assert exact_operations(inputs) * queries == pytest.approx(pairs * (4 * 16 + 20))
    assert actual.plan == pytest.approx(2 * (12 + heads * keys + 2000 * heads * queries))


def test_plans_that_begin_with_the_first_token_pay_for_all_queries(lines):
    """One query more costs what one query at the beginning does."""
    plan, tensors = fk.budget(32, is_causal=True, memory="constant"), problem(2000)
    whole = check_inputs(*tensors, is_causal=True)
    last = check_inputs(tensors[0][:, :, 1000:], *tensors[1:], is_causal=True, query_offset=1000)
    assert expected(last, plan).plan == expected(whole, plan).plan
    work = [plan_operations(x, plan) * x.queries for x in (whole, last)]
    assert work[0] == pytest.approx(work[1])


def test_what_has_more_arithmetic_is_not_measured(monkeypatch):
    monkeypatch.setattr(crossover, "_lines", None)
    q, k, v = problem(1, keys=4000)  # one decoded token: everything would be prepared for it
    assert exact_is_faster(check_inputs(q, k, v, query_offset=3999, is_causal=True), PLAN)
    assert fk.explain(q, k, v, plan=PLAN, query_offset=3999).runs == "exact"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A cache folder of its own, and a process that has read nothing yet."""
    monkeypatch.setenv("FEWKEYS_CACHE", str(tmp_path))
    crossover._lines.cache_clear()
    yield tmp_path / "measured"
    crossover._lines.cache_clear()


def as_another_process(inputs, plan=PLAN):
    crossover._lines.cache_clear()
    return expected(replace(inputs, _memory={}), plan)


@pytest.mark.long
def test_every_setting_is_measured_once(monkeypatch, folder):
    x = check_inputs(*problem(3000))
    first = expected(x, PLAN)
    assert first.exact > 0
    assert first.plan > 0
    assert len(list(folder.iterdir())) == 1  # and no drafts
    monkeypatch.setattr(crossover, "fastest", None)
    assert as_another_process(x, fk.budget(32)) == first
    with pytest.raises(TypeError):  # another head size is another setting
        expected(check_inputs(*problem(3000, dim=8)), PLAN)


@pytest.mark.long
def test_grouped_heads_are_measured_as_they_run(monkeypatch, folder):
    seen = []
    monkeypatch.setattr(exact, "attend", lambda x, weights: seen.append((x.query_heads, x.kv_heads)))
    q, k, v = problem(3000, 2)
    expected(check_inputs(q.repeat(1, 3, 1, 1), k, v), PLAN)
    assert set(seen) == {(6, 2)}


def test_autocast_is_off_while_the_machine_is_measured(monkeypatch, folder):
    seen = []
    monkeypatch.setattr(crossover, "_points", lambda *_: [(1.0, None), (2.0, None)] * 3)
    monkeypatch.setattr(
        crossover, "fastest", lambda *_: seen.append(torch.is_autocast_enabled("cpu")) or ([1.0, 2.0] * 3, True)
    )
    with torch.autocast("cpu", torch.bfloat16):
        expected(check_inputs(*(x.double() for x in problem(3000))), PLAN)  # no kernels to compile
    assert seen == [False]


@pytest.mark.parametrize(
    ("plan", "crossing"),
    [(fk.Plan(fk.Window(5)), 512), (fk.budget(64), 1024), (fk.budget(192), 2048), (fk.budget(1024), 2048)],
)
def test_lines_are_measured_near_the_crossing(plan, crossing):
    """Where a plan has a third of exact attention's operations, within bounds."""
    setting = crossover.Setting(torch.device("cpu"), torch.float32, 2, 2, 64, 64, 1, "none")
    points = crossover._points(setting, plan)
    pairs, tokens = [2 * (crossing // 2) ** 2, 2 * crossing**2], [2 * crossing, 4 * crossing]
    assert [units for units, _ in points] == [*pairs, *tokens, *tokens]


@needs_compiler
def test_plans_are_measured_as_they_run():
    """Later calls of a shape are recorded kernels."""
    setting = crossover.Setting(torch.device("cpu"), torch.float32, 2, 2, 16, 16, 1, "none")
    _, run_plan = crossover._points(setting, fk.budget(64))[2]
    run_plan()
    assert any(recorded._recordings.values())


def test_gradients_are_measured_apart(monkeypatch, folder):
    """With their backward pass, through exact attention and through the plan."""
    seen = []
    monkeypatch.setattr(
        crossover, "fastest", lambda calls, _: [call() for call in calls[:4]] and ([1.0, 2.0] * 3, True)
    )
    monkeypatch.setattr(torch.autograd, "grad", lambda output, rows: seen.append(len(rows)))
    rows = problem(3000)
    expected(check_inputs(*rows), PLAN)
    assert not seen
    with torch.no_grad():
        expected(check_inputs(*(part.clone().requires_grad_() for part in rows)), PLAN)
    assert not seen
    expected(check_inputs(*(part.clone().requires_grad_() for part in rows)), PLAN)
    assert seen == [3] * 4
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_choose_alike_both_times(monkeypatch, reentrant):
    """Also where the first call measures, of which the checkpoint sees nothing. With gradients, exact attention is
    faster here, without them the plan is.
    """

    def lines(facts, measure):
        measure()
        return (1.0, 0.0), (2.0 if facts["has_gradients"] else 0.0, 0.0), (0.0, 0.0)

    def fastest(calls, _):
        for call in calls:
            call()
        return [1.0, 2.0] * 3, True

    def attend(*rows):
        outputs.append(fk.attention(*rows, plan=fk.budget(16)))
        return outputs[-1] * outputs[-1]

    monkeypatch.setattr(crossover, "kept", lines)
    monkeypatch.setattr(crossover, "fastest", fastest)
    outputs, remembered = [], (flow._gives_way, crossover._lines)
    for function in remembered:
        function.cache_clear()
    rows = [part.requires_grad_() for part in problem(1024)]
    # Without an early stop, the checkpoint compares all tensors that are stored for gradients.
    options = {} if reentrant else {"early_stop": False}
    checkpoint(attend, *rows, use_reentrant=reentrant, **options).sum().backward()
    for function in remembered:
        function.cache_clear()
    first, *later = outputs
    assert later
    for output in later:
        torch.testing.assert_close(output, first)


def test_a_gpu_runs_no_plan_by_blocks_and_is_measured_where_it_computes(monkeypatch, lines):
    """On another device than the CPU, here one without numbers, whatever its lines say."""
    lines(exact=(1e9, 0.0), prepare=(0.0, 0.0), attend=(0.0, 0.0))
    query, key, value = (torch.empty(1, 1, 9000, 16, device="meta") for _ in range(3))
    by_plan = {
        plan: not exact_is_faster(Inputs(query, key, value, 1.0, plan.is_causal, 0), plan)
        for plan in (fk.budget(64), fk.budget(64, is_causal=True), fk.budget(64, is_causal=True, memory="constant"))
    }
    assert [*by_plan.values()] == [True, False, False]
    inputs = Inputs(query, key, value, 1.0, True, 0)
    assert "a GPU has no kernels" in explanation._times(inputs, fk.budget(64, is_causal=True))[0]
    here, there = (
        crossover.Setting(torch.device(kind), torch.float32, 2, 2, 8, 8, 1, "none") for kind in ("cpu", "meta")
    )
    lengths, short = [], here.draw(40)
    monkeypatch.setattr(crossover.Setting, "draw", lambda _, length: lengths.append(length) or short)
    crossover._points(there, PLAN)
    assert lengths == [4096, 8192, 16384]


def test_biases_of_the_distance_are_measured_as_they_run(monkeypatch, folder):
    """With a bias on either side."""
    calls = []
    monkeypatch.setattr(crossover, "fastest", lambda points, _: calls.append(points) or ([1.0, 2.0] * 3, True))
    expected(check_inputs(*problem(3000), distance_bias=torch.zeros(1, 5)), PLAN)
    ((exact_call, *_, attend),) = calls
    assert exact_call.args[1].bias is not None
    assert attend.args[0].inputs.bias is not None


def test_calls_with_a_bias_measure_no_lines_without(monkeypatch, folder):
    settings = []
    measured = ((1.0, 1.0),) * 3, True
    monkeypatch.setattr(crossover, "_measured", lambda setting, _: settings.append(setting) or measured)
    flow._gives_way.cache_clear()
    fk.attention(*problem(3000), plan=PLAN, distance_bias=torch.zeros(1, 5))
    assert [setting.is_biased for setting in settings] == [True]


def measure_numbers(monkeypatch, numbers):
    monkeypatch.setattr(crossover, "_measured", lambda *_: (tuple(next(numbers) for _ in range(3)), True))


@pytest.mark.parametrize("damage", ["", "{}", '{"of": 1, "numbers": [[1, 2]]}', "half", "negative"])
def test_a_damaged_file_is_measured_anew(monkeypatch, folder, damage):
    measure_numbers(monkeypatch, iter([(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)]))
    x = check_inputs(*problem(3000))
    first = expected(x, PLAN)
    for file in folder.iterdir():
        whole = file.read_text()
        file.write_text({"half": whole[: len(whole) // 2], "negative": whole.replace("1", "-1")}.get(damage, damage))
    again = as_another_process(x)
    assert again != first
    assert as_another_process(x) == again


def test_the_first_to_write_wins(monkeypatch, folder):
    """Another process finishes while this one measures: its numbers count for both."""

    def slow(*_):
        monkeypatch.setattr(crossover, "_measured", lambda *_: (((1, 1), (2, 2), (3, 3)), True))
        other.append(as_another_process(x))
        return ((7, 7), (2, 2), (3, 3)), True

    x, other = check_inputs(*problem(3000)), []
    monkeypatch.setattr(crossover, "_measured", slow)
    assert expected(x, PLAN) == other[0]
    assert other[0].exact == 1 + 3000**2


@pytest.mark.parametrize(("sound", "later", "again"), [(True, 29, False), (True, 31, True), (False, 0.05, True)])
@pytest.mark.parametrize("backwards", [False, True])
def test_what_is_old_or_was_disturbed_is_measured_again(monkeypatch, folder, sound, later, again, backwards):
    """After a month and an hour; also where the clock was ahead when it was written."""
    actual = [kept.kept({"of": "age"}, lambda: (((1.0,),), sound))]
    now = kept.time.time() + 86400 * later * (-1 if backwards else 1)
    monkeypatch.setattr(kept.time, "time", lambda: now)
    actual.append(kept.kept({"of": "age"}, lambda: (((2.0,),), True)))
    assert actual == [((1.0,),), ((2.0,),) if again or backwards else ((1.0,),)]
    assert kept.kept({"of": "age"}, None) == actual[1]


def test_what_another_process_has_just_written_is_not_removed(monkeypatch, folder):
    """It writes between this one's look and this one's measuring, and goes on by its own numbers."""
    read, others = kept._read, []

    def look(path, key):
        actual = read(path, key)
        if not others:
            others.append(None)
            others.append(kept.kept({"of": "both"}, lambda: (((1.0,),), True)))
        return actual

    monkeypatch.setattr(kept, "_read", look)
    assert kept.kept({"of": "both"}, lambda: (((2.0,),), True)) == ((1.0,),)
    assert others[1] == ((1.0,),)


def test_where_nothing_can_be_kept_operations_decide(monkeypatch, folder):
    folder.parent.joinpath("file").write_text("")
    monkeypatch.setenv("FEWKEYS_CACHE", str(folder.parent / "file" / "below"))
    monkeypatch.setattr(crossover, "_measured", None)  # nothing is measured
    for n, runs in ((300, "exact"), (3000, "plan")):
        explanation = fk.explain(*problem(n, dim=64), plan=PLAN)
        assert explanation.runs == runs
        assert "operations per query" in str(explanation)


def test_lines_go_through_their_points():
    line = crossover.through([(2.0, 5.0), (4.0, 9.0)])
    assert (line.at(2), line.at(4), line.at(6)) == (5, 9, 13)
    # Nothing takes less time for more work, or less than none: such points were disturbed.
    assert crossover.through([(2.0, 8.0), (4.0, 4.0)]) == Line(4.0, 0.0)
    assert crossover.through([(2.0, 1.0), (4.0, 9.0)]) == Line(0.0, 2.25)


def test_only_plans_that_allow_it_become_exact():
    q, k, v = problem(100)
    strict = replace(PLAN, exact_if_faster=False)
    assert strict == PLAN.never_exact() == strict.never_exact()
    assert torch.equal(fk.attention(q, k, v, plan=strict), fk.attention(q, k, v, plan=PLAN, impl="native"))
    actual = fk.attention(q, k, v, keep=fk.Window(5))
    assert torch.equal(actual, fk.attention(q, k, v, keep=fk.Window(5), impl="native"))
    assert not torch.equal(actual, fk.attention(q, k, v))


@pytest.mark.parametrize(
    ("plan", "runs", "reason"),
    [
        (fk.Plan(), "exact", "keeps every key"),
        (fk.Plan(fk.select.KeyNorm(500)), "exact", "all there are"),
        (fk.Plan(fk.select.KeyNorm(5)), "plan", "exact_if_faster"),
        (fk.budget(64), "exact", "operations per query"),
    ],
)
def test_reasons_are_told(plan, runs, reason):
    explanation = fk.explain(*problem(100), plan=plan)
    assert explanation.runs == runs
    assert reason in str(explanation)
    assert str(explanation).startswith("runs exact attention" if runs == "exact" else "runs the plan")


def test_the_executor_is_told(monkeypatch):
    q, k, v = problem(100)
    strict = PLAN.never_exact()
    if build.missing() is None:
        explanation = fk.explain(q, k, v, plan=strict)
        assert (explanation.executor, explanation.uncompiled) == ("native", None)
        assert explanation.kernels == build.instruction_set()
        assert str(explanation).startswith(f"runs the plan, by compiled kernels for {explanation.kernels}: ")
    explanation = fk.explain(q.double(), k.double(), v.double(), plan=strict)
    assert explanation.executor == "torch"
    assert str(explanation).endswith("no compiled kernels: expected float32 or bfloat16, got torch.float64")
    for impl in ("torch", "reference"):
        explanation = fk.explain(q, k, v, plan=PLAN, impl=impl)
        assert (explanation.runs, explanation.executor, explanation.uncompiled) == ("plan", impl, None)
    monkeypatch.setenv("FEWKEYS_NATIVE", "0")
    assert "no compiled kernels: expected compiled kernels, got none (FEWKEYS_NATIVE=0" in str(
        fk.explain(q, k, v, plan=strict)
    )
    with pytest.raises(ValueError, match="impl='native': expected compiled kernels"):
        fk.explain(q, k, v, plan=strict, impl="native")


def test_one_plan_is_asked_for():
    with pytest.raises(TypeError, match=r"plan: expected a fewkeys.Plan, got list; pass the plan of one head"):
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


@pytest.mark.parametrize("keep", [fk.TopK(8), fk.select.BestColumns(8)], ids=str)
def test_oracles_pay_for_scoring_every_pair(keep):
    inputs = check_inputs(*problem(512))
    assert plan_operations(inputs, fk.Plan(keep)) > 2 * 16 * 512  # scoring every pair


def disturbed_calls(monkeypatch, times, preemptions=0):
    """Calls that take as many milliseconds as `times` say, turn by turn; the last for ever."""
    clock, made = [0.0], [0] * len(times)

    def call(which):
        clock[0] += 1e-3 * times[which][min(made[which], len(times[which]) - 1)]
        made[which] += 1

    monkeypatch.setattr("fewkeys.core.clock.perf_counter", lambda: clock[0])
    monkeypatch.setattr("fewkeys.core.clock.preemptions", lambda: preemptions * sum(made))
    return [lambda which=which: call(which) for which in range(len(times))], made


@pytest.mark.parametrize("turns", [1, 4, 9])
def test_what_is_disturbed_is_repeated_until_it_is_not(monkeypatch, turns):
    """The first call counts for nothing: a warm-up makes it slow, or a cache fast."""
    busy = [9.0 - 0.5 * turn for turn in range(turns)]
    calls, made = disturbed_calls(monkeypatch, [[0.1, *busy, 1.0], [0.1, *busy, 2.0]])
    times, calm = crossover.fastest(calls, torch.device("cpu"))
    assert times == pytest.approx([1.0, 2.0])
    assert calm
    assert made == [1 + turns + 1 + crossover.CALM_TURNS] * 2


def test_what_never_comes_to_rest_is_told(monkeypatch):
    calls, made = disturbed_calls(monkeypatch, [[0.95**turn for turn in range(90)], [300.0]])
    assert not crossover.fastest(calls, torch.device("cpu"))[1]
    assert made[0] == 1 + 7  # two seconds


@pytest.mark.parametrize("preemptions", [0, 100])
def test_steady_times_beside_other_programs_are_told(preemptions, monkeypatch):
    calls, _ = disturbed_calls(monkeypatch, [[1.0], [2.0]], preemptions)
    assert crossover.fastest(calls, torch.device("cpu")) == (pytest.approx([1.0, 2.0]), preemptions == 0)


@pytest.mark.parametrize(("times", "sound"), [([1, 4, 1, 2, 3, 9], True), ([1, 4, 1, 2, 9, 3], False)])
def test_more_work_in_less_time_is_told(monkeypatch, times, sound):
    monkeypatch.setattr(crossover, "_points", lambda *_: [(float(1 + place % 2), None) for place in range(6)])
    monkeypatch.setattr(crossover, "fastest", lambda *_: (times, True))
    setting = crossover.Setting(torch.device("cpu"), torch.float32, 1, 1, 16, 16, 1, "none")
    assert crossover._measured(setting, PLAN)[1] == sound
