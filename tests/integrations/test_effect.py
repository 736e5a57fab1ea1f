"""The effect on a whole model: cosines of its hidden states, every layer attending by the plan."""

import pytest
import torch
import transformers

import fewkeys as fk
from fewkeys.integrations.compare import compare
from fewkeys.integrations.transformers import apply, capture


@pytest.fixture(scope="module", params=["encoder", "decoder"])
def model(request):
    torch.manual_seed(0)
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 50,
        "initializer_range": 0.5,
    }
    if request.param == "encoder":
        config = transformers.BertConfig(**small, intermediate_size=32, max_position_embeddings=32)
        return transformers.BertModel(config, add_pooling_layer=False).eval()
    config = transformers.LlamaConfig(**small, intermediate_size=32, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def batches():
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (3, 24), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    return [{"input_ids": ids[:2], "attention_mask": mask[:2]}, ids[2:]]


def test_cosines_are_those_of_pooled_and_single_states(model, batches):
    plans = {"exact": fk.Plan(), "window": fk.Plan(fk.Window(3))}
    base = model.base_model
    with torch.no_grad():
        before = [base(**b).last_hidden_state if isinstance(b, dict) else base(b).last_hidden_state for b in batches]
    actual = compare(capture(model, batches), plans, model=model, batches=batches)
    exact, window = actual.rows
    assert (exact.cosine, exact.cosine_min, exact.token_cosine) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)
    with apply(model, plans["window"]), torch.no_grad():
        after = [base(**b).last_hidden_state if isinstance(b, dict) else base(b).last_hidden_state for b in batches]
    lengths = [24, 15, 24]
    a, b = ([state[:n].double() for state, n in zip([*x[0], *x[1]], lengths, strict=True)] for x in (before, after))
    pooled = [torch.cosine_similarity(x.mean(0), y.mean(0), dim=0) for x, y in zip(a, b, strict=True)]
    single = torch.cosine_similarity(torch.cat(a), torch.cat(b), dim=-1)
    assert window.cosine == pytest.approx(float(sum(pooled) / 3), abs=1e-5)
    assert window.cosine_min == pytest.approx(float(min(pooled)), abs=1e-5)
    assert window.token_cosine == pytest.approx(float(single.mean()), abs=1e-5)
    assert window.token_cosine < 0.9999
    assert actual.versions["transformers"]


def test_the_model_is_left_as_it_was(model, batches):
    before = model.base_model(batches[1]).last_hidden_state
    compare(capture(model, batches), [fk.Plan(fk.Window(3))], model=model, batches=batches)
    assert torch.equal(model.base_model(batches[1]).last_hidden_state, before)


def test_the_effect_of_random_plans_depends_on_the_seed_alone(model, batches):
    captured, plans = capture(model, batches), [fk.Plan(fk.RandomKeys(4))]
    first, again, other = (
        compare(captured, plans, model=model, batches=batches, seed=seed).rows[0].token_cosine for seed in (0, 0, 1)
    )
    assert first == again
    if not captured.is_causal:  # causal choices among fewer than 64 keys leave nothing to chance
        assert first != other
