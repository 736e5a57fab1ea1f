"""The training experiment: what is hidden, what both runs share, and a run that goes on where it stopped."""

import pytest
import torch
from experiments.training import run
from experiments.training.model import HIDDEN, hidden

import fewkeys as fk

TEXT = torch.tensor(list(b"a few keys that matter, and a mean of what is left; " * 20))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for name, value in {"LENGTH": 96, "WIDTH": 16, "HEADS": 2, "LAYERS": 1, "JUDGED": 1}.items():
        monkeypatch.setattr(run, name, value)


def test_words_are_hidden_whole_and_some_are():
    text = TEXT[None, :600]
    away = hidden(text, torch.Generator().manual_seed(0)) == HIDDEN
    word = (text == ord(" ")).cumsum(-1)[0]
    assert all(len(set(away[0, word == one].tolist())) == 1 for one in word.unique())
    assert 0.05 < away.float().mean() < 0.3


@pytest.mark.parametrize("plan", [None, fk.budget(8).never_exact()])
def test_a_run_goes_on_where_it_stopped(plan, tmp_path):
    """To the last bit: weights, the optimiser's state and the batches to come."""
    whole = run.Run(plan)
    for _ in range(2):
        whole.step(TEXT, 1e9)
    whole.judge(TEXT)
    whole.save(tmp_path / "0")
    parts = run.Run(plan)
    parts.load(tmp_path / "0")
    assert (parts.steps, parts.rows) == (2, whole.rows)
    for each in (whole, parts):
        each.step(TEXT, 1e9)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(one, other)
    fresh = run.Run(plan).model.embedding.weight
    assert not torch.equal(whole.model.embedding.weight, fresh)
