"""The rivals that serve decoders: causal, within their slots, and true to what their papers promise."""

import math

import pytest
import torch
from experiments.decoders.rivals import Quest
from experiments.peers.decoders import run
from experiments.peers.decoders.express import Express
from experiments.peers.decoders.scored import compactor, expected, votes
from experiments.peers.decoders.vattention import VAttention

TOKENS = 300
RULES = {name: rule for name, rule in run.RULES.items() if name not in ("KeyDiff", "accumulated attention")}
"""Those that no test of the trees plays already, and quick."""


def rows(tokens=TOKENS, seed=0):
    """Scaled queries of four heads (2, 2, N, D), keys and values of two (2, N, D)."""
    draw = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 2, 2, tokens, 16, generator=draw)
    return query / 2, key[0], value[0]


def attend(rule, query, key, value, first=0):
    return run.play(rule, query, key, value, first)


def exact(query, key, value):
    late = torch.ones(query.shape[2], key.shape[1], dtype=torch.bool).triu(1)
    return (query @ key[:, None].mT).masked_fill(late, -torch.inf).softmax(-1) @ value[:, None]


@pytest.mark.parametrize("name", RULES)
def test_rules_with_room_for_all_are_exact(name):
    query, key, value = rows(100)
    actual, _ = attend(RULES[name](256), query, key, value)
    torch.testing.assert_close(actual, exact(query, key, value), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_rules_are_causal(name):
    query, key, value = rows()
    late = [part.clone() for part in (query, key, value)]
    for part in late:
        part[..., 200, :] = 3.0
    before, after = (attend(RULES[name](64), *parts)[0][:, :, :200] for parts in ((query, key, value), late))
    # A sketch of values sees the largest of all; nothing else looks ahead.
    torch.testing.assert_close(before, after, atol=0 if name != "Express" else 1e-5, rtol=0)


@pytest.mark.parametrize("name", RULES)
def test_rules_pay_about_what_they_are_given(name):
    _, paid = attend(RULES[name](128), *rows(), first=150)
    assert paid <= (128 if "free" not in name and name != "vAttention" else 160)


def test_quest_bounds_are_above_every_score_of_their_page():
    query, key, _ = rows()
    pages = key[:, :288].unflatten(1, (-1, Quest(64).page))
    low, high = pages.amin(2)[:, None], pages.amax(2)[:, None]
    bound = query.clamp_min(0) @ high.mT + query.clamp_max(0) @ low.mT
    best = (query @ key[:, None, :288].mT).unflatten(-1, (-1, 16)).amax(-1)
    assert (bound >= best - 1e-5).all()


@pytest.mark.parametrize(("epsilon", "delta"), [(0.2, 0.1), (0.4, 0.2)])
def test_vattention_keeps_its_promise_of_the_sum_of_weights(epsilon, delta):
    query, key, value = rows(600)
    missed = []
    for look in VAttention(16, epsilon, delta, base=32)(query, key, value):
        score = query[:, :, look.start : look.stop] @ key[:, None, : look.stop].mT
        past = torch.arange(look.stop) <= torch.arange(look.start, look.stop)[:, None]
        true = score.masked_fill(~past, -torch.inf).logsumexp(-1)
        total = torch.cat([score.masked_fill(~look.kept, -torch.inf), look.logit], -1).logsumexp(-1)
        missed.append(((total - true).exp() - 1).abs() > epsilon)
    assert torch.cat(missed, -1).float().mean() <= delta


def test_express_speaks_for_every_key_once():
    query, key, value = rows()
    for look in Express(16)(0 * query, key, value):
        total = look.logit.logsumexp(-1).exp() if look.start else torch.zeros(2, 2, look.stop - look.start)
        torch.testing.assert_close(total, torch.full_like(total, float(max(0, look.start - 4))))
        assert int(look.scored.max()) <= 16 * (math.log2(max(2, look.start / 16)) + 1)


def test_scores_find_what_their_papers_look_for():
    query, key, value = rows()
    key, value = key.clone(), value.clone()
    key[:, 50] = 3 * query[:, :, -32:].mean((1, 2)) / query[:, :, -32:].mean((1, 2)).norm(dim=-1, keepdim=True) * 4
    assert (votes(query, key, value)[:, 44:57].amax(-1) == votes(query, key, value)[:, :-7].amax(-1)).all()
    late = query[:, :, -512:]
    sample = (late @ key[:, None].mT).exp().mean(2)
    sample = (sample / sample.sum(-1, keepdim=True)).mean(1) * value.norm(dim=-1)
    selected = expected(query, key, value)
    assert torch.corrcoef(torch.stack([sample.log()[0], selected.log()[0]]))[0, 1] > 0.9
    key[:, 70] = torch.eye(16)[3] * 40
    assert (compactor(query, key, value).argmax(-1) == 70).all()
