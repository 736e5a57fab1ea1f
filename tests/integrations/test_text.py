"""Text becomes sequences of token ids of one length, in order, with the tokenizer's special tokens."""

import pytest
import tokenizers
import torch
import transformers

from fewkeys.integrations import text

WORDS = ["the", "a", "key", "query", "value", "window", "of", "and", "few", "many", "."]
TEXT = " ".join(WORDS[i * i % 11] for i in range(400)) + "\n"
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def words(around):
    """A tokenizer of whole words that puts special tokens around a text as `around` says."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: i for i, word in enumerate(special + WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=around, special_tokens=[(name, vocabulary[name]) for name in special]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, cls_token="[CLS]", sep_token="[SEP]")


@pytest.fixture(scope="module")
def encoder():
    return words("[CLS] $A [SEP]")


@pytest.fixture(scope="module")
def decoder():
    return words("[CLS] $A")


def test_sequences_are_the_text_in_order_with_special_tokens(encoder):
    (ids,) = text.batches([TEXT], encoder, sequences=3, length=12)
    plain = encoder(TEXT, add_special_tokens=False)["input_ids"]
    assert ids.shape == (3, 12)
    assert ids[:, 1:-1].flatten().tolist() == plain[:30]
    assert ids[:, 0].tolist() == [encoder.cls_token_id] * 3
    assert ids[:, -1].tolist() == [encoder.sep_token_id] * 3


def test_a_start_token_alone_is_kept_too(decoder):
    (ids,) = text.batches([TEXT], decoder, sequences=1, length=10)
    assert ids[0, 0] == 2
    assert (ids[0, 1:] > 3).all()


def test_pieces_of_a_long_text_give_the_same_tokens(encoder, monkeypatch):
    lines = [TEXT[i : i + 40] + "\n" for i in range(0, 400, 40)]
    whole = text.batches(lines, encoder, sequences=4, length=12)
    monkeypatch.setattr(text, "PIECE", 10)
    cut = text.batches(lines, encoder, sequences=4, length=12)
    assert torch.equal(whole[0], cut[0])


def test_no_more_is_read_than_is_needed(encoder, monkeypatch):
    read = []
    monkeypatch.setattr(text, "PIECE", 100)

    def counted(piece, **more):
        read.append(len(piece))
        return encoder(piece, **more)

    text.batches(["few keys\n" * 100_000], counted, sequences=1, length=12)
    assert sum(read) < 1000


def test_batches_are_bounded(encoder, monkeypatch):
    monkeypatch.setattr(text, "BATCH_TOKENS", 24)
    actual = text.batches([TEXT], encoder, sequences=5, length=12)
    assert [len(batch) for batch in actual] == [2, 2, 1]


def test_positions_kept_for_padding_do_not_count():
    small = {**SMALL, "vocab_size": 15, "pad_token_id": 1}
    roberta = transformers.RobertaModel(transformers.RobertaConfig(**small, max_position_embeddings=66))
    assert text.positions(roberta) == 64
    bert = transformers.BertModel(transformers.BertConfig(**small, max_position_embeddings=66))
    assert text.positions(bert) == 66
