"""Entmax over predicted clusters against dense entmax attention, in one run: `python benchmarks/grouped.py`.

One head of 64 dimensions, float32, 1.5-entmax. Queries and keys are drawn around 200 topics of unequal frequency;
C = sqrt(n) centroids are learned beforehand by k-means on another draw, and a query attends to the keys of its nearest
centroid's cluster. Finding the nearest centroids is part of the time. *balanced* are clusters of equal size instead:
chunks of the sequence, which no data has to be looked at for.

Dense attention scores every pair, in blocks of 1,024 queries; its entmax is that of the `entmax` package by full sort
(the default there) or by partial sort (`k=100` there: as exact, and as fast as the package goes), or our own. All take
part in turns, forward and forward + backward; times are medians over the turns, ratios are medians, least and most of
the ratios turn by turn. Beside it, softmax over the same clusters against torch's fused exact softmax attention. Last,
the clusters alone up to n = 65,536: least times, and the exponents of their growth over all lengths and over the
longest four.

One thread for all sides by default. `--quick` takes seconds and writes nothing.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from entmax import entmax15
from torch.nn.functional import scaled_dot_product_attention

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json
from fewkeys.core.work import Work
from fewkeys.papers import sparsefinder
from fewkeys.select import Selector

DIM, TOPICS, LLOYD, BLOCK = 64, 200, 10, 1024
DENSE = ("sort", "partial sort", "ours")
SIDES = {"forward": False, "forward_backward": True}


@dataclass(frozen=True, eq=False)
class Nearest(Selector):
    """Queries and keys of the same nearest centroid (Hq, C, D) attend to each other."""

    centres: torch.Tensor

    def select(self, inputs):
        half = self.centres.square().sum(-1).unsqueeze(-2) / 2
        query, key = ((rows @ self.centres.mT - half).argmax(-1, keepdim=True) for rows in (inputs.query, inputs.key))
        return fk.select.Graph(inputs, extra=sparsefinder.Groups(query, key, self.centres.shape[-2]))

    def covers(self, inputs):
        return False

    def work(self, inputs):
        count = self.centres.shape[-2]
        return Work(inputs.keys / count, 4.0 * count * inputs.head_dim)


@dataclass(frozen=True)
class Equal(Selector):
    """Chunks of equal size of the sequence."""

    count: int

    def select(self, inputs):
        ids = torch.arange(inputs.keys) * self.count // inputs.keys
        ids = ids.expand(inputs.batch, inputs.query_heads, -1).unsqueeze(-1)
        return fk.select.Graph(inputs, extra=sparsefinder.Groups(ids, ids, self.count))

    def covers(self, inputs):
        return False

    def work(self, inputs):
        return Work(inputs.keys / self.count)


def draw(n, seed):
    """Query, key and value around topics that all draws share, the r-th most frequent at a rate of 1 / sqrt(r)."""
    topics = torch.randn(TOPICS, DIM, generator=torch.Generator().manual_seed(7))
    rate = torch.arange(1, TOPICS + 1).float().rsqrt()
    g = torch.Generator().manual_seed(seed)
    q, k = (
        topics[rate.multinomial(n, replacement=True, generator=g)] + torch.randn(n, DIM, generator=g) for _ in range(2)
    )
    return [x[None, None] for x in (q, k, torch.randn(n, DIM, generator=g))]


def learn(n, count):
    """Centroids (1, C, D) of queries and keys together, of another draw."""
    q, k, _ = draw(n, seed=1)
    rows = torch.cat([q, k], 2)[0, 0]
    centres = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))[:count]]
    for _ in range(LLOYD):
        nearest = torch.cdist(rows, centres).argmin(-1)
        total = torch.zeros_like(centres).index_add_(0, nearest, rows)
        size = torch.bincount(nearest, minlength=count).unsqueeze(-1)
        centres = torch.where(size > 0, total / size.clamp_min(1), centres)
    return centres.unsqueeze(0)


def dense(q, k, v, how):
    if how == "ours":
        return fk.attention(q, k, v, weights=fk.weights.Entmax(1.5))
    parts = []
    for query in q.split(BLOCK, 2):
        scores = query @ k.mT / math.sqrt(DIM)
        parts.append(entmax15(scores, dim=-1, k=100 if how == "partial sort" else None) @ v)
    return torch.cat(parts, 2)


def clock(work, tensors, backward):
    tensors = [x.detach().requires_grad_(backward) for x in tensors]
    direction = torch.ones_like(tensors[2])
    start = perf_counter()
    with torch.set_grad_enabled(backward):
        output = work(*tensors)
        if backward:
            torch.autograd.grad(output, tensors, direction)
    return (perf_counter() - start) * 1e3, output.detach()


def turns(works, tensors, backward, count):
    """Milliseconds of every turn and the last output, by name; all works take turns."""
    times, outputs = {name: [] for name in works}, {}
    for turn in range(count + 1):
        for name, work in works.items():
            took, outputs[name] = clock(work, tensors, backward)
            if turn:  # the first warms up
                times[name].append(took)
    return times, outputs


def spread(above, below):
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": round(median(ratios), 1), "least": round(min(ratios), 1), "most": round(max(ratios), 1)}


def selector(n, kind):
    return Nearest(learn(n, math.isqrt(n))) if kind == "k-means" else Equal(math.isqrt(n))


def measure(n, kind, count):
    clusters, tensors, keep = math.isqrt(n), draw(n, seed=0), selector(n, kind)
    graph = keep.graph(*tensors)
    sizes = [torch.bincount(ids.flatten(), minlength=clusters) for ids in (graph.extra.query, graph.extra.key)]
    row = {
        "length": n,
        "clusters": clusters,
        "kind": kind,
        "edges": int((sizes[0] * sizes[1]).sum()),
        "largest_cluster": int(sizes[1].max()),
        "assign_ms": round(median(clock(lambda *x: keep.graph(*x).extra.key, tensors, False)[0] for _ in range(5)), 2),
    }
    for name, backward in SIDES.items():
        works = {how: (lambda *x, how=how: dense(*x, how)) for how in DENSE}
        works["clusters"] = lambda *x: fk.attention(*x, keep=keep, weights=fk.weights.Entmax(1.5))
        works["softmax"] = lambda *x: fk.attention(*x, keep=keep)
        works["fused softmax"] = scaled_dot_product_attention
        times, outputs = turns(works, tensors, backward, count)
        error = max((outputs[how] - outputs["ours"]).abs().max().item() for how in DENSE)
        assert error < 1e-4, error
        row[name] = {
            "ms": {how: round(median(took), 2) for how, took in times.items()},
            "times_faster_than": {how: spread(times[how], times["clusters"]) for how in DENSE},
            "softmax_times_faster_than_fused": spread(times["fused softmax"], times["softmax"]),
        }
    return row


def exponent(rows, name):
    """Least-squares slope of log time over log length."""
    x = [math.log(row["length"]) for row in rows]
    y = [math.log(row[f"{name}_ms"]) for row in rows]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((p - mean_x) * (q - mean_y) for p, q in zip(x, y, strict=True)) / sum((p - mean_x) ** 2 for p in x)
    return round(slope, 2)


def growth(lengths, kind, count):
    """The clusters alone, also where dense attention would take minutes; exponents between least times."""
    rows = []
    for n in lengths:
        keep, tensors = selector(n, kind), draw(n, seed=0)
        work = {"clusters": lambda *x, keep=keep: fk.attention(*x, keep=keep, weights=fk.weights.Entmax(1.5))}
        least = {name: min(turns(work, tensors, back, count)[0]["clusters"]) for name, back in SIDES.items()}
        rows.append({"length": n, **{f"{name}_ms": round(ms, 2) for name, ms in least.items()}})
    result = {"kind": kind, "rows": rows}
    for name in SIDES:
        result[f"{name}_exponent"] = exponent(rows, name)
        result[f"{name}_exponent_of_the_longest"] = exponent(rows[-4:], name)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="short lengths; writes nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "grouped.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lengths = [256, 512] if arguments.quick else [int(n) for n in arguments.lengths.split(",")]
    alone = lengths if arguments.quick else [1 << e for e in range(10, 17)]
    report = {"machine": machine(), "versions": versions(), "head_dim": DIM, "alpha": 1.5, "rows": [], "growth": []}
    for kind in ("k-means", "balanced"):
        for n in lengths:
            row = measure(n, kind, arguments.turns)
            report["rows"].append(row)
            print(
                f"{kind}, n = {n}: {row['clusters']} clusters, {row['edges']} edges, assigned in {row['assign_ms']} ms"
            )
            for name in SIDES:
                part = row[name]
                print(f"  {name}: {part['ms']}")
                print(
                    "    clusters faster than " + ", ".join(f"{k} x {v}" for k, v in part["times_faster_than"].items())
                )
                print(f"    softmax faster than fused x {part['softmax_times_faster_than_fused']}", flush=True)
        alone_growth = growth(alone, kind, 2 * arguments.turns)
        report["growth"].append(alone_growth)
        print(f"clusters alone: {alone_growth}", flush=True)
    if not arguments.quick:
        write_json(arguments.out.parent, arguments.out.name, report)


if __name__ == "__main__":
    main()
