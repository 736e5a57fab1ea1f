"""A spot check tells the error of a plan: exactly where it sees every query, without bias and with a sound interval
where it sees a few."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import fewkeys as fk
from cases import CAUSAL_PLANS, CAUSAL_SHAPES, KEEPS, SHAPES, SOME_PLANS, Shape
from executors import FORMS, rotated
from fewkeys.core.metrics import relative_error
from fewkeys.core.validation import check_inputs
from fewkeys.execute import exact
from fewkeys.guard import sample

WINDOW = fk.Plan(fk.Window(9))
spot_check = fk.spot_check
Q, K, V = SHAPES["plain"].draw()


def seed(number):
    return torch.Generator().manual_seed(number)


def true_errors(shape, plan, tensors=None):
    """The errors of the real queries, (heads, sequences' queries)."""
    query, key, value = tensors or shape.draw()
    few = fk.attention(query, key, value, plan=plan.never_exact(), **shape.options)
    errors = relative_error(
        few, fk.attention(query, key, value, weights=plan.weights, impl="reference", **shape.options)
    )
    lengths = shape.lengths if shape.lengths and shape.queries == shape.keys else [shape.queries] * shape.batch
    return torch.cat([row[:, :length] for row, length in zip(errors, lengths, strict=True)], -1)


# --- every query seen: the error itself --------------------------------------------------------------------------


CASES = [
    pytest.param(shape, plan, id=f"{form}: {name}")
    for form, shape in FORMS.items()
    for name, plan in SOME_PLANS.items()
    if not shape.is_causal or plan in CAUSAL_PLANS.values()
]


@pytest.mark.parametrize(("shape", "plan"), CASES)
def test_every_query_gives_the_error_itself(shape, plan):
    errors = true_errors(shape, plan)
    actual = spot_check(*shape.draw(), plan, queries=shape.queries + 2, **shape.options)
    assert actual.error == actual.low == actual.high == pytest.approx(float(errors.mean()), abs=1e-9)
    assert actual.per_head == pytest.approx(errors.mean(-1).tolist(), abs=1e-9)
    assert actual.of == errors.numel()
    assert actual.queries in (errors.numel(), 0)


def test_heads_with_plans_of_their_own():
    shape = SHAPES["grouped"]
    plans = (fk.Plan(fk.Window(5)), fk.Plan(fk.Sinks(2)))
    actual = spot_check(*shape.draw(), plans, queries=70)
    first, second = (true_errors(shape, plan).mean(-1).tolist() for plan in plans)
    assert actual.per_head == pytest.approx([*first[:3], *second[3:]], abs=1e-9)
    query, key, value = shape.draw()
    few = fk.attention(query, key, value, plan=plans, impl="torch")
    error = fk.metrics.output_error(few, fk.attention(query, key, value, impl="reference"))
    assert actual.error == pytest.approx(error, abs=1e-9)
    actual = spot_check(query, key, value, plans[::-1], queries=70)
    assert actual.per_head[:3] == pytest.approx(second[:3], abs=1e-9)


@pytest.mark.parametrize("plan", [fk.Plan(), fk.Plan(fk.Window(141)), fk.Plan(weights=fk.weights.Elu())], ids=str)
def test_exact_attention_has_no_error_and_no_doubt(plan):
    actual = spot_check(*SHAPES["padded"].draw(), plan, lengths=torch.tensor([70, 33]))
    assert (actual.error, actual.low, actual.high, actual.queries, actual.of) == (0, 0, 0, 0, 2 * 103)


@pytest.mark.parametrize(
    ("form", "name", "dtype"), rotated(["grouped"], KEEPS, [torch.bfloat16, torch.float16, torch.float32])
)
def test_low_precision(form, name, dtype):
    """Half-precision outputs move by their rounding, 2^-8 or 2^-11 of their size, and so does the error."""
    shape, plan = FORMS[form], fk.Plan(KEEPS[name])
    tensors = [tensor.to(dtype) for tensor in shape.draw()]
    actual = spot_check(*tensors, plan, queries=70)
    few = fk.attention(*tensors, plan=plan.never_exact()).float()
    exact = fk.attention(*(tensor.double() for tensor in tensors), impl="reference").float()
    assert actual.error == pytest.approx(fk.metrics.output_error(few, exact), abs=1e-5)


# --- a few queries seen ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", [fk.Softmax(), fk.weights.Entmax(1.5), fk.weights.Relu(2.0)], ids=str)
@pytest.mark.parametrize("block", [1, 2**22])
def test_exact_rows_are_rows_of_exact_attention(form, kernel, block, monkeypatch):
    monkeypatch.setattr(sample, "at_once", lambda tensor: block)
    shape = FORMS[form]
    inputs = check_inputs(*shape.draw(), **shape.options)
    index = torch.randint(0, shape.queries, (shape.batch, shape.query_heads, 9), generator=seed(0))
    every = exact.attend(replace(inputs, impl="reference"), kernel)
    expected = every.gather(2, index[..., None].expand(-1, -1, -1, shape.value_dim))
    torch.testing.assert_close(sample.exact_rows(inputs, kernel, index), expected)


@given(queries=st.integers(1, 40), count=st.integers(2, 20))
def test_every_query_is_drawn_equally_often(queries, count):
    """Over all places in the stretches, the mean of the samples' estimates is the mean of the errors."""
    short = max(1, queries // count)
    grid = (torch.arange(short * (short + 1), dtype=torch.float64) + 0.5) / (short * (short + 1))
    nothing = torch.zeros(len(grid), 1, queries, 1)
    drawn = sample.draw(check_inputs(nothing, nothing, nothing), grid[:, None, None].expand(-1, 1, count))
    errors = torch.rand(queries, generator=seed(queries), dtype=torch.float64)
    estimates = drawn.mean(errors.expand(len(grid), 1, -1).gather(-1, drawn.index))
    assert estimates.mean() == pytest.approx(float(errors.mean()), abs=1e-12)
    assert (drawn.size.sum(-1) == queries).all()
    used = drawn.index[0, 0][drawn.size[0] > 0]
    assert (used.diff() > 0).all()
    assert len(used) == min(queries, count)


SAMPLED = ["padded", "cross padded", "causal padded", "grouped", "causal with offset", "causal"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "queries", "keep"), rotated(SAMPLED, [9], [fk.Window(9), fk.select.Leverage(7) | fk.Window(5)])
)
def test_estimates_are_unbiased(form, queries, keep):
    """The mean over 200 samples lies within four of its own standard deviations of the truth."""
    shape, plan = FORMS[form], fk.Plan(keep)
    truth = float(true_errors(shape, plan).mean())
    tensors = shape.draw()
    actual = torch.tensor(
        [spot_check(*tensors, plan, queries=queries, generator=seed(n), **shape.options).error for n in range(200)],
        dtype=torch.float64,
    )
    assert actual.std() > 0
    assert abs(actual.mean() - truth) < 4 * actual.std() / math.sqrt(200)


@pytest.mark.parametrize(
    ("side", "is_causal", "offset"),
    [(side, is_causal, 0) for side in ("left", "right", "scattered") for is_causal in (False, True)]
    + [("left", True, 30), ("scattered", True, 30)],
)
def test_masked_is_deleted(side, is_causal, offset):
    """A padded sequence gives the sample, the estimate and the interval of the sequence without its padding."""
    query, key, value = Shape(batch=1).draw()
    place = torch.arange(70)
    mask = {"left": place >= 25, "right": place < 45, "scattered": place % 7 != 3}[side]
    plan = fk.Plan(fk.Window(9) if is_causal or side != "scattered" else fk.TopK(5))
    query, before = query[:, :, offset:], int(mask[:offset].sum())
    whole = spot_check(
        query, key, value, plan, queries=16, key_mask=mask[None], is_causal=is_causal, query_offset=offset
    )
    query, key, value = query[:, :, mask[offset:]], key[:, :, mask], value[:, :, mask]
    cut = spot_check(query, key, value, plan, queries=16, is_causal=is_causal, query_offset=before)
    for name in ("error", "low", "high", "per_head"):
        assert getattr(whole, name) == pytest.approx(getattr(cut, name), abs=1e-12), name
    assert (whole.queries, whole.of) == (cut.queries, cut.of) == (32, 2 * int(mask[offset:].sum()))


def test_queries_that_see_no_key_are_not_counted():
    """Nor is a sequence that is all padding; a causal query before the first real key sees nothing."""
    query, key, value = SHAPES["cross"].draw()
    actual = spot_check(query, key, value, WINDOW, queries=40, lengths=torch.tensor([90, 0]))
    alone = spot_check(query[:1], key[:1], value[:1], WINDOW, queries=40)
    assert (actual.error, actual.of) == (alone.error, alone.of)
    mask = (torch.arange(90) >= 7).expand(2, -1)
    actual = spot_check(query, key, value, WINDOW, queries=40, key_mask=mask, is_causal=True)
    assert actual.of == 2 * 2 * 30
    nothing = spot_check(query, key, value, WINDOW, lengths=torch.tensor([0, 0]))
    assert (nothing.error, nothing.low, nothing.high, nothing.of) == (0, 0, 0, 0)


def test_what_padding_gives_is_never_read():
    """A short sequence leaves places in the sample empty; an output there may be anything."""
    nothing = torch.zeros(2, 1, 20, 1)
    drawn = sample.draw(check_inputs(nothing, nothing, nothing, lengths=torch.tensor([20, 5])), torch.zeros(8))
    errors = torch.ones(2, 1, 8, dtype=torch.float64)
    errors[1, 0, 5:] = math.inf
    assert drawn.mean(errors).tolist() == [[1.0], [1.0]]
    assert drawn.estimates(errors).variance.sum() == drawn.estimates(errors).third.sum() == 0


def test_a_causal_query_with_a_cache_sees_the_keys_before_it():
    """Of 30 queries at keys 120 to 149, the one at 127 is the first to see the first real key."""
    query, key, value = CAUSAL_SHAPES["causal with offset"].draw()
    mask = (torch.arange(150) >= 127).expand(2, -1)
    actual = spot_check(query, key, value, WINDOW, queries=40, key_mask=mask, is_causal=True, query_offset=120)
    assert actual.of == 2 * 2 * 23


def test_heads_and_sequences_have_samples_of_their_own():
    """Where all are alike, equal samples would be one sample, counted several times."""
    query, key, value = (tensor.expand(3, 4, -1, -1) for tensor in SHAPES["long"].draw())
    heads = spot_check(query[:1], key[:1], value[:1], WINDOW).per_head
    assert len(set(heads)) == 4
    rows = [spot_check(query[:n, :1], key[:n, :1], value[:n, :1], WINDOW).error for n in (1, 3)]
    assert rows[0] != pytest.approx(rows[1], rel=1e-9)


def test_a_plan_is_judged_even_where_exact_attention_would_be_faster():
    plan = fk.budget(16)
    assert torch.equal(fk.attention(Q, K, V, plan=plan), fk.attention(Q, K, V))
    assert spot_check(Q, K, V, plan, queries=70).error == pytest.approx(
        fk.metrics.output_error(fk.attention(Q, K, V, plan=plan.never_exact()), fk.attention(Q, K, V))
    )


def test_the_cost_is_what_was_asked():
    shape = SHAPES["long"]
    actual = spot_check(*shape.draw(), WINDOW, queries=32)
    assert (actual.queries, actual.of) == (32, 401)
    assert actual.low < actual.error < actual.high


def test_the_same_seed_gives_the_same_sample():
    tensors = SHAPES["long"].draw()
    assert spot_check(*tensors, WINDOW) == spot_check(*tensors, WINDOW)
    one, same, other = (spot_check(*tensors, WINDOW, generator=seed(number)) for number in (1, 1, 2))
    assert one == same != other


def test_the_sample_does_not_follow_the_keys_a_plan_draws():
    """Plans draw by seed 0. With the same numbers, queries would be near the keys that are kept, or far from them."""
    tensors = SHAPES["long"].draw()
    assert spot_check(*tensors, WINDOW) != spot_check(*tensors, WINDOW, generator=seed(0))


# --- a whole model -----------------------------------------------------------------------------------------------


def batches(side="right"):
    from tiny_models import padded, tokens

    return [padded(side, (30, 40, 25), 40), {"input_ids": tokens(2, 40)}]


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_every_query_of_a_model_gives_the_error_of_compare(name):
    pytest.importorskip("transformers")
    from tiny_models import MODELS

    model, plan = MODELS[name](), fk.Plan(fk.Sinks(2) | fk.Window(3))
    plans = [plan, fk.Plan(), fk.Plan(fk.Window(5))]
    inputs = batches()
    capture = fk.capture(model, inputs)
    rows = fk.compare(capture, plans).rows
    actual = spot_check(model, inputs, plans, queries=40)
    for layer, (row, check) in enumerate(zip(rows, actual.per_layer, strict=True)):
        # compare is in float32
        assert check.error == check.low == pytest.approx(row.per_layer["error"][layer], rel=1e-4, abs=1e-6)
        assert check.per_head == pytest.approx(row.per_head["error"][layer], rel=1e-4, abs=1e-6)
    assert actual.error == pytest.approx(sum(check.error for check in actual.per_layer) / 3)
    assert actual.of == sum(check.of for check in actual.per_layer) == 3 * 4 * (30 + 40 + 25 + 80)


def test_layers_that_share_a_module_count_apart():
    albert = pytest.importorskip("transformers").AlbertModel
    from tiny_models import SIZES, tokens

    model = albert(albert.config_class(**SIZES, embedding_size=8, initializer_range=0.3)).eval()
    plan, inputs = fk.Plan(fk.Window(3)), [tokens(2, 40), tokens(1, 30)]
    capture = fk.capture(model, inputs)
    (row,) = fk.compare(capture, [plan]).rows
    checks = spot_check(model, inputs, plan, queries=40).per_layer
    assert [check.error for check in checks] == pytest.approx(row.per_layer["error"], rel=1e-4)
    with pytest.raises(ValueError, match=r"^capture: expected .* got 3 layers that share 1, .* use fewkeys\.budget"):
        fk.tune(capture, 8)


def test_every_layer_is_given_what_it_gets_in_the_exact_model():
    """The second layer's input is the first one's exact output, not the plan's."""
    pytest.importorskip("transformers")
    from tiny_models import bert, tokens

    model, ids, inputs = bert(), tokens(2, 40), []
    layer = model.encoder.layer[1].attention.self.query
    hook = layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].clone()))
    with torch.no_grad():
        model(ids)
    spot_check(model, ids, fk.Plan(fk.Window(1)), queries=8)
    hook.remove()
    torch.testing.assert_close(inputs[0], inputs[1])
    assert model.config._attn_implementation != "fewkeys"


