"""Biases of the distance (T5's and MPNet's) as `distance_bias`; and MPNet's modules, which ask for attention only as
long as a plan is in force.
"""

import copy
import pickle
import threading
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    DebertaV2Config,
    DebertaV2Model,
    MPNetConfig,
    MPNetModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import fewkeys as fk
from captures import captured
from fewkeys.bench.long_inputs import captured_inputs
from fewkeys.captures import Capture
from fewkeys.integrations.mpnet import MPNetForward
from fewkeys.integrations.terms import distance_bias
from fewkeys.judge.exact import blocks, exact
from fewkeys.papers import sparsefinder
from tiny_models import SIZES, close, far, padded, run, tokens

EXACT, WINDOW = fk.Plan(), fk.Plan(fk.Window(99))
FEW = fk.budget(8).never_exact()
SMALL = SIZES | {"num_hidden_layers": 2, "initializer_range": 0.3}


def seeded(make):
    torch.manual_seed(3)
    return make().eval()


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
    return T5EncoderModel(T5Config(**sizes, dropout_rate=0.0, initializer_factor=3.0))


MODELS = {"mpnet": lambda: MPNetModel(MPNetConfig(**SMALL, max_position_embeddings=40)), "t5": t5}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right", None])
def test_keeping_every_key_is_the_model_itself(name, side):
    model, inputs = seeded(MODELS[name]), padded(side)
    inputs.pop("position_ids", None)
    before, real = run(model, **inputs), inputs.get("attention_mask")
    for plan in (EXACT, WINDOW):
        with fk.apply(model, plan):
            close(run(model, **inputs), before, real)
    with fk.apply(model, fk.Plan(fk.Window(2))):
        assert far(run(model, **inputs), before)
    assert torch.equal(run(model, **inputs), before)


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name):
    """Also of the embeddings of distances."""
    model, actual = seeded(MODELS[name]), []
    for plan in (None, WINDOW):
        applied = None if plan is None else fk.apply(model, plan)
        model.zero_grad()
        out = model(input_ids=tokens())[0]
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
        actual.append({path: part.grad.clone() for path, part in model.named_parameters() if part.grad is not None})
        if applied is not None:
            applied.restore()
    assert actual[0].keys() == actual[1].keys()
    for path, grad in actual[0].items():
        assert (grad - actual[1][path]).norm() <= 1e-3 * grad.norm() + 1e-4, path
    table = [grad for path, grad in actual[1].items() if "relative_attention_bias" in path]
    assert len(table) == 1
    assert all(grad.norm() > 0 for grad in table)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_captures_hold_the_bias(name, side, tmp_path):
    """What is judged is what the model's own output projection reads."""
    model, inputs, read = seeded(MODELS[name]), padded(side), []
    inputs.pop("position_ids")
    outputs = [module for path, module in model.named_modules() if path.endswith(".o")]
    hooks = [module.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0])) for module in outputs]
    fk.capture(model, [inputs], tmp_path / "taken")
    for hook in hooks:
        hook.remove()
    taken, real = Capture.load(tmp_path / "taken"), inputs["attention_mask"].bool()
    for layer in range(2):
        assert torch.equal(taken.projection(layer).flatten(1), outputs[layer].weight)
        for row, block in enumerate(blocks(next(taken.calls(layer)))):
            truth = exact(block, 0.05).output[0].transpose(0, 1).flatten(1)
            torch.testing.assert_close(truth, read[layer][row][real[row]], rtol=1e-4, atol=1e-5)
    few = fk.Plan(fk.Window(3), fk.ClusterMeans(2))
    report = fk.compare(taken, {"few": few, "exact": EXACT}, model=model, batches=[inputs])
    assert report.rows[0].error > 0.05 > 1e-4 > report.rows[1].error
    # A check of every query is the error itself.
    assert fk.spot_check(model, [inputs], few, queries=99).error == pytest.approx(report.rows[0].error, rel=1e-3)


