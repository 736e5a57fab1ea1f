"""Late chunks are the encoder's own pooling of the token embeddings of one pass."""

import pytest
import torch
from torch.nn.functional import normalize

import encoders
import fewkeys as fk
from encoders import words
from fewkeys.guard.fallback import Fallbacks
from fewkeys.integrations.embed import WATCH, estimated, late_chunks, longest, read_tokens, split
from fewkeys.integrations.loading import load_encoder

modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
TEXT = words(55)
POOLINGS = {
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
    "mean_sqrt_len_tokens": lambda rows: rows.sum(0) / len(rows) ** 0.5,
}


def saved(folder, model, *after, **more):
    return load_encoder(encoders.save_encoder(folder, model, *after, **more))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    prompts = {"prompts": {"query": "query of : "}}
    return saved(tmp_path_factory.mktemp("bert"), encoders.bert(), modules.Normalize(), **prompts)


@pytest.fixture(scope="module")
def long_encoder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("modernbert"), encoders.modernbert(), modules.Normalize())


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("width", [None, 5])
def test_chunks_pool_the_tokens_of_one_pass(pooling, width, tmp_path):
    dense = [] if width is None else [modules.Dense(16, width)]
    encoder = saved(tmp_path, encoders.bert(), *dense, modules.Normalize(), pooling=pooling)
    rows = encoder.encode([TEXT], output_value="token_embeddings")[0]
    pooled = torch.stack([POOLINGS[pooling](rows[a:b]) for a, b in ((0, 26), (26, 51), (51, 57))])
    if width is not None:
        pooled = encoder[2]({"sentence_embedding": pooled})["sentence_embedding"]
    actual = late_chunks(encoder, TEXT, 25)
    torch.testing.assert_close(actual.vectors, normalize(pooled, dim=1), atol=1e-6, rtol=1e-5)
    assert actual.tokens == (26, 25, 6)
    assert [len(TEXT[start:stop].split()) for start, stop in actual.spans] == [25, 25, 5]


@pytest.mark.parametrize("prompt", [{}, {"prompt_name": "query"}, {"prompt": "the many "}], ids=str)
@pytest.mark.parametrize("included", [True, False])
def test_one_chunk_is_the_text(prompt, included, tmp_path):
    settings = {"prompts": {"query": "query of : "}, "include_prompt": included}
    encoder = saved(tmp_path, encoders.bert(), modules.Normalize(), **settings)
    whole = encoder.encode([TEXT], convert_to_tensor=True, **prompt)
    for chunks in (None, 55, [(0, len(TEXT))]):
        actual = late_chunks(encoder, TEXT, chunks, **prompt)
        torch.testing.assert_close(actual.vectors, whole, atol=1e-6, rtol=1e-6)
        assert actual.spans == ((0, len(TEXT)),)


def test_the_mean_of_all_chunks_is_the_text(tmp_path):
    encoder = saved(tmp_path, encoders.bert())
    actual = late_chunks(encoder, TEXT, 7, prompt="few ")
    tokens = torch.tensor(actual.tokens, dtype=torch.float32)
    mean = (actual.vectors * tokens[:, None]).sum(0) / tokens.sum()
    whole = encoder.encode(TEXT, convert_to_tensor=True, prompt="few ")
    torch.testing.assert_close(mean, whole, atol=1e-6, rtol=1e-5)
    assert sum(actual.tokens) == len(read_tokens(encoder, "few ", TEXT).ids)


def test_spans_of_the_callers_own(encoder):
    by_size = late_chunks(encoder, TEXT, 20)
    same = late_chunks(encoder, TEXT, by_size.spans)
    assert torch.equal(same.vectors, by_size.vectors)
    assert same.spans == by_size.spans
    first, second = by_size.spans[:2]
    overlapping = late_chunks(encoder, TEXT, [second, (first[0], second[1]), first])
    assert torch.equal(overlapping.vectors[[2, 0]], by_size.vectors[:2])
    assert overlapping.tokens == (20, 41, 21)


def test_a_plan_that_keeps_all_gives_the_same_vectors(long_encoder):
    text = words(700, seed=1)
    exact = late_chunks(long_encoder, text, 64)
    with fk.apply(long_encoder, fk.budget(2048)):
        every = late_chunks(long_encoder, text, 64)
    assert torch.cosine_similarity(exact.vectors, every.vectors).min() > 1 - 1e-6
    with fk.apply(long_encoder, fk.Plan(fk.Window(1))):
        few = late_chunks(long_encoder, text, 64)
    assert torch.cosine_similarity(exact.vectors, few.vectors).min() < 1 - 1e-4


