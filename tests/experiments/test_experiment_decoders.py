"""The experiment on decoders: its peers are causal and count every slot, its prompts hold their answers, it goes on."""

import json
import re

import pytest
import torch
from experiments.causal.eviction import attention_so_far, unlikeness
from experiments.decoders import heads, leaves, methods, tasks
from experiments.decoders.attend import ByRule
from experiments.decoders.evidence import main
from experiments.decoders.likelihood import Stretch
from experiments.decoders.rivals import Multipole, Quest

import fewkeys as fk
from chats import chat_text, chat_tokenizer
from fewkeys.captures.capture import AttentionInputs
from tiny_models import close, llama

TOKENS, SLOTS = 300, 64


def problem(tokens=TOKENS, seed=0):
    return torch.randn(3, 2, 2, tokens, 16, generator=torch.Generator().manual_seed(seed)).mul_(2)


def rows(tokens=TOKENS):
    """Scaled queries of four heads (2, 2, N, D), keys and values of two (2, N, D)."""
    query, key, value = problem(tokens)
    return query / 4, key[0], value[0]


def attend(rule, query, key, value, first=0):
    inputs = AttentionInputs(query.flatten(0, 1)[None], key[None], value[None], scale=1.0, is_causal=True)
    answer = ByRule(rule, first)
    return answer(0, torch.nn.Identity(), inputs)[0], answer.paid


@pytest.mark.parametrize("name", methods.RULES)
def test_rules_with_room_for_all_are_exact(name):
    query, key, value = rows(100)
    # The controls are half a window, half chosen keys.
    actual, paid = attend(methods.RULES[name](256), query, key, value)
    want = fk.attention(query.flatten(0, 1)[None], key[None], value[None], is_causal=True, scale=1.0)[0]
    close(actual, want)
    assert paid == pytest.approx(50.5)


@pytest.mark.parametrize("name", methods.RULES)
@pytest.mark.parametrize("at", [144, 200, 299])  # the first begins half a block, and a page
def test_rules_are_causal_to_the_last_bit(name, at):
    query, key, value = rows()
    before, _ = attend(methods.RULES[name](SLOTS), query, key, value)
    late = [part.clone() for part in (query, key, value)]
    for part in late:
        part[..., at, :] = 9 * torch.randn(part.shape[-1], generator=torch.Generator().manual_seed(1))
    after, _ = attend(methods.RULES[name](SLOTS), *late)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at:], after[:, at:])


@pytest.mark.parametrize("name", methods.RULES)
@pytest.mark.parametrize("slots", [64, 128])
def test_rules_pay_what_they_are_given(name, slots):
    """At most the slots where the means leave room for a page or a cluster; as much more as is free."""
    query, key, value = rows()
    rule = methods.RULES[name](slots)
    for look in rule(query, key, value):
        place = torch.arange(look.start, look.stop)
        kept = (look.kept & (torch.arange(look.stop) <= place[:, None])).sum(-1)
        assert (kept <= place + 1).all()
        assert name == "oracle" or look.kept.diagonal(look.start, -2, -1).all()  # the query's own key
        paid = kept if "free" in name else kept + look.scored
        assert (paid <= slots).float().mean() > 0.8
        if name.startswith(("Quest", "Multipole")):
            assert (look.scored[..., place >= slots + 64] > 0).all()
        else:
            assert (look.scored == 0).all()


def test_what_is_paid_is_counted_by_the_mask():
    query, key, value = rows()
    rule, first, total = Quest(SLOTS), 200, 0
    for look in rule(query, key, value):
        for row in range(look.start, look.stop):
            if row >= first:
                now = row - look.start
                total += int(look.kept[..., now, : row + 1].sum() + look.scored[..., now].sum())
    assert attend(rule, query, key, value, first)[1] == pytest.approx(total / (4 * (TOKENS - first)))


def test_bounds_of_pages_hold():
    """The page of the key of largest score has a bound that is not below the score, so a loud key is found."""
    query, key, value = rows()
    query[:] = torch.randn(16, generator=torch.Generator().manual_seed(2))
    key[:, 37] = query[0, 0, 0] * 5
    for look in Quest(SLOTS)(query, key, value):
        assert look.kept[:, :, max(0, 37 - look.start) :, 37].all()


def test_each_key_is_kept_or_inside_one_cluster():
    query, key, value = rows()
    checked = 0
    for look in Multipole(SLOTS)(query, key, torch.ones_like(value)):
        if look.logit is not None:
            score = query[:, :, look.start : look.stop] @ key[:, None, : look.stop].mT
            counts = (look.kept & (torch.arange(look.stop) < look.start)).sum(-1)
            # Where every mean is scored by a zero query, its weight is its count.
            again = list(Multipole(SLOTS)(torch.zeros_like(query), key, value))
            same = next(other for other in again if other.start == look.start)
            kept = (same.kept & (torch.arange(same.stop) < same.start)).sum(-1)
            torch.testing.assert_close(same.logit.exp().sum(-1) + kept, torch.full(kept.shape, float(look.start)))
            assert score.shape[:-1] == counts.shape
            checked += 1
    assert checked > 2