def test_a_plan_is_tuned_with_the_bias(monkeypatch):
    """For heads that look around, ahead, back and everywhere."""
    far = torch.arange(-20, 21).double()
    table = torch.stack([-far.abs(), -(far - 6).abs(), -(far + 6).abs(), 0 * far]).float()
    taken = captured(layers=1, batches=1, size=1, length=48, bias=table)
    plan = fk.tune(taken, 12)
    actual = fk.compare(taken, {"tuned": plan, "budget": fk.budget(12)}).rows
    assert actual[0].error == pytest.approx(plan.record["error"], rel=1e-3)
    assert actual[0].error < actual[1].error
    monkeypatch.setattr("fewkeys.judge.exact.BLOCK", 1)  # a key head at a time
    assert fk.compare(taken, {"tuned": plan}).rows[0].error == pytest.approx(actual[0].error, rel=1e-4)
    other = captured(layers=1, batches=1, size=1, length=48, bias=-table)
    assert other.digest(0) != taken.digest(0)


@pytest.mark.long
def test_a_decoder_is_tuned_with_the_bias():
    """T5's: some heads look back, so that lists beat a window; the plan is refused nowhere, and runs in the decoder."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
    config = T5Config(**sizes, dropout_rate=0.0, initializer_factor=3.0, decoder_start_token_id=0)
    model = seeded(lambda: T5ForConditionalGeneration(config))
    inputs = {"input_ids": tokens(2, 9), "decoder_input_ids": tokens(2, 48)}
    taken = fk.capture(model, [inputs], part="decoder")
    assert taken.biased
    plan, near = fk.tune(taken, 12), fk.Plan(fk.Sinks(4) | fk.Window(8))
    assert plan.record["slots"] <= 12
    actual = fk.compare(taken, {"tuned": plan, "near": near}).rows
    assert actual[0].error == pytest.approx(plan.record["error"], rel=1e-3)
    assert actual[1].error == pytest.approx(plan.record["budget"]["error"], rel=1e-3)
    assert actual[0].error < 0.95 * actual[1].error
    exact, away = run(model, **inputs), {}
    for name, layer_plans in {"tuned": plan.never_exact(), "near": [near] * 2, "exact": [EXACT] * 2}.items():
        plans = [each for layer in layer_plans for each in (layer, EXACT)]  # EXACT: cross-attention
        with fk.apply(model.decoder, plans):
            away[name] = (run(model, **inputs) - exact).norm()
    # Tuning looks at the outputs of layers, not of the model.
    assert away["exact"] < 1e-3 < away["tuned"] < 1.1 * away["near"]


def test_where_a_bias_is_refused():
    bias = torch.randn(4, 9)
    taken = captured(layers=1, batches=1, size=1, bias=bias)
    with pytest.raises(ValueError, match=r"^capture: .* which predicted graphs do not support; use fewkeys\.tune"):
        sparsefinder.Sparsefinder.fit(taken)
    with pytest.raises(ValueError, match=r"^capture: .* whose values for longer texts are unknown"):
        captured_inputs(taken, dtype=torch.float32)
    powers = fk.Plan(fk.Window(3), fk.ClusterMeans(4), fk.weights.Power(2.0))
    report = fk.compare(taken, {"powers": powers, "few": fk.budget(16)})
    assert [skipped.name for skipped in report.skipped] == ["powers"]
    torn = torch.ones(3, 40, dtype=torch.bool)
    torn[:, 20] = False
    call = replace(next(taken.calls(0)), key_mask=torn[:1])
    with pytest.raises(ValueError, match=r"^key_mask: expected contiguous real keys"):
        next(blocks(call))


# --- modules that are told to ask ----------------------------------------------------------------------------------


def standing(model):
    return sum(isinstance(part, MPNetForward) for module in model.modules() for part in vars(module).values())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_plan_and_the_model_gets_its_own_back(copied):
    model = seeded(MODELS["mpnet"])
    before = run(model, input_ids=tokens())
    with fk.apply(model, FEW), fk.apply(model, fk.Plan(fk.Window(2))):
        few, other = run(model, input_ids=tokens()), copied(model)
        assert standing(model) == 2
        assert far(few, before)
    assert standing(model) == 0
    assert model.config._attn_implementation == "eager"
    assert torch.equal(run(model, input_ids=tokens()), before)
    assert torch.equal(run(other, input_ids=tokens()), few)
    ours = {id(module) for module in model.modules()}
    held = [part for module in other.modules() for part in vars(module).values() if isinstance(part, MPNetForward)]
    assert len(held) == 2
    assert not any(id(part.module) in ours for part in held)


def test_calls_under_way_end_as_they_began():
    """A plan comes between the masks of a call and its attention, in another thread."""
    model, inputs, here = seeded(MODELS["mpnet"]), padded("right"), []
    inputs.pop("position_ids")
    before = run(model, **inputs)

    def come(*_):
        thread = threading.Thread(target=lambda: here.append(fk.apply(model, fk.Plan(fk.Window(1)))))
        thread.start()
        thread.join()

    hook = model.encoder.layer[0].register_forward_pre_hook(come)
    actual = run(model, **inputs)
    hook.remove()
    close(actual, before, inputs["attention_mask"])
    here[0].restore()
    assert torch.equal(run(model, **inputs), before)


# --- what does not fit ---------------------------------------------------------------------------------------------


def test_tables_end_where_the_bias_is_constant():
    place = torch.arange(9)
    even = (place - place[:, None]).clamp(-2, 3).float().expand(2, 4, 9, 9)
    table = distance_bias(even, 0)
    assert table.shape == (4, 7)
    assert torch.equal(table[0], torch.tensor([-2.0, -2, -1, 0, 1, 2, 3]))
    assert torch.equal(distance_bias(even[:, :, -1:], 8)[0], torch.tensor([-2.0, -2, -1, 0, 0, 0, 0])[1:-1])
    assert distance_bias(torch.zeros(1, 4, 3, 9), 0) is None
    for odd in (torch.randn(1, 4, 9, 9), torch.cat([even[:1], 2 * even[:1]])):
        with pytest.raises(ValueError, match=r"^position_bias: expected a bias that depends on the distance alone"):
            distance_bias(odd, 0)


def test_a_table_is_found_once_for_each_place():
    """What a tensor was found to be holds for its layers, not for a call that begins elsewhere."""
    place = torch.arange(9)
    even = (place - place[:, None]).clamp(-2, 3).float().expand(1, 4, 9, 9)[:, :, -1:].clone()
    first, beyond = distance_bias(even, 8), distance_bias(even, 0)
    assert distance_bias(even, 0) is beyond
    assert not torch.equal(first, beyond)
    with pytest.raises(ValueError, match="position_bias"):
        distance_bias(even, 9)
    learned = even.clone().requires_grad_()
    assert distance_bias(learned, 8) is not distance_bias(learned, 8)


def test_what_is_not_known_is_refused():
    deberta = DebertaV2Model(DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"]))
    with pytest.raises(ValueError, match="DebertaV2Model does not use transformers' attention interface"):
        fk.apply(deberta, FEW)
    model = seeded(MODELS["mpnet"])
    attention = model.encoder.layer[1].attention.attn
    attention.forward = hooked = attention.forward
    with pytest.raises(ValueError, match=r"^model: expected MPNet without hooks"):
        fk.apply(model, FEW)
    assert standing(model) == 0
    assert attention.forward == hooked
    assert model.config._attn_implementation == "eager"
    del attention.forward
    model.train()
    with fk.apply(model, FEW), pytest.raises(ValueError, match=r"^dropout: expected 0, got 0.1"):
        model(tokens())
    powers = fk.Plan(fk.Window(3), fk.ClusterMeans(4), fk.weights.Power(2.0))
    with fk.apply(model.eval(), powers), pytest.raises(ValueError, match=r"^distance_bias: .*Softmax"):
        model(tokens(1, 36))
