"""Biases of the distance: ALiBi as one more dimension, T5's and MPNet's as `distance_bias`; and modules that ask for
attention only as long as they are told to.
"""

import copy
import pickle
import threading
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DebertaV2Config,
    DebertaV2Model,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MPNetConfig,
    MPNetModel,
    MptConfig,
    MptForCausalLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import fewkeys as fk
from captures import captured
from fewkeys.bench.long_inputs import captured_inputs
from fewkeys.captures import Capture
from fewkeys.integrations.families import Restated
from fewkeys.integrations.terms import distance_bias, with_key_bias
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


def falcon(**more):
    return FalconForCausalLM(FalconConfig(**SMALL, alibi=True, **more))


ALIBI = {
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    ),
    "mpt": lambda: MptForCausalLM(
        MptConfig(vocab_size=60, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, initializer_range=0.3)
    ),
    "falcon": lambda: falcon(multi_query=False),
    "falcon, one key head": lambda: falcon(multi_query=True),
}
BUCKETS = {"mpnet": lambda: MPNetModel(MPNetConfig(**SMALL, max_position_embeddings=40)), "t5": t5}
ALL = ALIBI | BUCKETS


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("side", ["left", "right", None])
def test_keeping_every_key_is_the_model_itself(name, side):
    model, inputs = seeded(ALL[name]), padded(side)
    inputs.pop("position_ids", None)
    before, real = run(model, **inputs), inputs.get("attention_mask")
    for plan in (EXACT, WINDOW):
        with fk.apply(model, plan):
            close(run(model, **inputs), before, real)
    with fk.apply(model, fk.Plan(fk.Window(2))):
        assert far(run(model, **inputs), before)
    assert torch.equal(run(model, **inputs), before)


@pytest.mark.parametrize("name", ALIBI)
def test_a_cache_that_keeps_all_writes_the_same(name):
    """Streams hold keys with their places; rows of a batch count theirs from their first real token."""
    model, inputs = seeded(ALIBI[name]), padded("left", (7, 11))
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    inputs = {part: inputs[part] for part in ("input_ids", "attention_mask")}
    model.config.use_cache = model.generation_config.use_cache = True
    before = model.generate(**inputs, **how)
    every = fk.Plan(fk.select.RecentBlocks(64, 2), fk.rest.RunningMeans(1))
    assert torch.equal(model.generate(**inputs, **how, past_key_values=fk.cache(model, every)), before)


def test_a_cache_asks_for_the_mask_that_tells_places():
    model = seeded(ALIBI["bloom"])
    cache = fk.cache(model, fk.Plan(fk.select.RecentBlocks(8), fk.rest.RunningMeans(2)))
    model(tokens(1), past_key_values=cache)
    with pytest.raises(ValueError, match=r"^attention_mask: expected one over all tokens so far"):
        model(tokens(1), past_key_values=cache)


@pytest.mark.parametrize("centred", [False, True])
def test_heads_that_share_keys_get_biases_of_their_own(centred):
    """Against the definition: four heads of queries, two of keys."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 9, 5, generator=draw) for heads in (4, 2, 2))
    bias = torch.randn(2, 4, 9, generator=draw)
    biased = with_key_bias(query, key, value, bias, 0.3, centred=centred)
    scores = 0.3 * query @ key.repeat_interleave(2, 1).mT + bias.unsqueeze(2)
    want = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(fk.attention(*biased, plan=EXACT, scale=0.3), want)


@pytest.mark.parametrize("length", [64, 4096])
def test_alibi_costs_no_digits_however_long(length):
    """Against the definition in float64, and with few keys against the error without a bias."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, length, 16, generator=draw).unbind(0)
    slope, scale = torch.tensor([0.5, 2**-8]).view(1, 2, 1), 0.25
    bias, asked = slope * torch.arange(length), slice(length - 32, length)
    scores = query[:, :, asked].double() @ key.double().mT * scale + bias.double().unsqueeze(2)
    scores = scores.masked_fill(~torch.ones(32, length).tril(length - 32).bool(), -torch.inf)
    want = (scores.softmax(-1) @ value.double()).float()
    biased = with_key_bias(query, key, value, bias, scale, centred=True)
    how = {"is_causal": True, "scale": scale}
    for plan in (EXACT, fk.Plan(fk.Window(length))):
        actual = fk.attention(*biased, plan=plan, **how)[:, :, asked]
        torch.testing.assert_close(actual, want, rtol=1e-5, atol=2e-6)
    if length > 64:
        plans = [fk.budget(64, is_causal=True), fk.budget(64, is_causal=True, memory="constant")]
        for plan in (plan.never_exact() for plan in plans):
            few = fk.attention(*biased, plan=plan, **how)[:, :, asked]
            plain, exact = (fk.attention(query, key, value, plan=one, **how)[:, :, asked] for one in (plan, EXACT))
            assert (few - want).norm() / want.norm() < (plain - exact).norm() / exact.norm()


