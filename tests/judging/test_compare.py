"""The numbers of a comparison, checked against plain float64 and against laws that no plan may break."""

import math
from dataclasses import replace

import pytest
import torch

import fewkeys as fk
from captures import captured, dense
from fewkeys.captures.capture import AttentionInputs
from fewkeys.captures.writer import CaptureWriter
from fewkeys.integrations.compare import compare
from fewkeys.judge import exact as exact_module, layer as module
from fewkeys.judge.exact import blocks
from fewkeys.judge.standard import standard_plans
from fewkeys.tuning.score import layer_error

EPS = 0.05


def numbers(report):
    """Everything in the rows but the timings."""
    return [{**vars(row), "ms": 0, "exact_ms": 0} for row in report.rows]


@pytest.fixture(scope="module")
def capture():
    return captured()


@pytest.fixture(scope="module")
def report(capture):
    return compare(capture, {8: standard_plans(8), 16: standard_plans(16)})


def test_exact_attention_has_no_error_and_is_judged_once(report):
    row = report.row("exact")
    assert (row.kind, row.budget) == ("exact", None)
    assert 0.0 <= row.error < 1e-5
    assert row.mass == pytest.approx(1.0, abs=1e-6)
    assert row.recall == 1.0
    assert row.slots == 40.0


def test_one_plan_is_compared_as_a_list_of_one(capture):
    plan = fk.Plan(fk.Window(3))
    assert numbers(compare(capture, plan)) == numbers(compare(capture, [plan]))


def test_every_standard_row_is_there_at_every_budget(report):
    names = set(standard_plans(8)) - {"exact"}
    assert len(names) == 10
    assert {(row.name, row.budget) for row in report.rows} == {(n, b) for n in names for b in (8, 16)} | {
        ("exact", None)
    }
    assert [row.name for row in report.rows if row.kind == "oracle"] == [
        "top-k per query (oracle)",
        "best shared columns (oracle)",
    ] * 2
    assert report.skipped == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keep", [fk.TopK(5), fk.Window(7), fk.select.KeyNorm(3) | fk.Window(4)])
def test_the_numbers_are_those_of_plain_float64(keep, causal):
    capture = captured(causal=causal)
    row = compare(capture, {"plan": fk.Plan(keep)}, eps=EPS).rows[0]
    errors, masses, kept, recalls, total = [], [], [], [], [0, 0]
    for layer in range(capture.layers):
        per_layer, actual, heavy = [], 0, 0
        for call in capture.calls(layer):
            weights, output = dense(call)
            mask = keep.graph(call.query, call.key, is_causal=causal, scale=call.scale).to_mask()
            group = call.query.shape[1] // call.key.shape[1]
            cut = weights * mask
            approx = cut / cut.sum(-1, keepdim=True) @ call.value.double().repeat_interleave(group, 1)
            per_layer.append((approx - output).norm(dim=-1) / output.norm(dim=-1))
            masses.append(cut.sum(-1))
            kept.append(mask.sum(-1).double())
            actual = actual + ((weights >= EPS) & mask).sum((0, 2, 3))
            heavy = heavy + (weights >= EPS).sum((0, 2, 3))
        errors.append(torch.cat(per_layer))
        recalls.append((actual / heavy).tolist())
        total = [total[0] + int(actual.sum()), total[1] + int(heavy.sum())]
    every = torch.stack(errors)  # layer, sequence, head, query
    assert row.error == pytest.approx(float(every.mean()), rel=1e-4)
    assert row.error_p50 == pytest.approx(float(every.quantile(0.5)), rel=5e-3)
    assert row.error_p90 == pytest.approx(float(every.quantile(0.9)), rel=5e-3)
    per_head = every.mean((1, 3))
    assert torch.tensor(row.per_head["error"]).double() == pytest.approx(per_head.numpy(), rel=1e-4)
    assert row.per_layer["error"] == pytest.approx(per_head.mean(1).tolist(), rel=1e-4)
    assert row.worst_head == list(divmod(int(per_head.argmax()), capture.query_heads))
    assert row.worst_head_error == pytest.approx(float(per_head.max()), rel=1e-4)
    assert row.mass == pytest.approx(float(torch.cat(masses).mean()), rel=1e-5)
    assert row.slots == pytest.approx(float(torch.cat(kept).mean()))
    assert 0 < total[0] < total[1]
    assert row.recall == pytest.approx(total[0] / total[1])
    assert torch.tensor(row.per_head["recall"]).numpy() == pytest.approx(torch.tensor(recalls).numpy())


