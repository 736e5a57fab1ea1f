"""The experiment on decoders: its tasks say what they should, its peers do what their papers say."""

import pytest
import torch
from experiments.causal import methods, recall
from experiments.causal.run import main

import fewkeys as fk
from fewkeys.captures.capture import AttentionInputs
from tiny_models import close, llama, tokens


@pytest.mark.parametrize("stage", [recall.Stage(64, 8, 8, 3, 1), recall.Stage(96, 4, 40, 3, 1)])
def test_every_question_has_its_answer_in_the_text(stage):
    batch = recall.draw(stage, torch.Generator().manual_seed(0))
    assert batch.ids.shape == (3, stage.length)
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        pairs = dict(zip(ids[: 2 * stage.pairs : 2], ids[1 : 2 * stage.pairs : 2], strict=True))
        asked = [i for i, label in enumerate(labels) if label >= 0]
        assert len(asked) == stage.questions
        assert all(pairs[ids[i]] == labels[i] == ids[i + 1] for i in asked)


@torch.no_grad()
def test_accumulated_attention_with_room_for_all_is_exact():
    model, ids = llama(), tokens(2, 24)
    want = model(ids).logits
    with methods.replaced(model, methods.ACCUMULATED, 24):
        close(model(ids).logits, want)
    with methods.replaced(model, methods.ACCUMULATED, 6):
        assert (model(ids).logits - want).abs().max() > 1e-2


def test_accumulated_attention_keeps_the_latest_and_the_most_attended():
    """One loud key is kept for ever, and of the others the latest half."""
    key = torch.zeros(1, 1, 12, 4)
    key[..., 2, 0] = 8.0
    query = torch.zeros(1, 1, 12, 4)
    query[..., 0] = 1.0
    value = torch.eye(12).view(1, 1, 12, 12)
    inputs = AttentionInputs(query, key, value, scale=1.0, is_causal=True, key_mask=None, query_offset=0)
    actual = methods._Accumulated(6)(0, torch.nn.Identity(), inputs)
    seen = (actual[0, 0] > 0).int()
    assert (seen.sum(-1) == torch.arange(1, 13).clamp_max(6)).all()
    assert seen[2:, 2].all()
    assert all(seen[now, max(0, now - 2) : now + 1].all() for now in range(12))


@pytest.mark.parametrize("name", methods.PLANS)
@pytest.mark.parametrize("slots", [64, 256])
def test_plans_pay_the_slots_they_are_given(name, slots):
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 1024, 16, generator=g)
    plan = methods.PLANS[name](slots)
    kept = plan.keep.graph(q, k, v, is_causal=True).to_mask()[:, :, 512:].sum(-1).float().mean()
    assert 0.8 * slots < plan.slots(float(kept), 16, 16) <= slots + 1
    assert plan == plan.from_dict(plan.to_dict())
    assert isinstance(plan, fk.Plan)


@pytest.mark.long
def test_the_command_runs_and_goes_on(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"A line of words, the number is {i} and the next {i + 1}." for i in range(900)))
    arguments = ["--text", str(text), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--quick"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert "step 2/2" in first
    assert "| fewkeys |" in first
    assert (tmp_path / "out" / "figure.png").stat().st_size > 10_000
    assert main(arguments) == 0
    assert "step 2/2" not in capsys.readouterr().out
    assert main([*arguments[:-1]]) == 2
    assert "--work" in capsys.readouterr().err