def test_accounts():
    """KeyDiff keeps the keys unlike the others; accumulated attention those that are read."""
    key = torch.nn.functional.normalize(torch.randn(1, 1, 8, 4), dim=-1) * 0.1
    key[..., 0] = 1.0
    key[:, :, 3] = -key[:, :, 3]
    used = torch.ones(1, 1, 8, dtype=torch.bool)
    worth = torch.zeros(1, 1, 8)
    assert unlikeness(worth, key[:, :, :1, None], key, used).argmax() == 3
    query = key[:, :, 3][:, :, None] * 20
    once = attention_so_far(worth, query, key, used)
    assert once.argmax() == 3
    assert once.sum() == pytest.approx(1)
    torch.testing.assert_close(attention_so_far(once, query, key, used), 2 * once)


def test_every_method_is_in_the_table_and_restores_the_model():
    model, ids = llama(), torch.arange(1, 41)[None]
    with torch.no_grad():
        want = model(ids).logits
        for method in methods.METHODS:
            with methods.replaced(model, method, 128, 40, 20) as paid:
                # There is room for all; only means of the past are paid before there are any.
                close(model(ids).logits, want)
                assert paid() == pytest.approx(30.5) or method in ("constant memory", methods.OURS)
        assert torch.equal(model(ids).logits, want)


@pytest.fixture(scope="module")
def text():
    return chat_text()


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def maker(tokenizer, text):
    return tasks.Maker(tokenizer, text)


@pytest.mark.parametrize(("seed", "task"), [(turn % 2, task) for turn, task in enumerate(tasks.TASKS)])
def test_prompts_hold_their_answers(maker, tokenizer, task, seed):
    length = 1400
    prompt = tasks.TASKS[task](maker, length, seed)
    assert 0.9 * length < prompt.tokens.shape[1] <= length
    again = tasks.TASKS[task](maker, length, seed)
    assert torch.equal(prompt.tokens, again.tokens)
    assert prompt.judged == again.judged
    assert prompt.judged != tasks.TASKS[task](maker, length, seed + 2).judged
    places = [one.place for one in prompt.judged]
    assert places == sorted(set(places))
    for one in prompt.judged:
        assert prompt.tokens[0, one.place] == one.token
        assert one.token in (one.among or [one.token])
        # The answer is in the text before the first question, or nobody could know it.
        assert one.token in prompt.tokens[0, : prompt.first]
    asked = {"variable tracking": 12, "several numbers": 12, "frequent words": 3}.get(task, 8)
    assert len({one.answer for one in prompt.judged}) == asked
    text = tokenizer.decode(prompt.tokens[0])
    hidden = {"few needles": 8, "many needles": 32, "needles in noise": 8, "long numbers": 8, "several numbers": 12}
    if task in hidden:
        before = text[: text.index("What ")]
        assert before.count("The magic number of") == hidden[task]
    if task == "several numbers":
        named = re.findall(r"The magic numbers of (\w+) are (\d+), (\d+), (\d+)\.", text)
        for place, *numbers in named:
            assert re.findall(rf"The magic number of {place} is (\d+)\.", text) == numbers
        assert len(named) == 4
    if task == "frequent words":
        listed = text[: text.index("What are")].split()
        first, *others = (listed.count(word.strip(",.")) for word in text[text.index("words are:") :].split()[2:5])
        assert all(other == pytest.approx(first / rank**2, abs=1) for rank, other in enumerate(others, 2))
    if task == "variable tracking":
        assert all(len(one.among) in (0, 12) for one in prompt.judged)
    if task == "common words":
        assert all(len(one.among) == 4 for one in prompt.judged)
        listed = text[: text.index("What are")].split()
        named = [word.strip(",.") for word in text[text.index("words are:") :].split()[2:]]
        assert [listed.count(word) for word in named] == [30] * 8


@pytest.mark.parametrize("task", tasks.TASKS)
def test_scores_of_who_knows_and_of_who_does_not(maker, task):
    prompt = tasks.TASKS[task](maker, 2000, 0)
    rows = prompt.tokens.shape[1] - prompt.first
    logits = torch.zeros(rows, int(prompt.tokens.max()) + 1)
    for one in prompt.judged:
        logits[one.place - 1 - prompt.first, one.token] = 20.0
    best = tasks.score(logits, prompt)
    assert best["right"] == best["answers"]
    assert best["rank"] == 1
    assert best["likelihood"] > -1e-3
    # One wrong token spoils one answer.
    first = prompt.judged[0]
    other = next(token for token in first.among or range(9) if token != first.token)
    logits[first.place - 1 - prompt.first, other] = 30.0
    spoiled = tasks.score(logits, prompt)
    assert spoiled["right"] == best["right"] - 1
    assert spoiled["likelihood"] < best["likelihood"]
    assert spoiled["rank"] > 1


