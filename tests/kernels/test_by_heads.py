"""Parts of the heads give the same answer as all heads together."""

import pytest
import torch

import fewkeys as fk
from fewkeys.execute.native import by_heads, recorded

SHAPES_OF_PARTS = [(1, 4, 2, 300), (3, 4, 4, 200), (5, 2, 1, 150)]
"""Sequences, query heads, key heads, tokens."""


def drawn(shape, dtype, seed=0):
    batch, query_heads, key_heads, tokens = shape
    generator = torch.Generator().manual_seed(seed)

    def rows(heads):  # side by side for each token, as in models
        return torch.randn(batch, tokens, heads, 16, generator=generator).to(dtype).transpose(1, 2)

    return rows(query_heads), rows(key_heads), rows(key_heads)


def together(monkeypatch, rows, **options):
    monkeypatch.setattr(by_heads, "FEW", 2**40)
    recorded._recordings.clear()
    whole = fk.attention(*rows, **options)
    monkeypatch.setattr(by_heads, "FEW", 0)
    return whole


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("shape", SHAPES_OF_PARTS, ids=str)
def test_parts_are_the_whole(shape, heads, monkeypatch):
    """Some heads of a sequence, or several sequences; by the first call, which is recorded, and by later ones."""
    plan, rows = fk.budget(32).never_exact(), drawn(shape, torch.float32)
    whole = together(monkeypatch, rows, plan=plan)
    numbers = sum(part[0].numel() for part in (*rows, rows[0])) // rows[1].shape[1]
    monkeypatch.setattr(by_heads, "CACHE", 4 * numbers * heads)
    for _ in range(3):
        assert torch.equal(fk.attention(*rows, plan=plan), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", ["lengths", "distance_bias", "max_error", "plans"])
def test_what_comes_with_the_rows_is_divided_alike(option, dtype, monkeypatch):
    plan, rows = fk.budget(32).never_exact(), drawn((3, 4, 2, 200), dtype)
    options = {
        "lengths": {"lengths": torch.tensor([200, 150, 90]), "plan": plan},
        "distance_bias": {"distance_bias": torch.randn(4, 21), "plan": fk.budget(32, cohorts=2).never_exact()},
        "max_error": {"max_error": 0.2, "plan": plan},
        "plans": {"plan": [plan, fk.budget(24).never_exact()]},
    }[option]
    whole = together(monkeypatch, rows, **options)
    monkeypatch.setattr(by_heads, "CACHE", 1)
    assert torch.equal(fk.attention(*rows, **options), whole)


def test_no_parts_where_heads_depend_on_each_other(monkeypatch):
    """Random keys of all heads are drawn together. Gradients of parts would each fill a tensor of all heads."""
    monkeypatch.setattr(by_heads, "FEW", 0)
    monkeypatch.setattr(by_heads, "CACHE", 1)
    parts, attend = [], recorded.attend
    monkeypatch.setattr(recorded, "attend", lambda *args: parts.append(args[2:]) or attend(*args))
    plan, rows = fk.budget(32).never_exact(), drawn((2, 4, 2, 200), torch.float32)
    fk.attention(*rows, plan=plan, generator=torch.Generator().manual_seed(0))
    fk.attention(*(part.requires_grad_() for part in rows), plan=plan).sum().backward()
    assert parts == [(), ()]
