"""The value-aware experiment: its parts obey their definitions, and the command runs, resumes and refuses."""

import statistics
from dataclasses import replace

import pytest
import torch
from experiments.value_aware import data, evaluation, models, run, stages, stand_in_variants, summary
from experiments.value_aware.hyper import hyper_weights
from experiments.value_aware.methods import METHODS, Call, budget
from experiments.value_aware.prefix import prefix_leverage
from hypothesis import given, strategies as st

import fewkeys as fk
import tiny_models
from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.files import read_json
from fewkeys.papers import levattention

KERNELS = list(stages.KERNELS.values())
LENGTH = 20


def call(kernel, is_causal, seed=0):
    torch.manual_seed(seed)
    query, key, value = torch.randn(3, 2, 4, LENGTH, 8).unbind()
    inputs = AttentionInputs(2 * query, key, value, 8**-0.5, is_causal, None, 0)
    return Call.of(inputs, kernel, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_call_is_exact_attention(kernel, is_causal):
    made = call(kernel, is_causal)
    x = made.inputs
    expected = fk.attention(x.query, x.key, x.value, weights=kernel, is_causal=is_causal, impl="reference")
    torch.testing.assert_close(made.output, expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("fewkeys", "window", "HyperAttention")])
def test_all_keys_are_exact(method, kernel, is_causal):
    made = call(kernel, is_causal)
    torch.testing.assert_close(METHODS[method](made, LENGTH), made.output, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("r", [1, 3, 6])
def test_sight_of_the_values_never_harms(kernel, is_causal, r):
    made = call(kernel, is_causal)
    error = {name: (METHODS[name](made, r) - made.output).norm(dim=-1) for name in ("aware", *list(METHODS)[:2])}
    for name in ("oblivious", "oblivious (projected)"):
        assert bool((error["aware"] <= error[name] + 1e-5).all())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("r", [1, 2, 5, 8])
def test_hyper_attention_keeps_to_its_budget(r, is_causal):
    made = call(fk.Softmax(), is_causal)
    x = made.inputs
    actual = hyper_weights(x.query, x.key, made.scores, made.kernel, r, is_causal, made.generator)
    torch.testing.assert_close(actual.sum(-1), torch.ones(actual.shape[:-1]))
    assert int((actual > 0).sum(-1).max()) <= r
    assert not bool(actual[(made.scores == -torch.inf)].any())


def test_hyper_attention_speaks_for_every_key():
    """Where all keys outside the block are alike, those in the sample carry the weight of all of them."""
    made = call(fk.Softmax(), False)
    x = made.inputs
    flat = torch.zeros_like(made.scores)
    actual = hyper_weights(x.query, x.key, flat, made.kernel, 8, False, made.generator)
    for row in actual.flatten(0, 2):
        inside, outside = row[torch.isclose(row, torch.tensor(1 / LENGTH))], row[row > 1.01 / LENGTH]
        assert len(inside) in range(2, 9)
        torch.testing.assert_close(len(inside) / LENGTH + float(outside.sum()), 1.0)
        assert bool((outside == outside[:1]).all())
    assert hyper_weights(x.query, x.key, made.scores, made.kernel, 2 * LENGTH, False, made.generator).allclose(
        made.weights
    )


def test_prefix_leverage_is_the_leverage_of_every_prefix():
    key = torch.randn(2, 3, 30, 6, generator=torch.Generator().manual_seed(0))
    actual = prefix_leverage(key)
    for i in (11, 20, 29):  # where the keys so far span everything, the ridge changes little
        expected = levattention.leverage_scores(key[:, :, : i + 1])
        torch.testing.assert_close(actual[:, :, i, : i + 1].float(), expected.float(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "HyperAttention"])
def test_causal_methods_do_not_see_the_future(method):
    made = call(fk.Softmax(), True)
    x = made.inputs
    cut = 13
    key, value = x.key.clone(), x.value.clone()
    key[:, :, cut:], value[:, :, cut:] = 9.0, -9.0
    other = Call.of(replace(x, key=key, value=value), made.kernel, torch.Generator().manual_seed(0))
    before, after = METHODS[method](made, 4)[:, :, :cut], METHODS[method](other, 4)[:, :, :cut]
    # Oracles work in coordinates about the mean of all values, so that rounding differs.
    torch.testing.assert_close(before, after, atol=1e-5, rtol=1e-4)


@given(r=st.integers(1, 80), which=st.integers(0, 2))
def test_our_plan_costs_at_most_r_with_every_kernel(r, which):
    kernel = KERNELS[which]
    plan = budget(r, kernel, False)
    assert plan.weights == kernel
    parts = getattr(plan.keep, "parts", (plan.keep,))
    slots = sum(getattr(part, "size", 0) or getattr(part, "count", 0) for part in parts)
    assert slots + plan.rest.slots(32, 32) <= r + 0.5


def test_masking_hides_what_is_asked_and_nothing_else(encoder):
    _, tokenizer = models.load_encoder(encoder)
    rows = torch.randint(5, 40, (60, 30), generator=torch.Generator().manual_seed(0))
    batch = data.masked(rows, tokenizer, 0.2, torch.Generator().manual_seed(0))
    hidden = batch.labels >= 0
    assert hidden.sum(1).tolist() == [6] * 60
    assert bool((batch.ids[hidden] == tokenizer.mask_token_id).all())
    assert torch.equal(torch.where(hidden, batch.labels, batch.ids)[:, 1:-1], rows)
    assert hidden.any(0).tolist() == [False, *[True] * 30, False]


def test_what_follows_is_the_next_token():
    batch = data.following(torch.arange(12).view(2, 6))
    assert batch.labels.tolist() == [[1, 2, 3, 4, 5, -100], [7, 8, 9, 10, 11, -100]]


def test_held_out_text_is_not_trained_on(tmp_path):
    paths = []
    for name in "ab":
        paths.append(tmp_path / f"{name}.txt")
        paths[-1].write_text("".join(f"{name}{i}\n" for i in range(200)))
    train, held = data.read(paths)
    assert set(train.split()) | set(held.split()) == {f"{name}{i}" for name in "ab" for i in range(200)}
    assert not set(train.split()) & set(held.split())
    assert {line[0] for line in held.split()} == {"a", "b"}


def test_windows_are_pieces_of_the_text():
    tokens = torch.arange(100)
    actual = data.windows(tokens, 8, 4, torch.Generator().manual_seed(0))
    for _ in range(10):
        rows = next(actual)
        assert rows.shape == (4, 8)
        assert bool((rows.diff(dim=1) == 1).all())
        assert len(rows[:, 0].unique()) == 4


def test_judging_counts_what_the_model_gets_right():
    model = tiny_models.llama()
    batch = data.following(tiny_models.tokens(3, 11))
    judged = models.judge(model, batch)
    with torch.no_grad():
        logits = model(batch.ids).logits[:, :-1]
    right = logits.argmax(-1) == batch.ids[:, 1:]
    assert judged["right"] == right.sum(1).tolist()
    assert judged["count"] == [10.0] * 3
    loss = torch.nn.functional.cross_entropy(logits.mT, batch.ids[:, 1:], reduction="none").sum(1)
    assert judged["loss"] == pytest.approx(loss.tolist(), rel=1e-4)


def test_the_exact_model_is_restored_and_all_keys_change_nothing():
    model = tiny_models.llama()
    batch = data.following(tiny_models.tokens(3, 11))
    before = models.judge(model, batch)
    for method in ("oblivious", "aware"):
        judged = evaluation.model_error(model, fk.Softmax(), batch, method, 11)
        assert judged["loss"] == pytest.approx(before["loss"], rel=1e-4)
    assert evaluation.model_error(model, fk.Softmax(), batch, "window", 1)["loss"] != pytest.approx(before["loss"])
    assert models.judge(model, batch) == before


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=12))
def test_differences_are_paired_and_cut_to_what_both_were_judged_on(rows):
    counts = [n for n, _, _ in rows]
    one = {"count": counts, "right": [n * a for n, a, _ in rows], "loss": counts}
    other = {"count": counts[:-1], "right": [n * b for n, _, b in rows[:-1]], "loss": counts[:-1]}
    whole, part = summary.percent(one), {name: values[:-1] for name, values in one.items()}
    expected = summary.percent(part)["error"] - summary.percent(other)["error"]
    assert summary.difference(one, other)["error"] == pytest.approx(expected, abs=1e-9)
    assert set(summary.difference(one, one).values()) == {0.0}
    # Twice the same sample holds no more sequences' worth of errors, only more of them.
    twice = summary.percent({name: values * 2 for name, values in one.items()})
    assert twice["error"] == pytest.approx(whole["error"])
    n = len(counts)
    assert twice["se"] == pytest.approx(whole["se"] * ((n - 1) / (2 * n - 1)) ** 0.5, abs=1e-6)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = [f"w{i}" for i in range(30)]
    generator = torch.Generator().manual_seed(0)
    place = tmp_path_factory.mktemp("text") / "text.txt"
    lines = (" ".join(words[i] for i in torch.randint(30, (12,), generator=generator)) for _ in range(120))
    place.write_text("\n".join(lines) + "\n")
    return place


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A folder with a tiny masked language model of random weights and its tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {name: i for i, name in enumerate([*names, *(f"w{i}" for i in range(55))])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), names, strict=True))
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(**(tiny_models.SIZES | {"num_hidden_layers": 1}), max_position_embeddings=40)
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


