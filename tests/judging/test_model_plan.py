"""A plan for every head is each head's plan, run on that head alone."""

import json
from dataclasses import replace

import pytest
import torch

import fewkeys as fk
from captures import captured
from cases import CAUSAL_SHAPES, SHAPES
from fewkeys.integrations.compare import compare
from fewkeys.model_plan import FILE, ModelPlan
from tiny_models import MODELS, close, padded, run

FOUR = (
    fk.budget(16),
    fk.Plan(fk.select.KeyNorm(5) | fk.Window(9), fk.ClusterMeans(4)),
    fk.Plan(),
    fk.Plan(fk.select.KeyNorm(5) | fk.Window(9), fk.ClusterMeans(4)),
)
CAUSAL = (fk.Plan(fk.Window(5)), fk.Plan(), fk.Plan(fk.select.Leverage(4) | fk.Window(3)), fk.Plan(fk.Window(5)))
SHAPE = replace(SHAPES["padded"], query_heads=8, kv_heads=4)
CASES = {
    "padded": (SHAPE, FOUR),
    "cross": (replace(SHAPES["cross"], query_heads=4, kv_heads=4), FOUR),
    "causal": (replace(CAUSAL_SHAPES["causal grouped"], query_heads=8, kv_heads=4), CAUSAL),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("impl", ["reference", "torch", "auto"])
def test_every_head_runs_its_own_plan(name, impl):
    shape, plans = CASES[name]
    query, key, value = shape.draw()
    output = fk.attention(query, key, value, plan=plans, impl=impl, **shape.options)
    groups = shape.query_heads // shape.kv_heads
    for head, plan in enumerate(plans):
        heads = slice(head * groups, (head + 1) * groups)
        alone = fk.attention(
            query[:, heads], key[:, [head]], value[:, [head]], plan=plan, impl=impl, **shape.options
        )  # fmt: skip
        torch.testing.assert_close(output[:, heads], alone, rtol=1e-10, atol=1e-12)


def test_gradients_are_those_of_the_heads():
    tensors = [x.requires_grad_() for x in SHAPE.draw()]
    fk.attention(*tensors, plan=FOUR, **SHAPE.options).square().sum().backward()
    together = [x.grad for x in tensors]
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    total = 0.0
    for head, plan in enumerate(FOUR):
        q, k, v = tensors[0][:, 2 * head : 2 * head + 2], tensors[1][:, [head]], tensors[2][:, [head]]
        total = total + fk.attention(q, k, v, plan=plan, **SHAPE.options).square().sum()
    total.backward()
    for one, other in zip(together, tensors, strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_apply_runs_a_plan_per_layer_and_head(name):
    model = MODELS[name]()
    inputs = padded("right")
    heads = 2 if name == "llama" else 4
    plan = fk.Plan(fk.Window(3)) if name == "bert" else fk.Plan(fk.Window(4))
    with fk.apply(model, plan):
        common = run(model, **inputs)
    with fk.apply(model, ModelPlan(((plan,) * heads,) * 3)):
        close(run(model, **inputs), common, inputs["attention_mask"])
    mixed = ModelPlan(((plan, *(fk.Plan(),) * (heads - 1)), (fk.Plan(),) * heads, (fk.Plan(),) * heads))
    with fk.apply(model, mixed):
        assert not torch.allclose(run(model, **inputs), common)
    with fk.apply(model, ModelPlan(((fk.Plan(),) * heads,) * 3)):
        close(run(model, **inputs), run(MODELS[name](), **inputs), inputs["attention_mask"])


def test_a_comparison_judges_every_head_by_its_own_plan():
    capture = captured(layers=2, heads=4, kv_heads=2)
    # Plans that keep equally many keys in every head, so that the slots of a layer are the mean of its heads'.
    one, two = fk.Plan(fk.Window(5), fk.ClusterMeans(3)), fk.Plan(fk.Sinks(3) | fk.Window(5))
    mixed, shared = ModelPlan(((one, two), (two, fk.Plan()))), ModelPlan.of({0: one, 1: [one, one]})
    actual = compare(capture, {"one": one, "two": two, "mixed": mixed, "shared": shared, "exact": fk.Plan()})
    assert actual.row("shared").per_head == actual.row("one").per_head
    single = {name: actual.row(name).per_head for name in ("one", "two", "exact")}
    rows = (("one", "two"), ("two", "exact"))
    for kind in ("error", "mass", "recall"):
        for layer, names in enumerate(rows):
            expected = [single[name][kind][layer][2 * h + g] for h, name in enumerate(names) for g in range(2)]
            assert actual.row("mixed").per_head[kind][layer] == pytest.approx(expected, abs=1e-6)
    slots = [actual.row(name).per_layer["slots"] for name in ("one", "two", "mixed")]
    assert slots[2][0] == pytest.approx((slots[0][0] + slots[1][0]) / 2)
    assert slots[2][1] == pytest.approx((slots[1][1] + 40) / 2)
    assert actual.row("mixed").kind == "method"
    assert ModelPlan.from_dict(actual.row("mixed").config) == mixed


def test_save_and_load_is_identity(tmp_path):
    plan = ModelPlan([list(FOUR), CAUSAL], {"slots": 3.5})
    plan.save_pretrained(tmp_path / "new")
    loaded = ModelPlan.from_pretrained(tmp_path / "new")
    assert (loaded, loaded.record, hash(loaded)) == (plan, plan.record, hash(plan))
    assert [file.name for file in (tmp_path / "new").iterdir()] == [FILE]
    assert len(json.loads((tmp_path / "new" / FILE).read_text())["plans"]) == 5


DAMAGE = {
    "format": lambda data: data | {"format": 9},
    "no layers": lambda data: {key: value for key, value in data.items() if key != "layers"},
    "no record": lambda data: {key: value for key, value in data.items() if key != "record"},
    "number too high": lambda data: data | {"layers": [[0, 9]]},
    "negative number": lambda data: data | {"layers": [[-1]]},
    "not a list": lambda data: data | {"layers": 3},
    "empty": lambda data: data | {"layers": []},
    "damaged plan": lambda data: data | {"plans": [{"format": 1}] * 3},
    "a list": lambda data: [data],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_refused(tmp_path, kind):
    data = ModelPlan((FOUR,)).to_dict()
    (tmp_path / FILE).write_text(json.dumps(DAMAGE[kind](data)))
    with pytest.raises(ValueError, match="model plan: expected"):
        ModelPlan.from_pretrained(tmp_path)


def test_refusals(tmp_path):
    query, key, value = SHAPE.draw()
    with pytest.raises(ValueError, match=r"plan: expected one plan for each of 4 key heads, got 3"):
        fk.attention(query, key, value, plan=FOUR[:3])
    with pytest.raises(TypeError, match=r"plan: expected a fewkeys.Plan, got str"):
        fk.attention(query, key, value, plan=[*FOUR[:3], "window"])
    with pytest.raises(ValueError, match=r"directory: expected a folder with model_plan\.json"):
        ModelPlan.from_pretrained(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ValueError, match="directory: expected JSON"):
        ModelPlan.from_pretrained(tmp_path)
    for layers in ((), ((),), (FOUR, ())):
        with pytest.raises(ValueError, match="layers: expected"):
            ModelPlan(layers)
    with pytest.raises(TypeError, match=r"layers: expected a tuple of plans in layer 1, .* got \(3,\)"):
        ModelPlan((FOUR, (3,)))
    with pytest.raises(ValueError, match="expected one plan for each of 3 attention layers, got 1"):
        fk.apply(MODELS["bert"](), ModelPlan((FOUR,)))
    with pytest.raises(ValueError, match="plans: expected 2 layers of 2 plans, or one for all, under 'mine', got"):
        compare(captured(), {"mine": ModelPlan((FOUR,))})


def test_a_description_with_an_unknown_field_is_refused():
    """Such as a damaged "checksum": without one, the plans could be anybody's."""
    with pytest.raises(ValueError, match=r"^model plan: .*unknown fields \['checksun'\]"):
        ModelPlan.from_dict({**ModelPlan.of({0: fk.budget(8)}).to_dict(), "checksun": "9dae"})


def test_one_plan_a_layer_is_not_one_of_one_head():
    assert str(fk.ModelPlan.of({0: fk.budget(16), 1: fk.budget(16)})) == "1 plan over 2 layers"
    assert str(fk.ModelPlan.of({0: [fk.budget(16), fk.Plan()]})) == "2 plans over 1 layer of 2 heads"
