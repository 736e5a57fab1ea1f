"""Layers with a window of their own keep exactly that window; the others take the plan."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    Cohere2Config,
    Cohere2Model,
    Gemma3TextConfig,
    Gemma3TextModel,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    Olmo3Config,
    Olmo3Model,
    Qwen2Config,
    Qwen2Model,
    Qwen2MoeConfig,
    Qwen2MoeModel,
)

import fewkeys as fk
from fewkeys.integrations import transformers
from tiny_models import GROUPED, close, far, padded, run, tokens

EXACT = fk.Plan()
FEW = fk.Plan(fk.Sinks(1))
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
DECODER = GROUPED | {"pad_token_id": 0}
MIXED = DECODER | {"sliding_window": 4, "layer_types": KINDS}
MAKERS = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**DECODER, sliding_window=4)).model,
    "qwen2": lambda: Qwen2Model(Qwen2Config(**MIXED, use_sliding_window=True)),
    "qwen2-moe": lambda: Qwen2MoeModel(
        Qwen2MoeConfig(
            **MIXED, use_sliding_window=True, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        )
    ),
    "gemma3": lambda: Gemma3TextModel(Gemma3TextConfig(**MIXED, head_dim=8)),
    "embedding-gemma": lambda: Gemma3TextModel(
        Gemma3TextConfig(**MIXED | {"sliding_window": 6}, head_dim=8, use_bidirectional_attention=True)
    ),
    "olmo3": lambda: Olmo3Model(Olmo3Config(**MIXED)),
    "cohere2": lambda: Cohere2Model(Cohere2Config(**MIXED)),
    "modernbert": lambda: ModernBertModel(
        ModernBertConfig(
            vocab_size=60, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
            local_attention=6, layer_types=KINDS, pad_token_id=0, initializer_range=0.3,
        )
    ),
}  # fmt: skip


@pytest.fixture(params=MAKERS)
def model(request):
    torch.manual_seed(7)
    return MAKERS[request.param]().eval()


def windows(model):
    return [kind == "sliding_attention" for kind in KINDS] if hasattr(model.config, "layer_types") else [True] * 3


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_exact_plan_is_the_model_itself(model, side):
    inputs = {name: rows for name, rows in padded(side).items() if name != "position_ids"}
    before = run(model, **inputs)
    with fk.apply(model, EXACT):
        close(run(model, **inputs), before, inputs["attention_mask"])
        assert far(run(model, **inputs, output_hidden_states=False), run(model, input_ids=tokens(seed=9)))


def test_windows_keep_what_they_are_and_others_take_the_plan(model):
    """Two layers see four keys: their plan would leave one."""
    inputs, every = {"input_ids": tokens()}, windows(model)
    states = states_of(model, inputs)
    with fk.apply(model, FEW):
        actual = states_of(model, inputs)
    first = every.index(False) if False in every else 3
    for before, after in zip(states[: first + 1], actual[: first + 1], strict=True):
        close(after, before)
    assert first == 3 or far(actual[first + 1], states[first + 1])


@torch.no_grad()
def states_of(model, inputs):
    return model(**inputs, output_hidden_states=True).hidden_states


def test_a_capture_by_given_weights_keeps_windows(model):
    """Later layers are captured from the states that windows give."""
    if all(windows(model)):
        return
    want = next(fk.capture(model, [tokens()]).calls(0))
    actual = next(fk.capture(model, [tokens()], weights=fk.weights.Softmax()).calls(0))
    close(actual.query, want.query)
    close(actual.value, want.value)


def test_capture_compare_tune_and_spot_check_see_the_other_layers(model):
    if all(windows(model)):
        with pytest.raises(ValueError, match="layers without a sliding window"):
            fk.capture(model, [tokens()])
        with pytest.raises(ValueError, match="a model with layers that see every key"):
            fk.spot_check(model, tokens(), fk.Plan(fk.Window(3)))
        return
    capture = fk.capture(model, [tokens()])
    assert capture.layers == 1
    plan = fk.ModelPlan(((FEW,) * capture.kv_heads,))
    report = fk.compare(capture, {"few": plan, "exact": EXACT}, model=model, batches=[tokens()])
    assert report.rows[0].error > 0.1 > 1e-4 > report.rows[1].error
    assert report.rows[0].token_cosine < 0.999 < report.rows[1].token_cosine
    with fk.apply(model, FEW):
        want = run(model, input_ids=tokens())
    with fk.apply(model, plan):
        assert torch.equal(run(model, input_ids=tokens()), want)
    assert len(fk.spot_check(model, tokens(), FEW).per_layer) == 1
    with pytest.raises(ValueError, match="each of 3 attention layers, or of the 1 that see every key, got 2"):
        fk.apply(model, [FEW] * 2)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3"])
def test_decoding_with_a_cache(name):
    """Whose sliding layers hold the latest keys alone."""
    torch.manual_seed(7)
    model, ids = MAKERS[name]().eval(), tokens(2, 15)
    with fk.apply(model, fk.Plan(fk.Sinks(1) | fk.Window(5))), torch.no_grad():
        whole, cache, parts = model(ids)[0], None, []
        for start, stop in ((0, 9), (9, 13), (13, 14), (14, 15)):
            out = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out[0])
    close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_last_layers_that_see_the_last_queries_only(count, side):
    """Those of Gemma 4 that read the keys of layers before them get a part of the mask."""
    torch.manual_seed(7)
    sizes = {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    sizes |= {"num_hidden_layers": 4, "layer_types": KINDS[:2] * 2, "vocab_size_per_layer_input": 60}
    model = Gemma4ForCausalLM(Gemma4TextConfig(**MIXED | sizes)).eval()
    inputs = {name: rows for name, rows in padded(side).items() if name != "position_ids"}
    real = inputs["attention_mask"][:, -count:]
    before = run(model, **inputs, logits_to_keep=count)
    for plan in (EXACT, fk.Plan(fk.Window(30))):
        with fk.apply(model, plan):
            close(run(model, **inputs, logits_to_keep=count), before, real)
    with fk.apply(model, FEW):
        few = run(model, **inputs, logits_to_keep=count)
        close(few, run(model, **inputs, logits_to_keep=0)[:, -count:], real)
    assert far(few, before)


GAPS = torch.tensor([[1] * 14, [1] * 4 + [0] * 3 + [1] * 7, [0] * 2 + [1] * 12])


@pytest.mark.parametrize("is_fast", [False, True])
def test_windows_count_padding_between_tokens_as_the_model_does(model, is_fast, monkeypatch):
    """Whatever is expected to be faster."""
    monkeypatch.setattr(transformers, "gives_way", lambda *_: is_fast)
    inputs = {"input_ids": tokens(3, 14), "attention_mask": GAPS}
    with fk.apply(model, EXACT):
        actual = run(model, **inputs)
    close(actual, run(model, **inputs), GAPS)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@torch.no_grad()
def test_a_cache_refuses_padding_between_the_tokens_of_a_window(name):
    """In one call, or after a call that ended with it."""
    model, ids = MAKERS[name]().eval(), tokens(3, 14)
    for ends in ((0, 14), (0, 7, 14), (0, 6, 7, 14)):
        cache = fk.cache(model, fk.Plan(fk.Window(50)))
        *before, last = (
            (ids[:, a:b], {"attention_mask": GAPS[:, :b], "past_key_values": cache}) for a, b in pairwise(ends)
        )
        for piece, options in before:
            model(piece, **options)
        with pytest.raises(ValueError, match=r"^attention_mask: .* between its tokens"):
            model(last[0], **last[1])
        assert cache.get_seq_length() < 14


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@torch.no_grad()
def test_a_piece_may_be_padding_alone(name):
    torch.manual_seed(7)
    model, ids = MAKERS[name]().eval(), tokens(2, 14)
    real = (torch.arange(14) >= 6).long().expand(2, -1)
    want = model(ids, attention_mask=real)[0]
    for cache, plan in ((fk.cache(model, fk.Plan(fk.Window(50))), None), (None, fk.Plan(fk.Window(50)))):
        applied = fk.apply(model, plan) if plan else nullcontext()
        with applied:
            parts = []
            for start, stop in ((0, 5), (5, 9), (9, 14)):
                out = model(ids[:, start:stop], attention_mask=real[:, :stop], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                parts.append(out[0])
        close(torch.cat(parts, 1), want, real)


def test_chunks_are_refused():
    torch.manual_seed(7)
    sizes = {"head_dim": 8, "intermediate_size_mlp": 32, "num_local_experts": 2, "attention_chunk_size": 8}
    kinds = {"no_rope_layers": [1, 1, 0], "layer_types": ["chunked_attention"] * 2 + ["full_attention"]}
    model = Llama4ForCausalLM(Llama4TextConfig(**GROUPED, **sizes, **kinds, pad_token_id=0)).eval()
    before = run(model, input_ids=tokens(length=8))
    with fk.apply(model, EXACT):
        close(run(model, input_ids=tokens(length=8)), before)
        with pytest.raises(ValueError, match="attention_chunk_size: expected at most 8 tokens, one chunk"):
            run(model, input_ids=tokens(length=9))
