"""Law 11 and every other refusal: the message names the argument, what was expected, and what came."""

import pytest
import torch

import fewkeys as fk
from cases import SHAPES, places
from fewkeys.papers import levattention, sparsefinder, value_aware
from fewkeys.papers.sparsefinder import Joined

Q, K, V = SHAPES["plain"].draw(dtype=torch.float32)


def spoiled(tensor, value):
    tensor = tensor.clone()
    tensor[0, 0, 0, 0] = value
    return tensor


CALLS = {
    "query: expected shape": lambda: fk.attention(Q[0], K, V),
    "key: expected shape": lambda: fk.attention(Q, K[0], V),
    "query: expected a torch.Tensor, got list": lambda: fk.attention([1.0], K, V),
    "query: expected float64, float32, bfloat16 or float16, got torch.int64": lambda: fk.attention(Q.long(), K, V),
    "key: expected torch.float32 on cpu like query, got torch.float64": lambda: fk.attention(Q, K.double(), V),
    "key: expected batch 2 like query, got 1": lambda: fk.attention(Q, K[:1], V),
    "key: expected head dimension 8 like query, got 7": lambda: fk.attention(Q, K[..., :7], V),
    "value: expected \\(2, 70\\)": lambda: fk.attention(Q, K, V[:, :, :69]),
    "query: expected a number of heads that is a multiple of key's 2, got 1": lambda: fk.attention(Q[:, :1], K, V),
    "query: expected no empty dimension": lambda: fk.attention(Q[:, :, :0], K, V),
    "key: expected finite numbers, got 1 NaN": lambda: fk.attention(Q, spoiled(K, float("nan")), V, keep=fk.Sinks(2)),
    "value: expected finite numbers": lambda: fk.attention(Q, K, spoiled(V, float("inf"))),
    "query: expected finite numbers": lambda: fk.attention(spoiled(Q, float("-inf")), K, V),
    "scale: expected a finite number": lambda: fk.attention(Q, K, V, scale=float("nan")),
    "scale: expected a number, got str": lambda: fk.attention(Q, K, V, scale="1"),
    "lengths: expected values from 0 to 70": lambda: fk.attention(Q, K, V, lengths=torch.tensor([71, 3])),
    "lengths: expected values from 0": lambda: fk.attention(Q, K, V, lengths=torch.tensor([-1, 3])),
    "lengths: expected 2 integers": lambda: fk.attention(Q, K, V, lengths=torch.tensor([3])),
    "lengths: expected 2 integers, one per sequence": lambda: fk.attention(Q, K, V, lengths=[1.0, 2.0]),
    "key_mask: expected a bool tensor of shape \\(2, 70\\)": lambda: fk.attention(Q, K, V, key_mask=torch.ones(2, 70)),
    "lengths, key_mask: expected at most one": lambda: fk.attention(
        Q, K, V, lengths=torch.tensor([3, 3]), key_mask=torch.ones(2, 70, dtype=torch.bool)
    ),
    "lengths: expected 2 integers, one per sequence, got str": lambda: fk.attention(Q, K, V, lengths="a"),
    "query: expected a tensor .*, got one of layout torch.sparse_coo": lambda: fk.attention(Q.to_sparse(), K, V),
    "is_causal: expected True or False, got str 'False'": lambda: fk.attention(Q, K, V, is_causal="False"),
    "is_causal: expected True or False, got str 'no'": lambda: fk.budget(64, is_causal="no"),
    "is_causal: expected True or False, got int 3": lambda: fk.Plan(fk.Window(3), is_causal=3),
    "exact_if_faster: expected True or False, got str": lambda: fk.Plan(fk.Window(3), exact_if_faster="no"),
    "generator: expected a torch.Generator or None, got int": lambda: fk.attention(Q, K, V, generator=3),
    "query_offset: expected at least 0, got -1": lambda: fk.attention(Q, K, V, query_offset=-1),
    "impl: expected one of auto, reference, torch, native, got 'cuda'": lambda: fk.attention(Q, K, V, impl="cuda"),
    "plan: expected a fewkeys.Plan, got int": lambda: fk.attention(Q, K, V, plan=64),
    "plan: expected either a plan or keep": lambda: fk.attention(Q, K, V, plan=fk.budget(8), keep=fk.Sinks(1)),
    "keep: expected a selector or None, got int": lambda: fk.attention(Q, K, V, keep=64),
    "keep: expected a selector on both sides": lambda: fk.Sinks(1) | 3,
    "rest: expected a fewkeys Rest, got int": lambda: fk.Plan(fk.Sinks(1), 3),
    "weights: expected a fewkeys Weights, got int": lambda: fk.Plan(fk.Sinks(1), fk.Drop(), 3),
    "Window size: expected at least 1, got 0": lambda: fk.Window(0),
    "Window size: expected an integer, got float": lambda: fk.Window(1.5),
    "Sinks count: expected at least 1, got -1": lambda: fk.Sinks(-1),
    "Leverage count: expected at least 1, got 0": lambda: fk.select.Leverage(0),
    "Leverage: expected exactly one of count and eps": lambda: fk.select.Leverage(),
    "Leverage: expected exactly one of count and eps, got": lambda: fk.select.Leverage(3, eps=0.1),
    "Leverage eps: expected a finite number in": lambda: fk.select.Leverage(eps=1.5),
    "Leverage: eps is a guarantee for uncentred": lambda: fk.select.Leverage(eps=0.5, centre=True),
    "Sensitivity power: expected a finite number": lambda: fk.papers.levattention.Sensitivity(5, power=0),
    "KeyNorm count": lambda: fk.select.KeyNorm(0),
    "RandomKeys count": lambda: fk.RandomKeys(0),
    "TopK count": lambda: fk.TopK(0),
    "BestColumns count": lambda: fk.select.BestColumns(0),
    "Outliers clusters": lambda: fk.Outliers(3, 0),
    "ClusterMeans count": lambda: fk.ClusterMeans(0),
    "ClusterMeans rank": lambda: fk.ClusterMeans(3, rank=-1),
    "UniformSample count": lambda: fk.rest.UniformSample(0),
    "slots: expected at least 1, got 0": lambda: fk.budget(0),
    "slots: expected an integer, got bool": lambda: fk.budget(True),
    "Joined key: expected a floating tensor": lambda: Joined(torch.ones(2, 4, 3), None, torch.ones(2, 4, 4).bool()),
    "alpha: expected a finite number": lambda: fk.weights.Entmax(1.0),
    "p: expected a finite number": lambda: fk.weights.Power(0),
    "cap: expected a finite number in \\(0.0, 80.0\\), got 80": lambda: fk.weights.Softcap(80.0),
    "cap: expected a finite number in \\(0.0, 80.0\\), got 0": lambda: fk.weights.Softcap(0),
    "KeyScan count": lambda: fk.KeyScan(0),
    "BlockMeans count": lambda: fk.BlockMeans(0),
    "BlockClusters window: expected an odd number": lambda: sparsefinder.BlockClusters(4, 2, places(), window=2),
    "p: expected a finite number in \\(0.0, inf\\), got -1": lambda: fk.weights.Relu(-1),
    "eps: expected a finite number": lambda: levattention.universal_set(K, 0.0),
    "key: expected finite numbers, got": lambda: levattention.leverage_scores(spoiled(K, float("nan"))),
    "r: expected at least 1": lambda: value_aware.value_oblivious(torch.ones(3) / 3, 0),
    "form: expected 'renormalised' or 'projected'": lambda: value_aware.value_oblivious(torch.ones(3) / 3, 1, "best"),
    "predicted: expected the shape of gold": lambda: fk.metrics.recall(torch.ones(2, 2) > 0, torch.ones(3, 3) > 0),
    "gold: expected a bool mask": lambda: fk.metrics.recall(torch.ones(2, 2) > 0, torch.ones(2, 2)),
    "approx: expected a tensor shaped like exact": lambda: fk.metrics.output_error(Q, Q[:1]),
}


