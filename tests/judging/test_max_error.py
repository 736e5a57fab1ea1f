"""`max_error`: a head whose plan is good keeps it, any other is answered exactly, and the counts say which."""

import math
import sys
import threading

import pytest
import torch
from hypothesis import given, strategies as st

import fewkeys as fk
from cases import CAUSAL_PLANS, CAUSAL_SHAPES, SHAPES, SOME_PLANS, Shape
from fewkeys.core.metrics import relative_error
from fewkeys.core.validation import check_inputs
from fewkeys.guard.fallback import Fallbacks, Guard

FORMS = {**SHAPES, **CAUSAL_SHAPES}
WINDOW = fk.Plan(fk.Window(9))


def attend(shape, plan, max_error=None, tensors=None, **options):
    return fk.attention(
        *(tensors or shape.draw()), plan=plan, impl="torch", max_error=max_error, **shape.options, **options
    )


def exactly(shape, plan, tensors=None):
    return fk.attention(*(tensors or shape.draw()), weights=plan.weights, **shape.options)


def cases():
    for form, shape in FORMS.items():
        for name, plan in SOME_PLANS.items():
            if not shape.is_causal or plan in CAUSAL_PLANS.values():
                yield pytest.param(shape, plan, id=f"{form}: {name}")


# --- what is answered --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "plan"), list(cases()))
def test_a_limit_beyond_reach_changes_nothing(shape, plan):
    """Except that a call of no more queries than a check computes is answered exactly."""
    guard = Guard(1e9, queries=9)
    actual = attend(shape, plan, guard)
    short = shape.queries <= 9 or plan.keep.covers(check_inputs(*shape.draw(), **shape.options))
    assert torch.equal(actual, exactly(shape, plan) if short else attend(shape, plan))
    assert guard.fallbacks.calls == 1
    assert guard.fallbacks.fallbacks == 0
    assert guard.fallbacks.checked == (0 if short else shape.batch * shape.query_heads)


@pytest.mark.parametrize(("shape", "plan"), list(cases()))
def test_no_error_allowed_is_exact_attention(shape, plan):
    assert torch.equal(attend(shape, plan, 0.0), exactly(shape, plan))


@pytest.mark.parametrize(
    ("form", "queries"),
    [
        *((form, 9) for form in ("plain", "grouped", "padded", "cross", "causal", "causal with offset", "long")),
        *((form, 32) for form in ("plain", "grouped", "padded", "cross", "causal", "long")),
        *((form, 60) for form in ("plain", "grouped", "padded", "causal", "long")),
    ],
)
def test_each_head_is_the_plan_or_exact(form, queries):
    """Far above the limit exact, far below the plan, by the error over all its queries; and the counts agree."""
    shape = FORMS[form]
    query, key, value = shape.draw()
    # Heads whose queries attend ever more sharply: their errors differ.
    sharpness = torch.logspace(-2, 0.5, shape.batch * shape.query_heads, dtype=torch.float64)
    query = query * sharpness.view(shape.batch, shape.query_heads, 1, 1)
    value = value + 1.0
    tensors = (query, key, value)
    plan, exact = attend(shape, WINDOW, tensors=tensors), exactly(shape, WINDOW, tensors)
    errors = relative_error(plan, exact)
    lengths = shape.lengths if shape.lengths and shape.queries == shape.keys else [shape.queries] * shape.batch
    error = torch.stack([row[:, :length].mean(-1) for row, length in zip(errors, lengths, strict=True)])
    fell = 0
    for limit in error.flatten().tolist():
        guard = Guard(limit * 1.0001, queries=queries)
        actual = attend(shape, WINDOW, guard, tensors=tensors)
        as_plan = (actual == plan).all(-1).all(-1)
        as_exact = torch.isclose(actual, exact, rtol=1e-12, atol=1e-12).all(-1).all(-1)
        assert (as_plan ^ as_exact).all()
        assert as_exact[error > 2.5 * limit].all()
        assert as_plan[error < limit / 2.5].all()
        assert guard.fallbacks.fallbacks == int(as_exact.sum())
        assert guard.fallbacks.checked == shape.batch * shape.query_heads
        fell += int(as_exact.sum())
    assert fell > 0 or form == "long"