def test_no_choice_of_as_many_keys_holds_more_mass_than_top_k(report):
    for budget in (8, 16):
        bound = report.row("top-k per query (oracle)", budget)
        for row in report.rows:
            if row.kind == "exact" or row.budget != budget or row.name == bound.name:
                continue
            if row.name == "fewkeys budget":
                continue  # its kept keys are bounded by another number than `slots`
            assert row.slots <= bound.slots + 1e-9
            for mine, best in zip(row.per_head["mass"], bound.per_head["mass"], strict=True):
                assert all(a <= b + 1e-6 for a, b in zip(mine, best, strict=True)), row.name


def test_best_shared_columns_hold_more_mass_than_other_shared_columns(report):
    bound = report.row("best shared columns (oracle)", 8)
    for name in ("random keys", "key norm", "leverage (LevAttention)", "leverage (centred)"):
        assert report.row(name, 8).mass < bound.mass


def test_stand_ins_are_paid_for(capture, report):
    window, means = compare(capture, [fk.Plan(fk.Window(7)), fk.Plan(fk.Window(7), fk.ClusterMeans(5, rank=2))]).rows
    assert means.slots == pytest.approx(window.slots + fk.ClusterMeans(5, rank=2).slots(8, 8))
    assert report.row("fewkeys budget", 16).slots <= 16.0


def test_keeping_every_key_is_exact(capture):
    actual = compare(capture, {64: standard_plans(64)})
    for row in actual.rows:
        if row.name not in ("fewkeys budget", "leverage + window", "sinks + window", "window"):
            assert row.error < 1e-5, row.name
            assert row.mass == pytest.approx(1.0, abs=1e-6)
            assert row.slots == 40.0


def test_padding_is_as_if_it_were_not_there():
    padded = captured(layers=1, batches=1, size=2, lengths=[40, 23])
    plans = {name: plan for name, plan in standard_plans(8).items() if name != "random keys"}
    call = next(padded.calls(0))
    writer = CaptureWriter(None, "random")
    for sequence, length in enumerate((40, 23)):
        q, k, v = (x[sequence : sequence + 1, :, :length] for x in (call.query, call.key, call.value))
        writer.write(AttentionInputs(q, k, v, call.scale, False))
        writer.end_batch()
    cut = compare(writer.finish(), plans)
    whole = compare(padded, plans)
    assert (whole.tokens, whole.length, whole.sequences) == (63, 40, 2)
    for a, b in zip(whole.rows, cut.rows, strict=True):
        assert (a.error, a.mass, a.recall, a.slots) == pytest.approx((b.error, b.mass, b.recall, b.slots), abs=1e-6)


@pytest.mark.parametrize("queries", [(20, 12), (20, 20)], ids=["padded queries", "all real"])
def test_padding_of_other_tokens_is_as_if_it_were_not_there(queries):
    """Cross-attention with as many queries as keys: padded keys are not padded queries."""
    call, keys = next(captured(layers=1, batches=1, size=2, length=20).calls(0)), (20, 9)
    whole, cut = CaptureWriter(None, "random"), CaptureWriter(None, "random")
    mask, query_mask = (torch.arange(20) < torch.tensor(lengths)[:, None] for lengths in (keys, queries))
    whole.write(replace(call, key_mask=mask, query_mask=query_mask))
    whole.end_batch()
    for row, (n, m) in enumerate(zip(queries, keys, strict=True)):
        one = call.rows(slice(row, row + 1))
        alone = [one.query[:, :, :n], one.key[:, :, :m], one.value[:, :, :m]]
        cut.write(AttentionInputs(*alone, call.scale, False, query_mask=torch.ones(1, n, dtype=torch.bool)))
        cut.end_batch()
    captures = whole.finish(), cut.finish()
    plans = {"top": fk.Plan(fk.TopK(3)), "budget": fk.budget(8)}
    a, b = ([(row.error, row.mass, row.slots) for row in compare(capture, plans).rows] for capture in captures)
    assert a == [pytest.approx(numbers, abs=1e-6) for numbers in b]
    # Tuning runs plans as the model does, which does not know which queries are padded.
    a, b = (layer_error(capture, 0, [plans["top"]], seed=0) for capture in captures)
    assert a == pytest.approx(b, abs=1e-5)


