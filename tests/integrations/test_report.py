"""A report survives the disk, refuses what is not one, and is shown in full."""

import contextlib
import copy
import functools
import io
import json
import operator
import os
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given as given_any, settings as limits, strategies as st

from fewkeys import cli
from fewkeys.core import clock
from fewkeys.core.clock import in_words
from fewkeys.core.records import seal
from fewkeys.judge.result import SCHEMA, Report, Row, Sample, Skipped, WholeTime
from fewkeys.judge.standard import OURS, standard_plans
from fewkeys.report import print_table, save_figure
from fewkeys.report.figure import LOOKS
from fewkeys.report.headline import crossing, headline
from fewkeys.report.table import cells, title


def row(name="window", budget=16, kind="method", slots=16.0, error=0.5, **more):
    numbers = {
        "plan": f"{name} in words",
        "config": {"keep": [name, budget]},
        "error_p50": error * 0.9,
        "error_p90": error * 1.7,
        "worst_head": [1, 0],
        "worst_head_error": error * 2,
        "mass": 0.75,
        "recall": None,
        "cosine": 0.9,
        "cosine_min": 0.1 + 0.2,
        "token_cosine": None,
        "ms": 4.0,
        "exact_ms": 1.0,
        "per_layer": {"error": [error, 1 / 3], "recall": [None, 1.0]},
        "per_head": {"error": [[error, 0.1], [0.2, 1e-17]]},
    }
    return Row(name=name, budget=budget, kind=kind, slots=slots, error=error, **{**numbers, **more})


def report(rows=None, skipped=()):
    rows = rows or [
        row("exact", None, "exact", 64.0, 0.0),
        row("top-k per query (oracle)", 16, "oracle", error=0.2),
        row("window", 16, error=0.5),
        row("fewkeys budget", 16, error=0.1),
        row("leverage (centred)", 16, slots=33.0, error=0.05),
    ]
    budgets = sorted({r.budget for r in rows if r.budget is not None})
    return Report(
        model="some/folder/tiny-model",
        layers=2,
        query_heads=2,
        kv_heads=1,
        head_dim=4,
        value_dim=4,
        is_causal=False,
        sequences=3,
        length=64,
        tokens=192,
        settings={"eps": 0.05, "seed": 0, "budgets": budgets, "timed_shape": [3, 2, 64, 4]},
        versions={"fewkeys": "0", "python": "3"},
        machine={"cpu": "a processor", "cores": 2, "threads": 2, "platform": "any", "device": "cpu"},
        rows=rows,
        skipped=list(skipped),
    )


def shown(report, width=160):
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        print_table(report, width)
    return stream.getvalue()


def test_a_report_comes_back_from_disk_as_it_was(tmp_path):
    sample = Sample([3], [[[[1, 2]] * 2] * 2], [[[[0.5, 0.25]] * 2] * 2], ["a", "b"])
    result = replace(report(skipped=[Skipped("sinks + window", None, "because")]), sample=sample)
    result.save(tmp_path / "results.json")
    assert Report.load(tmp_path / "results.json") == result
    assert Report.from_dict(result.to_dict()) == result
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").stat().st_mode & 0o777 == 0o644


def test_settings_are_added_as_json_gives_them_back():
    result = report().with_settings(text=("a.txt",), length=64)
    assert result.settings["text"] == ["a.txt"]
    assert result.settings["eps"] == 0.05
    assert Report.from_dict(json.loads(result.to_json())) == result


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "results.json"
    report().save(path)
    before = path.read_bytes()
    broken = report([row(error=float("nan"))])
    with pytest.raises(ValueError, match="JSON"):
        broken.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["results.json"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data.update(schema="other/1"), SCHEMA),
        (lambda data: data.pop("layers"), "layers"),
        (lambda data: data.update(more=1), "more"),
        (lambda data: data["rows"][0].pop("mass"), "mass"),
        (lambda data: data.update(rows=None), "rows"),
        (lambda data: data["rows"].append(3), "Row"),
    ],
)
def test_what_is_not_a_report_is_refused(change, match):
    data = report().to_dict()
    change(data)
    with pytest.raises(ValueError, match=match):
        Report.from_dict(data)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="report"):
        Report.load(path)


