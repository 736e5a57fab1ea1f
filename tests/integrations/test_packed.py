"""Sequences laid end to end in one row, as sentence-transformers gives them to flash attention."""

import pytest
import torch
import transformers

import encoders
import fewkeys as fk
from encoders import IDS, SIZES, words
from fewkeys.integrations.loading import load_encoder
from tiny_models import llama

pytest.importorskip("sentence_transformers")
TEXTS = [words(90, 1), words(7, 2), words(150, 3), words(1, 4)]


def roberta():
    """Its positions begin after that of padding."""
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(**SIZES, **IDS, vocab_size=15, max_position_embeddings=260)
    return transformers.XLMRobertaModel(config)


MODELS = {"bert": lambda: encoders.bert(256), "modernbert": encoders.modernbert, "roberta": roberta}
PLANS = [fk.Plan(), fk.budget(16).never_exact(), fk.budget(16, cohorts=1).never_exact()]


@pytest.mark.parametrize("name", MODELS)
def test_flattened_texts_are_as_texts_alone(name, tmp_path, monkeypatch):
    encoder = load_encoder(encoders.save_encoder(tmp_path, MODELS[name]()))
    exact = torch.stack([encoder.encode(text, convert_to_tensor=True) for text in TEXTS])
    utils = transformers.modeling_flash_attention_utils
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *_: ((None, print), None))
    monkeypatch.setattr(type(encoder[0]), "_is_flash_attention_requested", lambda _: True)
    encoder[0].unpad_inputs = True
    assert encoder.preprocess(TEXTS)["cu_seq_lens_q"].tolist() == [0, 92, 101, 253, 256]
    for number, plan in enumerate(PLANS):
        with fk.apply(encoder, plan):
            alone = torch.stack([encoder.encode(text, convert_to_tensor=True) for text in TEXTS])
            together = encoder.encode(TEXTS, convert_to_tensor=True)
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
        assert torch.allclose(alone, exact, atol=1e-5) == (number == 0)


def test_flattened_causal_texts_are_refused(tmp_path):
    config = transformers.Qwen3Config(**SIZES, vocab_size=15, num_key_value_heads=1, head_dim=8)
    model = transformers.Qwen3Model(config).eval()
    places = {"position_ids": torch.tensor([[0, 1, 2, 0, 1]]), "cu_seq_lens_q": torch.tensor([0, 3, 5])}
    with fk.apply(model, fk.budget(16, is_causal=True)), pytest.raises(ValueError, match=r"unpad_inputs = False"):
        model(torch.ones(1, 5, dtype=torch.long), use_cache=False, **places)


@pytest.mark.parametrize("starts", [[0, 3], [0, 3, 4], [1, 3, 5], [0, 4, 3, 5]], ids=str)
def test_places_that_are_none(starts):
    model = encoders.bert().eval()
    with fk.apply(model, fk.budget(16)), pytest.raises(ValueError, match=r"^cu_seq_lens_q: expected places from 0 to"):
        model(torch.ones(1, 5, dtype=torch.long), cu_seq_lens_q=torch.tensor(starts))
    with fk.apply(model, fk.budget(16)), pytest.raises(ValueError, match=r"^seq_idx: BertSelfAttention passes this"):
        model(torch.ones(1, 5, dtype=torch.long), seq_idx=torch.zeros(1, 5))


def test_a_cache_refuses_flattened_texts():
    model = llama()
    cache, starts = fk.cache(model, fk.budget(16, is_causal=True)), torch.tensor([0, 3, 5])
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: LlamaAttention passes this"):
        model(torch.ones(1, 5, dtype=torch.long), past_key_values=cache, cu_seq_lens_q=starts)
