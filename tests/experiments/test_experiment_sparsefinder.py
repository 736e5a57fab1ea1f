"""The Sparsefinder experiment: its parts obey their definitions, and the translation command runs and resumes."""

import pytest
import torch
from experiments.sparsefinder import analysis, methods, mt, mt_data, mt_model, score, tags
from experiments.sparsefinder.dense import dense_entmax
from hypothesis import given, strategies as st

import fewkeys as fk
from fewkeys.core.files import read_json
from fewkeys.papers import sparsefinder
from fewkeys.papers.sparsefinder.evaluate import score_graphs
from tiny_models import close

WORDS = {"en": "a man and the dog run in red rain .", "de": "ein Mann und der Hund laufen in rotem Regen ."}


def sentences(language, count):
    words, draw = WORDS[language].split(), torch.Generator().manual_seed(len(language))
    picks = [torch.randint(len(words), (2 + i % 5,), generator=draw).tolist() for i in range(count)]
    return tuple(" ".join(words[i] for i in pick) for pick in picks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("pairs")
    for split, count in (("train", 60), ("val", 20), ("test", 20)):
        for language in WORDS:
            text = "\n".join(sentences(language, count))
            (where / f"{split}.{language}").write_text(text + "\n", encoding="utf-8")
    return where


@pytest.fixture(scope="module")
def pairs(folder):
    return mt_data.read_folder(folder, "en", "de")["train"]


@pytest.fixture(scope="module")
def tokenizer(pairs):
    return mt_data.train_tokenizer(pairs, 60)


@pytest.fixture(scope="module")
def model(tokenizer):
    return mt_model.new_model(len(tokenizer), 1).eval()


@torch.no_grad()
def test_training_attention_is_exact_entmax(model, tokenizer, pairs):
    batch = next(mt_data.stream(tokenizer, pairs, 8, torch.Generator().manual_seed(0)))
    assert (batch.source == mt_data.PAD).any()
    assert (batch.target == mt_data.PAD).any()
    late = batch.inputs["decoder_input_ids"]
    assert (late[:, 0] == mt_data.PAD).all()
    assert torch.equal(late[:, 1:], batch.target[:, :-1])
    with dense_entmax(model):
        actual = model(**batch.inputs).logits
    with fk.apply(model, fk.Plan(weights=fk.weights.Entmax(1.5)), impl="reference"):
        want = model(**batch.inputs).logits
    real = batch.inputs["decoder_attention_mask"].bool()
    close(actual[real], want[real])


@pytest.mark.parametrize("part", mt.PARTS)
def test_even_batches_hold_every_pair_once_and_no_padding_where_it_counts(tokenizer, pairs, part):
    actual = mt_data.even_batches(tokenizer, pairs, part, size=4)
    rows = [mt_data.encode(tokenizer, side) for side in (pairs.source, pairs.target)]
    for side, texts in (("source", rows[0]), ("target", rows[1])):
        ids = [tuple(t for t in row if t != mt_data.PAD) for b in actual for row in getattr(b, side).tolist()]
        assert sorted(ids) == sorted(map(tuple, texts))
        if part == "cross" or (part == "encoder") == (side == "source"):
            assert all((getattr(b, side) != mt_data.PAD).all() for b in actual)
    assert max(len(b.source) for b in actual) <= 4


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "val.de").unlink(), "expected one file"),
        (lambda f: (f / "val.de").write_text("one line\n"), "20 lines of en and 1 of de"),
        (lambda f: (f / "val.de").write_bytes(b"\xff\xfe\xff"), "cannot read"),
    ],
)
def test_unusable_folders_are_named(folder, tmp_path, spoil, message, capsys):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path)
    assert mt.main(["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_points_are_what_the_library_measures(model, tokenizer, pairs, monkeypatch):
    monkeypatch.setattr(score, "WINDOWS", (0, 1, 3))
    inputs = [batch.inputs for batch in mt_data.even_batches(tokenizer, pairs.first(12), "decoder")]
    capture = fk.capture(model, inputs, weights=fk.weights.Entmax(1.5), part="decoder")
    raw = sparsefinder.Sparsefinder.raw(capture, sample=64)
    every = methods.families(raw, raw)
    names = ("window", "clusters, raw", "cluster pairs, raw", "strided", "key norm")
    chosen = {n: methods.Family(every[n].kind, every[n].values[:2], every[n].make) for n in names}
    points = score.score(capture, chosen, 1.5, lambda done, of: None)
    assert len(points) == sum(len(family.values) for family in chosen.values()) * 3
    for point in points:
        value = next(v for v in chosen[point.family].values if str(v) == point.value)
        actual = chosen[point.family].make(0, value)
        near = fk.Window(point.window) if point.window else None
        keep = actual if near is None else near if actual is None else actual | near
        if keep is not None:
            want = score_graphs(capture, 0, {"own": keep})["own"].means()
            assert (point.recall, point.sparsity, point.exact) == pytest.approx(
                (want["recall"], want["sparsity"], want["exact"]), abs=1e-6
            )


SCORES = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20)


@given(SCORES, st.integers(0, 8))
def test_the_front_is_what_nothing_beats(pairs, recall):
    points = [score.Point("f", "learned", "", 0, r / 8, s / 8, 0.0) for r, s in pairs]
    kept = score.front(points)
    for point in points:
        beaten = any(
            (p.recall, p.sparsity) != (point.recall, point.sparsity)
            and p.recall >= point.recall
            and p.sparsity >= point.sparsity
            for p in points
        )
        assert beaten != any((p.recall, p.sparsity) == (point.recall, point.sparsity) for p in kept)
    best = score.sparsest(points, recall / 8)
    fit = [point.sparsity for point in points if point.recall >= recall / 8]
    assert (best is None) == (not fit)
    assert best is None or (best.recall >= recall / 8 and best.sparsity == max(fit))


def test_every_piece_has_the_tag_of_its_word():
    tokens = ["▁The", "▁ca", "t", "▁sat", "▁on", "▁12", "▁", ".", "</s>"]
    assert tags.tag_tokens(tokens, tags.closed_class) == [
        "DET", "OPEN", "OPEN", "OPEN", "ADP", "NUM", "PUNCT", "PUNCT", "END",
    ]  # fmt: skip
    heard = []
    assert tags.tag_tokens(tokens, lambda words: heard.extend(words) or [w.upper() for w in words])[1:3] == ["CAT"] * 2
    assert heard == ["The", "cat", "sat", "on", "12", "."]
    with pytest.raises(ValueError, match="expected 6 tags for 6 words, got 1"):
        tags.tag_tokens(tokens, lambda words: ["X"])


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), min_size=1, max_size=6), min_size=1))
def test_occupancy_counts_every_token_once(rows):
    ids = [torch.tensor([[cluster for cluster, _ in row]] * 2) for row in rows]
    actual = tags.occupancy(ids, [[tag for _, tag in row] for row in rows], 4)
    assert [(one.head, one.cluster) for one in actual] == [(head, cluster) for head in (0, 1) for cluster in range(4)]
    for one in actual:
        cluster_tags = [tag for row in rows for cluster, tag in row if cluster == one.cluster]
        assert one.count == len(cluster_tags)
        assert one.tags == pytest.approx(
            {tag: cluster_tags.count(tag) / len(cluster_tags) for tag in set(cluster_tags)}
        )


