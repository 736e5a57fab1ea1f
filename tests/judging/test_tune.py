"""Tuning finds what is best among its candidates, under its budget, and the same again."""

import pytest
import torch
from hypothesis import given, strategies as st

import fewkeys as fk
from captures import captured, dense
from fewkeys.captures.capture import AttentionInputs
from fewkeys.captures.writer import CaptureWriter
from fewkeys.integrations.compare import compare
from fewkeys.integrations.transformers import capture
from fewkeys.plan import Plan
from fewkeys.tuning import tune as module
from fewkeys.tuning.allocate import within_error, within_slots
from fewkeys.tuning.candidates import Candidate, splits
from fewkeys.tuning.score import layer_error, score_layer
from tiny_models import MODELS, tokens

PLANS = [
    Candidate(fk.budget(12), 12),
    Candidate(Plan(fk.select.KeyNorm(3) | fk.Window(5)), 8),
    Candidate(Plan(fk.select.Leverage(4) | fk.Window(5)), 9),
    Candidate(Plan(), 40),
]


def by_definition(taken, layer, plan, projection):
    """Both errors of every head, from dense float64 attention, a query at a time."""
    relative, share, count = 0, 0, 0
    for call in taken.calls(layer):
        for b in range(len(call.query)):
            real = slice(None) if call.key_mask is None else call.key_mask[b]
            q, k, v = (x[b : b + 1, :, real] for x in (call.query, call.key, call.value))
            exact = dense(AttentionInputs(q, k, v, call.scale, call.is_causal))[1][0]
            g = torch.Generator().manual_seed(0)
            options = {"scale": call.scale, "is_causal": call.is_causal, "generator": g, "impl": "reference"}
            error = fk.attention(q.double(), k.double(), v.double(), plan=plan, **options)[0] - exact
            relative = relative + (error.norm(dim=-1) / exact.norm(dim=-1)).sum(1)
            whole = torch.einsum("hnd,ohd->no", exact, projection).square().sum(-1)
            share = share + (torch.einsum("hnd,ohd->hno", error, projection).square().sum(-1) / whole).sum(1)
            count += exact.shape[1]
    groups = taken.query_heads // taken.kv_heads
    return [(x / count).view(-1, groups).mean(1) for x in (relative, share)]


@pytest.mark.parametrize("lengths", [None, [40, 17, 1]])
@pytest.mark.parametrize("has_projection", [True, False])
def test_scores_are_the_errors_by_definition(lengths, has_projection, monkeypatch):
    taken = captured(lengths=lengths)
    weight = torch.eye(32).view(32, 4, 8)
    if has_projection:
        weight = torch.randn(24, 4, 8, generator=torch.Generator().manual_seed(5))
        monkeypatch.setattr(type(taken), "projection", lambda self, layer: weight)
    done = []
    scores = score_layer(taken, 1, PLANS, seed=0, done=lambda: done.append(1))
    assert len(done) == 2 * len(PLANS)
    for index, candidate in enumerate(PLANS):
        expected = by_definition(taken, 1, candidate.plan, weight.double())
        torch.testing.assert_close(scores.relative[:, index], expected[0], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(scores.added[:, index], expected[1], rtol=1e-3, atol=1e-6)
    assert not scores.output_change.any()


def test_the_error_of_a_layer_is_that_of_its_heads_together(monkeypatch):
    taken = captured(batches=1)
    weight = torch.randn(24, 4, 8, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(type(taken), "projection", lambda self, layer: weight)
    plans = [PLANS[0].plan, PLANS[1].plan]
    heads, whole = layer_error(taken, 0, plans, seed=0)
    (call,) = taken.calls(0)
    exact = dense(call)[1]
    output = fk.attention(call.query, call.key, call.value, plan=plans, impl="reference")
    assert heads == pytest.approx(fk.metrics.output_error(output, exact), rel=1e-4)
    layer = [torch.einsum("bhnd,ohd->bno", x.double(), weight.double()) for x in (output, exact)]
    assert whole == pytest.approx(fk.metrics.output_error(*layer), rel=1e-4)


choices = st.integers(1, 4).flatmap(
    lambda heads: st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=4, max_size=4), min_size=heads, max_size=heads
    )
)


def every(slots, cost):
    """All choices with their mean slots and total cost."""
    grids = torch.cartesian_prod(*[torch.arange(slots.shape[1])] * slots.shape[0]).view(-1, slots.shape[0])
    heads = torch.arange(slots.shape[0])
    return slots[heads, grids].mean(1), cost[heads, grids].sum(1)


@given(choices, st.floats(1, 9))
def test_slots_are_kept_and_no_choice_of_as_few_is_much_better(table, budget):
    slots, cost = (torch.tensor([[entry[i] for entry in row] for row in table]).double() for i in (0, 1))
    all_slots, all_costs = every(slots, cost)
    if float(all_slots.min()) > budget:
        with pytest.raises(ValueError, match="slots: expected at least"):
            within_slots(cost, slots, budget)
        return
    chosen = within_slots(cost, slots, budget)
    heads = torch.arange(len(chosen))
    paid, got = float(slots[heads, chosen].mean()), float(cost[heads, chosen].sum())
    assert paid <= budget
    # Lagrange: optimal for what a relaxed choice pays; one head's step at most is lost to the integers.
    best = float(all_costs[all_slots <= budget].min())
    assert got <= best + float((cost.amax(1) - cost.amin(1)).max()) + 1e-9
    assert torch.equal(chosen, within_slots(cost, slots, budget))


