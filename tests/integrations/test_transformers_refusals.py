"""What a model may ask of its attention and a plan does not give is refused, never answered wrongly."""

import copy
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("transformers")

from transformers import (
    BertModel,
    BloomConfig,
    BloomModel,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    XLNetConfig,
    XLNetModel,
)

import fewkeys as fk
from fewkeys.integrations import switch
from fewkeys.integrations.transformers import apply
from tiny_models import GROUPED, MODELS, bert, llama, run, tokens

EXACT = fk.Plan()
WINDOW = fk.Plan(fk.Window(3))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["argument", "configuration"])
def test_attention_weights_are_refused(name, how):
    model = MODELS[name]()
    asked = {"output_attentions": True} if how == "argument" else {}
    if how == "configuration":
        model.set_attn_implementation("eager")
        model.config.output_attentions = True
    with apply(model, EXACT), pytest.raises(ValueError, match="output_attentions"):
        run(model, input_ids=tokens(), **asked)
    run(model, input_ids=tokens(), **asked)


def test_the_fix_that_the_refusal_names_works_at_once():
    model = bert()
    with apply(model, EXACT):
        with pytest.raises(ValueError, match=r"or model\.set_attn_implementation\('eager'\)"):
            run(model, input_ids=tokens(), output_attentions=True)
        model.set_attn_implementation("eager")
        assert len(model(tokens(), output_attentions=True).attentions) == 3


def test_a_model_from_a_copied_configuration_is_told_how_to_give_weights():
    """The copy names our attention for good; the error names the way back."""
    with apply(llama(), EXACT) as applied:
        model = LlamaForCausalLM(copy.deepcopy(applied.model.config)).eval()
    with pytest.raises(ValueError, match=r"output_attentions: .*, or model\.set_attn_implementation\('eager'\)$"):
        run(model, input_ids=tokens(), output_attentions=True)
    model.set_attn_implementation("eager")
    assert len(model(tokens(), output_attentions=True).attentions) == 3


def test_calls_that_are_refused():
    model = llama()
    ids = tokens(2, 5)
    packed = {"position_ids": torch.tensor([[0, 1, 2, 0, 1]] * 2), "use_cache": False}
    square = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    cases = {
        "static or preallocated cache": {"past_key_values": StaticCache(config=model.config, max_cache_len=9)},
        "packed causal sequences": packed,
        "not one prepared for each query": {"attention_mask": square},
        "cu_seq_lens_q: expected places from 0 to the 5 tokens of one row": {"cu_seq_lens_q": torch.tensor([0, 3, 5])},
        "mystery: LlamaAttention passes this": {"mystery": 1.0},
    }
    for said, more in cases.items():
        with apply(model, EXACT), pytest.raises(ValueError, match=said):
            run(model, input_ids=ids, **more)
    added = torch.zeros(2, 1, 5, 5).masked_fill(~square, torch.finfo(torch.float32).min)
    with apply(model, EXACT), pytest.raises(ValueError, match="not one prepared for each query"):
        run(model, input_ids=ids, attention_mask=added)
    cache = StaticCache(config=model.config, max_cache_len=9)
    run(model, input_ids=ids, past_key_values=cache)
    with apply(model, EXACT), pytest.raises(ValueError, match="static or preallocated cache"):
        run(model, input_ids=ids[:, :1], past_key_values=cache)


class Alone(torch.nn.Module):
    """A model as a function of token ids."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids)[0]


def faked(model, ids):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(*ids)


RECORDERS = {
    "trace": partial(torch.jit.trace, check_trace=False),
    "export": torch.export.export,
    "strict export": partial(torch.export.export, strict=True),
    "fake tensors": faked,
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_graphs_that_outlive_the_plan_are_refused(name, recorder):
    """One that is recorded has the sizes, masks and modules of one call."""
    model = MODELS[name]()
    with apply(model, EXACT), pytest.raises(Exception, match=r"compile by torch\.compile"):
        RECORDERS[recorder](Alone(model), (tokens(2, 5),))


def test_dropout_is_refused():
    model = bert().train()
    with apply(model, EXACT), pytest.raises(ValueError, match=r"dropout: expected 0, got 0\.1; call model\.eval\(\)"):
        run(model, input_ids=tokens())
    quiet = LlamaForCausalLM(LlamaConfig(**GROUPED)).train()
    with apply(quiet, EXACT):
        run(quiet, input_ids=tokens())


def test_architectures_that_are_refused():
    old = XLNetModel(XLNetConfig(vocab_size=60, d_model=32, n_layer=1, n_head=4, d_inner=32)).eval()
    with pytest.raises(ValueError, match="XLNetModel does not use transformers' attention interface"):
        apply(old, EXACT)
    alibi = BloomModel(BloomConfig(vocab_size=60, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="BloomModel does not use transformers' attention interface"):
        apply(alibi, EXACT)


def test_a_class_that_does_not_let_itself_be_switched(monkeypatch):
    model = bert()
    monkeypatch.setattr(BertModel, "_can_set_attn_implementation", classmethod(lambda _: False))
    before = run(model, input_ids=tokens())
    with pytest.raises(ValueError, match="BertModel does not let its attention implementation be set"):
        apply(model, WINDOW)
    assert torch.equal(run(model, input_ids=tokens()), before)
    assert model.config not in switch.switched


def test_a_rest_that_is_not_causal_is_refused_in_a_causal_model():
    model = llama()
    before = run(model, input_ids=tokens())
    plan = fk.Plan(fk.Window(3), fk.ClusterMeans(4))
    with pytest.raises(ValueError, match="ClusterMeans"), apply(model, plan):
        run(model, input_ids=tokens())
    assert torch.equal(run(model, input_ids=tokens()), before)


def test_bad_arguments():
    model = bert()
    for plan, error, said in (
        (fk.Window(3), TypeError, "expected a Plan, or one per layer, got Window"),
        ([WINDOW] * 2, ValueError, "each of 3 attention layers, got 2"),
        ({0: WINDOW, 5: WINDOW}, ValueError, r"every layer from 0 on, got \[0, 5\]"),
        ([WINDOW, None, WINDOW], TypeError, r"a tuple of plans in layer 1, .* got \(None,\)"),
    ):
        with pytest.raises(error, match=said):
            apply(model, plan)
    with pytest.raises(ValueError, match=r"impl: expected one of .*, got 'fast'"):
        apply(model, WINDOW, impl="fast")
    with pytest.raises(TypeError, match=r"generator: expected a torch\.Generator or None, got int"):
        apply(model, WINDOW, generator=3)
    with pytest.raises(TypeError, match=r"model: expected a transformers PreTrainedModel, .* got Linear with 0 inside"):
        apply(torch.nn.Linear(2, 2), WINDOW)
    assert model.config._attn_implementation == "sdpa"
