"""What stand-ins say, held against their equations written out naively, and against what they estimate."""

import pytest
import torch

import fewkeys as fk
from cases import SHAPES
from fewkeys.core.validation import check_inputs
from fewkeys.sketch.clusters import clusters
from fewkeys.sketch.gram import top_subspace

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""The library adds a ridge of 1e-6 to the query metric; the naive equations do not."""


@pytest.mark.parametrize("shape", ["plain", "grouped", "padded", "cross"])
def test_cluster_means_follow_their_equations(shape):
    """The docstring of ClusterMeans, one key at a time; full rank, so that S itself can be compared."""
    shape = SHAPES[shape]
    q, k, v = shape.draw()
    inputs = check_inputs(q, k, v, **shape.options)
    graph = fk.select.Leverage(6).select(inputs)
    actual = fk.ClusterMeans(5, rank=8).prepare(inputs, graph, fk.Softmax())
    label = clusters(inputs, 5).label
    lengths = shape.lengths or (shape.keys,) * shape.batch
    for b, n in enumerate(lengths):
        for h in range(shape.kv_heads):
            group = shape.query_heads // shape.kv_heads
            queries = q[b, h * group : (h + 1) * group, : n if shape.queries == shape.keys else None]
            rows = queries.flatten(0, 1) / shape.head_dim**0.5
            m = rows.mean(0)
            covariance = rows.mT @ rows / len(rows) - torch.outer(m, m)
            keys, values = k[b, h, :n], v[b, h, :n]
            centred = keys - keys.mean(0)
            g = centred @ m + 0.5 * ((centred @ covariance) * centred).sum(-1)
            labels = label[b, h, :n]
            kept = graph.to_mask()[b, h * group, 0, :n]
            pooled, mass, spreads, means = torch.zeros(8, shape.value_dim).double(), {}, {}, {}
            for c in range(5):
                inside = [j for j in range(n) if labels[j] == c and not kept[j]]
                if not inside:
                    continue
                e = torch.zeros(n, dtype=torch.float64)
                g_mean = g[labels == c].mean()
                for j in inside:
                    e[j] = (0.5 * (g[j] - g_mean)).clamp(-2, 2).exp()
                mu, nu = e @ keys / e.sum(), e @ values / e.sum()
                torch.testing.assert_close(actual.key[b, h, 0, c], mu, **CLOSE)
                torch.testing.assert_close(actual.mass[b, h, 0, c], e.sum(), **CLOSE)
                assert actual.size[b, h, 0, c] == len(inside)
                offset = mu - keys.mean(0)
                g_mu = offset @ m + 0.5 * offset @ covariance @ offset
                torch.testing.assert_close(actual.bias[b, h, 0, c], (0.5 * (g_mean - g_mu)).clamp(-2, 2), **CLOSE)
                pooled += ((keys - mu) * e[:, None]).mT @ (values - nu)
                spreads[c] = e @ (((keys - mu) @ covariance) * (keys - mu)).sum(-1) / e.sum()
                mass[c], means[c] = e.sum(), (offset, nu)
            pooled = pooled / sum(mass.values())
            # Directions of at most sqrt(4e-6) of the first are rounding (`fewkeys.sketch.gram`).
            assert (actual.left[b, h, 0] @ actual.right[b, h, 0] - pooled).norm() < 2e-3 * pooled.norm()
            mean_spread = sum(spreads[c] * mass[c] for c in mass) / sum(mass.values())
            for c, (offset, nu) in means.items():
                factor = (spreads[c].clamp_min(0) / mean_spread).sqrt().clamp_max(2)
                torch.testing.assert_close(actual.factor[b, h, 0, c], factor, **CLOSE)
                expected = nu - factor * (0.5 * covariance @ offset) @ pooled
                torch.testing.assert_close(actual.value[b, h, 0, c], expected, **CLOSE)


@pytest.mark.parametrize(("count", "rank"), [(26, 0), (26, 4), (7, 1)])
def test_slots_of_means_are_their_products(count, rank):
    """A mean is met as a key is, d + dv products; a direction as often; and what they say of directions, one a mean."""
    products = (count + rank) * (48 + 16) + count * (rank > 0)
    assert fk.ClusterMeans(count, rank).slots(48, 16) == pytest.approx(products / (48 + 16))


@pytest.mark.parametrize("weights", [fk.Softmax(), fk.weights.Power(2.0)], ids=str)
def test_uniform_sample_is_unbiased(weights):
    """Sums over the sample, averaged over draws, are the sums over all keys that are not kept."""
    q, k, v = SHAPES["plain"].draw()
    q = q / 4
    inputs = check_inputs(q, k, v)
    graph = fk.select.Leverage(6).select(inputs)
    free = ~graph.to_mask()

    def kernel(scores):
        return scores.exp() if isinstance(weights, fk.Softmax) else scores.square()

    exact = (kernel(q @ k.mT / 8**0.5) * free) @ v
    draws = []
    for seed in range(400):
        inputs = check_inputs(q, k, v, generator=torch.Generator().manual_seed(seed))
        sample = fk.rest.UniformSample(20).prepare(inputs, graph, weights)
        draws.append((kernel(q @ sample.key[:, :, 0].mT / 8**0.5) * sample.mass) @ sample.value[:, :, 0])
    draws = torch.stack(draws)
    standard_error = draws.std(0) / 400**0.5
    assert ((draws.mean(0) - exact).abs() < 5 * standard_error).all()


@pytest.mark.parametrize("weights", [fk.Softmax(), fk.weights.Power(2.0)], ids=str)
@pytest.mark.parametrize("count", [64, 70, 500])
def test_a_sample_of_everything_is_exact(count, weights):
    """64 of the 70 keys are not kept: with as many places each of them speaks for itself."""
    q, k, v = SHAPES["plain"].draw()
    rest = fk.rest.UniformSample(count)
    actual = fk.attention(q, k, v, keep=fk.select.Leverage(6), rest=rest, weights=weights, impl="torch")
    torch.testing.assert_close(actual, fk.attention(q, k, v, weights=weights))


def test_more_slots_describe_better():
    """On keys in tight groups, as many means as groups leave almost no error; fewer leave some."""
    g = torch.Generator().manual_seed(0)
    centres, tags = torch.randn(12, 8, generator=g), torch.randn(12, 8, generator=g)
    group = torch.randint(12, (400,), generator=g)
    k = (2 * centres[group] + 0.01 * torch.randn(400, 8, generator=g))[None, None]
    v = (tags[group] + 0.01 * torch.randn(400, 8, generator=g))[None, None]
    q = torch.randn(1, 1, 50, 8, generator=g)
    exact = fk.attention(q, k, v)
    errors = [
        fk.metrics.output_error(fk.attention(q, k, v, keep=fk.Sinks(1), rest=fk.ClusterMeans(c), impl="torch"), exact)
        for c in (2, 6, 48)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.02


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_top_subspace_finds_leading_eigenvectors(rank):
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(2, 6, 6, generator=g, dtype=torch.float64)).Q
    matrix = basis @ torch.diag(10.0 ** -torch.arange(6, dtype=torch.float64)) @ basis.mT
    actual = top_subspace(matrix, rank)
    torch.testing.assert_close(actual.mT @ actual, torch.eye(rank, dtype=torch.float64).expand(2, -1, -1))
    held = (actual.mT @ matrix @ actual).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert (held > 0.9999 * sum(10.0**-i for i in range(rank))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_subspace_has_no_direction_that_rounding_chose(dtype):
    """Gradients go along every direction, also where outputs do not."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 2, 46, generator=g, dtype=dtype)
    actual = top_subspace(rows.mT @ rows, 4)
    lengths = actual.norm(dim=-2)
    torch.testing.assert_close(lengths, torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=dtype).expand(50, -1))


@pytest.mark.parametrize("kept", [1, 2, 60])
@pytest.mark.parametrize("count", [4, 7, 23])
def test_a_sampled_key_is_of_the_share_it_speaks_for(kept, count):
    """Also where shares are of two sizes, and where there are more of them than keys."""
    inputs = check_inputs(*SHAPES["plain"].draw())
    actual = fk.rest.UniformSample(count).prepare(inputs, fk.Sinks(kept).select(inputs), fk.Softmax())
    place = (inputs.key.unsqueeze(3) == actual.key).all(-1).int().argmax(2)
    shares = torch.arange(count)[: min(count, 70 - kept)]
    assert torch.equal(actual.label.gather(-1, place)[..., shares], shares.expand(2, 2, -1))
    assert (place[..., shares] >= kept).all()