@given(choices, st.floats(0, 1))
def test_errors_are_kept_and_slots_fall_with_them(table, most):
    slots, cost = (torch.tensor([[entry[i] for entry in row] for row in table]).double() for i in (0, 1))
    slots, cost = torch.cat([slots, torch.full_like(slots[:, :1], 20)], 1), torch.cat([cost, cost[:, :1] * 0], 1)
    heads = torch.arange(len(slots))
    chosen = within_error(cost, slots, cost, most)
    assert float(cost[heads, chosen].mean()) <= most
    looser = within_error(cost, slots, cost, 2 * most)
    assert float(slots[heads, looser].mean()) <= float(slots[heads, chosen].mean())


@pytest.mark.parametrize(("most", "expected"), [(0.4, [0, 0]), (0.2, [1, 0]), (0.05, [2, 1])])
def test_errors_of_heads_without_a_cost_are_kept(most, expected):
    """The predictions do not depend on some heads; the error does."""
    cost = torch.zeros(2, 3)
    slots = torch.tensor([[2.0, 4.0, 8.0], [2.0, 8.0, 8.0]])
    error = torch.tensor([[0.5, 0.2, 0.0], [0.1, 0.0, 0.0]])
    assert within_error(cost, slots, error, most).tolist() == expected


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("slots", [2, 7, 64, 500])
def test_candidates_pay_what_they_say(slots, is_causal):
    """Kept keys and stand-ins of a candidate are at most its slots, on average over blocks where it keeps blocks."""
    keys = 1000
    query, key, value = (
        torch.randn(1, 1, keys, 32, generator=torch.Generator().manual_seed(s)) for s in (0, 1, 2)
    )  # fmt: skip
    actual = splits(slots, is_causal=is_causal, keys=keys, width=64)
    assert actual[0].plan == fk.budget(slots, is_causal=is_causal)
    assert len(set(actual)) == len(actual)
    whole = fk.Plan(fk.KeyScan(keys), fk.BlockMeans(1), exact_if_faster=True) if is_causal else Plan()
    assert (actual[-1].plan, actual[-1].slots) == (whole, keys)
    assert max(candidate.slots for candidate in actual[:-1]) < keys  # who pays for every key may have every key
    for candidate in actual[:-1:5]:
        graph = candidate.plan.keep.graph(query, key, value, is_causal=is_causal)
        kept = graph.to_mask()[0, 0].sum(-1).float()
        by_block = isinstance(candidate.plan.rest, fk.rest.RunningMeans | fk.BlockMeans)
        kept = kept[256:768].mean() if by_block else kept.max()
        assert candidate.plan.slots(float(kept), 32, 32) <= candidate.slots + 1e-9, candidate


@pytest.mark.long
def test_tuning_beats_the_budget_at_no_more_slots():
    model = MODELS["bert"]()
    taken = capture(model, [tokens(3, 40), tokens(3, 40, seed=9)])
    actual = fk.tune(taken, 12)
    assert len(actual) == 3
    assert {len(layer) for layer in actual} == {4}
    assert actual.record["slots"] <= 12
    rows = compare(taken, {"tuned": actual, "budget": fk.budget(12)})
    assert rows.row("tuned").slots <= 12
    assert rows.row("tuned").error == pytest.approx(actual.record["error"], rel=1e-3)
    assert rows.row("budget").error == pytest.approx(actual.record["budget"]["error"], rel=1e-3)
    gains = [actual.record[name] / actual.record["budget"][name] for name in ("error", "layer_error")]
    assert max(gains) < 0.9


def test_errors_of_both_kinds_count_by_those_of_the_budget(monkeypatch):
    costs, inner = [], module.within_slots
    monkeypatch.setattr(module, "within_slots", lambda cost, *rest: costs.append(cost) or inner(cost, *rest))
    fk.tune(captured(batches=1), 8)
    assert float(costs[0][:, 0].mean()) == pytest.approx(2)


@pytest.mark.long
def test_slots_go_where_the_projection_looks(monkeypatch):
    """Of two key heads with inputs alike, the one whose output the layer enlarges gets more slots."""
    taken = captured(layers=1, length=60)
    for loud in (0, 1):
        size = torch.full((4,), 0.01)
        size[2 * loud : 2 * loud + 2] = 10.0
        weight = torch.eye(32).view(32, 4, 8) * size[:, None]
        monkeypatch.setattr(type(taken), "projection", lambda self, layer, weight=weight: weight)
        call = next(taken.calls(0))
        for layer in fk.tune(taken, 12):
            paid = [
                plan.slots(plan.keep.graph(call.query, call.key, call.value).slots(), 8, 8) if plan.keep else 60.0
                for plan in layer
            ]
            assert paid[loud] > 1.5 * paid[1 - loud]


