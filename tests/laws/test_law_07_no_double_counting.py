"""Law 7: the weights of kept keys and stand-ins sum to one, and every real key is represented exactly once."""

import pytest
import torch

import fewkeys as fk
from cases import CAUSAL_PLANS, CAUSAL_SHAPES, PLANS, RESTS, SHAPES


@pytest.mark.parametrize("shape", ["plain", "padded", "grouped"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_weights_sum_to_one(plan, shape):
    """Constant values come back unchanged."""
    shape = SHAPES[shape]
    q, k, v = shape.draw()
    constant = torch.arange(1.0, v.shape[-1] + 1, dtype=v.dtype).expand_as(v)
    found = fk.attention(q, k, constant, plan=plan, impl="torch", **shape.options)
    if shape.lengths is not None:
        found[1, :, shape.lengths[1] :] = constant[1, :, shape.lengths[1] :]  # queries of padding
    empty = (found == 0).all(-1)  # a row on which relu vanishes has no weights
    torch.testing.assert_close(found[~empty], constant[:1, :1, :1].expand_as(found)[~empty], rtol=1e-8, atol=1e-8)
    assert empty.float().mean() < 0.2


@pytest.mark.parametrize("name", [name for name, plan in CAUSAL_PLANS.items() if plan.weights != fk.Relu(2.0)])
def test_weights_sum_to_one_causal(name):
    q, k, v = CAUSAL_SHAPES["causal"].draw()
    found = fk.attention(q, k, torch.ones_like(v), plan=CAUSAL_PLANS[name], impl="torch", is_causal=True)
    torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rest", ["means", "first-order means", "moments", "sample"])
@pytest.mark.parametrize("window", [1, 6, 11, 41])
@pytest.mark.parametrize("lengths", [None, (70, 33)], ids=["full", "padded"])
def test_kept_keys_and_stand_ins_count_every_key_once(rest, window, lengths):
    """With all scores equal each of n keys weighs 1 / n: so the 7 keys that no stand-in speaks for weigh 7 / n.

    That fails as soon as the multiplicities miss a key, or count one that the query's own window keeps.
    """
    _, k, v = SHAPES["plain"].draw()
    q, lengths = torch.zeros_like(k), None if lengths is None else torch.tensor(lengths)
    listed = fk.Leverage(7).graph(q, k, lengths=lengths).to_mask()[:, :, 0]
    marked = listed[..., None].to(v.dtype).expand_as(v).contiguous()
    keep = fk.Leverage(7) | fk.Window(window)
    found = fk.attention(q, k, marked, keep=keep, rest=RESTS[rest], lengths=lengths, impl="torch")
    for b, n in enumerate((70, 70) if lengths is None else lengths.tolist()):
        torch.testing.assert_close(found[b, :, :n], torch.full_like(found[b, :, :n], 7 / n), rtol=1e-6, atol=1e-9)


def test_means_without_window_are_exact_for_indifferent_queries():
    _, k, v = SHAPES["plain"].draw()
    q = torch.zeros_like(k)
    for rest in (fk.ClusterMeans(8), fk.ClusterMeans(8, rank=3), fk.Moments()):
        found = fk.attention(q, k, v, keep=fk.Leverage(7), rest=rest, impl="torch")
        torch.testing.assert_close(found, v.mean(-2, keepdim=True).expand_as(found))


def test_members_partition_the_keys_not_kept():
    from fewkeys.core.validation import check_inputs

    q, k, v = SHAPES["padded"].draw()
    q = torch.zeros_like(q)  # no tilt: every member weighs 1
    inputs = check_inputs(q, k, v, lengths=torch.tensor([70, 33]))
    graph = fk.Leverage(7).select(inputs)
    kept = graph.to_mask()[:, :, 0]
    for name, rest in RESTS.items():
        stand_ins = rest.prepare(inputs, graph, fk.Softmax())
        if stand_ins is None:
            assert name == "drop"
            continue
        held = stand_ins.member.sum(-1)
        real = torch.arange(70) < torch.tensor([70, 33])[:, None, None]
        torch.testing.assert_close(held, (real & ~kept).to(held.dtype))