def test_rows_without_a_budget_are_under_no_heading_of_slots(capsys):
    print_table(report([row("tuned", 16), row("exact", None, "exact")]))
    lines = capsys.readouterr().out.splitlines()
    exact, heading, tuned = (
        next(i for i, line in enumerate(lines) if word in line) for word in ("  exact", "16 slots", "tuned")
    )
    assert exact < heading < tuned


def test_rows_are_found_by_name_and_budget():
    result = report([row(budget=16), row(budget=32), row("exact", None, "exact")])
    assert result.row("window", 32) is result.rows[1]
    assert result.row("exact") is result.rows[2]
    for name, budget in [("window", None), ("window", 64), ("nobody", None)]:
        with pytest.raises(ValueError, match="expected one row"):
            result.row(name, budget)


def test_the_best_method_keeps_to_its_budget():
    result = report()
    assert result.best(16).name == "fewkeys budget"  # centred leverage has less error but pays 33 slots
    assert result.best(16, "oracle").name == "top-k per query (oracle)"
    assert result.best(32) is None
    assert result.best(32, "oracle") is None


def test_the_table_shows_every_row_number_and_reason():
    text = shown(
        report(skipped=[Skipped("leverage", 16, "cannot be causal"), Skipped("leverage", 32, "cannot be causal")])
    )
    for name in ["exact", "top-k per query (oracle)", "window", "fewkeys budget *", "tiny-model"]:
        assert name in text
    assert "leverage (centred) *" not in text  # less error, for twice the slots
    assert "ms: attention of 2 heads over 3 × 64 tokens." in " ".join(text.split())
    line = next(line for line in text.splitlines() if "window" in line)
    assert line.split() == [
        "window",
        "16.0",
        "0.500",
        "0.450",
        "0.850",
        "1.00",
        "L1",
        "H0",
        "0.750",
        "0.9000",
        "4.0",
        "0.25×",
    ]
    assert "left out: leverage at 16, 32 slots: cannot be causal" in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("width", "cells"),
    [
        (80, ["window", "16.0", "0.500", "0.850", "0.750", "0.9000", "4.0", "0.25×"]),
        (60, ["window", "16.0", "0.500", "0.9000", "4.0", "0.25×"]),
        (48, ["window", "0.500", "0.9000", "0.25×"]),
    ],
)
def test_a_narrow_terminal_loses_columns_but_no_digits(width, cells):
    text, error, notes = shown(report(), width=width).partition("error:")
    assert error
    assert ("mass:" in notes, "cosine:" in notes, "recall:" in notes) == ("0.750" in cells, True, False)
    table = text.splitlines()
    assert next(line for line in table if "window" in line).split() == cells
    assert max(map(len, table)) <= width


def test_printing_is_a_short_table():
    lines = str(report(skipped=[Skipped("leverage", 16, "cannot be causal")])).splitlines()
    assert len(lines) == 8
    assert lines[0].split() == ["plan", "asked", "slots", "error", "p90", "cosine", "time", "speed"]
    assert lines[4].split() == ["window", "16", "16.0", "0.500", "0.850", "0.9000", "4", "ms", "0.25"]
    assert lines[7] == "left out: leverage: cannot be causal"
    assert "100 ms" in repr(report([row(ms=99.6)]))


@pytest.mark.parametrize(
    ("number", "expected"), [(99.6, "100 ms"), (0.01234, "0.012 ms"), (1.5, "1.5 ms"), (12345.6, "12,000 ms")]
)
def test_milliseconds_are_plain(number, expected):
    assert in_words(number) == expected


def timed(*series):
    """A report with times of whole models at 512, 2,048 and 8,192 tokens: by slots, exact's time over the plan's."""
    rows = [row(OURS, slots, slots=float(slots), error=error) for slots, error, _ in series]
    times = [
        WholeTime(OURS, slots, length, 3, 60.0, 60.0 * ratio)
        for slots, _, ratios in series
        for length, ratio in zip((512, 2048, 8192), ratios, strict=True)
    ]
    return replace(report([row("exact", None, "exact", 64.0, 0.0), *rows]), whole_times=times)


