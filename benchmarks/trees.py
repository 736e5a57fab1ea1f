"""Trees of keys against exact attention, in one run: `python benchmarks/trees.py` (two minutes on a quiet machine).

Prefill: the time of `fewkeys.attention` under `budget(256, is_causal=True)`, and of torch's exact attention, on random
normal queries, keys and values of 4 heads of 64; medians over turns taken one after the other.

Decoding: the time of one attention call of a stream (append, attend, and the trees that are built as blocks are
sealed), and of the same with transformers' DynamicCache and `scaled_dot_product_attention`, over the `STRETCH` tokens
up to n. `pause`: of the token at which a tree over all n keys is built, once in n tokens. Trees of more than `STRETCH`
keys are seldom, so `plan` is the mean over the stretch plus what those would add: pause / n for each of their sizes.
`exponent`: by which power of n the time of a token grows between two lengths.
Writes benchmarks/results/trees.json.
"""

import argparse
import json
import sys
from math import log
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json
from fewkeys.tree.rule import SINKS

RESULTS = Path(__file__).parent / "results"
SLOTS, HEADS, DIM = 256, 4, 64
STRETCH = 512
"""Tokens decoded at each length: 16 blocks, so that trees of up to so many keys are built."""


def rows(count, generator):
    return torch.randn(3, 1, HEADS, count, DIM, generator=generator)


def seconds(run):
    start = perf_counter()
    run()
    return perf_counter() - start


@torch.no_grad()
def prefill(tokens, turns):
    """Seconds of exact attention and of the plan."""
    q, k, v = rows(tokens, torch.Generator().manual_seed(tokens))
    plan = fk.budget(SLOTS, is_causal=True).never_exact()
    runs = {
        "exact": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        "plan": lambda: fk.attention(q, k, v, plan=plan, is_causal=True),
    }
    runs["plan"]()
    times = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            times[name].append(seconds(run))
    found = {name: median(some) for name, some in times.items()}
    return {"tokens": tokens, **found, "ratio": found["exact"] / found["plan"]}


@torch.no_grad()
def decode(lengths):
    """One row for each length: seconds of a token's attention."""
    from transformers import DynamicCache

    generator, cache = torch.Generator().manual_seed(0), DynamicCache()
    stream = fk.stream(fk.budget(SLOTS, is_causal=True))

    def ours(q, k, v):
        stream.append(k, v)
        stream.attend(q)

    def theirs(q, k, v):
        scaled_dot_product_attention(q, *cache.update(k, v, 0))

    found = []
    for length in lengths:
        start = length + SINKS - STRETCH  # the sinks are in no tree
        while stream.length < start:
            q, k, v = rows(min(8192, start - stream.length), generator)
            stream.append(k, v)
            stream.attend(q)
            cache.update(k, v, 0)
        # Turn by turn, since the machine is not the same all the time; of the exact ones, fewer tell as much.
        times = {"plan": [], "exact": []}
        for number in range(STRETCH):
            token = rows(1, generator)
            times["plan"].append(seconds(lambda token=token: ours(*token)))
            if number % 8 == 0:
                times["exact"].append(seconds(lambda token=token: theirs(*token)))
        pause = seconds(lambda: ours(*rows(1, generator)))
        mean, seldom = sum(times["plan"]) / STRETCH, log(length / STRETCH, 4) * pause / length
        row = {"tokens": length, "plan": mean + seldom, "plan_median": median(times["plan"]), "pause": pause}
        row |= {"exact": median(times["exact"]), "bytes": stream.memory()}
        row["ratio"] = row["exact"] / row["plan"]
        if found:
            row["exponent"] = log(row["plan"] / found[-1]["plan"]) / log(length / found[-1]["tokens"])
        found.append(row)
        print(json.dumps(row), flush=True)
    first, last = found[0], found[-1]
    exponent = log(last["plan"] / first["plan"]) / log(last["tokens"] / first["tokens"])
    return {"rows": found, "exponent": exponent}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--contexts", type=int, nargs="*", default=[8192, 32768, 131072])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = []
    for tokens in options.lengths:
        found.append(prefill(tokens, options.turns if tokens <= 16384 else 1))
        print(json.dumps(found[-1]), flush=True)
    results = {"slots": SLOTS, "heads": HEADS, "dim": DIM, "threads": options.threads, "prefill": found}
    results["decoding"] = decode(options.contexts) if options.contexts else {}
    results |= {"machine": machine(), "versions": versions(with_transformers=True)}
    write_json(options.out, "trees.json", results)


if __name__ == "__main__":
    sys.exit(main())
