"""Heavy entries in linear time, and streams in constant memory: `python benchmarks/levattention.py`.

One head of 64 dimensions, float32, keys with 32 planted heavy ones, half of the queries aimed at them.

- *scaling*: `universal_set` and `heavy_entries` (4,096 queries) against scoring all pairs, for all queries, in the same
  run. The peer is a careful program by hand: float32, tiles that stay in cache, one pass over
  the keys in which the normalisers grow and scores that reach eps times the normaliser so far are remembered; the
  fastest of several tile sizes. Its entries must be ours, up to its rounding, and those of 64 queries are recomputed
  in float64 from the formula.
- *power 4*: 16,384 queries in 32 dimensions, exact, with estimated normalisers, and the peer.
- *sketches*: the options of `Sketched` beside the exact answer, power 2. *embeddings*: their first step alone.
- *stream*: `KeySketch` on streams of up to 2^22 keys, made piece by piece in a process each: the most bytes held, the
  peak of the process in the first pass, and whether that pass has the same universal set as a second pass,
  planted keys included.

Times are medians over turns in which all take part; ratios are between times of the same run. `--quick` takes about a
minute and writes nothing. `python -m docs.figures` puts the results into docs/levattention.md.
"""

import argparse
import json
import math
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that holds `experiments`

from experiments.levattention.projections import PROJECTIONS
from experiments.levattention.sketched import Sketched, sketch_rows, sketched_entries

from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json
from fewkeys.papers import levattention
from fewkeys.papers.levattention import heavy_entries
from fewkeys.papers.levattention.gram import exact_form
from fewkeys.papers.levattention.keys import BLOCK, ScaledKeys
from fewkeys.papers.levattention.tensor_power import width

DIM, QUERIES, PLANTED, EPS = 64, 4096, 32, 0.05
FOUR_DIM, FOUR_QUERIES = 32, 16384
TILES = [(256, 1024), (512, 512), (512, 1024), (1024, 1024), (256, 4096), (4096, 1024)]
STREAM_EPS, PIECE = 0.1, 50_000  # no multiple of the blocks in which a sketch forgets