@pytest.mark.parametrize(
    ("series", "sentence"),
    [
        (
            [(16, 0.3, (0.5, 2.0, 8.0)), (64, 0.08, (0.5, 2.0, 8.0)), (128, 0.04, (0.5, 2.0, 8.0))],
            "Up to about 1,000 tokens use exact attention; for longer texts fk.budget(64) is faster, with an error of "
            "8 % (measured at 64 tokens): 8.0 times as fast at 8,192 tokens.",
        ),
        (
            [(16, 0.3, (1.5, 2.0, 8.0)), (32, 0.2, (1.5, 2.0, 3.0))],
            "From 512 tokens on, fk.budget(32) is faster than exact attention, with an error of 20 % (measured at 64 "
            "tokens): 3.0 times as fast at 8,192 tokens.",
        ),
        (
            [(64, 0.012, (0.2, 0.5, 0.9))],
            "Use exact attention up to 8,192 tokens. fk.budget(64) is not faster there; it comes with an error of "
            "1.2 % (measured at 64 tokens).",
        ),
    ],
)
def test_the_headline_says_from_where_on_which_plan_is_faster(series, sentence):
    """The fewest slots with a small error; without one, the least error; the length between those measured."""
    result = timed(*series)
    assert headline(result) == sentence
    text = " ".join(shown(result).split())
    assert text.endswith(sentence)
    assert "ms at 8,192" in text
    assert "speed" not in text
    assert Report.from_dict(result.to_dict()) == result


def test_a_plan_of_other_weights_has_its_own_times():
    """It keeps every key, as exact attention does."""
    result = timed((64, 0.1, (0.5, 2.0, 3.0)))
    rows = [*result.rows, row("entmax", None, "exact")]
    times = [*result.whole_times, WholeTime("entmax", None, 8192, 3, 777.0, 180.0)]
    actual = {
        cell["plan"].rstrip(" *"): cell["ms at 8,192"] for cell in cells(replace(result, rows=rows, whole_times=times))
    }
    assert actual == {"exact": "180", OURS: "60", "entmax": "777"}


def test_the_headline_says_that_other_programs_ran():
    quiet, disturbed = (timed((64, 0.1, (0.5, 2.0, 3.0))).with_settings(disturbed=was) for was in (False, True))
    assert headline(disturbed).removeprefix(headline(quiet)).startswith(" Other programs ran meanwhile")


@pytest.mark.parametrize(("count", "disturbed"), [(0, False), (9, False), (130, True)])
def test_other_programs_take_processors_away(count, disturbed, monkeypatch):
    """In a tenth of a second, with two threads."""
    counts = iter([1000, 1000 + count])
    monkeypatch.setattr(clock, "preemptions", lambda: next(counts))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert clock.Watch().is_disturbed == disturbed


def test_the_headline_at_one_length():
    assert headline(report()) == (
        "Use exact attention up to 64 tokens. fk.budget(16) is not faster there; it comes with an error of 10 % "
        "(measured at 64 tokens)."
    )
    fast = report([row(budget=None, ms=0.5)])
    assert headline(fast) == (
        "From 64 tokens on, window is faster than exact attention, with an error of 50 % (measured at 64 tokens): 2.0 "
        "times as fast at 64 tokens."
    )
    control = report([row(), row("random keys", slots=16.0, error=0.0)])
    assert "up to 64 tokens. window with 16 slots is not faster" in headline(control)
    assert headline(report([row(slots=99.0)])) == "No method stayed within its budget."
    slow = report([row(budget=None, ms=1e200, exact_ms=1e-200)])
    assert "window is not faster there" in headline(slow)


def test_a_ratio_of_times_may_be_zero():
    assert crossing([(512, 0.0), (1024, 2.0)]) == pytest.approx(1024, rel=1e-2)


