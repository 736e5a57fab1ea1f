"""The choice of a rule for many encoders: what is judged, what is chosen, and that a stopped run goes on."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from experiments.encoders import choose, judge, live, models, run, shares
from experiments.encoders.shares import RULES, Cell, Part, Rule, cohorts_of
from torch.nn.functional import scaled_dot_product_attention

import fewkeys as fk
from captures import captured


def test_a_plan_pays_its_slots():
    for slots in (8, 12, 16, 64, 100, 192, 512):
        for cell in shares.cells(slots):
            paid = cell.outliers + cell.window + cell.plan().rest.slots(64, 64)
            assert slots - 2 - slots // 128 < paid <= slots
            assert cell.window % 2 == 1
    rule = Rule(1 / 2, Part(1.5, root=True), Part(1 / 8))
    assert rule.cell(64, 32) == Cell(25, 13, 17, 8, 32)
    assert rule.cell(8, 32) == Cell(1, 5, 2, 0, 32)
    assert rule.cell(1, 32) is None


@pytest.mark.parametrize("biased", [False, True])
def test_a_sample_of_queries_is_judged_by_head(biased):
    """Errors of the sample, mean over sequences, then the mean and the largest over layers and heads."""
    table = torch.linspace(-1, 1, 9).expand(4, 9) if biased else None
    capture = captured(layers=3, batches=1, size=2, heads=4, kv_heads=4, length=80, bias=table)
    x = judge.problem(capture, (0, 2))
    plan = Cell(6, 3, 4, 2, 4).plan()
    by_head = []
    for layer in (0, 2):
        call = next(capture.calls(layer))
        distance = (torch.arange(80) - torch.arange(80)[:, None]).clamp(-4, 4) + 4
        mask = table[:, distance] if biased else None
        exact = scaled_dot_product_attention(call.query, call.key, call.value, attn_mask=mask, scale=call.scale)
        output = fk.attention(call.query, call.key, call.value, plan=plan, **call.options())
        by_head.append(fk.metrics.relative_error(output, exact)[:, :, x.sample].mean((0, 2)))
    by_head = torch.cat(by_head)
    assert judge.error(x, plan) == pytest.approx((by_head.mean().item(), by_head.max().item()), rel=1e-4)
    assert judge.best_keys(x, 80) == pytest.approx((0, 0), abs=1e-5)
    assert judge.best_keys(x, 8) > judge.best_keys(x, 32)


def measured(errors):
    """What two lengths of every model have, for plans at 16 and 64 slots whose errors are `errors[model](rule)`."""
    return {
        f"{name} {length} {slots}": {
            str(rule.cell(slots, cohorts_of(slots))): [error(rule), 2 * error(rule)] for rule in RULES
        }
        | {"fk.budget": [3 * min(map(error, RULES)), 6 * min(map(error, RULES))]}
        for name, error in errors.items()
        for length in (128, 256)
        for slots in (16, 64)
    }


def test_the_one_left_out_has_no_say():
    """Two models want many outliers, the third wants few, and more so: each gets what the other two choose."""
    many = lambda rule: 2 - rule.outliers  # noqa: E731
    few = lambda rule: (1 + rule.outliers) ** 3  # noqa: E731
    conclusions = choose.conclusions(measured({"a": many, "b": many, "c": few}))
    held_out = {row["model"]: row for row in conclusions["held_out"]}
    assert "outliers 0.625" in held_out["c"]["rule"]
    assert "outliers 0.375" in held_out["c"]["best rule"]
    assert held_out["c"]["error beside best rule"] == pytest.approx((1.625 / 1.375) ** 3, rel=1e-3)
    assert held_out["a"]["error beside best rule"] >= 1
    assert conclusions["excess of budget"] == pytest.approx(dict.fromkeys("abc", 3), rel=1e-3)
    with pytest.raises(ValueError, match="--models: expected two at least"):
        choose.conclusions(measured({"a": many}))


@pytest.mark.long
def test_the_command_goes_on_chooses_and_draws(tmp_path, monkeypatch, capsys):
    bias = torch.linspace(-1, 1, 9).expand(4, 9)
    made = {name: captured(1, 1, 2, 4, 4, 64, seed=seed) for seed, name in enumerate(("minilm", "albert"))}
    made["mpnet"] = captured(1, 1, 2, 4, 4, 64, bias=bias)
    tiny = {
        name: models.Encoder(models.ENCODERS[name].title, (), (64,), (0,), models.ENCODERS[name].read) for name in made
    }
    monkeypatch.setattr(run, "ENCODERS", tiny)
    monkeypatch.setattr("experiments.encoders.report.ENCODERS", tiny)
    monkeypatch.setattr(run, "captured", lambda name, *_: made[name])
    monkeypatch.setattr(run, "SLOTS", (16, 32, 64))
    arguments = ["--models", *made, "--out", str(tmp_path), "--work", str(tmp_path)]
    assert run.main(arguments) == 0
    data = json.loads((tmp_path / "encoders.json").read_text())
    assert set(data["errors"]) == {f"{name} 64 {slots}" for name in made for slots in (16, 32)}
    assert {row["model"] for row in data["chosen"]["held_out"]} == set(made)
    assert (tmp_path / "encoders.png").stat().st_size > 10_000
    assert "| rule chosen on the others |" in (tmp_path / "table.md").read_text()
    monkeypatch.setattr(run, "error", None)  # nothing is judged twice
    assert run.main(["--models", "minilm", "albert", *arguments[4:]]) == 0
    assert run.main(["--draw", "--out", str(tmp_path)]) == 0
    capsys.readouterr()


def test_the_plan_of_a_head_is_chosen_in_the_first_call_and_judged_in_later_ones(monkeypatch):
    """Of two plans each is exact for half of the heads."""
    x = judge.problem(captured(layers=3, batches=1, size=3, heads=4, kv_heads=4, length=80), (0, 2))
    drawn = torch.rand(8, 3, 64, generator=torch.Generator().manual_seed(0))
    halves = torch.arange(8)[:, None, None] < 4
    made = {"a": drawn * halves, "b": drawn * ~halves}
    monkeypatch.setattr(live, "forms", lambda slots: list(made))
    monkeypatch.setattr(live, "errors", lambda x, plan: made.get(plan, drawn))
    cells = [cell.strip() for cell in live.row("minilm", 16, x).split("|")[1:-1]]
    later = drawn[:, 1:].mean((1, 2))
    assert cells[:2] == ["minilm", "16"]
    assert cells[2] == f"{later[:4].sum() / 8:.3f}, {later[:4].max():.2f}"
    assert cells[3:6] == ["0.000, 0.00"] * 3
    assert cells[6].startswith(f"{(later[:4].sum() - later[drawn[:4, 0, few()].mean(-1).argmax()]) / 8:.3f}")
    assert cells[7] == f"{later.mean():.3f}, {later.max():.2f} ({16 + 64 // 8})"


def few():
    return torch.randperm(64, generator=torch.Generator().manual_seed(1))[: live.QUERIES]


def test_the_forms_of_a_plan_pay_its_slots():
    for slots in (32, 64, 192):
        for plan in live.forms(slots)[1:]:
            kept = sum(getattr(part, "count", 0) + getattr(part, "size", 0) for part in plan.parts)
            assert slots - 2 - slots // 128 < kept + plan.rest.slots(64, 64) <= slots


def test_a_missing_file_is_named(tmp_path, capsys):
    assert run.main(["--models", "whisper", "--out", str(tmp_path), "--work", str(tmp_path)]) == 2
    assert "--files: expected whisper=PATH, speech=PATH for whisper" in capsys.readouterr().err
