"""Decoders under a plan against exact attention, in one run: `python benchmarks/decoders.py` (minutes).

Random normal queries, keys and values of heads of 64, as SmolLM2 has them (9 query heads on 3 key heads) and of one
head; the plan is what `fewkeys.budget(256, is_causal=True)` takes: `KeyScan(231)` and `BlockMeans(8)`.

Prefill: seconds of `fewkeys.attention` and of torch's exact attention over n tokens, the fastest of some turns taken
one after the other. `taking_in`: of the codes of n keys and the sums of their blocks alone. `constant`: of the plan
`fewkeys.budget(256, is_causal=True, memory="constant")`.

Decoding: seconds of `Stream.answer` for one token (with the blocks that are finished) after n others, and
of torch's exact attention over as many keys without any cache, medians over `STRETCH` tokens taken in turns.
`exponent`: by which power of n the time of a token grows from the first length to the last.
Writes benchmarks/results/decoders.json.
"""

import argparse
import json
import sys
from functools import partial
from math import log
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json
from fewkeys.core.validation import check_inputs
from fewkeys.rest import BlockMeans
from fewkeys.select import KeyScan

RESULTS = Path(__file__).parent / "results"
PLAN = fk.Plan(KeyScan(231), BlockMeans(8)).never_exact()
CONSTANT = fk.budget(256, is_causal=True, memory="constant").never_exact()
HEADS, DIM = ((9, 3), (1, 1)), 64
STRETCH = 64
"""Tokens decoded at each length: two blocks."""


def rows(count, heads, kv_heads, generator):
    return (torch.randn(1, h, count, DIM, generator=generator) for h in (heads, kv_heads, kv_heads))


def seconds(run):
    start = perf_counter()
    run()
    return perf_counter() - start


def exact(q, k, v, *, is_causal):
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


@torch.no_grad()
def prefill(tokens, heads, kv_heads, turns):
    q, k, v = rows(tokens, heads, kv_heads, torch.Generator().manual_seed(tokens))

    def take_in():
        x = check_inputs(q, k, v, is_causal=True)
        PLAN.rest.prepare(x, PLAN.keep.select(x), PLAN.weights)

    runs = {
        "exact": lambda: exact(q, k, v, is_causal=True),
        "plan": lambda: fk.attention(q, k, v, plan=PLAN, is_causal=True),
        "taking_in": take_in,
        "constant": lambda: fk.attention(q, k, v, plan=CONSTANT, is_causal=True),
    }
    runs["plan"]()
    times = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            times[name].append(seconds(run))
    fastest = {name: min(each) for name, each in times.items()}
    return {"tokens": tokens, "heads": heads, **fastest, "ratio": fastest["exact"] / fastest["plan"]}


@torch.no_grad()
def decode(tokens, heads, kv_heads):
    generator, stream = torch.Generator().manual_seed(0), fk.stream(PLAN)
    _, k, v = rows(tokens, heads, kv_heads, generator)
    stream.append(k, v)

    times = {"plan": [], "exact": []}
    for _ in range(STRETCH):
        token = [*rows(1, heads, kv_heads, generator)]
        times["plan"].append(seconds(partial(stream.answer, *token)))
        times["exact"].append(seconds(partial(exact, token[0], k, v, is_causal=False)))
    middle = {name: median(each) for name, each in times.items()}
    row = {"tokens": tokens, "heads": heads, **middle, "ratio": middle["exact"] / middle["plan"]}
    return row | {"bytes": stream.memory()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {"plan": PLAN.to_dict(), "dim": DIM, "threads": options.threads, "prefill": [], "decoding": []}
    for heads, kv_heads in HEADS:
        for tokens in options.lengths:
            turns = options.turns if tokens <= 16384 else 1
            results["prefill"].append(prefill(tokens, heads, kv_heads, turns))
            print(json.dumps(results["prefill"][-1]), flush=True)
        contexts = []
        for tokens in options.contexts:
            contexts.append(decode(tokens, heads, kv_heads))
            print(json.dumps(contexts[-1]), flush=True)
        if len(contexts) > 1:
            first, last = contexts[0], contexts[-1]
            last["exponent"] = log(last["plan"] / first["plan"]) / log(last["tokens"] / first["tokens"])
        results["decoding"] += contexts
    results |= {"machine": machine(), "versions": versions()}
    write_json(options.out, "decoders.json", results)


if __name__ == "__main__":
    sys.exit(main())