@pytest.mark.parametrize("message", CALLS)
def test_bad_input_is_named(message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}") as caught:
        CALLS[message]()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rest", [fk.ClusterMeans(4), fk.rest.UniformSample(4)], ids=str)
def test_entmax_refuses_stand_ins_and_says_why(rest):
    with pytest.raises(ValueError, match=r"^rest: .* needs weights that are f\(score\) over a sum.*threshold"):
        fk.attention(Q, K, V, keep=fk.Window(5), rest=rest, weights=fk.weights.Entmax(1.5))


@pytest.mark.parametrize("weights", [fk.weights.Power(2.0), fk.weights.Elu(), fk.weights.Relu(1.0)], ids=str)
@pytest.mark.parametrize("rest", [fk.ClusterMeans(4, rank=2)], ids=str)
def test_terms_derived_for_softmax_refuse_other_kernels(rest, weights):
    with pytest.raises(ValueError, match=r"^rest: .*Softmax"):
        fk.Plan(fk.Window(5), rest, weights)


@pytest.mark.parametrize("rest", [fk.ClusterMeans(4), fk.rest.UniformSample(4)], ids=str)
@pytest.mark.parametrize("keep", [fk.KeyScan(5), fk.KeyScan(5) | fk.Window(3)], ids=str)
def test_rests_of_lists_refuse_scans(keep, rest):
    """Each query keeps other keys of every cluster: to count them would take quadratic time."""
    with pytest.raises(ValueError, match=r"^keep: .* has no stand-ins for what a KeyScan leaves, got KeyScan.*use Bl"):
        fk.Plan(keep, rest)


@pytest.mark.parametrize("rest", [fk.ClusterMeans(4), fk.rest.UniformSample(4)], ids=str)
@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_rests_that_see_the_future_refuse_causality(rest, impl):
    with pytest.raises(ValueError, match=r"^is_causal: .* looks at the future"):
        fk.attention(Q, K, V, keep=fk.Window(5), rest=rest, is_causal=True, impl=impl)


@pytest.mark.parametrize(
    "keep",
    [
        fk.select.BestColumns(4),
        fk.Outliers(4, 4),
        fk.select.Leverage(eps=0.5),
        fk.papers.levattention.Sensitivity(4, power=3),
    ],
    ids=str,
)
def test_selectors_that_see_the_future_refuse_causality(keep):
    with pytest.raises(ValueError, match=r"^is_causal: .* looks at the future"):
        fk.attention(Q, K, V, keep=keep | fk.Window(3), is_causal=True)


def test_graphs_of_different_inputs_do_not_join():
    with pytest.raises(ValueError, match=r"^graph: expected two graphs of the same inputs"):
        fk.Sinks(2).graph(Q, K) | fk.Sinks(2).graph(Q, K)
