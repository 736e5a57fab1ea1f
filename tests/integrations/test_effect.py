"""The effect on a whole model: cosines of its hidden states, every layer attending by the plan."""

import pytest
import torch
import transformers

import fewkeys as fk
from fewkeys.integrations.compare import compare
from fewkeys.integrations.effect import time_model
from fewkeys.integrations.transformers import apply, capture

WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SPEECH = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "layer"}


@pytest.fixture(scope="module", params=["encoder", "decoder"])
def model(request):
    torch.manual_seed(0)
    small = WIDTHS | {"vocab_size": 50, "initializer_range": 0.5}
    if request.param == "encoder":
        config = transformers.BertConfig(**small, max_position_embeddings=32)
        return transformers.BertModel(config, add_pooling_layer=False).eval()
    config = transformers.LlamaConfig(**small, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def batches():
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (3, 24), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    return [{"input_ids": ids[:2], "attention_mask": mask[:2]}, ids[2:]]


def test_a_sequence_of_padding_has_no_cosine(model, batches):
    plans = {"exact": fk.Plan()}
    padding = {name: torch.cat([rows, torch.zeros_like(rows[:1])]) for name, rows in batches[0].items()}
    (exact,) = compare(capture(model, [padding]), plans, model=model, batches=[padding]).rows
    assert (exact.cosine, exact.cosine_min, exact.token_cosine) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)


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


def test_a_plan_that_is_in_force_changes_nothing(model, batches):
    captured, plans = capture(model, batches), {"exact": fk.Plan(), "window": fk.Plan(fk.Window(3))}
    alone = compare(captured, plans, model=model, batches=batches)
    with apply(model, fk.Plan(fk.Window(1))):
        inside = compare(captured, plans, model=model, batches=batches)
    assert [row.cosine for row in inside.rows] == [row.cosine for row in alone.rows]


def test_a_model_that_drops_out_is_refused_before_any_work(model, batches):
    captured, seen = capture(model, batches), []
    try:
        with pytest.raises(ValueError, match=r"^model: .* in training mode; call model\.eval\(\)$"):
            compare(captured, fk.Plan(), model=model.train(), batches=batches, progress=lambda *step: seen.append(step))
    finally:
        model.eval()
    assert not seen