def test_the_estimated_error_is_that_of_the_plan(long_encoder):
    """One layer of three sees all keys; its input does not depend on the plan."""
    text, plan = words(500, seed=2), fk.Plan(fk.Window(9))
    with fk.apply(long_encoder, plan, max_error=WATCH) as applied:
        late_chunks(long_encoder, words(300, seed=3), None)
        before = applied.fallbacks
        late_chunks(long_encoder, text, None)
        actual = estimated(before, applied.fallbacks)
        assert estimated(applied.fallbacks, applied.fallbacks) == 0
    ids = long_encoder.preprocess([text])["input_ids"]
    truth = fk.spot_check(long_encoder, ids, plan, queries=502).error
    assert actual == pytest.approx(truth, rel=0.2)
    with fk.apply(long_encoder, fk.Plan(), max_error=WATCH) as applied:
        late_chunks(long_encoder, text, None)
    assert estimated([Fallbacks()] * 3, applied.fallbacks) == 0


def test_long_texts_are_split_and_never_cut(encoder):
    text = words(500, seed=4)
    with pytest.raises(ValueError, match=r"^text: expected at most 64 tokens.* got 502; embed the parts that .*split"):
        late_chunks(encoder, text)
    for prompt, room in (("", 62), ("a few many ", 59)):
        spans = split(encoder, text, prompt=prompt)
        counts = [len(read_tokens(encoder, prompt, text[start:stop]).ids) for start, stop in spans]
        assert "".join(text[start:stop] for start, stop in spans) == text
        assert len(spans) == -(-500 // room)
        assert max(counts) <= longest(encoder) == 64
        assert max(counts) - min(counts) <= 1
        assert all(text[start - 1] == " " for start, _ in spans[1:])
    assert split(encoder, TEXT) == [(0, len(TEXT))]
    with pytest.raises(ValueError, match=r"^encoder\.max_seq_length: expected room .* 66 tokens .* got 64; raise it"):
        split(encoder, text, prompt=words(64))


@pytest.mark.parametrize("text", ["few.key.a " * 54, "few.key." * 70], ids=["words of five tokens", "one word"])
def test_parts_begin_with_words_where_there_are_any(text, encoder):
    spans = split(encoder, text)
    assert "".join(text[start:stop] for start, stop in spans) == text
    assert max(len(read_tokens(encoder, "", text[start:stop]).ids) for start, stop in spans) <= 64
    assert len(spans) == 5
    assert all(text[start - 1] == " " or " " not in text for start, _ in spans[1:])


@pytest.mark.parametrize(
    ("text", "chunks", "options", "message"),
    [
        (" \n", 5, {}, r"^text: expected some text"),
        (TEXT, 0, {}, r"^chunks: expected at least 1, got 0"),
        (TEXT, [], {}, r"^chunks: expected at least one span"),
        (TEXT, 2.5, {}, r"^chunks: expected a number of tokens, spans .*, got 2\.5$"),
        (TEXT, "ab", {}, r"^chunks: expected a number of tokens, spans .*, got 'ab'$"),
        (TEXT, [(0,)], {}, r"^chunks: expected a number of tokens, spans .*, got \[\(0,\)\]$"),
        (TEXT, [(3, 3)], {}, r"^chunks: expected spans .* got \(3, 3\) without one"),
        (TEXT, 5, {"prompt_name": "other"}, r"^prompt_name: expected one of .*'query'.*, got 'other'"),
        (TEXT, 5, {"prompt": 5}, r"^prompt: expected a str, got int"),
        (TEXT, 5, {"prompt_name": "query", "prompt": "a"}, r"^prompt, prompt_name: expected at most one"),
    ],
)
def test_what_is_refused(text, chunks, options, message, encoder):
    with pytest.raises((ValueError, TypeError), match=message):
        late_chunks(encoder, text, chunks, **options)


def test_a_chunk_of_the_prompt_alone_is_refused(tmp_path):
    """Its only token, "key", begins in the prompt, which this encoder does not pool."""
    encoder = saved(tmp_path, encoders.bert(), include_prompt=False)
    with pytest.raises(ValueError, match=r"^chunks: expected a token beside the prompt in each, got \(0, 1\) without"):
        late_chunks(encoder, "y of the many", 1, prompt="ke")


def test_other_models_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"^encoder: expected a SentenceTransformer, got BertModel"):
        late_chunks(encoders.bert(), TEXT)
    by_one = saved(tmp_path, encoders.bert(), pooling="cls")
    with pytest.raises(ValueError, match=r"^chunks: expected an encoder that pools by mean, .*, got cls, which means"):
        late_chunks(by_one, TEXT, 5)
    whole = by_one.encode([TEXT], convert_to_tensor=True)
    torch.testing.assert_close(late_chunks(by_one, TEXT, None).vectors, whole)
