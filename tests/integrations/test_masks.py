"""What a call sees is what its mask says, whatever the flags of the attention module; and what models do with masks."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import BigBirdPegasusConfig, BigBirdPegasusForConditionalGeneration, DogeConfig, DogeForCausalLM

import fewkeys as fk
from fewkeys.captures.capture import AttentionInputs
from fewkeys.integrations import interface, switch
from fewkeys.integrations.terms import in_terms, with_sink
from tiny_models import GROUPED, MODELS, bert, close, far, llama, padded, run, tokens

EXACT = fk.Plan()
FEW = fk.Plan(fk.Window(3))


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_flags_do_not_count(make, flag, side):
    """Models that were only ever run by "eager" have wrong ones, or none."""
    model, inputs = make(), padded(side)
    model.set_attn_implementation("eager")
    for module in interface.attention_modules(model):
        module.is_causal = flag
        if flag is None:
            del module.is_causal
    before = run(model, **inputs)
    with fk.apply(model, EXACT):
        close(run(model, **inputs), before, inputs.get("attention_mask"))


def test_a_call_without_a_mask_is_what_the_own_implementation_takes_it_for():
    """ "eager" sees every key; SDPA goes by the flag."""
    model = llama()
    attention, heads = model.model.layers[0].self_attn, torch.randn(3, 1, 4, 7, 8)
    for implementation, causal in (("eager", False), ("sdpa", True)):
        model.set_attn_implementation(implementation)
        with fk.apply(model, EXACT):
            output, _ = interface._attention_forward(attention, *heads, None, scaling=0.4)
        want = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal, scale=0.4)
        close(output.transpose(1, 2), want)


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("size", [4, 5, None])
def test_a_window_beside_a_learned_sink(size, is_causal, offset):
    """The sink stands before all keys, so that places count from one."""
    if offset and not is_causal:
        return
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 12 - offset, 8, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, 2, 4, 12, 8, generator=draw, dtype=torch.float64)
    sink = torch.randn(4, generator=draw, dtype=torch.float64)
    call = AttentionInputs(query, key, value, 0.4, is_causal, query_offset=offset, window=size, sink=sink)
    sunk = with_sink(call)
    output = fk.attention(sunk.query, sunk.key, sunk.value, plan=in_terms(call, None), **sunk.options())
    place = torch.arange(offset, 12)[:, None] - torch.arange(12)
    seen = place >= 0 if is_causal else place > -99
    if size is not None:
        seen = seen & (place < size if is_causal else (place <= size // 2) & (-place <= (size - 1) // 2))
    scores = (query @ key.mT * 0.4).masked_fill(~seen, -torch.inf)
    column = sink.view(1, 4, 1, 1).expand(2, 4, 12 - offset, 1)
    close(output, torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value)
    if size is not None:  # the same by a plan
        plan = in_terms(replace(call, window=None), fk.Plan(fk.Window(size)))
        close(fk.attention(sunk.query, sunk.key, sunk.value, plan=plan, **sunk.options()), output)


def test_attention_beside_the_interface_gets_what_the_mask_stands_for():
    """BigBirdPegasus's encoder adds the mask to scores of its own."""
    torch.manual_seed(5)
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32, "vocab_size": 60, "init_std": 0.3}
    model = BigBirdPegasusForConditionalGeneration(BigBirdPegasusConfig(**sizes, attention_type="original_full")).eval()
    inputs = {"input_ids": tokens(), "attention_mask": padded("right")["attention_mask"]}
    inputs["decoder_input_ids"] = tokens(3, 5)
    before = run(model, **inputs)
    with fk.apply(model, EXACT):
        close(run(model, **inputs), before)


def test_a_model_that_computes_with_its_mask_is_refused():
    sizes = GROUPED | {"num_hidden_layers": 1, "keep_window_size": 4}
    model = DogeForCausalLM(DogeConfig(**sizes)).eval()
    before = run(model, input_ids=tokens())
    with (
        fk.apply(model, EXACT),
        pytest.raises(ValueError, match="attention_mask: expected a model that passes its mask"),
    ):
        run(model, input_ids=tokens())
    assert torch.equal(run(model, input_ids=tokens()), before)


def test_an_implementation_that_is_set_meanwhile_stays():
    model = bert()
    with fk.apply(model, FEW):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    with fk.apply(model, FEW):
        model.set_attn_implementation("eager")
        with fk.apply(model, FEW):
            assert far(run(model, input_ids=tokens()), run(bert(), input_ids=tokens()))
    assert model.config._attn_implementation == "eager"
    assert not switch.switched


@torch.no_grad()
@pytest.mark.parametrize("make", [bert, llama])
def test_a_mask_of_ours_means_the_same_to_sdpa(make):
    """Another thread takes the plan away while a call is halfway through the layers."""
    model, inputs = make(), padded("right")
    before, applied = run(model, **inputs), fk.apply(model, EXACT)
    layer = (model.encoder.layer if make is bert else model.model.layers)[1]
    hook = layer.register_forward_pre_hook(lambda *_: applied.restore())
    close(run(model, **inputs), before, inputs["attention_mask"])
    hook.remove()
    assert torch.equal(run(model, **inputs), before)