def test_a_model_gives_intervals_and_stays_as_it_is():
    pytest.importorskip("transformers")
    from tiny_models import bert, run

    model, inputs = bert(), batches()
    before = run(model, **inputs[0])
    truth = spot_check(model, inputs, WINDOW, queries=40).error
    actual = spot_check(model, inputs, WINDOW, queries=8, generator=seed(0))
    assert actual.low < truth < actual.high
    assert all(layer.low < layer.error < layer.high for layer in actual.per_layer)
    assert actual.high - actual.low < sum(layer.high - layer.low for layer in actual.per_layer) / 3
    with fk.apply(model, fk.Plan(fk.Window(1))):
        assert spot_check(model, inputs, WINDOW, queries=8, generator=seed(0)) == actual
    assert torch.equal(run(model, **inputs[0]), before)
    one = spot_check(model=model, batches=inputs[1], plan=WINDOW, queries=8)
    assert one.of == 3 * 2 * 4 * 40
    assert one == spot_check(model, inputs[1:], WINDOW, queries=8)
    assert one == spot_check(model, inputs[1]["input_ids"], WINDOW, queries=8)


def test_samples_of_the_calls_of_a_model_are_independent():
    """The same batch twice would otherwise be sampled at the same queries and count as twice the evidence."""
    pytest.importorskip("transformers")
    from tiny_models import bert, tokens

    model, ids = bert(), tokens(2, 40)
    once, twice = spot_check(model, ids, WINDOW, queries=8), spot_check(model, [ids, ids], WINDOW, queries=8)
    assert twice.error != pytest.approx(once.error, rel=1e-9)
    assert twice.high - twice.low < 0.9 * (once.high - once.low)


