"""The blocks of docs/recipes/encoders.md, run on tiny models of random weights in place of those of the hub."""

import re

import pytest
import torch
import transformers

import encoders
import fewkeys as fk
from encoders import IDS, SIZES, words
from fewkeys.integrations.loading import load_encoder
from test_pages import BLOCK
from test_project import ROOT

PAGE = (ROOT / "docs" / "recipes" / "encoders.md").read_text(encoding="utf-8")
START, *BLOCKS = BLOCK.findall(PAGE)
FAMILIES = {
    "ModernBERT": encoders.modernbert,
    "Nomic": lambda: drawn(transformers.NomicBertConfig),
    "Jina v3": lambda: drawn(transformers.JinaEmbeddingsV3Config),
    "GTE": lambda: drawn(transformers.GteConfig),
    "BGE-M3": lambda: drawn(transformers.XLMRobertaConfig),
    "EuroBERT": lambda: drawn(transformers.EuroBertConfig),
}
pytest.importorskip("sentence_transformers")
ROWS = {
    cells[0]: cells[1:] for cells in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (yes|no) \|$", PAGE, re.M)
}
TEXTS = [words(700, 1), words(90, 2)]


def drawn(kind):
    """A model of random weights."""
    torch.manual_seed(0)
    ids = {name: value for name, value in IDS.items() if name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = kind(**SIZES, **ids, vocab_size=15, max_position_embeddings=1030, initializer_range=0.3)
    return transformers.AutoModel.from_config(config)


def test_the_table_has_every_block():
    assert list(ROWS) == list(FAMILIES)
    assert re.findall(r"^## (.+)$", PAGE, re.M)[:-1] == list(ROWS)
    assert len(BLOCKS) == len(ROWS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slots", [2048, 16])
def test_a_recipe(family, slots, tmp_path, monkeypatch):
    """With every key kept its vectors are exact; with few they are not. Its words are those of the table."""
    model, pooling, prefix, late = ROWS[family]
    block = BLOCKS[list(FAMILIES).index(family)]
    mode = {"mean": "mean", "first token": "cls"}[pooling]
    folder = encoders.save_encoder(tmp_path, FAMILIES[family](), pooling=mode)
    plan = fk.budget(slots).never_exact()
    monkeypatch.setattr(fk, "budget", lambda count: plan)
    monkeypatch.chdir(tmp_path)
    for name, text in zip("ab", TEXTS, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    has, asked = {}, []
    exec(START, has)
    has["SentenceTransformer"] = lambda name: asked.append(name) or load_encoder(folder)
    exec(block, has)
    if model.startswith("`"):
        assert asked == [model.strip("`")]
    prompt = prefix.strip("`") if prefix.startswith("`") else ""
    assert prompt in block
    assert ("prompt=" in block) == bool(prompt)
    assert ("late_chunks(" in block) == (late == "yes")
    exact = load_encoder(folder).encode([prompt + text for text in TEXTS])
    assert (abs(has["vectors"] - exact).max() < 1e-4) == (slots == 2048)
    if late == "yes":
        assert has["chunks"].vectors.shape[0] == 3