def test_a_plan_that_falls_behind_again_is_not_called_faster():
    assert crossing([(512, 0.8), (1024, 1.2), (2048, 0.9)]) is None
    assert 2048 < crossing([(512, 0.8), (1024, 1.2), (2048, 0.9), (4096, 1.2)]) < 4096


def test_the_title_names_model_and_size_without_folders():
    assert title(report()) == "tiny-model · 3 sequences × 64 tokens · 2 layers × 2 heads"
    assert title(replace(report(), tokens=100)) == "tiny-model · 3 sequences, 100 tokens · 2 layers × 2 heads"


def test_the_figure_is_a_picture_of_the_expected_size(tmp_path):
    for name, drawn in {
        "all": report([row(n, b, slots=float(b), error=0.5 / b) for n in LOOKS for b in (16, 32)]),
        "one": report([row("my own plan", None)]),
        "none": report([row(error=0.0)]),
    }.items():
        path = tmp_path / f"{name}.png"
        save_figure(drawn, path)
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", data[16:24]) == (1320, 862)
    assert (tmp_path / "all.png").stat().st_size > (tmp_path / "none.png").stat().st_size


def test_every_standard_row_has_a_colour_of_its_own():
    colours = {LOOKS[name].color for name in standard_plans(8)}
    assert len(colours) == len(standard_plans(8))


def test_the_figure_is_the_same_bytes_twice(tmp_path):
    save_figure(report(), tmp_path / "a.png")
    save_figure(report(), tmp_path / "b.png")
    for kind, begin in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        one, other = (tmp_path / f"{name}.{kind}" for name in "ab")
        assert one.read_bytes() == other.read_bytes()
        assert one.read_bytes().startswith(begin)


VALUES = [
    None,
    True,
    0,
    -1,
    10**400,
    1e308,
    5e-324,
    "",
    "[/b] $_{$ \x1b",
    "\ud800",
    [],
    [[]],
    [None],
    {},
    {"a": {}},
    [1, 2, 3, 4],
]


def places(data, path=()):
    """Where the values of a JSON value stand, by the keys on the way to each."""
    parts = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in parts for place in places(value, (*path, key)))]


@st.composite
def malformed(draw):
    """A results file in which one to three values are gone, or are others; its checksum may be that of before."""
    data = seal(report(skipped=[Skipped("sinks + window", 16, "because")]).with_settings(text=["a.txt"]).to_dict())
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(data)[1:]))
        *way, last = place
        inner = functools.reduce(operator.getitem, way, data)
        if draw(st.booleans()):
            del inner[last]
        else:
            inner[last] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return json.dumps(data).encode()


BYTES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"3",
    b"\xff\xfe",
    b"NaN",
    b"[" * 10**5,
    b'{"schema": "fewkeys.report/1"}',
    b"1" * 5000,
]


@pytest.mark.long
@limits(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given_any(data=malformed() | st.sampled_from(BYTES), page=st.booleans())
def test_a_malformed_results_file_is_one_line(data, page, tmp_path, capsys):
    """Shown, where it is still the report that was written, or refused: never a traceback."""
    path = tmp_path / "results.json"
    path.write_bytes(data)
    code = cli.main(["report", str(path), *(["--html", str(tmp_path / "page.html")] if page else [])])
    said = capsys.readouterr()
    assert code == (2 if said.err else 0)
    if code:
        assert said.err.count("\n") == 1
        assert said.err.startswith("fewkeys: error: RESULTS: expected a JSON report, got ")
        assert not said.out


@pytest.mark.parametrize("name", ["[/foo]", "[bold]x", "a$b_{$", ":smile:", "\\frac"])
def test_names_are_shown_as_they_are(name, tmp_path):
    """Not as mathematics of matplotlib."""
    actual = replace(report([row("exact", None, "exact", 64.0, 0.0), row(name)]), model=name)
    assert shown(actual).count(name) >= 2
    save_figure(actual, tmp_path / "figure.png")


def test_a_report_without_rows_is_shown():
    assert "No method stayed within its budget" in shown(replace(report(), rows=[]))
