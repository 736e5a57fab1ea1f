"""A plan inside a model: the same model with other attention, and afterwards the same model to the bit."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")

from transformers import BartConfig, BartModel, DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralModel

import fewkeys as fk
from fewkeys import flow
from fewkeys.integrations import interface, switch
from fewkeys.integrations.transformers import apply, capture, load_model
from tiny_models import GROUPED, MODELS, after_attention, bert, close, far, gpt2, llama, padded, run, tokens

EXACT = fk.Plan()
WINDOW = fk.Plan(fk.Window(3))


# --- the answer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_every_key_is_the_model_itself(name, side, impl):
    model, inputs = MODELS[name](), padded(side)
    before = run(model, **inputs)
    with apply(model, EXACT, impl=impl):
        close(run(model, **inputs), before, inputs.get("attention_mask"))
    with apply(model, fk.Plan(fk.Window(101)), impl=impl):
        close(run(model, **inputs), before, inputs.get("attention_mask"))


def test_each_layer_has_its_own_scale():
    model = gpt2(scale_attn_by_inverse_layer_idx=True)
    before = run(model, input_ids=tokens())
    assert far(before, run(gpt2(), input_ids=tokens()))
    with apply(model, EXACT):
        close(run(model, input_ids=tokens()), before)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", [fk.Window(3), fk.Sinks(2) | fk.Window(3)])
def test_padding_is_the_same_as_no_padding(name, side, keep):
    model, inputs = MODELS[name](), padded(side)
    with apply(model, fk.Plan(keep)):
        batch = run(model, **inputs)
        for row, real in enumerate(inputs["attention_mask"].bool()):
            alone = run(model, input_ids=inputs["input_ids"][row, real][None])
            close(batch[row, real], alone[0])
    assert far(run(model, **inputs)[1], batch[1]), "the plan changed nothing"


def test_stand_ins_do_not_see_padding():
    model, inputs = bert(), padded("right", (30, 40), 40)
    plan = fk.Plan(fk.select.Leverage(2) | fk.Window(3), fk.ClusterMeans(4))
    with apply(model, plan):
        batch = run(model, **inputs)
        alone = run(model, input_ids=inputs["input_ids"][:1, :30])
    close(batch[:1, :30], alone)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("plan", [EXACT, WINDOW, fk.Plan(fk.Sinks(1) | fk.Window(4))])
@pytest.mark.parametrize("steps", [[8, 1, 1, 1], [6, 4, 1], [1] * 11])
def test_decoding_with_a_cache_is_the_whole_forward(name, side, plan, steps):
    model, inputs = MODELS[name](), padded(side)
    with apply(model, plan), torch.no_grad():
        whole = model(**inputs).logits
        cache, start, parts = DynamicCache(config=model.config), 0, []
        for size in steps:
            part = {key: item[:, start : start + size] for key, item in inputs.items()}
            if side:
                part["attention_mask"] = inputs["attention_mask"][:, : start + size]
            parts.append(model(**part, past_key_values=cache).logits)
            start += size
    close(torch.cat(parts, 1), whole, inputs.get("attention_mask"))
    if plan is EXACT:
        close(whole, run(model, **inputs), inputs.get("attention_mask"))
    else:
        assert far(whole, run(model, **inputs))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation(name):
    model, inputs = MODELS[name](), padded("left")
    del inputs["position_ids"]
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before = model.generate(**inputs, **how)
    with apply(model, EXACT):
        assert torch.equal(model.generate(**inputs, **how), before)
    assert torch.equal(model.generate(**inputs, **how), before)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_call_that_exact_attention_answers_faster_is_the_models_own(name, side, monkeypatch):
    """Bit for bit; and a plan runs where it says `never_exact`, or where the model of the machine prefers it."""
    model, inputs, plan = MODELS[name](), padded(side), fk.budget(8, is_causal=name != "bert")
    before = run(model, **inputs)
    with apply(model, plan):
        assert torch.equal(run(model, **inputs), before)
    by_head = [plan, fk.budget(9, is_causal=name != "bert")] * (1 if name == "llama" else 2)
    with apply(model, [by_head] * 3):
        assert torch.equal(run(model, **inputs), before)
    with apply(model, plan.never_exact()):
        few = run(model, **inputs)
    assert far(few, before)
    monkeypatch.setattr(flow, "exact_is_faster", lambda *_: False)
    flow._gives_way.cache_clear()
    try:
        with apply(model, plan):
            assert torch.equal(run(model, **inputs), few)
    finally:
        flow._gives_way.cache_clear()


def test_a_call_unlike_the_last_one_takes_nothing_from_it(monkeypatch):
    """Of one model under one plan: longer, padded, in halves of a batch, under autocast, with a plan within."""
    model, plan = MODELS["bert"](), fk.budget(8)
    inputs = padded("right")
    whole = {"input_ids": inputs["input_ids"]}
    short = {"input_ids": inputs["input_ids"][:1, :5]}
    calls = [whole, inputs, whole, short, whole, inputs]
    before = [run(model, **call) for call in calls]
    with torch.autocast("cpu", torch.bfloat16):
        lowered = run(model, **whole)
    with apply(model, plan):
        for call, expected in zip(calls, before, strict=True):
            assert torch.equal(run(model, **call), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(run(model, **whole), lowered)
        assert torch.equal(run(model, **whole), before[0])
        with apply(model, plan.never_exact()):
            assert far(run(model, **whole), before[0])
        assert torch.equal(run(model, **whole), before[0])
    outer = apply(model, plan)
    with apply(model, plan.never_exact()), ThreadPoolExecutor(1) as threads:
        # Another thread has the outer plan.
        assert torch.equal(threads.submit(run, model, **whole).result(), before[0])
        assert far(run(model, **whole), before[0])
    outer.restore()
    with apply(model, [plan, plan.never_exact(), plan]):
        assert torch.equal(run(model, **whole), run(model, **whole))
        assert far(run(model, **whole), before[0])
    monkeypatch.setattr(flow, "exact_is_faster", lambda inputs, _: inputs.query.shape[-2] == 5)
    flow._gives_way.cache_clear()
    try:
        with apply(model, plan):
            assert torch.equal(run(model, **short), before[3])
            assert far(run(model, **whole), before[0])
    finally:
        flow._gives_way.cache_clear()


def test_a_plan_that_must_run_runs_by_the_executor_asked_for():
    """Also where exact attention is faster, as it is for so few tokens."""
    model = MODELS["bert"]()
    exact = run(model, input_ids=tokens())
    actual = []
    for impl in ("auto", "torch", "reference"):
        with apply(model, fk.budget(8).never_exact(), impl=impl):
            actual.append(run(model, input_ids=tokens()))
        torch.testing.assert_close(actual[-1], actual[0], rtol=1e-3, atol=1e-4)
        assert (actual[-1] - exact).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_each_layer_gets_what_attention_gives(name):
    """The first layer, whose inputs no plan has touched yet, holds exactly `fk.attention` of the captured inputs."""
    model = MODELS[name]()
    (call,) = capture(model, [tokens()]).calls(0)
    seen = []
    after_attention(model, name)[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with apply(model, WINDOW):
        run(model, input_ids=tokens())
    out = fk.attention(
        call.query,
        call.key,
        call.value,
        plan=WINDOW,
        is_causal=call.is_causal,
        scale=call.scale,
    )
    assert torch.equal(seen[0], out.transpose(1, 2).reshape(3, 11, 32))


@pytest.mark.parametrize("kind", ["sequence", "mapping"])
@pytest.mark.parametrize("name", MODELS)
def test_plans_per_layer_go_to_their_layer(name, kind):
    model = MODELS[name]()
    states = run_states(model)
    for chosen in range(3):
        plans = [WINDOW if layer == chosen else EXACT for layer in range(3)]
        with apply(model, plans if kind == "sequence" else dict(enumerate(plans))):
            changed = run_states(model)
        for layer in range(chosen + 1):
            close(changed[layer], states[layer])
        assert far(changed[chosen + 1], states[chosen + 1])


@torch.no_grad()
def run_states(model):
    return model(tokens(), output_hidden_states=True).hidden_states


def test_gradients_pass():
    model = llama()

    def gradients():
        model.zero_grad()
        model(tokens()).logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    before = gradients()
    with apply(model, EXACT):
        during = gradients()
    for one, other in zip(before, during, strict=True):
        close(one, other)


def test_randomness_comes_from_the_generator():
    model, plan = bert(), fk.Plan(fk.RandomKeys(2))

    def drawn(seed):
        with apply(model, plan, generator=torch.Generator().manual_seed(seed)):
            return run(model, input_ids=tokens())

    assert torch.equal(drawn(5), drawn(5))
    assert far(drawn(5), drawn(6))


def test_windows_of_the_model_that_cover_the_text():
    torch.manual_seed(4)
    model = MistralModel(MistralConfig(**GROUPED, sliding_window=11)).eval()
    before = run(model, input_ids=tokens())
    with apply(model, EXACT):
        close(run(model, input_ids=tokens()), before)


def bart():
    torch.manual_seed(5)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(vocab_size=60, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, init_std=0.3, **sizes)
    return BartModel(config).eval()


def test_encoder_decoder():
    model = bart()
    inputs = {k: v for k, v in padded("right").items() if k != "position_ids"} | {"decoder_input_ids": tokens(3, 5)}
    before = run(model, **inputs)
    with apply(model, EXACT):
        close(run(model, **inputs), before)
    assert torch.equal(run(model, **inputs), before)


def test_padding_of_the_source_does_not_mark_tokens_of_the_target():
    """Where both are as long, one more padded token of the source changes nothing."""
    model, inputs = bart(), {name: x for name, x in padded("right").items() if name != "position_ids"}
    more = {name: torch.nn.functional.pad(x, (0, 1)) for name, x in inputs.items()}
    with apply(model, [EXACT, EXACT, fk.budget(4, cohorts=2).never_exact()]):  # cross-attention
        same, longer = (run(model, decoder_input_ids=tokens(), **given) for given in (inputs, more))
    close(same, longer)


# --- the model afterwards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_restored_to_the_bit(name, implementation):
    model, inputs = MODELS[name](), padded("left")
    model.set_attn_implementation(implementation)
    before = run(model, **inputs)
    applied = apply(model, WINDOW)
    assert far(run(model, **inputs), before)
    applied.restore()
    assert model.config._attn_implementation == implementation
    assert torch.equal(run(model, **inputs), before)
    applied.restore()
    assert torch.equal(run(model, **inputs), before)


def test_a_restored_plan_cannot_be_entered():
    applied = apply(bert(), WINDOW)
    applied.restore()
    with pytest.raises(ValueError, match=r"^model: expected an active plan"), applied:
        pass


def test_restored_after_an_exception():
    model = llama()
    before = run(model, input_ids=tokens())
    with pytest.raises(RuntimeError, match="mine"), apply(model, WINDOW):
        raise RuntimeError("mine")
    assert torch.equal(run(model, input_ids=tokens()), before)


@pytest.mark.parametrize("order", [[2, 1, 0], [0, 1, 2], [1, 2, 0]])
def test_nested_plans_undo_in_any_order(order):
    model = bert()
    plans = [fk.Plan(fk.Window(size)) for size in (1, 3, 5)]
    alone = []
    for plan in plans:
        with apply(model, plan):
            alone.append(run(model, input_ids=tokens()))
    before = run(model, input_ids=tokens())
    applied, active = [apply(model, plan) for plan in plans], [0, 1, 2]
    for index in order:
        assert torch.equal(run(model, input_ids=tokens()), alone[active[-1]])
        applied[index].restore()
        active.remove(index)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(run(model, input_ids=tokens()), before)


def test_a_part_and_the_whole():
    """Applied to the base model and to the model around it, which share modules and a configuration."""
    model = llama()
    inner, outer = apply(model.model, EXACT), apply(model, WINDOW)
    inner.restore()
    assert model.config._attn_implementation == interface.NAME
    outer.restore()
    assert model.config._attn_implementation == "sdpa"


def test_models_that_share_a_configuration():
    config = LlamaConfig(**GROUPED)
    one, other = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    before = run(one, input_ids=tokens())
    first, second = apply(one, WINDOW), apply(other, WINDOW)
    few = run(other, input_ids=tokens())
    first.restore()
    assert torch.equal(run(other, input_ids=tokens()), few)
    close(run(one, input_ids=tokens()), before)
    second.restore()
    assert torch.equal(run(one, input_ids=tokens()), before)


@pytest.mark.long
def test_nothing_keeps_a_model_alive():
    gc.collect()  # models of earlier tests, dead but in cycles, would leave the counts halfway
    before = len(switch.switched)
    model = bert()
    applied = apply(model, WINDOW)
    run(model, input_ids=tokens())
    alive = weakref.ref(model)
    del model, applied
    gc.collect()
    assert alive() is None
    assert (len(switch.switched)) == before


def test_a_dropped_handle_changes_nothing():
    model = bert()
    before = run(model, input_ids=tokens())
    apply(model, WINDOW)
    gc.collect()
    assert far(run(model, input_ids=tokens()), before)


def test_without_transformers(monkeypatch):
    monkeypatch.setattr(interface, "find_spec", lambda _: None)
    for use in (lambda: apply(bert(), EXACT), lambda: capture(bert(), [tokens()]), lambda: load_model("anything")):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'fewkeys\[hf\]'"):
            use()
