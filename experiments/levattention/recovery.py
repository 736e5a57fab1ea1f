"""Which keys leverage recovers, on problems whose heavy keys are known: `python experiments/levattention/recovery.py`.

Two problems of `synthetic.py`, softmax attention with the usual scale:

- *planted*: 16 relevant keys of 64 dimensions among many irrelevant ones, 512 queries, each about two of them. Every
  method keeps as many keys as are relevant. `relevant`: the share of the relevant keys that are kept. `heavy`: the
  share of the entries of attention of at least 0.2, of all queries, whose key is kept. `busy`: queries that have such
  an entry. Swept: the noise of the queries, the number of irrelevant keys, their leak into the relevant directions.
- *random signs*: 1024 keys of 64 dimensions, queries equal to keys, entries of at least 0.5. `heavy` for sets of
  growing size: none can hold a larger share of the diagonal than its own share of the keys. Beside it weights `|s|^2`
  on the same keys, entries of at least 0.1, where the universal set cannot hold all keys.

Methods: leverage (of centred keys too), key norm, random keys, and as oracle the set of keys that holds most heavy
entries (the keys with most heavy entries each; nothing of that size holds more). Everything is a mean over the seeds.
Writes results/recovery.json and results/recovery.png; `--quick` runs one seed on fewer points and writes nothing.
"""

import argparse
import math
from functools import partial
from pathlib import Path

import torch
from experiments.levattention.synthetic import planted, random_signs

from fewkeys.bench.machine import versions
from fewkeys.core.files import write_json
from fewkeys.papers import levattention
from fewkeys.report.style import Look, draw, logarithmic, name_lines, save, say, sheet, upright

HERE = Path(__file__).parent / "results"
RELEVANT, DIM, QUERIES, COMBINE, EPS = 16, 64, 512, 2, 0.2
NOISE = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0]
IRRELEVANT = [256, 1024, 4096, 16384, 65536]
LEAKS = [0.05, 0.1]
LEAK = [0.0, 0.04, 0.08, 0.09, 0.1, 0.11, 0.12, 0.16, 0.2]
SIZES = [16, 32, 64, 128, 256, 512, 768, 1024]
SIGNS, SIGNS_EPS, SQUARES_EPS = 1024, 0.5, 0.1
LOOKS = {
    "oracle": Look("#000000", (0, (5, 2)), 1.8, "D"),
    "leverage": Look("#e69f00", marker="^"),
    "leverage (centred)": Look("#d55e00", marker="v"),
    "key norm": Look("#a3a3a3", width=1.3, marker="+"),
    "random keys": Look("#767676", width=1.3, marker="x"),
}
METHODS = list(LOOKS)


def rankings(problem, heavy, seed):
    """Keys by method, best first."""
    key = problem.key
    noise = torch.rand(key.shape[2], generator=torch.Generator().manual_seed(seed))
    scores = {
        "oracle": heavy.sum(0).float(),
        "leverage": levattention.leverage_scores(key)[0, 0],
        "leverage (centred)": levattention.leverage_scores(key - key.mean(2, keepdim=True))[0, 0],
        "key norm": key[0, 0].norm(dim=-1),
        "random keys": noise,
    }
    # Equal scores, which all keys of random signs have in norm, are put in random order.
    order = noise.argsort()
    return {name: order[score[order].argsort(descending=True, stable=True)] for name, score in scores.items()}


def heavy_entries(problem, weights, eps):
    """Where attention is at least eps: (M, N), bool."""
    scores = problem.query[0, 0] @ problem.key[0, 0].T / problem.key.shape[-1] ** 0.5
    shares = torch.softmax(scores, -1) if weights == "softmax" else scores.square() / scores.square().sum(-1, True)
    return shares >= eps


def share(mask, kept):
    """The share of the true entries (or keys) that the kept columns hold; None where there are none."""
    total = int(mask.sum())
    return int(mask[..., kept].sum()) / total if total else None


def planted_row(seeds, **settings):
    """Mean recovery over the seeds, and the share of queries with a heavy entry at all."""
    found = {name: {"relevant": [], "heavy": []} for name in METHODS}
    busy = []
    for seed in seeds:
        n = settings.get("irrelevant", 4096) + RELEVANT
        model = {name: value for name, value in settings.items() if name != "irrelevant"}
        g = torch.Generator().manual_seed(seed)
        problem = planted(n, DIM, RELEVANT, QUERIES, combine=COMBINE, generator=g, **model)
        heavy = heavy_entries(problem, "softmax", EPS)
        busy.append(float(heavy.any(-1).float().mean()))
        for name, order in rankings(problem, heavy, seed).items():
            kept = order[:RELEVANT]
            found[name]["relevant"].append(share(problem.relevant[0, 0], kept))
            found[name]["heavy"].append(share(heavy, kept))
    return {
        **settings,
        "queries_with_heavy_entries": mean(busy),
        "recovery": {name: {what: mean(values) for what, values in both.items()} for name, both in found.items()},
    }


