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
    found = fk.ClusterMeans(5, rank=8).prepare(inputs, graph, fk.Softmax())
    label = clusters(inputs, 5).label
    lengths = shape.lengths or (shape.keys,) * shape.batch
    for b, n in enumerate(lengths):
        for h in range(shape.kv_heads):
            group = shape.query_heads // shape.kv_heads
            queries = q[b, h * group : (h + 1) * group, : n if shape.queries == shape.keys else None]
            rows = queries.flatten(0, 1) / shape.head_dim**0.5
            m, second = rows.mean(0), rows.mT @ rows / len(rows)
            covariance = second - torch.outer(m, m)
            keys, values = k[b, h, :n], v[b, h, :n]
            centred = keys - keys.mean(0)
            g = centred @ m + 0.5 * ((centred @ covariance) * centred).sum(-1)
            own = label[b, h, :n]
            kept = graph.to_mask()[b, h * group, 0, :n]
            pooled, mass, spreads, means = torch.zeros(8, shape.value_dim).double(), {}, {}, {}
            for c in range(5):
                inside = [j for j in range(n) if own[j] == c and not kept[j]]
                if not inside:
                    continue
                e = torch.zeros(n, dtype=torch.float64)
                # The mean importance comes with the clusters, from the members at the last of Lloyd's steps.
                g_mean = clusters(inputs, 5).importance[b, h, c]
                assert g.min() <= g_mean <= g.max()
                for j in inside:
                    e[j] = (0.5 * (g[j] - g_mean)).clamp(-2, 2).exp()
                mu, nu = e @ keys / e.sum(), e @ values / e.sum()
                torch.testing.assert_close(found.key[b, h, c], mu, **CLOSE)
                torch.testing.assert_close(found.member[b, h, :n, c], e, **CLOSE)
                offset = mu - keys.mean(0)
                g_mu = offset @ m + 0.5 * offset @ covariance @ offset
                torch.testing.assert_close(found.bias[b, h, c], (0.5 * (g_mean - g_mu)).clamp(-2, 2), **CLOSE)
                pooled += ((keys - mu) * e[:, None]).mT @ (values - nu)
                spreads[c] = e @ (((keys - mu) @ second) * (keys - mu)).sum(-1) / e.sum()
                mass[c], means[c] = e.sum(), (offset, nu)
            pooled = pooled / sum(mass.values())
            torch.testing.assert_close(found.left[b, h] @ found.right[b, h], pooled, **CLOSE)
            mean_spread = sum(spreads[c] * mass[c] for c in mass) / sum(mass.values())
            for c, (offset, nu) in means.items():
                factor = (spreads[c].clamp_min(0) / mean_spread).sqrt().clamp_max(2)
                torch.testing.assert_close(found.factor[b, h, c], factor, **CLOSE)
                expected = nu - factor * (0.5 * covariance @ offset) @ pooled
                torch.testing.assert_close(found.value[b, h, c], expected, **CLOSE)


@pytest.mark.parametrize(("count", "rank"), [(26, 0), (26, 4), (7, 1)])
def test_slots_of_means_are_their_products(count, rank):
    """A mean is met as a key is, d + dv products; a direction as often; and what they say of directions, one a mean."""
    products = (count + rank) * (48 + 16) + count * (rank > 0)
    assert fk.ClusterMeans(count, rank).slots(48, 16) == pytest.approx(products / (48 + 16))


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
    found = top_subspace(matrix, rank)
    torch.testing.assert_close(found.mT @ found, torch.eye(rank, dtype=torch.float64).expand(2, -1, -1))
    held = (found.mT @ matrix @ found).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert (held > 0.9999 * sum(10.0**-i for i in range(rank))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_subspace_has_no_direction_that_rounding_chose(dtype):
    """Gradients go along every direction, also where outputs do not."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 2, 46, generator=g, dtype=dtype)
    found = top_subspace(rows.mT @ rows, 4)
    lengths = found.norm(dim=-2)
    torch.testing.assert_close(lengths, torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=dtype).expand(50, -1))
