"""Calls that repeat recorded kernels (`execute/native/recorded.py`) answer as if they did not."""

import threading
import weakref

import pytest
import torch

import fewkeys as fk
from cases import Shape
from fewkeys import flow
from fewkeys.core.validation import check_inputs
from fewkeys.cost import crossover
from fewkeys.cost.crossover import Line
from fewkeys.execute.native import recorded
from fewkeys.native import kernels, tensors
from fewkeys.sketch.clusters import clusters
from native_cases import needs_compiler

pytestmark = needs_compiler

PLANS = {
    "cohorts": fk.budget(64, cohorts=4).never_exact(),
    "more slots": fk.budget(128, cohorts=8).never_exact(),
    "few slots": fk.budget(12, cohorts=4).never_exact(),
    "all queries": fk.budget(16, cohorts=1).never_exact(),
    "no window": fk.Plan(fk.select.Outliers(9, 5, cohorts=2), fk.ClusterMeans(5, rank=2, cohorts=2)),
}
FORMS = {
    "several sequences": Shape(batch=3, queries=260, keys=260),
    "grouped": Shape(query_heads=6, queries=230, keys=230),
    "cross": Shape(queries=190, keys=300, value_dim=5),
    "offset": Shape(queries=190, keys=300, query_offset=40),
}
PLAN, FORM = PLANS["cohorts"], FORMS["cross"]


def drawn(form, count):
    return [form.draw(seed, torch.float32) for seed in range(count)]


def anew(rows, plan=PLAN, **options):
    """The output without any recording."""
    recorded._recordings.clear()
    return fk.attention(*rows, plan=plan, **options)


def recordings():
    return [*recorded._recordings.values()]


@pytest.fixture
def prepared(monkeypatch):
    """The problems that were prepared."""
    problems, prepare = [], recorded.prepare
    monkeypatch.setattr(recorded, "prepare", lambda *args: problems.append(args) or prepare(*args))
    return problems


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_later_calls_give_the_same_bits(plan, form, prepared):
    rows = drawn(form, 4)
    outputs = [fk.attention(*one, plan=plan, **form.options) for one in rows]
    assert len(prepared) == 1
    for one, output in zip(rows, outputs, strict=True):
        assert torch.equal(output, anew(one, plan, **form.options))


def test_plans_that_may_give_way(prepared, monkeypatch):
    """The choice by expected times leaves no statistic with the inputs."""
    monkeypatch.setattr(crossover, "_lines", lambda *_: (Line(1e6, 0.0), Line(0.0, 0.0), Line(0.0, 0.0)))
    plan, form = fk.budget(16, cohorts=4), Shape(queries=1801, keys=1801)
    flow._gives_way.cache_clear()
    try:
        for one in drawn(form, 3):
            fk.attention(*(part.transpose(1, 2).contiguous().transpose(1, 2) for part in one), plan=plan)
    finally:
        flow._gives_way.cache_clear()
    assert len(prepared) == 1
    assert recordings()


def test_other_shapes_and_plans_are_other_calls():
    one, other = FORM.draw(0, torch.float32), FORMS["grouped"].draw(0, torch.float32)
    calls = [(one, PLAN), (other, PLAN), (one, PLANS["no window"])]
    outputs = [fk.attention(*rows, plan=plan) for rows, plan in calls * 2]
    for (rows, plan), output in zip(calls * 2, outputs, strict=True):
        assert torch.equal(output, anew(rows, plan))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float64, {}), (torch.bfloat16, {}), (torch.float32, {"lengths": torch.tensor([300, 250])})],
    ids=["float64", "bfloat16", "padding"],
)
def test_what_torch_computes_is_not_repeated(dtype, options, prepared):
    for seed in range(3):
        fk.attention(*FORM.draw(seed, dtype), plan=PLAN, **options)
    assert len(prepared) == 3
    assert not recordings()


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": torch.tensor([300, 250])},
        {"distance_bias": torch.linspace(-2, 2, 42).view(2, 21)},
        {"impl": "torch"},
        {"query_offset": 9},
        {"scale": 0.1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_options_are_other_calls(options):
    rows = FORM.draw(0, torch.float32)
    for _ in range(2):
        fk.attention(*rows, plan=PLAN)
    output = fk.attention(*rows, plan=PLAN, **options)
    assert torch.equal(output, anew(rows, **options))


def test_other_layouts_of_memory():
    rows = FORM.draw(0, torch.float32)
    for _ in range(2):
        output = fk.attention(*rows, plan=PLAN)
    by_token = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in rows)
    other = flow.run(flow.choose(PLAN, check_inputs(*by_token)))
    torch.testing.assert_close(other, output)


def test_addresses_inside_rows():
    """A kernel that reads the last keys and values reads those of later calls."""

    def last(query, key, value):
        return query, key[:, :, -50:], value[:, :, -50:]

    first, later = drawn(FORM, 2)
    later[1][0, 0, -20, 3] = 50.0
    output, (query, *pair) = torch.empty(3), last(*first)
    args = tensors.STRUCTS["Extents"](**tensors.sized(*pair), query=query, queries=190, largest=output)
    spans = [range(part.data_ptr(), part.data_ptr() + part.nbytes) for part in (*first, output)]
    recording = recorded.Recording([("fewkeys_extents", args, torch.float32)], spans, output)
    assert recording.run(later).tolist() == kernels.largest_and_rows(*last(*later))[0]


