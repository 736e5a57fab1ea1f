"""`fewkeys embed`: from files and folders to rows of vectors, whatever is in them, and however often it is killed."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

import encoders
import fewkeys as fk
from encoders import words
from fewkeys import cli
from fewkeys.cli import embed, vectors
from fewkeys.cli.documents import HEAD, read_documents
from fewkeys.integrations import embed as late
from fewkeys.integrations.loading import load_encoder
from fewkeys.plan import MODEL_FILE

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 15}
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return encoders.save_encoder(folder, encoders.bert(), modules.Normalize(), prompts={"query": "query of : "})


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return encoders.save_encoder(tmp_path_factory.mktemp("modernbert"), encoders.modernbert(), modules.Normalize())


@pytest.fixture
def folder(tmp_path):
    """Six texts, one of them twice, and files that are none."""
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    for seed in range(4):
        (root / f"{seed}.txt").write_text(words(400 + 300 * seed, seed))
    (root / "sub" / "again.md").write_text(words(400, 0))
    (root / "sub" / "marked.txt").write_bytes(b"\xef\xbb\xbf" + words(30).encode())
    (root / ".hidden").write_text(words(5))
    (root / "empty.txt").touch()
    (root / "sub" / "blank.txt").write_text(" \n\t")
    (root / "zero.txt").write_text("\u200b\n", encoding="utf-8")
    (root / "latin.txt").write_bytes(b"caf\xe9")
    (root / "paper.pdf").write_bytes(b"%PDF-1.4\n1 0 obj\nendobj\n%%EOF\n")
    (root / "sub" / "picture.png").write_bytes(b"\x89PNG\0\0words")
    (root / "dead").symlink_to(root / "nothing")
    (root / "sub" / "round").symlink_to(root)
    return root


def run(model, *words):
    """The exit code of `fewkeys embed`."""
    return cli.main(["embed", "--model", str(model), *map(str, words)])


def columns(path):
    with np.load(path) as data:
        return {name: data[name] for name in data}


def same(one, other):
    """Whether two files hold the same rows."""
    one, other = columns(one), columns(other)
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


TEXTS = ["0.txt", "1.txt", "2.txt", "3.txt", "sub/again.md", "sub/marked.txt"]


def test_a_folder_becomes_vectors(long, folder, tmp_path, capsys):
    out = tmp_path / "new" / "vectors.npz"
    assert run(long, "--out", out, "--json", folder) == 0
    printed, actual = json.loads(capsys.readouterr().out), columns(out)
    assert [Path(name).relative_to(folder).as_posix() for name in actual["path"]] == TEXTS
    assert printed["vectors"] == [6, 16] == list(actual["vectors"].shape)
    assert {Path(name).name: reason for name, reason in printed["skipped"].items()} == {
        "empty.txt": "is empty or blank",
        "blank.txt": "is empty or blank",
        "zero.txt": "makes no token",
        "latin.txt": "is not UTF-8 text",
        "paper.pdf": "is a PDF (pdftotext extracts its text)",
        "picture.png": "is not UTF-8 text",
        "dead": "is no regular file",
        "round": "is no regular file",
    }
    encoder, plan = load_encoder(long), fk.budget(192)
    texts = [Path(name).read_text(encoding="utf-8-sig") for name in actual["path"]]
    with fk.apply(encoder, plan):
        expected = torch.stack([encoder.encode(text, convert_to_tensor=True) for text in texts])
    torch.testing.assert_close(torch.from_numpy(actual["vectors"]), expected, atol=1e-5, rtol=1e-4)
    assert actual["stop"].tolist() == [len(text) for text in texts]
    assert actual["tokens"].tolist() == [402, 702, 1002, 1302, 402, 32]
    assert fk.Plan.from_dict(json.loads(str(actual["settings"]))["plan"]) == plan
    assert printed["tokens"] == actual["tokens"].sum()
    assert sorted(path.name for path in out.parent.iterdir()) == ["vectors.npz"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_model_gives_the_same_vectors(long, folder, tmp_path, capsys, monkeypatch):
    files = [tmp_path / name for name in ("eager.npz", "compiled.npz")]
    assert run(long, "--out", files[0], folder) == 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._inductor.config.patch(freezing=False):
        assert run(long, "--out", files[1], "--compile", folder) == 0
        assert torch._inductor.config.freezing
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    eager, compiled = map(columns, files)
    np.testing.assert_allclose(compiled["vectors"], eager["vectors"], atol=1e-5)
    np.testing.assert_allclose(compiled["error"], eager["error"], rtol=1e-3)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-compiler"))
    assert run(long, "--out", tmp_path / "v.npz", "--compile", folder) == 2
    assert "--compile: expected a C++ compiler, got none; install g++" in capsys.readouterr().err


def test_late_chunks_by_a_plan_beside_the_model(long, folder, tmp_path, capsys):
    """Its error is told, text by text; a text that the window covers has none."""
    plan = fk.Plan(fk.Window(99))
    beside = tmp_path / "model"
    beside.mkdir()
    for path in long.iterdir():
        (beside / path.name).symlink_to(path)
    plan.save_pretrained(beside)
    out, files = tmp_path / "chunks.npz", [folder / "2.txt", folder / "sub" / "marked.txt"]
    assert run(beside, "--out", out, "--chunk", 256, *files) == 0
    actual, encoder = columns(out), load_encoder(long)
    with fk.apply(encoder, plan):
        chunks = [late.late_chunks(encoder, path.read_text("utf-8-sig"), 256) for path in files]
    assert np.array_equal(actual["vectors"], torch.cat([chunk.vectors for chunk in chunks]).numpy())
    spans = [span for chunk in chunks for span in chunk.spans]
    assert list(zip(actual["start"].tolist(), actual["stop"].tolist(), strict=True)) == spans
    assert len(set(actual["error"][:4].tolist())) == 1
    assert (actual["error"] > 0).tolist() == [True] * 4 + [False]
    assert "at most" in capsys.readouterr().out
    for options, expected in (
        (["--slots", 8], fk.budget(8)),
        (["--slots", 512, "--chunk", 256], fk.budget(512, cohorts=embed.CHUNK_COHORTS)),
    ):
        assert run(beside, "--out", out, *options, *files) == 0
        assert fk.Plan.from_dict(json.loads(str(columns(out)["settings"]))["plan"]) == expected
    assert run(long, "--out", out, "--chunk", 256, *files) == 0
    default = fk.budget(embed.CHUNK_SLOTS, cohorts=embed.CHUNK_COHORTS)
    assert fk.Plan.from_dict(json.loads(str(columns(out)["settings"]))["plan"]) == default


@pytest.mark.parametrize(
    ("options", "prompt"), [(["--prompt-name", "query"], "query of : "), (["--prompt", "a few "], "a few ")], ids=str
)
def test_prompts_are_those_of_the_model(options, prompt, short, tmp_path):
    (tmp_path / "text.txt").write_text(words(30))
    assert run(short, "--out", tmp_path / "v.npz", *options, tmp_path / "text.txt") == 0
    expected = load_encoder(short).encode([prompt + words(30)])
    np.testing.assert_allclose(columns(tmp_path / "v.npz")["vectors"], expected, atol=1e-5)


def interrupted_in_the_third(monkeypatch):
    """The texts of all passes; the third pass is interrupted."""
    passes, chunks = [], late.late_chunks

    def counted(encoder, text, *args, **options):
        passes.append(text)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return chunks(encoder, text, *args, **options)

    monkeypatch.setattr(late, "late_chunks", counted)
    return passes


def test_a_killed_run_goes_on_where_it_stopped(long, folder, tmp_path, capsys, monkeypatch):
    assert run(long, "--out", tmp_path / "whole.npz", "--chunk", 100, folder) == 0
    passes = interrupted_in_the_third(monkeypatch)
    out = tmp_path / "out.npz"
    capsys.readouterr()
    assert run(long, "--out", out, "--chunk", 100, folder) == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    assert not out.exists()
    assert run(long, "--out", out, "--chunk", 100, folder) == 0
    assert same(out, tmp_path / "whole.npz")
    assert len(passes) == 3 + 3  # five texts are different, two were finished
    assert "2 of them from the run before" in capsys.readouterr().out
    assert not list(tmp_path.glob(".out*"))


def test_a_killed_run_keeps_the_finished_parts_of_a_text(short, tmp_path, monkeypatch):
    """A book may take hours."""
    (tmp_path / "book").write_text(words(300))
    options = ["--longer", "split", "--chunk", 20, tmp_path / "book"]
    assert run(short, "--out", tmp_path / "whole.npz", *options) == 0
    passes = interrupted_in_the_third(monkeypatch)
    assert [run(short, "--out", tmp_path / "out.npz", *options) for _ in range(2)] == [130, 0]
    assert len(passes) == 3 + 3  # of five parts
    assert same(tmp_path / "out.npz", tmp_path / "whole.npz")


def test_what_is_damaged_or_of_other_settings_is_done_again(long, folder, tmp_path, monkeypatch):
    out, work, chunks, passes = tmp_path / "out.npz", tmp_path / ".out.npz.embedding", late.late_chunks, []

    def counted(encoder, text, *args, **options):
        passes.append(text)
        return chunks(encoder, text, *args, **options)

    monkeypatch.setattr(late, "late_chunks", counted)
    monkeypatch.setattr(vectors, "SECONDS", -1.0)  # a file for every text
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    assert run(long, "--out", out, folder) == 0
    files = sorted(work.glob("*.safetensors"))
    assert len(files) == len(passes) == 5
    files[0].write_bytes(files[0].read_bytes()[:-9])
    (work / "folder.safetensors").mkdir()
    before = columns(out)
    assert run(long, "--out", out, folder) == 0
    assert len(passes) == 5 + 1
    assert np.array_equal(columns(out)["vectors"], before["vectors"])
    (folder / "0.txt").write_text(words(77, 9))
    assert run(long, "--out", out, folder) == 0
    assert len(passes) == 6 + 1
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert run(long, "--out", out, "--prompt", "a ", folder) == 0
    assert len(passes) == 7 + 6
    assert not work.exists()


def edited(folder, file, **changes):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def scaled(folder, file, name):
    """Change one weight."""
    weights = load_file(folder / file)
    save_file(weights | {name: 2 * weights[name]}, folder / file, {"format": "pt"})


def without_the_last_module(folder):
    path = folder / "modules.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:-1]))


CHANGES = {
    "pooling": lambda folder: edited(folder, "1_Pooling/config.json", pooling_mode="cls"),
    "no normalisation": without_the_last_module,
    "dense layer": lambda folder: scaled(folder, "2_Dense/model.safetensors", "linear.bias"),
    "embeddings": lambda folder: scaled(folder, "model.safetensors", "embeddings.word_embeddings.weight"),
    "activation": lambda folder: edited(folder, "config.json", hidden_act="relu"),
    "tokenizer": lambda folder: edited(folder, "tokenizer.json", normalizer={"type": "Prepend", "prepend": "few "}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_vectors_of_another_encoder_in_the_same_folder_are_not_kept(change, tmp_path, monkeypatch):
    model = encoders.save_encoder(tmp_path, encoders.bert(), modules.Dense(16, 4), modules.Normalize())
    (tmp_path / "a.txt").write_text(words(30))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert run(model, "--out", tmp_path / "v.npz", tmp_path / "a.txt") == 0
    before = columns(tmp_path / "v.npz")["vectors"]
    CHANGES[change](model)
    assert run(model, "--out", tmp_path / "v.npz", tmp_path / "a.txt") == 0
    assert run(model, "--out", tmp_path / "fresh.npz", tmp_path / "a.txt") == 0
    assert same(tmp_path / "v.npz", tmp_path / "fresh.npz")
    assert not np.allclose(columns(tmp_path / "v.npz")["vectors"], before, atol=1e-3)


@pytest.mark.long
def test_thousands_of_files(short, tmp_path, capsys):
    """Equal texts are embedded once."""
    for number in range(3000):
        place = tmp_path / "many" / str(number % 20)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.txt").write_text(words(10 + number % 7, number % 7))
    assert run(short, "--out", tmp_path / "v.npz", tmp_path / "many") == 0
    actual = columns(tmp_path / "v.npz")
    assert actual["vectors"].shape == (3000, 16)
    assert len(np.unique(actual["vectors"], axis=0)) == 7
    assert actual["path"].tolist() == sorted(actual["path"].tolist(), key=lambda name: Path(name).parts)
    assert "Exact attention answered every text" in capsys.readouterr().out


def test_every_file_that_is_left_out_is_named_with_the_reason(short, tmp_path, capsys, monkeypatch):
    notes = tmp_path / "notes"
    for name in ("locked", "shut", "elsewhere"):
        (notes / name).mkdir(parents=True)
        (notes / name / "text").write_text(words(5, 2))
    (notes / "elsewhere").rename(tmp_path / "elsewhere")
    (notes / "link").symlink_to(tmp_path / "elsewhere")
    (notes / "broken").symlink_to("nowhere")
    (notes / "good").write_text(words(5, 1))
    (notes / "binary").write_bytes(b"MZ" + bytes(9))
    (notes / "later").write_bytes(b"a" * HEAD + b"\0")
    (notes / ".hidden").write_text("text")
    os.mkfifo(notes / "pipe")
    scan, read = os.scandir, Path.open

    def scandir(path):  # permissions do not stop root, who may run this
        if str(path) == str(notes / "locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    def opened(path, *args, **options):
        if path == notes / "shut" / "text":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **options)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(Path, "open", opened)
    out = tmp_path / "v.npz"
    assert run(short, "--out", out, notes) == 0
    assert columns(out)["path"].tolist() == [str(notes / "good")]
    note = capsys.readouterr().err.partition("fewkeys: note: ")[2].splitlines()
    assert note[0] == "7 files left out:"
    assert dict(line.removeprefix(f"  {notes}/").split(" ", 1) for line in note[1:]) == {
        "binary": "is not UTF-8 text",
        "later": "is not UTF-8 text",
        "broken": "is no regular file",
        "link": "is no regular file",
        "pipe": "is no regular file",
        "locked": "cannot be read (Permission denied)",
        "shut/text": "cannot be read (Permission denied)",
    }
    (notes / "good").unlink()
    assert run(short, "--out", out, notes) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"fewkeys: error: FILE_OR_FOLDER: expected at least one text, got none in {notes}: {notes}/binary is not "
        f"UTF-8 text; {notes}/broken is no regular file; {notes}/later is not UTF-8 text"
    )


def test_names_that_are_not_utf8_stay_apart(tmp_path):
    for name in (b"k_\xe8", b"k_\xe9"):
        (tmp_path / os.fsdecode(name)).write_text(repr(name))
    documents, _ = read_documents([tmp_path])
    assert {Path(name).name: text for name, text in documents.items()} == {
        r"k_\xe8": repr(b"k_\xe8"),
        r"k_\xe9": repr(b"k_\xe9"),
    }


def test_longer_texts_are_refused_skipped_or_split(short, tmp_path, capsys):
    for name, count in (("a", 20), ("b", 300), ("c", 90)):
        (tmp_path / name).write_text(words(count, 1))
    out, files = tmp_path / "v.npz", [tmp_path / name for name in "abc"]
    assert run(short, "--out", out, *files) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path / 'b'}: expected at most 64 tokens" in error
    assert "got 302, the longest of 2 such texts; use --longer split or --longer skip" in error
    assert not out.exists()
    assert run(short, "--out", out, "--longer", "skip", *files) == 0
    assert [Path(name).name for name in columns(out)["path"]] == ["a"]
    assert capsys.readouterr().err.endswith(
        f"note: 2 files left out:\n  {files[1]} has 302 tokens, more than one pass of 64\n"
        f"  {files[2]} has 92 tokens, more than one pass of 64\n"
    )
    assert run(short, "--out", out, "--longer", "skip", *files[1:]) == 2
    assert f"at least one text to embed, got none: {files[1]} has 302 tokens, more" in capsys.readouterr().err
    assert run(short, "--out", out, "--longer", "split", *files) == 0
    actual = columns(out)
    assert [Path(name).name for name in actual["path"]] == ["a", *"bbbbb", "c", "c"]
    encoder = load_encoder(short)
    parts = [Path(n).read_text()[a:b] for n, a, b in zip(actual["path"], actual["start"], actual["stop"], strict=True)]
    np.testing.assert_allclose(actual["vectors"], encoder.encode(parts), atol=1e-5)
    assert [sum(len(part.split()) for part in parts[i:j]) for i, j in ((0, 1), (1, 6), (6, 8))] == [20, 300, 90]
    assert run(short, "--out", out, "--max-tokens", 30, "--longer", "split", files[0], files[2]) == 0
    assert columns(out)["tokens"].max() <= 30


def test_the_oldest_numpy_writes_the_same_arrays(short, tmp_path, monkeypatch):
    """Before 2.2, every keyword of `savez` is an array."""
    (tmp_path / "a.txt").write_text(words(20))
    savez, names = np.savez, ["path", "start", "stop", "tokens", "error", "vectors", "settings"]

    def old(file, *args, **arrays):
        assert sorted(arrays) == sorted(names)
        savez(file, *args, **arrays)

    monkeypatch.setattr(np, "savez", old)
    assert run(short, "--out", tmp_path / "v.npz", tmp_path / "a.txt") == 0
    assert sorted(columns(tmp_path / "v.npz")) == sorted(names)


def test_parquet(short, tmp_path, capsys, monkeypatch):
    (tmp_path / "a.txt").write_text(words(20))
    monkeypatch.setattr(embed, "find_spec", lambda name: None)
    assert run(short, "--out", tmp_path / "v.parquet", tmp_path / "a.txt") == 2
    assert "--out: .parquet needs pyarrow, which is not installed" in capsys.readouterr().err
    monkeypatch.undo()
    table = pytest.importorskip("pyarrow.parquet")
    assert run(short, "--out", tmp_path / "v.parquet", tmp_path / "a.txt") == 0
    assert run(short, "--out", tmp_path / "v.npz", tmp_path / "a.txt") == 0
    actual, rows = columns(tmp_path / "v.npz"), table.read_table(tmp_path / "v.parquet")
    assert np.array_equal(np.stack(rows["vectors"].to_numpy()), actual["vectors"])
    assert rows.schema.metadata[b"fewkeys"].decode() == str(actual["settings"])
    for name in ("path", "start", "stop", "tokens", "error"):
        assert rows[name].to_pylist() == actual[name].tolist()


def test_other_layouts_of_a_folder(tmp_path):
    """A model's folder without pooling: the mean of all tokens. With dense layers: they run on every chunk."""
    plain = tmp_path / "plain"
    encoders.bert().save_pretrained(plain)
    encoders.tokenizer().save_pretrained(plain)
    (tmp_path / "a.txt").write_text(words(20))
    assert run(plain, "--out", tmp_path / "v.npz", "--chunk", 7, tmp_path / "a.txt") == 0
    rows = load_encoder(plain).encode([words(20)], output_value="token_embeddings")[0]
    mean = torch.stack([rows[a:b].mean(0) for a, b in ((0, 8), (8, 15), (15, 22))])
    np.testing.assert_allclose(columns(tmp_path / "v.npz")["vectors"], mean, atol=1e-5)
    dense = encoders.save_encoder(tmp_path / "dense", encoders.bert(), modules.Dense(16, 3), modules.Normalize())
    assert run(dense, "--out", tmp_path / "v.npz", "--chunk", 7, tmp_path / "a.txt") == 0
    actual = load_encoder(dense)[2]({"sentence_embedding": mean})["sentence_embedding"]
    np.testing.assert_allclose(columns(tmp_path / "v.npz")["vectors"], normalize(actual, dim=1).detach(), atol=1e-5)


