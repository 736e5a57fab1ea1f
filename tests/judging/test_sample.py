"""What the sample says of a few queries is what the plans do with them."""

import pytest
import torch

import fewkeys as fk
from captures import captured, dense
from fewkeys.flow import prepare
from fewkeys.integrations.compare import compare
from fewkeys.judge import sample as module
from fewkeys.judge.sample import UNIT, Sample, take
from fewkeys.model_plan import ModelPlan

MIXED = ModelPlan((((fk.budget(24)), fk.Plan(fk.Window(3))), (fk.Plan(fk.TopK(4)), fk.budget(16))))
PLANS = {
    "exact": fk.Plan(),
    "window": fk.Plan(fk.Window(5)),
    "top-k": fk.Plan(fk.TopK(4)),
    "means": fk.budget(24),
    "sample": fk.Plan(fk.Window(3), fk.rest.UniformSample(4)),
    "moments": fk.Plan(fk.Window(3), fk.rest.Moments()),
    "cohorts": fk.budget(24, cohorts=2),
    "by head": MIXED,
}
CAUSAL = {"constant": fk.budget(24, is_causal=True, memory="constant"), "scan": fk.budget(24, is_causal=True)}


def bits(sample, row, length):
    packed = sample.tensors[f"{row}.kept"]
    return (packed[..., torch.arange(length) // 8] >> (torch.arange(length) % 8).to(torch.uint8)) & 1 == 1


@pytest.mark.long
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_queries_get_what_compare_measures(causal):
    capture = captured(batches=1, size=1, causal=causal, length=128 if causal else 40)
    plans = {"exact": fk.Plan(), "window": fk.Plan(fk.Window(5)), **CAUSAL} if causal else PLANS
    report = compare(capture, {name: plan for name, plan in plans.items() if name != "sample"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "QUERIES", capture.tokens)  # then means over queries are those of the report
        actual = take(capture, list(plans.values()))
    assert actual.queries == tuple(range(capture.tokens))
    weights = torch.stack([dense(next(capture.calls(layer)))[0][0] for layer in range(2)])
    torch.testing.assert_close(actual.tensors["exact"].double() / UNIT, weights, rtol=0, atol=1 / UNIT)
    for row, name in enumerate(plans):
        kept = bits(actual, row, capture.tokens)
        stand_ins = actual.tensors.get(f"{row}.weight")
        assert (stand_ins is None) == (name in ("exact", "window", "top-k"))
        if stand_ins is not None:
            total = stand_ins.double().sum(-1) / UNIT
            assert total.max() <= 1 + 1e-2
        if name == "sample":
            continue
        mine = report.row(name)
        measured = [torch.tensor(mine.per_head[of], dtype=torch.float64) for of in ("error", "mass")]
        shown = actual.tensors[f"{row}.error"].double().mean(-1), (weights * kept).sum(-1).mean(-1)
        torch.testing.assert_close(shown, tuple(measured), rtol=0, atol=1e-5)


def test_weights_of_stand_ins_are_the_same_one_by_one_and_together():
    """Two ways to the same number: stand-ins that speak for labelled keys, and all that kept keys leave."""
    call = next(captured(size=1).calls(0))
    problem = prepare(call.checked(), fk.Plan(fk.select.Leverage(7), fk.ClusterMeans(5, rank=2)))
    picks = [0, 11, 39]
    kept = problem.graph.to_mask()[0][:, picks]
    each = module._stand_ins(problem, kept, picks)
    labels = each["label"]
    assert set(labels.unique().tolist()) > {-1, 1, 2, 3}
    assert torch.equal(labels == -1, kept[:, 0])
    whole = module._stand_ins_together(problem, kept, picks)["weight"]
    torch.testing.assert_close(each["weight"].sum(-1, keepdim=True).double(), whole.double(), rtol=0, atol=5)
    assert whole.min() > 0.01 * UNIT


def test_it_comes_back_from_disk_and_damage_is_refused(tmp_path):
    path = tmp_path / "sample.safetensors"
    actual = take(captured(lengths=(33, 40, 7)), [fk.budget(16)], tokens=["a"] * 33)
    assert (actual.queries[0], actual.queries[-1], len(actual.tokens)) == (2, 30, 33)
    actual.save(path)
    again = Sample.load(path)
    assert (again.tokens, again.queries) == (actual.tokens, actual.queries)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in actual.tensors.items())
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        Sample.load(path)


def test_it_stays_small(monkeypatch):
    capture = captured()
    size = capture.layers * capture.query_heads * 40 * (2 + 1 / 8)
    for most, queries in ((2 * size, 2), (size, 1), (size - 1, None)):
        monkeypatch.setattr(module, "MOST", most)
        actual = take(capture, [fk.Plan(fk.Window(3))])
        assert actual is None if queries is None else len(actual.queries) == queries