# --- the edge ----------------------------------------------------------------------------------------------------

CALLS = {
    "queries: expected at least 2, got 1": lambda: spot_check(Q, K, V, WINDOW, queries=1),
    "queries: expected an integer, got float": lambda: spot_check(Q, K, V, WINDOW, queries=8.0),
    "confidence: expected a finite number in \\(0.0, 1.0\\), got 95": lambda: spot_check(
        Q, K, V, WINDOW, confidence=95
    ),
    "confidence: expected a number, got str": lambda: spot_check(Q, K, V, WINDOW, confidence="high"),
    "plan: expected a fewkeys.Plan, got int": lambda: spot_check(Q, K, V, 64),
    "plan: expected a fewkeys.Plan, got str": lambda: spot_check(Q, K, V, "budget"),
    "plan: expected a fewkeys.Plan, got NoneType": lambda: spot_check(Q, K, V, [WINDOW, None]),
    "plan: expected one plan for each of 2 key heads, got 3": lambda: spot_check(Q, K, V, [WINDOW] * 3),
    "query: expected shape": lambda: spot_check(Q[0], K, V, WINDOW),
    "is_causal: ClusterMeans": lambda: spot_check(Q, K, V, fk.budget(24), is_causal=True),
}


@pytest.mark.parametrize("message", CALLS)
def test_bad_input_is_named(message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}") as caught:
        CALLS[message]()
    assert "\n" not in str(caught.value)


