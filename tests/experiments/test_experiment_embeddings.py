"""Nearest neighbours of embeddings: the oracle and the agreement."""

import pytest
import torch

pytest.importorskip("transformers")

from experiments.embeddings.run import Top, judged, kept

import fewkeys as fk
from tiny_models import bert, close, far, run, tokens


def test_the_oracle_is_every_query_s_own_best_keys():
    model = bert()
    exact = run(model, input_ids=tokens())
    with fk.apply(model, fk.Plan(fk.TopK(5))):
        want = run(model, input_ids=tokens())
    with Top(model, 5):
        close(run(model, input_ids=tokens()), want)
    assert torch.equal(run(model, input_ids=tokens()), exact)
    assert far(want, exact)


def test_agreement():
    """Of four texts in two pairs, two have changed places."""
    exact = torch.nn.functional.normalize(torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.0, 1.0], [0.1, 1.0]]), dim=-1)
    same, other = judged(exact, exact), judged(exact[[0, 2, 1, 3]], exact)
    assert (same["agreement"], same["high"]) == (1.0, pytest.approx(1.0))
    assert other["same"] == 0
    assert 0.0 <= other["low"] < other["high"] < 1.0


def test_finished_pieces_are_not_made_again(tmp_path):
    ids, made = torch.arange(120)[:, None], []

    def make(part):
        made.append(len(part))
        return part.float()

    first, seconds = kept(tmp_path, "exact", ids, make)
    again, before = kept(tmp_path, "exact", ids, make)
    assert made == [50, 50, 20]
    assert torch.equal(first, again)
    assert seconds == before > 0