def test_padding_of_a_source_is_not_that_of_its_target():
    """The states are the target's, of which the second has ten tokens; the sources have padded tokens more, or not."""
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = transformers.BartModel(transformers.BartConfig(**sizes, **heads, vocab_size=50, init_std=0.5)).eval()
    ids, real = torch.randint(3, 50, (2, 12)), torch.arange(12) < torch.tensor([[12], [10]])
    cosines = []
    for more in (0, 3):
        mask = torch.nn.functional.pad(torch.arange(12) < torch.tensor([[5], [12]]), (0, more))
        batch = {"input_ids": torch.nn.functional.pad(ids, (0, more), value=1), "attention_mask": mask.long()}
        batch |= {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": real.long()}
        taken = capture(model, [batch], part="cross")
        (row,) = compare(taken, fk.Plan(fk.Window(3)), model=model, batches=[batch]).rows
        cosines.append((row.cosine, row.token_cosine))
    with torch.no_grad():
        states = model(**batch).last_hidden_state
        with apply(model, fk.Plan(fk.Window(3))):
            changed = model(**batch).last_hidden_state
    expected = torch.cosine_similarity(states[real], changed[real], dim=-1).mean()
    assert [token for _, token in cosines] == pytest.approx([float(expected)] * 2, abs=1e-5)
    assert cosines[0] == pytest.approx(cosines[1], abs=1e-5)


def test_padding_prepared_for_the_keys_is_that_of_two_axes():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**WIDTHS, vocab_size=50, initializer_range=0.5)).eval()
    ids, mask = torch.randint(1, 50, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[1, 15:] = 0
    cosines = []
    for form in (
        mask,
        mask[:, None, None].bool(),
        torch.zeros(2, 1, 1, 24).masked_fill(mask[:, None, None] == 0, -1e9),
    ):
        batches = [{"input_ids": ids, "attention_mask": form}]
        row = compare(capture(model, batches), fk.Plan(fk.Window(3)), model=model, batches=batches).rows[0]
        cosines.append((row.cosine, row.token_cosine))
    assert cosines == [pytest.approx(cosines[0], abs=1e-6)] * 3


def speech(**more):
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(**WIDTHS, **SPEECH, vocab_size=20, initializer_range=0.3, **more)
    return transformers.Wav2Vec2ForCTC(config).eval()


def test_padding_that_counts_samples_is_that_of_the_frames():
    """The shorter sound alone has the same states: the mean is over its own frames."""
    model, plan = speech(), fk.Plan(fk.Window(3))
    sounds, mask = torch.randn(2, 600, generator=torch.Generator().manual_seed(0)), torch.ones(2, 600).long()
    mask[1, 310:] = 0
    together = [{"input_values": sounds * mask, "attention_mask": mask}]
    alone = [{"input_values": sounds[:1]}, {"input_values": sounds[1:, :310]}]
    one, other = (compare(capture(model, b), plan, model=model, batches=b).rows[0] for b in (together, alone))
    # The convolution of positions sees the padding.
    assert one.cosine == pytest.approx(other.cosine, abs=1e-3)
    assert one.token_cosine == pytest.approx(other.token_cosine, abs=1e-3)


@pytest.mark.parametrize("kind", ["videos", "spectrograms"])
def test_videos_and_spectrograms_are_judged(kind):
    """They have one more dimension than images and samples."""
    torch.manual_seed(0)
    if kind == "videos":
        config = transformers.VideoMAEConfig(**WIDTHS, image_size=16, patch_size=4, num_frames=4)
        model, batches = transformers.VideoMAEModel(config).eval(), [torch.randn(2, 4, 3, 16, 16)]
    else:
        config = transformers.ASTConfig(**WIDTHS, max_length=40, num_mel_bins=16, patch_size=8)
        model, batches = transformers.ASTModel(config).eval(), [torch.randn(2, 40, 16)]
    captured, plan = capture(model, batches), fk.Plan(fk.Window(3))
    row = compare(captured, plan, model=model, batches=batches).rows[0]
    assert captured.sequences == 2
    assert row.error > 0
    assert row.cosine < 1
    assert fk.spot_check(model, batches, plan, queries=50).error == pytest.approx(row.error, rel=1e-3)


def test_states_that_cannot_be_compared_are_refused():
    mask = torch.ones(2, 600).long()
    mask[1, 310:] = 0
    adapted = speech(add_adapter=True, output_hidden_size=16, num_adapter_layers=1)
    sounds = [{"input_values": torch.randn(2, 600), "attention_mask": mask}]
    vectors = transformers.DPRQuestionEncoder(transformers.DPRConfig(**WIDTHS, vocab_size=50)).eval()
    ids = [torch.randint(1, 50, (2, 24))]
    for model, batches, said in (
        (adapted, sounds, r"^batches: expected padding of the \d+ states .*; pass sequences of one length"),
        (vectors, ids, r"^model: expected one that returns last_hidden_state \(B, N, H\), got .* DPRQuestionEncoder$"),
    ):
        with pytest.raises(ValueError, match=said):
            compare(capture(model, batches), fk.Plan(), model=model, batches=batches)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "MPNet", "T5Encoder"])
def test_a_model_is_timed_at_more_tokens_than_it_has_positions(family):
    sizes = WIDTHS | {"vocab_size": 1000, "pad_token_id": 1, "max_position_embeddings": 20}
    if family == "T5Encoder":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    config = getattr(transformers, f"{family.removesuffix('Encoder')}Config")(**sizes)
    model = getattr(transformers, f"{family}Model")(config).eval()
    ((turns, plan_ms, exact_ms),) = time_model(model, [fk.Plan(fk.Window(3))], 40, seconds=0.0)
    assert turns == 1
    assert min(plan_ms, exact_ms) > 0