def test_the_estimate_decides_and_is_reported():
    """A limit just above the largest estimate lets all pass, one just below it stops that head."""
    shape = Shape(1, 1, 1)
    guard = Guard(10.0)
    attend(shape, WINDOW, guard)
    estimate = guard.fallbacks.error
    for limit, expected in ((estimate, 0), (estimate * (1 - 1e-9), 1)):
        guard = Guard(limit)
        attend(shape, WINDOW, guard)
        assert guard.fallbacks.fallbacks == expected


def test_each_sequence_and_head_is_judged_on_its_own():
    """Alone, in a batch, in another place of it, or padded: the same answer."""
    shape = Shape(batch=4, query_heads=4)
    tensors = shape.draw()
    guard = Guard(1.7)
    together = attend(shape, WINDOW, guard, tensors)
    assert 0 < guard.fallbacks.fallbacks < 16
    for row in range(4):
        for head in range(4):
            one = [tensors[0][row : row + 1, head : head + 1]]
            one += [tensor[row : row + 1, head // 2 : head // 2 + 1] for tensor in tensors[1:]]
            alone = fk.attention(*one, plan=WINDOW, max_error=1.7)
            torch.testing.assert_close(alone[0, 0], together[row, head])
    padding = [torch.nn.functional.pad(tensor, (0, 0, 0, 11)) for tensor in tensors]
    padded = fk.attention(*padding, plan=WINDOW, max_error=1.7, lengths=torch.full((4,), 70))
    torch.testing.assert_close(padded[:, :, :70], together)


def test_heads_with_plans_of_their_own():
    shape = SHAPES["grouped"]
    plans = (WINDOW, fk.Plan(fk.Sinks(1), weights=fk.weights.Elu()))
    one, other = (attend(shape, plan) for plan in plans)
    guard = Guard(1e9)
    actual = attend(shape, plans, guard)
    assert torch.equal(actual, torch.cat([one[:, :3], other[:, 3:]], 1))
    assert (guard.fallbacks.calls, guard.fallbacks.checked) == (1, 12)
    actual = attend(shape, plans, 0.0)
    expected = torch.cat([exactly(shape, plans[0])[:, :3], exactly(shape, plans[1])[:, 3:]], 1)
    torch.testing.assert_close(actual, expected)
    guard = Guard(1e9)
    attend(shape, (fk.Plan(), WINDOW), guard)
    assert guard.fallbacks.checked == 6


def test_an_output_that_is_not_a_number_has_failed():
    inputs = check_inputs(*SHAPES["plain"].draw())
    output = fk.attention(*SHAPES["plain"].draw(), plan=WINDOW)
    output[1, 0] = math.nan
    guard = Guard(1e9)
    actual = guard.correct(inputs, fk.Softmax(), output)
    exact = fk.attention(*SHAPES["plain"].draw())
    torch.testing.assert_close(actual[1, 0], exact[1, 0])
    assert torch.equal(actual[0], output[0])
    assert guard.fallbacks.fallbacks == 1


def test_a_sequence_of_padding_is_not_judged():
    shape = Shape(queries=80, lengths=(0, 70))
    guard = Guard(0.0)
    actual = attend(shape, WINDOW, guard)
    assert (guard.fallbacks.checked, guard.fallbacks.fallbacks) == (2, 2)
    torch.testing.assert_close(actual, exactly(shape, WINDOW))
    guard = Guard(1e9)
    attend(shape, WINDOW, guard)
    assert 0 < guard.fallbacks.error < 10
    nobody = Guard(0.0)
    attend(Shape(lengths=(0, 0)), WINDOW, nobody)
    assert nobody.fallbacks == Fallbacks(calls=1)


@pytest.mark.parametrize(("queries", "checked"), [(31, 0), (32, 0), (33, 4)])
def test_a_call_as_long_as_its_check_is_answered_exactly(queries, checked):
    shape, guard = Shape(queries=queries), Guard(1e9)
    actual = attend(shape, WINDOW, guard)
    assert torch.equal(actual, attend(shape, WINDOW) if checked else exactly(shape, WINDOW))
    assert guard.fallbacks.checked == checked


def test_exact_because_faster_is_not_checked():
    tensors = Shape(queries=40, keys=40).draw()
    guard = Guard(0.0)
    assert torch.equal(fk.attention(*tensors, plan=fk.budget(16), max_error=guard), fk.attention(*tensors))
    assert guard.fallbacks == Fallbacks(calls=1)


def test_the_reference_is_guarded_too():
    shape = SHAPES["padded"]
    one = fk.attention(*shape.draw(), plan=WINDOW, impl="reference", max_error=1.7, **shape.options)
    torch.testing.assert_close(one, attend(shape, WINDOW, 1.7))


def test_randomness_comes_from_the_generator():
    shape, plan = SHAPES["plain"], fk.Plan(fk.RandomKeys(30))

    def drawn(seed):
        guard = Guard(1.0)
        actual = attend(shape, plan, guard, generator=torch.Generator().manual_seed(seed))
        assert 0 < guard.fallbacks.fallbacks < 4, "the case is not mixed"
        return actual

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert torch.equal(attend(shape, plan, 1.0), attend(shape, plan, 1.0))
    # The plan draws first: with or without a check it draws the same.
    loose = attend(shape, plan, 1e9, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loose, attend(shape, plan, generator=torch.Generator().manual_seed(1)))


# --- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "grouped", "causal padded"])
def test_gradients_are_those_of_whoever_answers(form):
    shape = FORMS[form]
    tensors = [tensor.requires_grad_() for tensor in shape.draw()]
    weight = torch.randn(shape.batch, shape.query_heads, shape.queries, shape.value_dim, dtype=torch.float64)
    plain, exact = attend(shape, WINDOW, tensors=tensors), exactly(shape, WINDOW, tensors)
    errors = relative_error(plain, exact).detach()
    guard = Guard(float(errors.mean()))
    actual = attend(shape, WINDOW, guard, tensors)
    assert 0 < guard.fallbacks.fallbacks < guard.fallbacks.checked, "the case is not mixed"
    fell = ~(actual == plain).all(-1, keepdim=True).all(-2, keepdim=True)
    mixed = torch.where(fell, exact, plain)
    for one, other in zip(
        torch.autograd.grad((actual * weight).sum(), tensors, retain_graph=True),
        torch.autograd.grad((mixed * weight).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.long
def test_gradcheck_where_some_heads_fall_back():
    tensors = [tensor.requires_grad_() for tensor in Shape(1, 2, 2, 36, 36, 3, 3).draw(3)]
    loose = Guard(1e9)
    fk.attention(*tensors, plan=fk.Plan(fk.Window(5)), max_error=loose)
    limit = loose.fallbacks.error  # the mean of two heads: one is above it

    def few(*tensors):
        guard = Guard(limit)
        actual = fk.attention(*tensors, plan=fk.Plan(fk.Window(5)), max_error=guard)
        assert guard.fallbacks.fallbacks == 1
        return actual

    assert torch.autograd.gradcheck(few, tensors)


# --- counts ------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from(["plain", "grouped", "few keys", "one query"]), st.integers(0, 9)), max_size=5)
)
def test_counts_add_up(calls):
    """One guard over many calls counts what a guard for each would."""
    shared, counts = Guard(1.0), []
    for form, seed in calls:
        for guard in (shared, Guard(1.0)):
            attend(SHAPES[form], WINDOW, guard, SHAPES[form].draw(seed))
        counts.append(guard.fallbacks)
    total = shared.fallbacks
    assert total.calls == len(calls)
    assert total.checked == sum(one.checked for one in counts)
    assert total.fallbacks == sum(one.fallbacks for one in counts)
    measured = [one for one in counts if one.checked]
    assert (total.error is None) == (not measured)
    if measured:
        assert total.error == pytest.approx(sum(one.error * one.checked for one in measured) / total.checked)


# --- in a model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_in_a_model(name):
    pytest.importorskip("transformers")
    from tiny_models import MODELS, close, padded, run

    model, inputs = MODELS[name](), padded("left", (40, 36), 40)
    real = inputs["attention_mask"]
    before = run(model, **inputs)
    with fk.apply(model, WINDOW) as applied:
        few = run(model, **inputs)
        assert applied.fallbacks == ()
    with fk.apply(model, WINDOW, max_error=1e9) as applied:
        assert torch.equal(run(model, **inputs)[real.bool()], few[real.bool()])
        assert [(one.calls, one.checked, one.fallbacks) for one in applied.fallbacks] == [(1, 8, 0)] * 3
        errors = [one.error for one in applied.fallbacks]
    with fk.apply(model, [WINDOW, fk.Plan(), WINDOW], max_error=0.0) as applied:
        close(run(model, **inputs), before, real)
        run(model, **inputs)
        assert [(one.calls, one.checked, one.fallbacks) for one in applied.fallbacks] == [
            (2, 16, 16),
            (2, 0, 0),
            (2, 16, 16),
        ]
    # Layer 0 has the same input in all; a limit between the layers' errors stops some heads only.
    with fk.apply(model, WINDOW, max_error=errors[0]) as applied:
        run(model, **inputs)
    first = applied.fallbacks[0]
    assert first.error == pytest.approx(errors[0])
    assert 0 < first.fallbacks < first.checked


def test_decoded_tokens_are_exact():
    pytest.importorskip("transformers")
    from tiny_models import llama, tokens

    model, ids = llama(), tokens(2, 40)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **how)
    with fk.apply(model, fk.Plan(fk.Window(2)), max_error=0.0) as applied:
        assert torch.equal(model.generate(ids, **how), before)
    assert [(one.calls, one.checked, one.fallbacks) for one in applied.fallbacks] == [(5, 8, 8)] * 3


# --- the edge ----------------------------------------------------------------------------------------------------

Q, K, V = SHAPES["plain"].draw()
CALLS = {
    "max_error: expected at least 0, got -0.1": lambda: fk.attention(Q, K, V, plan=WINDOW, max_error=-0.1),
    "max_error: expected a finite number": lambda: fk.attention(Q, K, V, plan=WINDOW, max_error=math.nan),
    "max_error: expected a finite number in \\(-inf, inf\\), got inf": lambda: Guard(math.inf),
    "max_error: expected a number, got bool": lambda: fk.attention(Q, K, V, plan=WINDOW, max_error=True),
    "max_error: expected a number, got str": lambda: fk.attention(Q, K, V, plan=WINDOW, max_error="5%"),
    "queries: expected at least 1, got 0": lambda: Guard(0.1, queries=0),
    "queries: expected an integer, got float": lambda: Guard(0.1, queries=1.5),
}


@pytest.mark.parametrize("message", CALLS)
def test_bad_input_is_named(message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}") as caught:
        CALLS[message]()
    assert "\n" not in str(caught.value)


def test_a_refused_limit_leaves_the_model_alone():
    pytest.importorskip("transformers")
    from tiny_models import bert, run, tokens

    model = bert()
    before = run(model, input_ids=tokens())
    for bad in (-1.0, "0.1", [Guard(0.1)]):
        with pytest.raises((ValueError, TypeError), match=r"^max_error: expected"):
            fk.apply(model, WINDOW, max_error=bad)
    assert torch.equal(run(model, input_ids=tokens()), before)


def test_threads_that_share_a_guard_lose_no_count():
    guard, together, interval = Guard(1e9, queries=9), threading.Barrier(2), sys.getswitchinterval()

    def calls():
        together.wait()
        for _ in range(4000):
            guard.count_call()

    threads = [threading.Thread(target=calls) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert guard.fallbacks.calls == 8000