def problem(n, queries=QUERIES, dim=DIM):
    """Normal keys, planted keys of a leverage of about a third, queries at these and at random."""
    g = torch.Generator().manual_seed(0)
    key = torch.randn(1, 1, n, dim, generator=g)
    place = torch.randperm(n, generator=g)[:PLANTED]
    key[0, 0, place] = torch.randn(PLANTED, dim, generator=g) * math.sqrt(n / dim / 2)
    query = torch.randn(1, 1, queries, dim, generator=g)
    aim = key[0, 0, place][torch.arange(queries // 2) % PLANTED]
    query[0, 0, : queries // 2] = 8 * aim / aim.norm(dim=-1, keepdim=True) + 0.3 * query[0, 0, : queries // 2]
    return query, key


def all_pairs(query, key, power, tile):
    """The peer: rows, columns and values of all entries >= EPS of one head, float32."""
    pieces = []
    for start in range(0, query.shape[0], tile[0]):
        part = query[start : start + tile[0]]
        total = part.new_zeros(part.shape[0], 1)
        rows, columns, values = [], [], []
        for offset in range(0, key.shape[0], tile[1]):
            weight = (part @ key[offset : offset + tile[1]].T).square_()
            weight = weight.square_() if power == 4 else weight
            total += weight.sum(-1, keepdim=True)
            row, column = (weight >= EPS * total).nonzero(as_tuple=True)
            rows.append(row)
            columns.append(column + offset)
            values.append(weight[row, column])
        row, column = torch.cat(rows), torch.cat(columns)
        value = torch.cat(values) / total[row, 0]
        heavy = value >= EPS
        pieces.append((row[heavy] + start, column[heavy], value[heavy]))
    return tuple(torch.cat(part) for part in zip(*pieces, strict=True))


def best_tile(power):
    query, key = problem(1 << 14, 1024)
    times = {}
    for tile in TILES:
        work = partial(all_pairs, query[0, 0], key[0, 0], power, tile)
        work()
        times[tile] = min(clock(work)[0] for _ in range(3))
    return min(times, key=times.get)


def clock(work):
    start = perf_counter()
    result = work()
    return perf_counter() - start, result


def turns(works, count):
    """Median seconds and last results of all works, which take turns."""
    times, results = {name: [] for name in works}, {}
    for _ in range(count):
        for name, work in works.items():
            seconds, results[name] = clock(work)
            times[name].append(seconds)
    return {name: median(values) for name, values in times.items()}, results


def table(heavy):
    """Values by (query, key)."""
    return {(i, j): v for i, j, v in zip(*heavy.indices[2:].tolist(), heavy.values.tolist(), strict=True)}


def beside_peer(heavy, peer):
    """Agreement with the peer's float32 entries; one that rounding takes across eps may be on one side only."""
    ours, theirs = table(heavy), {(i, j): v for i, j, v in zip(*(part.tolist() for part in peer), strict=True)}
    odd = [v for one, other in ((ours, theirs), (theirs, ours)) for at, v in one.items() if at not in other]
    both = [abs(v / theirs[at] - 1) for at, v in ours.items() if at in theirs]
    return {
        "entries": len(ours),
        "in_one_only": sum(abs(v / EPS - 1) > 1e-4 for v in odd),
        "largest_difference": float(f"{max(both, default=0.0):.1e}"),
    }


def beside_formula(heavy, query, key, power, count=64):
    """Whether the entries of some queries are those of the formula in float64, and their largest relative error."""
    pick = torch.linspace(0, query.shape[2] - 1, count).long()
    weights = (query[0, 0, pick].double() @ key[0, 0].double().T).abs() ** power
    entries = weights / weights.sum(-1, keepdim=True)
    row, column = (entries >= EPS).nonzero(as_tuple=True)
    checked = torch.isin(heavy.indices[2], pick)
    same = torch.equal(torch.stack([pick[row], column]), heavy.indices[2:, checked])
    worst = float((heavy.values[checked] / entries[row, column] - 1).abs().max()) if same and len(row) else None
    return {"queries": count, "same_entries": same, "largest_error": worst and float(f"{worst:.1e}")}


def scaling(lengths):
    tile = best_tile(2)
    print(f"\nscaling, peer with tiles of {tile}")
    print(f"{'keys':>9} {'universal s':>12} {'heavy s':>9} {'peer s':>9} {'peer/heavy':>11}")
    rows = []
    for n in lengths:
        query, key = problem(n)
        heavy_entries(query, key, EPS)
        works = {
            "universal_set": partial(levattention.universal_set, key, EPS),
            "heavy_entries": partial(heavy_entries, query, key, EPS),
            "peer": partial(all_pairs, query[0, 0], key[0, 0], 2, tile),
        }
        seconds, results = turns(works, 5 if n <= 1 << 16 else 3)
        row = {
            "keys": n,
            **{f"{name}_s": round(value, 5) for name, value in seconds.items()},
            "ratio": round(seconds["peer"] / seconds["heavy_entries"], 1),
            "universal_keys": int(results["universal_set"].sum()),
            **beside_peer(results["heavy_entries"], results["peer"]),
            "float64": beside_formula(results["heavy_entries"], query, key, 2),
        }
        rows.append(row)
        print(
            f"{n:>9} {row['universal_set_s']:>12.4f} {row['heavy_entries_s']:>9.4f} {row['peer_s']:>9.3f} "
            f"{row['ratio']:>11}   {row['entries']} entries, {row['in_one_only']} in one only, "
            f"{'equal to' if row['float64']['same_entries'] else 'NOT'} the formula",
            flush=True,
        )
    growth = {name: slope(rows, f"{name}_s") for name in ("universal_set", "heavy_entries", "peer")}
    print("growth exponents:", growth)
    return {"eps": EPS, "queries": QUERIES, "peer_tile": tile, "growth": growth, "rows": rows}


def slope(rows, name):
    """Least squares exponent of time against length."""
    x, y = ([math.log(row[column]) for row in rows] for column in ("keys", name))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return round(sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x), 3)


def options_beside_exact(query, key, power, options, count):
    """Time, size and errors of every option of `Sketched`; the first, None, is the exact answer."""
    works = {
        name: partial(sketched_entries, query, key, EPS, power, sketch=sketch)
        if sketch
        else partial(heavy_entries, query, key, EPS, power)
        for name, sketch in options.items()
    }
    seconds, results = turns(works, count)
    total, columns, exact = key.shape[2], width(key.shape[3], int(power) // 2), table(results["exact"])
    rows = []
    for name, sketch in options.items():
        entries = table(results[name])
        m = sketch_rows(sketch, query.shape[2], total, columns, sketch.failure) if sketch else total
        errors = [abs(v / exact[at] - 1) for at, v in entries.items() if at in exact]
        row = {
            "keys": total,
            "option": name,
            "seconds": round(seconds[name], 4),
            "exact/option": round(seconds["exact"] / seconds[name], 2),
            "sketch_rows": m if m < total else None,
            "entries": len(entries),
            "missed": sum(at not in entries for at in exact),
            "largest_missed/eps": round(max((v for at, v in exact.items() if at not in entries), default=0.0) / EPS, 2),
            "extra": sum(at not in exact for at in entries),
            "largest_error": float(f"{max(errors, default=0.0):.1e}"),
        }
        rows.append(row)
        print(
            f"{total:>9} {name:<43} {row['seconds']:>9.4f} s {row['exact/option']:>7}  rows "
            f"{row['sketch_rows'] or '-':>7}  missed {row['missed']} "
            f"(to {row['largest_missed/eps']} eps), extra {row['extra']} of {len(exact)}, "
            f"largest error {row['largest_error']:.2g}",
            flush=True,
        )
    return rows


def sketches(lengths):
    options = {
        "exact": None,
        "scores 0.9": Sketched(scores=0.9),
        "numerators 0.5": Sketched(numerators=0.5, failure=0.2),
    }
    for projection in ("countsketch", "hadamard", "gaussian"):
        options[f"normalizers 0.5, scores 0.9, {projection}"] = Sketched(0.5, 0.9, None, 0.1, projection)
    print("\nsketches, power 2")
    return [row for n in lengths for row in options_beside_exact(*problem(n), 2.0, options, 9 if n <= 1 << 14 else 3)]


def power_four(lengths):
    """In 32 dimensions: in 64 the bound on the universal set, 64^2 / EPS, is above most of these lengths."""
    tile = best_tile(4)
    options = {"exact": None, "normalizers 0.5": Sketched(0.5), "normalizers 0.9": Sketched(0.9)}
    print(f"\npower 4, {FOUR_DIM} dimensions, {FOUR_QUERIES} queries, peer with tiles of {tile}")
    rows = []
    for n in lengths:
        query, key = problem(n, FOUR_QUERIES, FOUR_DIM)
        seconds, peer = clock(partial(all_pairs, query[0, 0], key[0, 0], 4, tile))
        print(f"{n:>9} {'peer':<43} {seconds:>9.4f} s", flush=True)
        heavy = heavy_entries(query, key, EPS, 4.0)
        row = {"keys": n, "option": "peer", "seconds": round(seconds, 4), **beside_peer(heavy, peer)}
        rows.append(row | {"float64": beside_formula(heavy, query, key, 4)})
        rows += options_beside_exact(query, key, 4.0, options, 1)
    return {"head_dim": FOUR_DIM, "queries": FOUR_QUERIES, "rows": rows}


def embeddings(lengths):
    """`S K` alone beside `K^T K`, at far fewer rows than the proofs require."""
    print("\nembeddings: S K beside the exact Gram matrix; error: of the length of K y, for the worst y")
    rows = []
    for n in lengths:
        key = problem(n, 2)[1][0, 0]
        form, keys = exact_form(ScaledKeys(key, 2.0), 1), ScaledKeys(key, 2.0)
        whiten = torch.linalg.inv(torch.linalg.cholesky(form.matrix)).mT
        exact, _ = turns({"gram": partial(exact_form, keys, 1)}, 3)
        for name, projection in PROJECTIONS.items():
            for m in (512, 4096):
                work = partial(embed, projection, keys, m)
                work()
                seconds, sketch = clock(work)
                sizes = torch.linalg.svdvals(sketch.double() @ whiten).square()
                row = {
                    "keys": n,
                    "projection": name,
                    "rows": m,
                    "seconds": round(seconds, 4),
                    "gram_s": round(exact["gram"], 4),
                    "worst_error": round(float((sizes - 1).abs().max()), 3),
                }
                rows.append(row)
                print(
                    f"{n:>9} {name:<12} rows {m:>5} {seconds:>9.4f} s, Gram matrix {exact['gram']:.4f} s, "
                    f"error {row['worst_error']}",
                    flush=True,
                )
    return rows


def embed(projection, keys, m):
    return projection.apply(keys.blocks(BLOCK, torch.float32), m, torch.Generator().manual_seed(0))


def stream(n):
    """One stream of n keys, in pieces that are drawn when needed. Runs in a separate process."""
    stretch = n // PLANTED  # one planted key in each, anywhere
    places = torch.arange(PLANTED) * stretch
    places += torch.randint(stretch, (PLANTED,), generator=torch.Generator().manual_seed(1))

    def pieces():
        for start in range(0, n, PIECE):
            keys = torch.randn(min(PIECE, n - start), DIM, generator=torch.Generator().manual_seed(start + 2))
            planted = places[(places >= start) & (places < start + PIECE)]
            for place in planted.tolist():
                g = torch.Generator().manual_seed(n + place)
                keys[place - start] = torch.randn(DIM, generator=g) * math.sqrt(n / DIM / 2)
            yield keys[None, None]

    sketch, most = levattention.KeySketch(STREAM_EPS), 0
    spent, empty = 0.0, peak()
    for keys in pieces():
        seconds, _ = clock(partial(sketch.update, keys))
        spent, most = spent + seconds, max(most, sketch.nbytes)
    universal, most_used = sketch.universal_set(), peak()
    second = torch.cat(
        [(sketch.scores(keys)[0, 0] >= STREAM_EPS).nonzero()[:, 0] + i * PIECE for i, keys in enumerate(pieces())]
    )
    kept = set(universal.indices[2].tolist())
    return {
        "keys": n,
        "held_bytes": most,
        "process_peak_mb": round(most_used / 1e6, 1),
        "process_before_mb": round(empty / 1e6, 1),
        "update_s": round(spent, 3),
        "keys_per_s": round(n / spent),
        "universal_keys": len(kept),
        "planted_lost": sum(place not in kept for place in places.tolist()),
        "lost_against_two_passes": sum(place not in kept for place in second.tolist()),
        "all_keys_bytes": n * DIM * 4,
    }


def peak():
    """The most memory this process has used so far, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would include the parent's peak
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def streams(lengths):
    print(f"\nstream, KeySketch({STREAM_EPS}), pieces of {PIECE} keys")
    rows = []
    for n in lengths:
        command = [sys.executable, __file__, "--stream", str(n), "--threads", str(torch.get_num_threads())]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(row)
        print(
            f"{n:>9} keys of {row['all_keys_bytes'] / 1e6:.0f} MB: {row['held_bytes'] / 1e6:.2f} MB held at most, "
            f"process {row['process_before_mb']} to {row['process_peak_mb']} MB, {row['universal_keys']} keys found, "
            f"{row['planted_lost']} planted and {row['lost_against_two_passes']} of all lost, {row['update_s']} s",
            flush=True,
        )
    return {"eps": STREAM_EPS, "piece": PIECE, "planted": PLANTED, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short lengths; writes nothing")
    parser.add_argument("--threads", type=int, help="threads of torch; default: its own choice")
    parser.add_argument("--stream", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "levattention.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.stream:
        print(json.dumps(stream(arguments.stream)))
        return
    quick = arguments.quick
    report = {
        "machine": machine(),
        "versions": versions(),
        "head_dim": DIM,
        "planted": PLANTED,
        "scaling": scaling([1 << e for e in (range(13, 16) if quick else range(14, 21))]),
        "power 4": power_four([1 << e for e in ((14,) if quick else (14, 16, 18))]),
        "sketches": sketches([1 << e for e in ((14,) if quick else (14, 17, 20))]),
        "embeddings": embeddings([1 << e for e in ((14,) if quick else (14, 17, 20))]),
        "stream": streams([1 << e for e in ((14, 16) if quick else (14, 16, 18, 20, 22))]),
    }
    if not quick:
        write_json(arguments.out.parent, arguments.out.name, report)


if __name__ == "__main__":
    with torch.no_grad():
        main()