BAD = {
    "a file without a token": ([], "zero.txt", "zero.txt: expected some text, got none that makes a token"),
    "a folder without a token": (
        [],
        "sub/zero",
        "FILE_OR_FOLDER: expected at least one text to embed, got none: .*zero.txt makes no",
    ),
    "a file that is no text": (
        [],
        "latin.txt",
        "expected a folder or a file of UTF-8 text, got .*latin.txt, which is not",
    ),
    "no such file": (
        [],
        "absent",
        "FILE_OR_FOLDER: expected a folder or a file .*absent, which cannot be read .No such",
    ),
    "no text in the folder": ([], "sub/odd", "got none in .*odd: .*nothing.txt is empty or blank"),
    "another ending": (["--out", "v.csv"], "0.txt", "--out: expected a file that ends in .npz or .parquet, got v.csv"),
    "too many positions": (["--max-tokens", "99"], "0.txt", "--max-tokens: expected at most the model's 64 positions"),
    "no such prompt": (["--prompt-name", "x"], "0.txt", "--prompt-name: expected one of .*'query'.*, got 'x'"),
    "two prompts": (["--prompt-name", "x", "--prompt", "y"], "0.txt", "not allowed with argument"),
    "two plans": (["--slots", "8", "--plan", "x"], "0.txt", "not allowed with argument"),
    "a prompt that is no text": (
        ["--prompt", "\udce9"],
        "0.txt",
        "'utf-8' codec can't encode .* surrogates not allowed",
    ),
    "no such plan": (
        ["--plan", "nowhere"],
        "sub/marked.txt",
        "--plan: expected a folder with plan.json, got 'nowhere'",
    ),
    "no room": (
        ["--max-tokens", "2", "--longer", "split"],
        "0.txt",
        "--max-tokens: expected room .* 2 tokens .* got 2;",
    ),
    "no chunk": (["--chunk", "0"], "0.txt", "expected a whole number from 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name, short, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "sub" / "odd").mkdir()
    (folder / "sub" / "odd" / "nothing.txt").touch()
    (folder / "sub" / "zero").mkdir()
    (folder / "zero.txt").rename(folder / "sub" / "zero" / "zero.txt")
    (folder / "zero.txt").symlink_to(folder / "sub" / "zero" / "zero.txt")
    options, text, message = BAD[name]
    assert run(short, *(options if "--out" in options else ["--out", "v.npz", *options]), folder / text) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = (line for line in said.err.splitlines() if "error" in line)
    assert re.search(message, line)
    assert not list(tmp_path.glob("*.npz")) + list(tmp_path.glob(".v.npz*"))


def test_bad_models_are_one_line(folder, short, tmp_path, capsys):
    wrong = tmp_path / "wrong"
    fk.ModelPlan(((fk.budget(8),),) * 3).save_pretrained(wrong)
    assert (wrong / MODEL_FILE).is_file()
    decoder = tmp_path / "decoder"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(decoder)
    encoders.tokenizer().save_pretrained(decoder)
    by_one = encoders.save_encoder(tmp_path / "cls", encoders.bert(), pooling="cls")
    fk.budget(8, is_causal=True).save_pretrained(tmp_path / "causal")
    file = folder / "sub" / "marked.txt"
    for model, options, message in (
        (tmp_path / "absent", [], "--model: expected a model, there is no folder"),
        (wrong, [], "is not a model folder (it has no config.json)"),
        (short, ["--plan", wrong], "--plan: expected one plan for each of 2 attention layers, got 3"),
        (short, ["--plan", tmp_path / "causal"], "--plan: the plan was made for causal attention"),
        (by_one, ["--chunk", 5], "--chunk: expected an encoder that pools by mean"),
        (decoder, [], "--model: expected a model that makes embeddings, got "),
    ):
        assert run(model, "--out", tmp_path / "v.npz", *options, file) == 2
        assert message in capsys.readouterr().err
        assert not list(tmp_path.glob("*v.npz*"))
    for plan, message in (((wrong / MODEL_FILE).read_text(), "one plan for each"), ("[]", "a description of format")):
        (by_one / MODEL_FILE).write_text(plan)
        assert run(by_one, "--out", tmp_path / "v.npz", file) == 2
        assert f"--model: expected {message}" in capsys.readouterr().err


def test_without_the_library(short, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fewkeys.cli.inputs.find_spec", lambda name: None)
    assert run(short, "--out", tmp_path / "v.npz", folder) == 2
    error = capsys.readouterr().err
    assert "not installed: sentence_transformers, transformers; pip install 'fewkeys[embed,hf]'" in error


def test_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["embed", "--help"])
    assert "late chunks" in capsys.readouterr().out