def test_bad_input_with_a_model_is_named():
    pytest.importorskip("transformers")
    from tiny_models import bert, tokens

    model = bert()
    for message, call in {
        "batches: expected at least one batch": lambda: spot_check(model, [], WINDOW),
        "batches: expected input_ids": lambda: spot_check(model, [torch.zeros(3)], WINDOW),
        "plan: expected a Plan": lambda: spot_check(model, tokens(), 64),
        "plan: expected one plan for each of 3": lambda: spot_check(model, tokens(), [WINDOW]),
        "queries: expected at least 2": lambda: spot_check(model, tokens(), WINDOW, queries=0),
        "model: expected a model in eval mode": lambda: spot_check(bert().train(), tokens(), WINDOW),
        "model: expected a transformers PreTrainedModel": lambda: spot_check(torch.nn.Linear(1, 1), tokens(), WINDOW),
        "model: .* got str": lambda: spot_check("bert", tokens(), WINDOW),
    }.items():
        with pytest.raises((ValueError, TypeError), match=f"^{message}"):
            call()


def test_no_gradients_are_needed_or_kept():
    tensors = [tensor.requires_grad_() for tensor in SHAPES["plain"].draw()]
    plain = spot_check(*SHAPES["plain"].draw(), WINDOW)
    assert spot_check(*tensors, WINDOW) == plain
    assert all(tensor.grad is None for tensor in tensors)


def test_a_result_can_be_read():
    text = str(spot_check(*SHAPES["long"].draw(), WINDOW, confidence=0.9))
    assert re.fullmatch(r"error [\d.]+, 90 % interval [\d.]+ to [\d.]+, from 32 of 401 queries", text)


def test_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "quality-control.md").read_text()
    actual = re.findall(r"```python\n(.*?)```", page, re.S)
    assert actual
    exec(actual[0], {})
    assert "interval" in capsys.readouterr().out
