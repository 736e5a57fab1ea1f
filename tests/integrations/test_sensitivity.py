"""Captured gradients are those of what the model says, and tuning by them spends slots where the model feels errors."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LayoutLMConfig, LayoutLMForMaskedLM

import fewkeys as fk
from captures import captured
from fewkeys.captures.capture import Capture
from fewkeys.integrations.interface import attach, exact
from fewkeys.integrations.sensitivity import Sensitivity, counted
from fewkeys.integrations.transformers import capture
from fewkeys.tuning.candidates import Candidate
from fewkeys.tuning.score import score_layer
from tiny_models import MODELS, SIZES, padded, tokens

SMALL = 1e-3
OTHER = "gradient001-batch00000.safetensors"


def said_with(model, batch, counts, layer, change):
    """What the model says, as a number, where `change` is added to the output of one layer."""

    def answer(place, module, inputs):
        actual = exact(module, inputs)
        return actual + change if place == layer else actual

    attachment = attach(model, answer)
    try:
        with torch.no_grad():
            return float(Sensitivity(0)._score(model(**batch), counts).double())
    finally:
        attachment.detach()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("labelled", [False, True])
def test_gradients_are_what_finite_differences_say(name, labelled):
    model, batch = MODELS[name](), padded("right", lengths=(7, 11, 3))
    counts = batch["attention_mask"].bool()
    inputs = dict(batch)
    if labelled:
        labels = torch.where(tokens(3, 11, seed=8) % 2 == 0, 5, -100)
        inputs["labels"] = labels
        counted = labels != -100
        if name != "bert":  # the token before predicts it
            counted = torch.cat([counted[:, 1:], torch.zeros(3, 1, dtype=torch.bool)], 1)
        counts = counts & counted
    taken = capture(model, [inputs], gradients=True)
    assert taken.gradients
    assert not any(parameter.grad is not None for parameter in model.parameters())
    for layer in range(3):
        (call,) = taken.calls(layer)
        assert call.gradient.shape == call.query.shape
        draw = torch.Generator().manual_seed(layer)
        change = torch.randn(call.gradient.shape, generator=draw) * counts.sum() ** -0.5
        up, down = (said_with(model, batch, counts, layer, sign * SMALL * change) for sign in (1, -1))
        expected = float((call.gradient * change).sum())
        assert (up - down) / (2 * SMALL) == pytest.approx(expected, rel=0.02, abs=0.02)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradients_predict_what_errors_do_on_average(name):
    """E (g . e)^2 is twice the divergence of predictions, or the squared change of hidden states by their length."""
    model, ids = MODELS[name]().double(), tokens(1, 6)
    error = 1e-3 * torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    felt, counts = Sensitivity(0), torch.ones(1, 6, dtype=torch.bool)

    def ask(change):
        attachment = attach(model, lambda place, module, inputs: change(exact(module, inputs), place == 1))
        try:
            return model(ids)
        finally:
            attachment.detach()

    draws = []
    for _ in range(300):
        said = ask(lambda output, here: felt.follow(output) if here else output)
        (gradient,) = felt.gradients(said, counts)
        draws.append(float((gradient * error).sum().square()))
    with torch.no_grad():
        one, other = (ask(lambda output, here, e=e: output + e if here else output) for e in (0 * error, error))
    if name == "llama":
        p, q = (said.logits.log_softmax(-1) for said in (one, other))
        want = 2 * float((p.exp() * (p - q)).sum())
    else:
        old, new = one.last_hidden_state, other.last_hidden_state
        want = float(((new - old).square().sum(-1) / old.square().sum(-1)).sum())
    assert sum(draws) / 300 == pytest.approx(want, rel=0.25)  # three standard deviations of the mean of squares


def test_a_capture_with_gradients_is_the_capture_without_and_can_be_opened_again(tmp_path):
    model = MODELS["llama"]()
    plain, more = capture(model, [tokens()]), capture(model, [tokens()], tmp_path / "taken", gradients=True)
    opened = Capture.load(tmp_path / "taken")
    again = capture(model, [tokens()], gradients=True)
    for layer in range(3):
        (one,), (two,), (three,), (four,) = (actual.calls(layer) for actual in (plain, more, opened, again))
        assert one.gradient is None
        assert torch.equal(one.query, two.query)
        assert torch.equal(one.value, three.value)
        assert torch.equal(two.gradient, three.gradient)
        assert torch.equal(two.gradient, four.gradient)
    rows = next(iter(more.part(1, 3).calls(0)))
    assert torch.equal(rows.gradient, next(iter(more.calls(0))).gradient[1:3])
    (tmp_path / "taken" / OTHER).write_bytes(b"x")
    with pytest.raises(ValueError, match="capture again"):
        list(Capture.load(tmp_path / "taken").calls(1))


def test_a_model_that_returns_something_else_is_refused():
    with pytest.raises(ValueError, match=r"gradients: expected .*, got \['pooler_output'\]$"):
        counted(MODELS["bert"](), {}, {"pooler_output": torch.zeros(1, 32)}, None, False)


def test_labels_of_an_encoder_belong_to_their_own_tokens_whatever_its_flag_says():
    """LayoutLM's attention has no flag `is_causal`, which counts as causal."""
    sizes = SIZES | {"max_position_embeddings": 40, "initializer_range": 0.3}
    torch.manual_seed(0)
    model, ids = LayoutLMForMaskedLM(LayoutLMConfig(**sizes)).eval(), tokens(2)
    labels = torch.full_like(ids, -100)
    labels[:, 4] = 5
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor(10), 0)}
    taken = capture(model, [inputs | {"labels": labels}], gradients=True)
    last = next(taken.calls(2)).gradient
    assert (last.abs().sum((0, 1, 3)) > 0).nonzero().flatten().tolist() == [4]