def signs_rows(seeds, weights, eps, c, sizes):
    """Recovery for every size of the kept set, and how much of the diagonal is heavy."""
    found = {name: {size: [] for size in sizes} for name in METHODS}
    diagonal, entries, universal = [], [], []
    for seed in seeds:
        problem = random_signs(SIGNS, DIM, c, generator=torch.Generator().manual_seed(seed))
        heavy = heavy_entries(problem, weights, eps)
        diagonal.append(float(heavy.diagonal().float().mean()))
        entries.append(int(heavy.sum()))
        universal.append(int(levattention.universal_set(problem.key, eps).sum()))
        for name, order in rankings(problem, heavy, seed).items():
            for size in sizes:
                found[name][size].append(share(heavy, order[:size]))
    return {
        "weights": weights,
        "eps": eps,
        "c": c,
        "heavy_diagonal": mean(diagonal),
        "heavy_entries": mean(entries),
        **({"universal_set": mean(universal)} if weights == "squares" else {}),
        "recovery": {name: {size: mean(values) for size, values in by.items()} for name, by in found.items()},
    }


def mean(values):
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if known else None


def draw_all(report, path):
    """Four panels of the share of heavy entries that the kept keys hold."""
    figure, panels = sheet(
        "Which keys leverage recovers",
        f"mean of {report['seeds']} seeds; planted: 16 keys kept; 4,096 irrelevant ones, unless swept",
        rows=2, columns=2, size=(4.3, 2.6), names=1.6,
    )  # fmt: skip
    sweeps = {
        "noise": "noise of the queries",
        f"irrelevant, leak {LEAKS[-1]}": f"irrelevant keys (leak {LEAKS[-1]})",
        "leak": "leak",
    }
    for (title, label), axes in zip(sweeps.items(), panels, strict=False):
        rows, sweep = report["planted"][title], title.partition(",")[0]
        places = [row[sweep] for row in rows]
        if sweep == "irrelevant":
            logarithmic(axes, "x", places, places)
        lines(axes, {name: (places, [row["recovery"][name]["heavy"] for row in rows]) for name in METHODS})
        say(axes, label, "share of heavy entries", f"Planted, by {label}")
    # Beyond it the largest leverage of 4096 irrelevant keys is above that of a relevant one.
    limit = (DIM + 2 * math.sqrt(DIM * math.log(4096)) + 2 * math.log(4096)) ** -0.5
    upright(panels[2], limit, "predicted limit", "#0072b2", top=0.6)
    softmax = next(row for row in report["random_signs"] if row["weights"] == "softmax" and row["heavy_diagonal"] == 1)
    found = {name: softmax["recovery"][name] for name in METHODS}
    lines(panels[3], {name: ([int(size) for size in own], list(own.values())) for name, own in found.items()})
    say(
        panels[3],
        f"keys kept of {SIGNS:,}",
        "share of heavy entries",
        "Random signs: k / n for all",
    )
    panels[3].xaxis.set_major_formatter("{x:,.0f}")
    save(figure, path)


def lines(axes, points):
    """The lines of a panel, with their names."""
    axes.set_ylim(-0.04, 1.06)
    for name, (x, y) in points.items():
        draw(axes, x, y, LOOKS[name])
    name_lines(axes, {name: (x[-1], y[-1]) for name, (x, y) in points.items()}, LOOKS)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, fewer points, no files")
    arguments = parser.parse_args()
    seeds = range(1 if arguments.quick else arguments.seeds)
    few = (lambda values: values[::4]) if arguments.quick else (lambda values: values)
    report = {
        "versions": versions(),
        "seeds": len(seeds),
        "settings": {
            "relevant": RELEVANT,
            "kept": RELEVANT,
            "dim": DIM,
            "queries": QUERIES,
            "combine": COMBINE,
            "eps": EPS,
        },
        "planted": {
            "noise": [planted_row(seeds, noise=value) for value in few(NOISE)],
            **{
                f"irrelevant, leak {leak}": [
                    planted_row(seeds, noise=0.2, leak=leak, irrelevant=value) for value in few(IRRELEVANT)
                ]
                for leak in LEAKS
            },
            "leak": [planted_row(seeds, noise=0.2, leak=value) for value in few(LEAK)],
        },
        "random_signs": [
            *(signs_rows(seeds, "softmax", SIGNS_EPS, c, few(SIZES)) for c in (0.5, 0.75, 1.0, 2.0)),
            signs_rows(seeds, "squares", SQUARES_EPS, 1.0, few(SIZES)),
        ],
    }
    show(report)
    if not arguments.quick:
        write_json(HERE, "recovery.json", report)
        draw_all(report, HERE / "recovery.png")


def show(report):
    cell = partial("{:>20}".format)
    for title, rows in report["planted"].items():
        sweep = title.partition(",")[0]
        print(f"\nplanted, by {title}: relevant / heavy\n{sweep:>12} {'busy':>6}" + "".join(map(cell, METHODS)))
        for row in rows:
            pairs = [row["recovery"][name] for name in METHODS]
            shown = [f"{pair['relevant']:.3f} / {number(pair['heavy'])}" for pair in pairs]
            print(f"{row[sweep]:>12} {row['queries_with_heavy_entries']:>6.3f}" + "".join(map(cell, shown)))
    for row in report["random_signs"]:
        print(
            f"\nrandom signs, {row['weights']}, c = {row['c']:g}: {row['heavy_diagonal']:.3f} of the diagonal and "
            f"{row['heavy_entries']:g} entries >= {row['eps']}"
            + (f", universal set of {row['universal_set']:g} keys" if "universal_set" in row else "")
        )
        if row["heavy_diagonal"]:
            print(f"{'kept':>12} {'k / n':>6}" + "".join(map(cell, METHODS)))
            for size in row["recovery"]["oracle"]:
                shown = [number(row["recovery"][name][size]) for name in METHODS]
                print(f"{size:>12} {size / SIGNS:>6.3f}" + "".join(map(cell, shown)))


def number(value):
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