def test_padding_on_the_left_is_as_if_it_were_not_there():
    plain = captured(layers=1, batches=1, size=1, length=20, causal=True)
    call = next(plain.calls(0))
    writer = CaptureWriter(None, "random")
    q, k, v = (torch.cat([torch.full_like(x[:, :, :6], 9.0), x], 2) for x in (call.query, call.key, call.value))
    mask = (torch.arange(26) >= 6)[None]
    writer.write(AttentionInputs(q, k, v, call.scale, True, mask))
    writer.end_batch()
    plans = {"window": fk.Plan(fk.Window(5)), "top": fk.Plan(fk.TopK(3)), "sinks": fk.Plan(fk.Sinks(2) | fk.Window(3))}
    assert numbers(compare(writer.finish(), plans)) == numbers(compare(plain, plans))


@pytest.mark.parametrize("limit", [1, 40 * 40 * 4 * 2])
def test_the_size_of_blocks_changes_nothing(capture, monkeypatch, limit):
    plans = {name: standard_plans(8)[name] for name in ("exact", "window", "leverage (centred)", "fewkeys budget")}
    whole = compare(capture, plans)
    monkeypatch.setattr(exact_module, "BLOCK", limit)
    assert max(b.query[..., 0].numel() * 40 for b in blocks(next(capture.calls(0)))) == max(limit, 3200)
    for a, b in zip(whole.rows, compare(capture, plans).rows, strict=True):
        assert (a.error, a.mass, a.recall, a.slots) == pytest.approx((b.error, b.mass, b.recall, b.slots), rel=1e-4)
        assert a.worst_head == b.worst_head or a.kind == "exact"


def test_the_same_seed_gives_the_same_numbers(capture):
    plans = {"random": fk.Plan(fk.RandomKeys(8)), "window": fk.Plan(fk.Window(8))}
    first, again, other = (compare(capture, plans, seed=seed) for seed in (3, 3, 4))
    assert numbers(first) == numbers(again)
    assert first.row("window").error == other.row("window").error
    assert first.row("random").error != other.row("random").error


def test_plans_run_by_the_executor_asked_for():
    """And always, never exact attention in their place; those that it does not know are left out, with the reason."""
    capture = captured(layers=1, batches=1, size=1, heads=2, kv_heads=1, length=18)
    plans = {"budget": fk.budget(8), "power": fk.Plan(fk.Window(3), weights=fk.weights.Power(2.0))}
    slow, fast = (compare(capture, plans, impl=impl) for impl in ("reference", "torch"))
    assert (slow.settings["impl"], fast.settings["impl"]) == ("reference", "torch")
    assert slow.row("budget").error == pytest.approx(fast.row("budget").error, rel=1e-3)
    assert slow.row("budget").error > 0.01
    compiled = compare(capture, plans | {"exact": fk.Plan()}, impl="native")
    (reason,) = [row.reason for row in compiled.skipped if row.name == "power"]
    assert reason.startswith("impl='native': expected")


def test_a_row_does_not_depend_on_its_neighbours(capture):
    plan = fk.Plan(fk.RandomKeys(8))
    alone = compare(capture, {"random": plan})
    beside = compare(capture, {"other": fk.Plan(fk.RandomKeys(4)), "random": plan})
    assert numbers(alone)[0] == numbers(beside)[1]


def test_output_and_edges_come_from_the_same_random_keys(monkeypatch):
    capture = captured(layers=1, batches=1)
    outputs, edges, answer = [], [], module.answer

    def noted(choice):
        output, graph = answer(choice)
        outputs.append(output)
        edges.append(graph.to_mask())
        return output, graph

    monkeypatch.setattr(module, "answer", noted)
    compare(capture, {"random": fk.Plan(fk.RandomKeys(8))}, seed=1)
    (call,) = capture.calls(0)
    weights = dense(call)[0] * edges[0]
    expected = weights / weights.sum(-1, keepdim=True) @ call.value.double().repeat_interleave(2, 1)
    assert torch.allclose(outputs[0].double(), expected, atol=1e-5)


