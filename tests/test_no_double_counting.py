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


@pytest.mark.parametrize("name", [name for name in CAUSAL_PLANS if "relu" not in name])
def test_weights_sum_to_one_causal(name):
    q, k, v = CAUSAL_SHAPES["causal"].draw()
    found = fk.attention(q, k, torch.ones_like(v), plan=CAUSAL_PLANS[name], impl="torch", is_causal=True)
    torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rest", ["means", "first-order means", "moments"])
@pytest.mark.parametrize(
    "keep", [fk.Window(9), fk.Leverage(7) | fk.Window(11), fk.Outliers(5, 8) | fk.Window(9) | fk.Sinks(2)], ids=str
)
@pytest.mark.parametrize("lengths", [None, (70, 33)], ids=["full", "padded"])
def test_indifferent_queries_see_every_key_once(keep, rest, lengths):
    """With all scores equal, attention is the plain mean of the values: any key missed or counted twice moves it."""
    _, k, v = SHAPES["plain"].draw()
    lengths = None if lengths is None else torch.tensor(lengths)
    found = fk.attention(torch.zeros_like(k), k, v, keep=keep, rest=RESTS[rest], lengths=lengths, impl="torch")
    for b, n in enumerate((70, 70) if lengths is None else lengths.tolist()):
        # The means still contain the keys of the window, so only their number is exact: constant values, one at a time.
        marked = torch.zeros_like(v)
        marked[b, :, :n] = 1.0
        total = fk.attention(torch.zeros_like(k), k, marked, keep=keep, rest=RESTS[rest], lengths=lengths, impl="torch")
        torch.testing.assert_close(total[b, :, :n], marked[b, :, :n])
        if not any(isinstance(part, fk.Window) for part in getattr(keep, "parts", (keep,))):
            torch.testing.assert_close(found[b, :, :n], v[b, :, :n].mean(-2, keepdim=True).expand(-1, n, -1))


@pytest.mark.parametrize("rest", ["means", "first-order means", "moments", "sample"])
def test_multiplicities_count_the_keys_not_kept(rest):
    """Sum over stand-ins of their multiplicity = number of keys not kept, for equal scores."""
    _, k, v = SHAPES["plain"].draw()
    q = torch.zeros_like(k)
    keep = fk.Leverage(7) | fk.Window(11)
    graph = keep.graph(q, k)
    # Value 1 on kept keys only: the kept share is kept / (kept + sum of multiplicities).
    for query in (0, 3, 30, 69):
        kept = graph.to_mask()[:, :, query]
        marked = kept[..., None].to(v.dtype).expand_as(v).contiguous()
        others = torch.ones_like(v) - marked
        stand_in = fk.attention(q, k, others, keep=keep, rest=RESTS[rest], impl="torch")[:, :, query]
        alone = fk.attention(q, k, marked, keep=keep, rest=RESTS[rest], impl="torch")[:, :, query]
        torch.testing.assert_close(stand_in + alone, torch.ones_like(alone), rtol=1e-9, atol=1e-9)


def test_means_without_window_are_exact_for_indifferent_queries():
    _, k, v = SHAPES["plain"].draw()
    q = torch.zeros_like(k)
    for rest in (fk.ClusterMeans(8), fk.ClusterMeans(8, rank=3), fk.Moments()):
        found = fk.attention(q, k, v, keep=fk.Leverage(7), rest=rest, impl="torch")
        torch.testing.assert_close(found, v.mean(-2, keepdim=True).expand_as(found))


def test_members_partition_the_keys_not_kept():
    from fewkeys.validation import check_inputs

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