@pytest.mark.long
def test_the_command_runs_resumes_and_is_looked_into(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(methods, "COUNTS", (2, 4))
    monkeypatch.setattr(methods, "DISTANCES", (1.0,))
    monkeypatch.setattr(methods, "LIFTS", (0.5,))
    monkeypatch.setattr(score, "WINDOWS", (0, 1, 3))
    fit = mt.study.Fit(epochs=1, sample=128)
    monkeypatch.setattr(mt, "QUICK", mt.Settings(60, 1, 2, 16, 2e-3, fit, 40, 6, 6, 2))
    command = ["--data", str(folder), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--quick"]
    assert mt.main(command) == 0
    first = read_json(tmp_path / "out", "results.json")
    assert set(first["points"]) == set(mt.PARTS)
    assert {row["replaced"] for row in first["task"]["rows"]} == {"encoder", "decoder"}
    assert (tmp_path / "out" / "figure.png").stat().st_size > 10_000
    table = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in table for name in ("window", "clusters", "BigBird", "random edges"))
    monkeypatch.setattr(fk, "capture", None)  # nothing is computed twice
    monkeypatch.setattr(mt.report, "save_figure", lambda *_: None)  # it would draw the same again
    assert mt.main(command) == 0
    assert read_json(tmp_path / "out", "results.json") == first
    monkeypatch.setattr(mt, "QUICK", mt.Settings(60, 1, 3, 16, 2e-3, fit, 40, 6, 6, 2))
    assert mt.main(command) == 2
    assert "run of other settings" in capsys.readouterr().err
    monkeypatch.undo()
    looked = ["--work", str(tmp_path / "work" / "en-de"), "--data", str(folder), "--out", str(tmp_path / "look")]
    assert analysis.main([*looked, "--part", "cross", "--clusters", "2", "--sentences", "6"]) == 0
    assert (tmp_path / "look" / "graphs.png").stat().st_size > 5_000
    clusters = read_json(tmp_path / "look", "clusters.json")["clusters"]
    assert {(one["head"], one["cluster"]) for one in clusters} == {(h, c) for h in range(4) for c in range(2)}
    assert analysis.main([*looked, "--tagger", "nowhere:no"]) == 2
    assert "MODULE:FUNCTION" in capsys.readouterr().err