def test_too_short_for_a_task(maker):
    with pytest.raises(ValueError, match="--lengths"):
        maker.needles(200, 0, 8)


def test_heads_need_what_their_weights_say(tokenizer, text):
    """Against a head by head count with all weights at hand; heads that need all keys are counted as such."""
    model = llama()
    model.resize_token_embeddings(len(tokenizer))
    stretch = Stretch(model, tokenizer, text, 0, 96)
    actual = heads.judge(stretch)
    capture = fk.capture(model, [stretch.tokens])
    for layer in range(capture.layers):
        call = next(capture.calls(layer))
        key = call.key.repeat_interleave(2, 1)
        scores = call.query @ key.mT * call.scale + torch.full((96, 96), -torch.inf).triu(1)
        for head, weights in enumerate(scores.softmax(-1)[0, :, 48:]):
            count = [next(k for k in range(1, 97) if row.topk(k).values.sum() >= 0.99) for row in weights]
            assert actual["needed"][layer][head] == pytest.approx(sum(count) / 48, abs=0.2)
        plan = fk.budget(64, is_causal=True).never_exact()
        error = fk.metrics.output_error(
            fk.attention(call.query, call.key, call.value, plan=plan, is_causal=True, scale=call.scale)[:, :, 48:],
            fk.attention(call.query, call.key, call.value, is_causal=True, scale=call.scale)[:, :, 48:],
        )
        assert sum(actual["errors"]["64"][layer]) / 4 == pytest.approx(error, rel=1e-4)
        assert max(actual["oracle"]["128"][layer]) < 1e-4


@pytest.fixture
def folder(tmp_path, tokenizer, text):
    """A small decoder with its tokenizer, beside a text."""
    model = llama()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(text)
    return tmp_path / "model"


def test_the_command_runs_and_goes_on(folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--model", str(folder), "--text", f"lines={tmp_path / 'text.txt'}", "--out", str(out)]
    choices = ["--methods", "exact", "fewkeys", "Quest", "--slots", "64"]
    assert main([*arguments, *choices, "--lengths", "300", "--only", "perplexity", "heads"]) == 0
    assert main([*arguments, *choices[:3], *choices[4:], "--lengths", "1500", "--only", "retrieval", "report"]) == 0
    first = capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    cells = results["cells"]
    assert len(cells) == 3 + 1 + 2 * len(tasks.TASKS)
    assert first.count(" s)") == len(cells)
    assert (out / "figure.png").stat().st_size > 10_000
    assert "| **fewkeys 64** |" in (out / "table.md").read_text()
    exact = next(cell for cell in cells if cell["of"].get("method") == "exact")
    assert exact["ratio"] == 1
    assert exact["kl"] == 0
    # Nothing is computed twice, and what is missing is.
    assert main([*arguments, *choices, "--lengths", "300", "--only", "perplexity", "heads"]) == 0
    assert " s)" not in capsys.readouterr().out
    cells.pop(1)
    edited = {"model": "model", "cells": cells, "versions": results["versions"]}
    (out / "results.json").write_text(json.dumps(edited))
    assert main([*arguments, *choices, "--lengths", "300", "--only", "perplexity"]) == 0
    assert capsys.readouterr().out.count(" s)") == 1
    assert main([*arguments, "--gguf", "another"]) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert main(["--model", str(folder), "--text", "lines", "--out", str(out)]) == 2
    assert "NAME=FILE" in capsys.readouterr().err
    assert main([*arguments, "--lengths", "500000", "--only", "perplexity"]) == 2
    assert "longer text" in capsys.readouterr().err
    edited["versions"] = results["versions"] | {"plans": "0.5 0.5 0.5 0.5"}
    (out / "results.json").write_text(json.dumps(edited))
    assert main([*arguments, "--lengths", "300", "--only", "perplexity"]) == 2
    assert "older plans" in capsys.readouterr().err


def test_int8_is_measured_beside_keys_that_are_held_as_they_come(folder, tmp_path):
    arguments = ["--model", str(folder), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path)]
    leaves.main([*arguments, "--length", "200", "--slots", "64"])
    unchanged, rounded = json.loads((tmp_path / "leaves.json").read_text())["rows"]
    assert rounded["bytes"] < 0.75 * unchanged["bytes"]
    assert 0 < unchanged["kl"] < 1
    assert rounded["kl"] != unchanged["kl"]
