"""How long streams answer exactly: from the lines of this machine, and whatever the lengths."""

import pytest
import torch

import fewkeys as fk
from fewkeys.cost import crossover, decoding
from fewkeys.cost.crossover import Line, Setting
from fewkeys.cost.decoding import NEVER, crossing, exact_length
from fewkeys.memory.coded import Coded, _one_token

PLAN = fk.budget(64, is_causal=True)
ROWS = [torch.zeros(1, heads, 1, 16) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
    ("exact", "plan", "share", "keys"),
    [
        (Line(1.0, 0.5), Line(5.0, 0.25), 1.0, 16),
        (Line(1.0, 0.5), Line(5.0, 0.25), 0.75, 34),
        (Line(3.0, 0.5), Line(1.0, 0.25), 1.0, 0),
        (Line(1.0, 0.5), Line(5.0, 0.5), 1.0, NEVER),
        (Line(9.0, 0.0), Line(5.0, 0.0), 1.0, 0),  # a busy machine: exact attention took as long at both lengths
        (Line(9.0, 0.0), Line(5.0, 0.25), 1.0, 0),
    ],
)
def test_the_plan_answers_from_where_its_line_is_below(exact, plan, share, keys):
    assert crossing(exact, plan, share) == keys
    if 0 < keys < NEVER:
        assert plan.at(keys) <= share * exact.at(keys)
        assert plan.at(keys - 1) > share * exact.at(keys - 1)


def test_what_is_measured_is_kept_and_decides(monkeypatch):
    asked = []

    def kept(of, measure):
        asked.append(of)
        return (1.0, 0.5), (5.0, 0.25)

    decoding._length.cache_clear()
    monkeypatch.setattr(decoding, "kept", kept)
    longer = [rows.expand(3, -1, 7, -1) for rows in ROWS]
    assert exact_length(PLAN, *ROWS, _one_token) == exact_length(PLAN, *longer, _one_token) == 21
    assert len(asked) == 1
    assert asked[0]["query_heads"] == 4
    decoding._length.cache_clear()


@pytest.mark.parametrize(("times", "sound"), [([1.0, 4.0, 2.0, 2.0], True), ([4.0, 1.0, 2.0, 3.0], False)])
def test_a_disturbed_measurement_is_not_kept_for_long(monkeypatch, times, sound):
    monkeypatch.setattr(crossover, "fastest", lambda *_: (times, True))
    setting = Setting(torch.device("cpu"), torch.float32, 1, 1, 16, 16, 1, "none", is_causal=True)
    assert decoding._measured(PLAN, setting, lambda *_: (None, None))[1] == sound


def test_without_measurements_operations_decide(monkeypatch):
    decoding._length.cache_clear()
    monkeypatch.setattr(decoding, "kept", lambda *_: None)
    few, many = (exact_length(fk.budget(slots, is_causal=True), *ROWS, _one_token) for slots in (64, 256))
    assert 64 < few < many < 4096
    decoding._length.cache_clear()


def test_a_plan_that_never_gives_way_measures_nothing(monkeypatch):
    monkeypatch.setattr(decoding, "kept", None)
    assert exact_length(PLAN.never_exact(), *ROWS, _one_token) == 0


def test_on_a_gpu_streams_answer_exactly(monkeypatch):
    monkeypatch.setattr(decoding, "kept", None)
    assert exact_length(PLAN, *(rows.to("meta") for rows in ROWS), _one_token) == NEVER


def test_tokens_are_measured_as_streams_take_them():
    """Both calls take a token in and answer it: by exact attention, and by the plan."""
    inputs = Setting(torch.device("cpu"), torch.float32, 4, 2, 16, 8, 1, "none", is_causal=True).draw(200, queries=1)
    exactly, by_plan = _one_token(PLAN, inputs)
    assert exactly().shape == by_plan().shape == (1, 4, 1, 8)
    torch.testing.assert_close(exactly(), by_plan(), rtol=1.0, atol=1.0)


def test_measured_tokens_repeat_the_kernel_call_of_the_one_before(monkeypatch):
    """As in streams: to prepare each call anew takes two to four times as long."""
    prepared = []
    extend = Coded._extend
    monkeypatch.setattr(Coded, "_extend", lambda *args, **named: prepared.append(named) or extend(*args, **named))
    inputs = Setting(torch.device("cpu"), torch.float32, 4, 2, 16, 8, 1, "none", is_causal=True).draw(200, queries=1)
    _, by_plan = _one_token(PLAN, inputs)
    outputs = [by_plan() for _ in range(5)]
    assert prepared == [{"by_plan": True}]
    assert not torch.equal(outputs[0], outputs[4])  # each call adds a token
