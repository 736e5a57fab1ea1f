"""The search for inputs and heads on which plans are worst."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from experiments.worst import inputs, report, run
from experiments.worst.heads import KEPT, Heads

import fewkeys as fk
from tiny_models import bert, tokens

PLAN = fk.Plan(fk.Window(5))


@pytest.mark.parametrize("name", inputs.MADE)
def test_made_inputs_have_their_shape_and_come_back(name):
    first, again = (inputs.MADE[name](60, torch.Generator().manual_seed(1)) for _ in range(2))
    for part, other in zip(first, again, strict=True):
        assert part.shape == (1, 1, 60, inputs.DIM)
        assert torch.equal(part, other)


def test_a_query_points_at_one_key():
    query, key, _ = inputs.one_key_each(200, torch.Generator().manual_seed(0))
    weights = (query @ key.mT / 8).softmax(-1)[0, 0]
    assert weights.amax(-1).median() > 0.9
    assert len(weights.argmax(-1).unique()) > 150


def test_the_search_makes_it_worse_and_keeps_lengths():
    start = inputs.normal(60, torch.Generator().manual_seed(0))
    worse = inputs.Search(steps=15)(PLAN, start, False)
    before, after = (inputs.error_of(PLAN, rows, False).mean() for rows in (start, worse))
    assert after > 1.2 * before
    for part, other in zip(start, worse, strict=True):
        torch.testing.assert_close(part.norm(dim=-1), other.norm(dim=-1))


def test_the_worst_heads_are_those_of_largest_error():
    model, heads = bert(), Heads({"window": PLAN})
    for seed in range(2):
        heads.read(model, f"piece {seed}", input_ids=tokens(1, 40))
    errors = heads.errors["window"]
    assert len(errors) == 2 * model.config.num_hidden_layers * model.config.num_attention_heads
    kept = sorted((error for error, *_ in heads.worst["window"]), reverse=True)
    assert kept == sorted(errors, reverse=True)[:KEPT]
    error, _, _, call = heads.worst["window"][0]
    rows = (call.query, call.key, call.value)
    assert float(inputs.error_of(PLAN, rows, False).mean()) == pytest.approx(error, rel=1e-4)


def test_a_run_writes_figures_and_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TOKENS", 40)
    monkeypatch.setattr(run, "MADE", {"normal numbers": inputs.normal})
    monkeypatch.setattr(run, "BOTH", {"budget(64)": fk.budget(16).never_exact()})
    monkeypatch.setattr(run, "CAUSAL", {"budget(256, is_causal=True)": fk.budget(20, is_causal=True).never_exact()})
    assert run.main(["--out", str(tmp_path), "--steps", "2"]) == 0
    data = json.loads((tmp_path / run.FILE).read_text())
    assert [len(rows) for rows in data["inputs"].values()] == [2, 2]
    text = (tmp_path / "table.md").read_text()
    assert text == report.table(data)
    assert "made worse by search" in text