def test_recall_counts_entries_at_or_above_eps(capture):
    plans = {"window": fk.Plan(fk.Window(9))}
    low, high = (compare(capture, plans, eps=eps).rows[0] for eps in (0.01, 0.2))
    assert low.recall != high.recall
    none = compare(capture, plans, eps=1.0).rows[0]
    assert none.recall is None
    assert none.per_head["recall"] == [[None] * 4] * 2
    assert none.per_layer["recall"] == [None] * 2


def test_causal_models_leave_out_what_cannot_be_causal():
    actual = compare(captured(causal=True), {8: standard_plans(8, is_causal=True)})
    left_out = {item.name: item.reason for item in actual.skipped}
    assert set(left_out) == {"best shared columns (oracle)"}
    assert all("causal" in reason for reason in left_out.values())
    assert {"exact", "top-k per query (oracle)", "window", "fewkeys budget"} <= {row.name for row in actual.rows}
    assert actual.row("exact").slots == 20.5
    assert actual.is_causal


def test_a_plan_whose_output_is_not_finite_is_left_out(capture, monkeypatch):
    def broken(choice):
        output, graph = answer(choice)
        return output * (math.nan if choice.plan.keep == fk.Window(5) else 1.0), graph

    answer = module.answer
    monkeypatch.setattr(module, "answer", broken)
    actual = compare(capture, {"broken": fk.Plan(fk.Window(5)), "sound": fk.Plan(fk.Window(6))})
    assert [row.name for row in actual.rows] == ["sound"]
    assert "not finite" in actual.skipped[0].reason


def test_plans_come_as_list_mapping_or_budgets(capture):
    plan = fk.Plan(fk.Window(5))
    assert [(r.name, r.budget) for r in compare(capture, [plan]).rows] == [(str(plan), None)]
    assert [(r.name, r.budget) for r in compare(capture, {"a": plan}).rows] == [("a", None)]
    actual = compare(capture, {5: {"a": plan}, 6: {"a": plan}})
    assert [(r.name, r.budget) for r in actual.rows] == [("a", 5), ("a", 6)]
    assert actual.settings["budgets"] == [5, 6]
    assert fk.Plan.from_dict(actual.rows[0].config) == plan
    tuned = [fk.ModelPlan(((fk.Plan(fk.Window(count)),),) * capture.layers) for count in (3, 5)]
    assert len(compare(capture, [tuned[0], tuned[0]]).rows) == 1
    with pytest.raises(ValueError, match="plans: expected different names, got two of 1 plan over"):
        compare(capture, tuned)


def test_timings_are_of_both_and_in_the_report(report):
    for row in report.rows:
        assert row.ms > 0.0
        assert row.exact_ms > 0.0
    assert report.settings["timed_shape"] == [1, 4, 40, 8]


def test_plans_are_timed_on_a_sequence_with_as_many_heads_as_fit(capture, monkeypatch):
    def shape():
        return compare(capture, fk.Plan(fk.Window(5))).settings["timed_shape"]

    monkeypatch.setattr("fewkeys.judge.exact.BLOCK", 1)  # errors are those of a key head at a time
    assert shape() == [1, 4, 40, 8]
    monkeypatch.setattr("fewkeys.judge.exact.TIMED", 40 * 40 * 2)
    assert shape() == [1, 2, 40, 8]


def test_the_timings_are_medians_of_turns(capture, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr("fewkeys.core.clock.perf_counter", lambda: next(ticks) ** 2 / 1000.0)
    row = compare(capture, {"window": fk.Plan(fk.Window(5))}).rows[0]
    # Six turns of exact and plan: the clock reads t^2, so turn i takes 8i + 1 and 8i + 5 milliseconds.
    assert (row.exact_ms, row.ms) == (pytest.approx(21.0), pytest.approx(25.0))


def test_progress_rises_to_its_total(capture):
    seen = []
    compare(capture, standard_plans(8), progress=lambda done, total, what: seen.append((done, total, what)))
    counts = [done for done, _, _ in seen]
    assert counts == sorted(counts)
    assert len(set(counts)) > 20
    assert seen[-1][0] == seen[-1][1]
    assert any(what == "layer 2 of 2" for _, _, what in seen)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"plans": {}}, ValueError, "at least one plan"),
        ({"plans": []}, ValueError, "at least one plan"),
        ({"plans": {"a": fk.Window(3)}}, TypeError, "expected a Plan under 'a', got Window"),
        ({"plans": [{"a": fk.Plan(fk.Window(3))}]}, TypeError, "expected a Plan under .*, got dict"),
        ({"eps": 0.0}, ValueError, "eps: expected"),
        ({"eps": 1.5}, ValueError, "eps: expected"),
        ({"impl": "fast"}, ValueError, "impl: expected one of auto"),
        ({"model": object()}, ValueError, "both or neither"),
        ({"batches": []}, ValueError, "both or neither"),
        ({"capture": torch.nn.Linear(2, 2)}, TypeError, "^capture: .*, got Linear; make one with fewkeys.capture"),
        ({"capture": captured(lengths=[0, 0, 0])}, ValueError, "^capture: expected at least one real token"),
    ],
)
def test_bad_arguments_are_refused(capture, arguments, error, match):
    with pytest.raises(error, match=match):
        compare(**{"capture": capture, "plans": {"a": fk.Plan()}, **arguments})