def test_means_without_lists_are_not_repeated(prepared):
    """Torch's operations compute the variance of their scores."""
    for seed in range(3):
        fk.attention(*FORM.draw(seed, torch.float32), plan=fk.Plan(fk.Window(5), fk.ClusterMeans(5)))
    assert len(prepared) == 3
    assert not recordings()


def test_gradients_are_not_lost():
    for seed in range(3):
        query, key, value = FORM.draw(seed, torch.float32)
        fk.attention(query, key, value, plan=PLAN)
        value.requires_grad_()
        assert fk.attention(query, key, value, plan=PLAN).requires_grad


def test_rules_of_others_are_not_repeated(prepared):
    """They may read numbers in ways that torch does not see."""

    class Own(fk.Window, listed=False):
        pass

    plan = fk.Plan(fk.select.Outliers(9, 5, cohorts=2) | Own(5), PLANS["no window"].rest)
    for seed in range(3):
        fk.attention(*FORM.draw(seed, torch.float32), plan=plan)
    assert len(prepared) == 3


def test_rows_that_share_memory():
    """Their addresses do not tell which of them a kernel reads."""
    query, key, _ = FORM.draw(0, torch.float32)
    plan, other = PLANS["no window"], FORM.draw(1, torch.float32)
    wide = Shape(queries=300, keys=300).draw(2, torch.float32)
    for rows in ((query, key, key), (key, key, key), wide, (wide[1], wide[1], wide[2])):
        for again in (rows, tuple(part.flip(2).contiguous() for part in rows), other):
            output = fk.attention(*again, plan=plan)
            kept = dict(recorded._recordings)
            assert torch.equal(output, anew(again, plan))
            recorded._recordings.update(kept)


def test_an_indefinite_matrix_goes_on_in_torch(prepared):
    """Of equal queries, by rounding. Later calls are repeated as before."""
    (query, *rows), good = drawn(Shape(queries=190, keys=300, head_dim=64), 2)
    equal = (query[:1, :1, :1].expand(query.shape).contiguous(), *rows)
    outputs = [fk.attention(*one, plan=PLAN) for one in (good, equal, good)]
    assert len(prepared) == 2
    for one, output in zip((good, equal, good), outputs, strict=True):
        assert torch.equal(output, anew(one))


def test_inputs_that_know_statistics(prepared):
    """Of one plan, which another one reads: their kernels do not run again, and no later call overwrites them."""
    first, later = (check_inputs(*rows) for rows in drawn(FORM, 2))
    clusters(first, PLAN.rest.count)
    for inputs in (first, later):
        flow.run(flow.Choice(inputs, PLAN, False, ""))
    assert len(prepared) == 2
    centres = clusters(later, PLAN.rest.count).label.clone()
    flow.run(flow.Choice(first.branch(), PLAN, False, ""))
    fk.attention(*FORM.draw(3, torch.float32), plan=PLAN)
    assert torch.equal(clusters(later, PLAN.rest.count).label, centres)


def test_calls_under_inference_mode(prepared):
    with torch.inference_mode():
        for seed in range(2):
            fk.attention(*FORM.draw(seed, torch.float32), plan=PLAN)
    assert len(prepared) == 1
    rows = FORM.draw(2, torch.float32)
    output = fk.attention(*rows, plan=PLAN)
    assert len(prepared) == 1
    assert torch.equal(output, anew(rows))


def test_threads_do_not_share_memory():
    rows = drawn(FORM, 4)
    expected, right = [anew(one) for one in rows], []

    def run(number):
        outputs = [fk.attention(*rows[number], plan=PLAN) for _ in range(30)]
        right.append(all(torch.equal(output, expected[number]) for output in outputs))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 4


def test_rows_and_output_are_not_kept():
    query, key, value = FORM.draw(0, torch.float32)
    output = fk.attention(query, key, value, plan=PLAN)
    assert recordings()
    alive = [weakref.ref(part) for part in (query, key, value, output)]
    del query, key, value, output
    assert not any(part() is not None for part in alive)


def test_memory_is_bounded(monkeypatch):
    fk.attention(*FORM.draw(0, torch.float32), plan=PLAN)
    (first,) = recordings()
    monkeypatch.setattr(recorded, "MOST_BYTES", 2 * first.bytes)
    for queries in range(190, 196):
        fk.attention(*Shape(queries=queries, keys=300, value_dim=5).draw(0, torch.float32), plan=PLAN)
        assert sum(recording.bytes for recording in recordings()) <= 2 * first.bytes
    monkeypatch.setattr(recorded, "MOST_BYTES", first.bytes - 1)
    anew(FORM.draw(0, torch.float32))
    assert not recordings()
