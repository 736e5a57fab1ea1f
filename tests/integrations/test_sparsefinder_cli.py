"""`fewkeys fit` from model or capture to a predictor, and every way to get it wrong."""

import json

import pytest
from test_cli import decoder, encoder, left, refused, words

from captures import captured
from fewkeys import cli
from fewkeys.papers import sparsefinder

__all__ = ["decoder", "encoder", "words"]  # fixtures


@pytest.fixture
def run(encoder, words, capsys):
    """Fit in this process; options replace the usual ones, None leaves one out."""

    def run(flags=(), **options):
        usual = {"model": encoder, "text": words, "sequences": 8, "length": 24, "epochs": 2, "batch": 2}
        arguments = {name: value for name, value in {**usual, **options}.items() if value is not None}
        code = cli.main(["fit", *flags, *(f"--{name.replace('_', '-')}={value}" for name, value in arguments.items())])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_fit_prints_a_table_and_leaves_a_predictor(run, request, kind, tmp_path):
    out = tmp_path / "a" / "b"
    code, shown, err = run(model=request.getfixturevalue(kind), out=out, held_out=0.25)
    assert code == 0, err
    finder = sparsefinder.Sparsefinder.from_pretrained(out)
    assert (finder.shape.kind, finder.settings.epochs) == ("causal" if kind == "decoder" else "bidirectional", 2)
    assert [path.suffix for path in sorted(out.iterdir())] == [".json", ".safetensors", ".json"]
    assert "2 held-out sequences, fitted on 6" in shown
    report = json.loads((out / "fit.json").read_text())
    assert {row["space"] for row in report["rows"]} == {"projected", "raw"}
    for row in report["rows"]:
        assert row["name"] in shown
        assert all(0 <= row[name] <= 1 for name in ("recall", "sparsity", "exact", "window", "random"))
    assert "fewkeys: layer 2 of 2\n" in err


def test_fit_reads_a_capture_and_prints_json(run, tmp_path):
    capture = captured(batches=3)
    options = {"model": None, "text": None, "sequences": None, "length": None, "capture": capture.directory}
    code, shown, _ = run(
        ["--separate", "--json"], **options, out=tmp_path, rank=2, alpha=1.7, margin=2, lr=0.01, seed=3
    )
    assert code == 0
    assert json.loads(shown) == json.loads((tmp_path / "fit.json").read_text())
    finder = sparsefinder.Sparsefinder.from_pretrained(tmp_path)
    # All of it but the held-out sequences, exactly as in Python.
    settings = {"rank": 2, "alpha": 1.7, "margin": 2.0, "lr": 0.01, "shared": False, "epochs": 2, "batch": 2, "seed": 3}
    expected = sparsefinder.Sparsefinder.fit(capture.part(0, 7), **settings)
    assert all(finder.tensors[name].equal(expected.tensors[name]) for name in expected.tensors)


@pytest.mark.long
def test_an_interrupted_fit_goes_on(run, tmp_path, monkeypatch):
    from fewkeys.papers.sparsefinder import sparsefinder as fitted, train

    code, *_ = run(out=tmp_path / "straight")
    assert code == 0
    learn, learned = train.learn, []

    def stop(*arguments):
        learned.append(arguments[2])
        if len(learned) == 2:
            raise KeyboardInterrupt
        return learn(*arguments)

    monkeypatch.setattr(fitted, "learn", stop)
    code, _, err = run(out=tmp_path / "twice")
    assert code == 130
    assert "finished layers are kept" in err
    assert left(tmp_path / "twice") == [".fitting"]
    assert len(list((tmp_path / "twice" / ".fitting").iterdir())) == 1
    monkeypatch.undo()
    code, *_ = run(out=tmp_path / "twice")
    assert code == 0
    assert left(tmp_path / "twice") == left(tmp_path / "straight")
    for name in left(tmp_path / "twice"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"model": None}, ["--capture", "--model", "required"]),
        ({"text": None}, ["--text: expected a UTF-8 file to read, got none"]),
        ({"capture": "somewhere"}, ["not allowed with argument"]),
        ({"capture": "nowhere", "model": None}, ["--text: expected none beside --capture"]),
        ({"capture": "nowhere", "model": None, "text": None}, ["--capture: expected a capture", "nowhere"]),
        ({"alpha": 1.0}, ["--alpha", "expected a number in (1, 2], got '1.0'"]),
        ({"lr": "nan"}, ["--lr", "expected a number in (0, 1e+06], got 'nan'"]),
        ({"lr": "1e300"}, ["--lr", "expected a number in (0, 1e+06]"]),
        ({"margin": "1e200"}, ["--margin", "expected a number in (1e-06, 1e+06]"]),
        ({"margin": "1e-300"}, ["--margin", "expected a number in (1e-06, 1e+06]"]),
        ({"rank": 0}, ["--rank", "expected a whole number from 1"]),
        ({"held_out": 1.5}, ["--held-out", "expected a number in (0, 1]"]),
        ({"sequences": 2}, ["--held-out: expected at least 2 sequences left to fit on, got 2 in all"]),
        ({"length": 4000}, ["--length"]),
        ({"model": "no/such/model"}, ["--model"]),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_writes_nothing(run, options, parts, tmp_path):
    out = tmp_path / "out"
    refused(run(out=out, **options), *parts)
    assert not out.exists()