def test_causal_models_get_causal_plans():
    model = MODELS["llama"]()
    taken = capture(model, [tokens(3, 40)])
    actual = fk.tune(taken, 10)
    assert {len(layer) for layer in actual} == {2}
    tuned, common = actual.record, actual.record["budget"]
    assert tuned["error"] / common["error"] + tuned["layer_error"] / common["layer_error"] <= 2 + 1e-9
    assert all(plan.keep is None or plan.keep.causal for layer in actual for plan in layer)
    with fk.apply(model, actual):
        model(tokens(1, 20))


@pytest.mark.long
def test_an_error_is_met_with_fewer_slots_the_larger_it_is():
    taken = captured(length=60)
    strict, loose = (fk.tune(taken, max_error=error) for error in (0.02, 0.3))
    assert strict.record["error"] <= 0.02
    assert 0.1 < loose.record["error"] <= 0.3
    assert loose.record["slots"] < strict.record["slots"]


@pytest.mark.long
def test_tuning_is_deterministic_and_reports_progress():
    taken = captured(batches=1)
    seen = []
    one = fk.tune(taken, 8, progress=lambda *step: seen.append(step))
    two = fk.tune(taken, 8)
    assert (one, one.record) == (two, two.record)
    done = [step[0] for step in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1]
    assert {step[2] for step in seen} == {"layer 1 of 2", "layer 2 of 2"}


@pytest.mark.long
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    taken = captured(batches=1)
    whole = fk.tune(taken, 8)

    def stop(done, total, what):
        if what == "layer 2 of 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fk.tune(taken, 8, directory=tmp_path, progress=stop)
    assert len(list(tmp_path.iterdir())) == 1
    layers = []
    score = module.score_layer
    monkeypatch.setattr(module, "score_layer", lambda *a, **b: layers.append(a[1]) or score(*a, **b))
    assert fk.tune(taken, 8, directory=tmp_path) == whole
    assert layers == [1]  # the first layer was there
    layers.clear()
    assert fk.tune(taken, 8, directory=tmp_path) == whole
    assert layers == []
    # A damaged file is made again; another capture, seed or number of slots shares nothing.
    victim = sorted(tmp_path.iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:50])
    assert fk.tune(taken, 8, directory=tmp_path) == whole
    assert layers == [0]
    layers.clear()
    fk.tune(captured(batches=1, seed=1), 8, directory=tmp_path)
    fk.tune(taken, 8, directory=tmp_path, seed=1)
    fk.tune(taken, 9, directory=tmp_path)
    assert layers == [0, 1] * 3


def test_padding_changes_no_choice():
    """Sequences of one length, and the same ones padded, get the same plans."""
    short = captured(length=30)
    writer = CaptureWriter(None, "random")
    for batch in zip(*(short.calls(layer) for layer in range(2)), strict=True):
        for call in batch:
            padded = [torch.nn.functional.pad(x, (0, 0, 0, 10), value=7.0) for x in (call.query, call.key, call.value)]
            writer.write(AttentionInputs(*padded, call.scale, False, (torch.arange(40) < 30).expand(3, -1)))
        writer.end_batch()
    long = writer.finish()
    for one, other in zip(
        score_layer(short, 0, PLANS[:2], seed=0, done=lambda: None),
        score_layer(long, 0, PLANS[:2], seed=0, done=lambda: None),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_refusals():
    taken = captured()
    with pytest.raises(ValueError, match="slots, max_error: expected one of them, got both"):
        fk.tune(taken, 8, max_error=0.1)
    with pytest.raises(TypeError, match="capture: expected a Capture, got list"):
        fk.tune([], 8)
    with pytest.raises(ValueError, match="slots: expected at least 1, got 0"):
        fk.tune(taken, 0)
    with pytest.raises(ValueError, match="max_error: expected"):
        fk.tune(taken, max_error=0.0)


def test_candidates_of_decoders_keep_all_keys_at_hand():
    actual = splits(128, is_causal=True, keys=2000, width=64)
    assert actual[0].plan == fk.budget(128, is_causal=True)
    scans = {candidate.slots for candidate in actual if isinstance(candidate.plan.rest, fk.BlockMeans)}
    assert scans == {32, 48, 64, 96, 128, 176, 240, 320, 512, 768, 2000}
    parts = {(*map(type, candidate.plan.parts), type(candidate.plan.rest)) for candidate in actual[1:-1]}
    assert parts == {(fk.KeyScan, fk.BlockMeans), (fk.Sinks, fk.Window, fk.Drop)}


def test_what_is_left_is_spent_where_a_slot_gains_most():
    cost = torch.tensor([[1.0, 0.5], [1.0, 0.8]])
    slots = torch.tensor([[1.0, 1.5], [1.0, 1.1]])
    assert within_slots(cost, slots, 1.25).tolist() == [0, 1]
    assert within_slots(cost, slots, 1.35).tolist() == [1, 1]
