"""Caps and learned sinks that a model adds to its scores, and parts of encoder-decoders."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    BartConfig,
    BartModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    WhisperConfig,
    WhisperModel,
)

import fewkeys as fk
from fewkeys.captures.capture import AttentionInputs
from fewkeys.integrations.terms import in_terms, with_sink
from tiny_models import GROUPED, close, far, padded, run, tokens

EXACT = fk.Plan()
FEW = fk.budget(8, is_causal=True).never_exact()
KINDS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}


def gemma():
    torch.manual_seed(6)
    sizes = {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "pad_token_id": 0}
    return Gemma2ForCausalLM(Gemma2Config(**GROUPED, **KINDS, **sizes)).eval()


def gpt_oss():
    torch.manual_seed(6)
    small = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "pad_token_id": 0}
    model = GptOssForCausalLM(GptOssConfig(**GROUPED, **KINDS, **small)).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [gemma, gpt_oss])
def test_an_exact_plan_is_the_model_itself(make, side):
    model = make()
    inputs = {name: rows for name, rows in padded(side).items() if name != "position_ids"}
    before = run(model, **inputs)
    for plan in (EXACT, fk.Plan(fk.Window(30))):
        with fk.apply(model, plan):
            close(run(model, **inputs), before, inputs["attention_mask"])
    with fk.apply(model, FEW):
        assert far(run(model, **inputs), before)
    model.config.attn_logit_softcapping = None
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
        getattr(layer.self_attn, "sinks", torch.zeros(1)).data.fill_(-1e4)
    assert far(run(model, **inputs), before)


@pytest.mark.parametrize("make", [gemma, gpt_oss])
def test_generation(make):
    model = make()
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    before = model.generate(tokens(2), **how)
    with fk.apply(model, EXACT):
        assert torch.equal(model.generate(tokens(2), **how), before)


@pytest.mark.parametrize("plan", [fk.Plan(fk.Window(4)), fk.budget(64, is_causal=True), EXACT], ids=str)
def test_a_sink_is_one_more_column_without_a_value(plan):
    """Each query's weights with a further score in their sum; scans of so few keys keep them all."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 12, 8, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 12, 8, generator=draw, dtype=torch.float64)
    sink, real = torch.randn(4, generator=draw, dtype=torch.float64), torch.ones(2, 12, dtype=torch.bool)
    real[0, 7:] = False
    call = AttentionInputs(query, key, value, 0.4, True, real, sink=sink)
    sunk = with_sink(call)
    actual = fk.attention(sunk.query, sunk.key, sunk.value, plan=in_terms(call, plan), **sunk.options())
    seen = torch.ones(12, 12).tril().bool() & real[:, None, None]
    if plan.keep == fk.Window(4):
        seen = seen.triu(-3)
    scores = (query @ key.repeat_interleave(2, 1).mT * 0.4).masked_fill(~seen, -torch.inf)
    weights = torch.cat([scores, sink.view(1, 4, 1, 1).expand(2, 4, 12, 1)], -1).softmax(-1)[..., :-1]
    close(actual, weights @ value.repeat_interleave(2, 1))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("count", [60, 14])
