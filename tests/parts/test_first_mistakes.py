"""What newcomers get wrong first: the error names the argument and the fix."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch

import fewkeys as fk
from fewkeys.cli import main
from fewkeys.select.base import Selector, shared_top

Q = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
MODEL_PLAN = fk.ModelPlan(((fk.budget(16),),))


def test_a_folder_of_other_plans_is_named(tmp_path):
    fk.budget(16).save_pretrained(tmp_path / "one")
    MODEL_PLAN.save_pretrained(tmp_path / "many")
    with pytest.raises(ValueError, match=r"with plan\.json, got .*, which holds model_plan\.json$"):
        fk.Plan.from_pretrained(tmp_path / "many")
    with pytest.raises(ValueError, match=r"with model_plan\.json, got .*, which holds plan\.json$"):
        fk.ModelPlan.from_pretrained(tmp_path / "one")


def test_a_file_of_a_plan_names_its_folder(tmp_path, monkeypatch):
    fk.budget(16).save_pretrained(tmp_path / "plan")
    MODEL_PLAN.save_pretrained(tmp_path / "plan")
    monkeypatch.chdir(tmp_path)
    assert fk.Plan.from_pretrained("plan/plan.json") == fk.budget(16)
    assert fk.ModelPlan.from_pretrained("plan/model_plan.json") == MODEL_PLAN


@dataclass(frozen=True)
class Nearest(fk.Window):
    """A rule of one's own, in no catalogue."""


def test_what_cannot_be_loaded_is_not_saved(tmp_path):
    plan = fk.Plan(fk.Sinks(1) | Nearest(3))
    for one in (plan, fk.ModelPlan(((fk.budget(16), plan),))):
        with pytest.raises(TypeError, match=r"got Nearest, which no catalogue lists; .*listed=True"):
            one.save_pretrained(tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_the_mask_of_torch_is_named():
    plan, mask = fk.budget(16), torch.ones(40, 40, dtype=torch.bool)
    for call in (fk.attention, fk.explain, fk.spot_check):
        with pytest.raises(TypeError, match=r"^attn_mask: attention\(\) has no such argument; use key_mask"):
            call(Q, Q, Q, plan=plan, attn_mask=mask)
    with pytest.raises(TypeError, match=r"^dropout: attention\(\) has no such argument$"):
        fk.attention(Q, Q, Q, dropout=0.1)
    for call, (name, value) in product((fk.explain, fk.spot_check), {"max_error": 0.1, "rest": fk.Drop()}.items()):
        with pytest.raises(TypeError, match=rf"^{name}: expected a call of attention\(\), which alone has it"):
            call(Q, Q, Q, plan=plan, **{name: value})


@pytest.mark.parametrize("plan", [fk.budget(16), fk.Plan(fk.Window(3), fk.ClusterMeans(4))], ids=str)
def test_a_plan_that_sees_the_future_names_one_that_does_not(plan):
    with pytest.raises(ValueError, match=r"^is_causal: .*use budget\(slots, is_causal=True\)"):
        fk.attention(Q, Q, Q, plan=plan, is_causal=True)


@pytest.mark.parametrize("memory", ["all", "constant"])
@pytest.mark.parametrize("slots", [4, 12, 64])
def test_a_causal_plan_is_refused_without_causality(slots, memory, tmp_path):
    plan = fk.budget(slots, is_causal=True, memory=memory)
    plan.save_pretrained(tmp_path)
    for one in (plan, fk.Plan.from_pretrained(tmp_path), plan.never_exact()):
        with pytest.raises(ValueError, match=r"^is_causal: .* pass is_causal=True .*, or use budget\(slots\) where"):
            fk.attention(Q, Q, Q, plan=one)
        assert fk.attention(Q, Q, Q, plan=one, is_causal=True).shape == Q.shape
    saved = fk.budget(slots).to_dict()
    del saved["is_causal"]
    assert fk.Plan.from_dict(saved) == fk.budget(slots)


@pytest.mark.parametrize(
    ("words", "near"), [(["--versoin"], "--version"), (["compare", "--modle", "x", "--demo"], "--model")]
)
def test_a_misspelt_option_is_named(words, near, capsys):
    assert main(words) == 2
    assert f"; did you mean {near}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["embed", "--versoin"], ["compare", "--demo", "--seq", "3", "--slots", "x"]], ids=["alone", "abbreviated"]
)
def test_an_option_that_is_not_misspelt_is_not_guessed(words, capsys):
    assert main(words) == 2
    assert "did you mean" not in capsys.readouterr().err


@dataclass(frozen=True)
class Largest(Selector):
    """A rule of one's own: the keys of the largest norm, which later keys change."""

    count: int
    covers, work = fk.select.KeyNorm.covers, fk.select.KeyNorm.work

    def select(self, inputs):
        return shared_top(inputs, inputs.key.norm(dim=-1), self.count)


@dataclass(frozen=True)
class Newest(fk.Window):
    """A rule of one's own that keeps what a window keeps."""


@dataclass(frozen=True)
class Asked(fk.Window):
    """A rule of one's own: a window of a width that all queries decide."""

    def select(self, inputs):
        return fk.Window(self.size + int(inputs.query.mean() > 1)).select(inputs)


def test_a_rule_of_ones_own_is_causal_only_where_it_says_so():
    with pytest.raises(ValueError, match=r"^is_causal: Largest\(count=4\) looks at the future"):
        fk.attention(Q, Q, Q, keep=Largest(4), is_causal=True)
    assert torch.equal(fk.attention(Q, Q, Q, keep=Largest(4)), fk.attention(Q, Q, Q, keep=fk.select.KeyNorm(4)))


def test_a_rule_of_ones_own_can_be_tried():
    Newest(3).check_causal(Q, Q)
    fk.select.KeyNorm(4).check_causal(Q, Q, Q)
    for rule in (Largest(4), Asked(3)):
        with pytest.raises(ValueError, match=rf"^causal: expected {type(rule).__name__} to choose without tokens from"):
            rule.check_causal(Q, Q)


def test_plans_of_layers_without_their_heads_are_refused_with_the_fix():
    plan = fk.budget(8)
    for make, said in (
        (lambda: fk.ModelPlan((plan, plan)), r"layers: expected a tuple of plans in layer 0, .* write \(plan,\)$"),
        (lambda: fk.ModelPlan(plan), r"layers: .*, got Plan; ModelPlan\.of\({0: plan, 1: plan}\) makes one"),
        (lambda: fk.ModelPlan.of(plan), r"plans: expected a dictionary by layer, got Plan; write {0: plan}$"),
        (lambda: fk.ModelPlan.of([plan, plan]), r"plans: expected a dictionary by layer, got list; write {0: plan}$"),
        (lambda: fk.ModelPlan.of({0: 8}), r"layers: expected a tuple of plans in layer 0, .* got \(8,\)"),
    ):
        with pytest.raises(TypeError, match=f"^{said}"):
            make()


def test_what_is_no_path_is_named():
    for reader in (fk.Plan, fk.ModelPlan):
        with pytest.raises(TypeError, match=r"^directory: expected the path of a folder, got int"):
            reader.from_pretrained(3)