def test_when_every_plan_refuses_that_is_an_error():
    with pytest.raises(ValueError, match=r"only refusals.*causal"):
        compare(captured(causal=True), {"means": fk.Plan(fk.Window(3), fk.ClusterMeans(4))})


@pytest.mark.parametrize("slots", [0, -1, 1.5, True, "8"])
def test_standard_plans_need_a_count(slots):
    with pytest.raises((TypeError, ValueError), match="slots: expected"):
        standard_plans(slots)


def test_standard_plans_are_what_their_names_say():
    keeps = {name: plan.keep for name, plan in standard_plans(16).items()}
    assert keeps.pop("fewkeys budget") == fk.budget(16).keep
    assert keeps == {
        "exact": None,
        "top-k per query (oracle)": fk.TopK(16),
        "best shared columns (oracle)": fk.select.BestColumns(16),
        "random keys": fk.RandomKeys(16),
        "key norm": fk.select.KeyNorm(16),
        "window": fk.Window(16),
        "sinks + window": fk.Sinks(4) | fk.Window(12),
        "leverage (LevAttention)": fk.select.Leverage(16),
        "leverage (centred)": fk.select.Leverage(16, centre=True),
        "leverage + window": fk.select.Leverage(8) | fk.Window(8),
    }


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 17])
def test_standard_plans_exist_for_every_count(slots):
    for causal in (False, True):
        assert len(standard_plans(slots, is_causal=causal)) == 11


@pytest.mark.parametrize("causal", [False, True])
def test_the_sample_is_what_the_plans_keep(causal, monkeypatch):
    """Of every query of the first sequence, here: positions and weights of its heaviest keys, and who keeps them."""
    monkeypatch.setattr(module, "QUERIES", 40)
    monkeypatch.setattr(exact_module, "BLOCK", 2**25 if causal else 1)
    capture = captured(causal=causal, lengths=None if causal else (33, 40, 7))
    report = compare(capture, {"window": fk.Plan(fk.Window(5)), "top-k": fk.Plan(fk.TopK(4)), "exact": fk.Plan()})
    count = 40 if causal else 33
    assert report.sample.queries == list(range(count))
    for layer in range(2):
        call = next(capture.calls(layer)).rows(slice(0, 1))
        call = replace(
            call, **{name: getattr(call, name)[:, :, :count] for name in ("query", "key", "value")}, key_mask=None
        )
        largest, _ = dense(call)[0][0].topk(16)
        weights = torch.tensor(report.sample.weights[layer], dtype=torch.float64)
        torch.testing.assert_close(weights, largest, rtol=0, atol=6e-5)
        keys = torch.tensor(report.sample.keys[layer])
        position = torch.arange(count)[:, None]
        near = (keys >= position - (4 if causal else 2)) & (keys <= position + (0 if causal else 2))
        ranks = (
            torch.arange(16).expand_as(keys) < (torch.arange(count) + 1).clamp_max(4)[:, None]
            if causal
            else torch.arange(16).expand_as(keys) < 4
        )
        for name, expected in (("window", near), ("top-k", ranks), ("exact", torch.ones_like(near))):
            flags = torch.tensor([[int(flag) for flag in head] for head in report.row(name).kept[layer]])
            seen = weights > 1e-4
            assert torch.equal(flags.view_as(keys).bool() & seen, expected & seen)