def small_language_model(length):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = tiny_models.SIZES | {"vocab_size": 300, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=length, bos_token_id=None, eos_token_id=None))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(models, "VOCABULARY", 300)
    monkeypatch.setattr(models, "new_language_model", small_language_model)
    monkeypatch.setattr(run, "QUICK", replace(run.QUICK, sizes=(1, 2), gap_sizes=(2,), length=12))


@pytest.mark.long
def test_the_command_runs_resumes_and_refuses(text, encoder, tmp_path, small, monkeypatch, capsys):
    out, work = tmp_path / "out", tmp_path / "work"
    arguments = ["--text", str(text), "--out", str(out), "--work", str(work), "--model", str(encoder), "--quick"]
    assert run.main(arguments) == 0
    results = read_json(out, "results.json")
    assert {(row["model"], row["kernel"]) for row in results["rows"]} == {
        (model, kernel) for model in stages.MODELS for kernel in stages.KERNELS
    }
    for row in results["rows"]:
        if row["method"] == "aware" and row["r"] >= 9:  # Dv + 1
            assert row["output_error"] < 1e-5
            assert row["above_exact"]["error"] == 0.0
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "| aware |" in (out / "table.md").read_text()

    def never(*_, **__):
        raise AssertionError("a finished stage was repeated")

    monkeypatch.setattr(run, "save_figure", lambda *_: None)  # it would draw the same again
    monkeypatch.setattr(models, "train", never)
    monkeypatch.setattr(evaluation, "model_error", never)
    monkeypatch.setattr(evaluation, "output_errors", never)
    assert run.main(arguments) == 0
    assert read_json(out, "results.json") == results
    capsys.readouterr()
    assert run.main(arguments[:-1]) == 2  # other settings, same work folder
    message = capsys.readouterr().err
    assert message.startswith("error: --work: ")
    assert message.count("\n") == 1


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\xff", b"one line"])
def test_unusable_text_is_one_line(tmp_path, content, capsys):
    place = tmp_path / "text.txt"
    if content is not None:
        place.write_bytes(content)
    assert run.main(["--text", str(place), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --text: ")
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "work").exists()


def test_variants_of_stand_ins_are_the_librarys_without_switches():
    """But for heads with ties that rounding decides; also where queries are beyond the bounds of the first order."""
    query, key, value = (torch.randn(9, 90, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    query, settings = 2 * query, stand_in_variants.Settings(outliers=4, window=5, means=6, rank=3)
    plan = fk.Plan(fk.Outliers(4, 6) | fk.Window(5), fk.ClusterMeans(6, 3))
    expected = fk.attention(*(rows.unsqueeze(0) for rows in (query, key, value)), plan=plan, scale=1.0).squeeze(0)
    errors = []
    for reach in (settings.reach, torch.inf):
        actual, _ = stand_in_variants.attend(query, key, value, settings.but(reach=reach))
        errors.append(statistics.median(map(fk.metrics.output_error, actual, expected)))
    assert errors[0] < 1e-4 < 0.01 < errors[1]