def test_labels_that_say_nothing_are_refused():
    model, ids = MODELS["llama"](), tokens()
    for labels in (torch.full_like(ids, -100), ids[:, :5], ids.float(), [1, 2]):
        with pytest.raises(ValueError, match="labels: expected"):
            capture(model, [{"input_ids": ids, "labels": labels}], gradients=True)


def test_gradients_are_found_without_those_of_the_caller():
    model = MODELS["llama"]().requires_grad_(False)
    expected = next(capture(MODELS["llama"](), [tokens()], gradients=True).calls(2)).gradient
    with torch.no_grad():
        assert torch.equal(next(capture(model, [tokens()], gradients=True).calls(2)).gradient, expected)


@pytest.mark.long
@pytest.mark.parametrize(("causal", "length", "slots"), [(False, 60, 12), (True, 400, 100)])
def test_slots_go_where_the_model_feels_errors(causal, length, slots):
    """Of two key heads with inputs alike, the one whose gradients are larger gets more slots."""
    for loud in (0, 1):
        size = torch.full((4, 1, 1), 0.01)
        size[2 * loud : 2 * loud + 2] = 1.0
        taken = captured(batches=1, size=1, length=length, causal=causal, gradients=size)
        plan = fk.tune(taken, slots)
        assert plan.record["slots"] <= slots
        call = next(taken.calls(0))
        for layer in plan:
            paid = [
                head_plan.slots(head_plan.keep.graph(call.query, call.key, call.value, is_causal=causal).slots(), 8, 8)
                if head_plan.keep
                else length
                for head_plan in layer
            ]
            assert paid[loud] > 1.5 * paid[1 - loud]


def test_one_layer_and_one_batch_with_gradients_are_some():
    assert captured(layers=1, batches=1, gradients=1.0).gradients
    assert not captured(layers=1, batches=1).gradients


def test_scores_by_gradients_are_those_by_definition():
    size = torch.linspace(0.5, 2, 4).view(4, 1, 1)
    taken = captured(lengths=[40, 17, 1], gradients=size)
    plan = fk.Plan(fk.select.KeyNorm(3) | fk.Window(5))
    actual = score_layer(taken, 1, [Candidate(plan, 8)], seed=0, done=lambda: None)
    total, count = 0, 0
    for call in taken.calls(1):
        few, whole = (
            fk.attention(call.query, call.key, call.value, plan=layer_plan, scale=call.scale, key_mask=call.key_mask)
            for layer_plan in (plan, fk.Plan())
        )
        felt = ((few - whole) * call.gradient).sum(-1).square() * call.key_mask[:, None]
        total, count = total + felt.double().sum((0, 2)), count + int(call.key_mask.sum())
    torch.testing.assert_close(actual.output_change[:, 0], (total / count).view(2, 2).mean(1), rtol=1e-3, atol=1e-7)