@pytest.mark.parametrize("name", ALL)
def test_gradients(name):
    """Also of the embeddings of distances."""
    model, actual = seeded(ALL[name]), []
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
    assert len(table) == (name in BUCKETS)
    assert all(grad.norm() > 0 for grad in table)


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_is_captured_and_compared_like_any_other(name):
    model = seeded(ALIBI[name])
    capture = fk.capture(model, [tokens()])
    plans = {"few": fk.Plan(fk.Window(2)), "exact": EXACT}
    report = fk.compare(capture, plans, model=model, batches=[tokens()])
    assert capture.head_dim == 9
    assert report.rows[0].error > 0.05 > 1e-4 > report.rows[1].error


@pytest.mark.parametrize("name", BUCKETS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_captures_hold_the_bias(name, side, tmp_path):
    """What is judged is what the model's own output projection reads."""
    model, inputs, read = seeded(BUCKETS[name]), padded(side), []
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
    assert away["exact"] < 1e-3 < away["tuned"] < away["near"]


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


def test_local_layers_of_gpt_neo_keep_their_window():
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_heads": 4, "num_layers": 2}
    kinds = {"attention_types": [[["global", "local"], 1]], "window_size": 4}
    model = seeded(lambda: GPTNeoForCausalLM(GPTNeoConfig(**sizes, **kinds)))
    before = run(model, input_ids=tokens())
    with fk.apply(model, [WINDOW]):
        close(run(model, input_ids=tokens()), before)
    assert fk.capture(model, [tokens()]).layers == 1


# --- modules that are told to ask ----------------------------------------------------------------------------------


def standing(model):
    return sum(isinstance(part, Restated) for module in model.modules() for part in vars(module).values())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_plan_and_the_model_gets_its_own_back(copied):
    model = seeded(ALL["mpnet"])
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
    held = [part for module in other.modules() for part in vars(module).values() if isinstance(part, Restated)]
    assert len(held) == 2
    assert not any(id(part.module) in ours for part in held)


@pytest.mark.parametrize("name", ["mpnet", "bloom", "mpt"])
def test_calls_under_way_end_as_they_began(name):
    """A plan comes between the masks of a call and its attention, in another thread."""
    model, inputs, here = seeded(ALL[name]), padded("right"), []
    inputs.pop("position_ids")
    before = run(model, **inputs)
    first = next(part for part in model.modules() if type(part).__name__ in ("MPNetLayer", "BloomBlock", "MptBlock"))

    def come(*_):
        thread = threading.Thread(target=lambda: here.append(fk.apply(model, fk.Plan(fk.Window(1)))))
        thread.start()
        thread.join()

    hook = first.register_forward_pre_hook(come)
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
    with pytest.raises(ValueError, match="its scores depend on contents and distances together"):
        fk.apply(deberta, FEW)
    model = seeded(ALL["mpnet"])
    attention = model.encoder.layer[1].attention.attn
    attention.forward = hooked = attention.forward
    with pytest.raises(ValueError, match=r"^model: expected MPNetSelfAttention.forward to be that of its class"):
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