def test_a_sink_is_kept_by_every_cohort(count, ratio):
    """Also where few queries leave a single cohort."""
    draw = torch.Generator().manual_seed(0)
    query, sink = torch.randn(2, 4, count, 8, generator=draw), torch.randn(4, generator=draw)
    key, value = torch.randn(2, 2, 4 // ratio, count, 8, generator=draw)
    call = AttentionInputs(query, key, value, 0.4, False, sink=sink)
    sunk, plan = with_sink(call), in_terms(call, fk.budget(24).never_exact())
    graph = plan.keep.graph(sunk.query, sunk.key, sunk.value)
    assert graph.columns.place is not None
    assert graph.to_mask()[..., 0].all()
    auto, by_torch, reference = (
        fk.attention(sunk.query, sunk.key, sunk.value, plan=plan, **sunk.options(impl=impl))
        for impl in ("auto", "torch", "reference")
    )
    close(auto, reference)
    close(by_torch, reference)


def test_what_captures_and_caches_do_not_know_is_refused():
    for make, said in ((gemma, "scores capped at 2.0"), (gpt_oss, "a learned sink")):
        model = make()
        with pytest.raises(ValueError, match=said):
            fk.capture(model, [tokens()])
        with pytest.raises(ValueError, match="capped scores, learned sinks, a distance bias"):
            model(tokens(), past_key_values=fk.cache(model, FEW))
    assert fk.capture(gemma(), [tokens()], weights=fk.weights.Softcap(2.0)).layers == 2


# --- parts of encoder-decoders -----------------------------------------------------------------------------------


def bart():
    torch.manual_seed(5)
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(vocab_size=60, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, init_std=0.3, **sizes)
    return BartModel(config).eval(), {"input_ids": tokens(), "decoder_input_ids": tokens(3, 5)}


def whisper():
    torch.manual_seed(5)
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32, "num_mel_bins": 6, "init_std": 0.3}
    config = WhisperConfig(vocab_size=60, max_source_positions=40, pad_token_id=0, bos_token_id=1, **sizes)
    config.eos_token_id = config.decoder_start_token_id = 2
    sound = torch.randn(2, 6, 80, generator=torch.Generator().manual_seed(0))
    return WhisperModel(config).eval(), {"input_features": sound, "decoder_input_ids": tokens(2, 5)}


@pytest.mark.parametrize("make", [bart, whisper])
def test_the_encoder_inside_the_whole(make):
    model, inputs = make()
    before = run(model, **inputs)
    with fk.apply(model.encoder, fk.budget(8).never_exact()):
        few = run(model, **inputs)
        state = run(model.encoder, **{model.main_input_name: inputs[model.main_input_name]})
    assert far(few, before)
    close(run(model, encoder_outputs=(state,), decoder_input_ids=inputs["decoder_input_ids"]), few)
    assert torch.equal(run(model, **inputs), before)


@pytest.mark.parametrize("make", [bart, whisper])
def test_the_encoder_is_captured_alone(make):
    model, inputs = make()
    name = model.main_input_name
    capture = fk.capture(model, [{name: inputs[name]}], part="encoder")
    assert (capture.layers, capture.is_causal) == (2, False)
    with fk.apply(model.encoder, fk.ModelPlan(((fk.Plan(fk.Window(3)),) * 4,) * capture.layers)):
        assert far(run(model, **inputs), run(make()[0], **inputs))
    with pytest.raises(ValueError, match=f"batches: expected .*{name}.* in batch 0, got"):
        fk.capture(model, [{name: inputs[name][:0]}], part="encoder")


@pytest.mark.parametrize("make", [bart, whisper])
def test_the_encoder_is_judged_alone(make):
    """It has the configuration of the whole model, and no decoder: there is no part to name."""
    model, inputs = make()
    batches = [{model.main_input_name: inputs[model.main_input_name]}]
    if make is bart:
        batches[0]["attention_mask"] = padded("right")["attention_mask"]
    whole = fk.capture(model, batches, part="encoder", gradients=True)
    alone = fk.capture(model.encoder, batches, gradients=True)
    assert (alone.layers, alone.sequences) == (whole.layers, whole.sequences)
    for field in ("query", "gradient"):
        close(*(getattr(next(captured.calls(0)), field) for captured in (alone, whole)))
    report = fk.compare(alone, {"few": fk.budget(8)}, model=model.encoder, batches=batches)
    assert 0 < report.rows[0].error < 1
    assert 0.5 < report.rows[0].cosine < 1
    assert fk.spot_check(model.encoder, batches, fk.budget(8)).error == pytest.approx(report.rows[0].error, rel=0.3)
