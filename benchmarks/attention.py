"""Time of a plan against torch's exact attention, side by side in one run: `python benchmarks/attention.py`.

One head of 64 dimensions times `--heads`, float32, no gradients. At every length exact attention and the plan take
turns; the figures are medians over the turns and the ratio is the median of the ratios turn by turn. The plan always
runs (`impl="torch"`); `auto` says whether `impl="auto"` would have run it. Inputs are normal random numbers: good for
time, meaningless for error (`fewkeys compare` measures that).
"""

import argparse
import json
import math
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

import fewkeys as fk
from fewkeys.crossover import exact_is_faster
from fewkeys.measure.machine import machine, versions
from fewkeys.validation import check_inputs


def clock(work):
    start = perf_counter()
    work()
    return (perf_counter() - start) * 1e3


def measure(length, heads, plan, turns):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 64, generator=g) for _ in range(3))

    def exact():
        return scaled_dot_product_attention(q, k, v)

    def few():
        return fk.attention(q, k, v, plan=plan, impl="torch")

    def prepare():
        inputs = check_inputs(q, k, v)
        return plan.rest.prepare(inputs, plan.keep.select(inputs), plan.weights)

    few(), exact()
    times = [(clock(exact), clock(few), clock(prepare)) for _ in range(turns)]
    exact_ms, plan_ms, prepare_ms = (median(column) for column in zip(*times, strict=True))
    return {
        "length": length,
        "exact_ms": round(exact_ms, 2),
        "plan_ms": round(plan_ms, 2),
        "prepare_ms": round(prepare_ms, 2),
        "ratio": round(median(a / b for a, b, _ in times), 2),
        "ratio_least": round(min(a / b for a, b, _ in times), 2),
        "ratio_most": round(max(a / b for a, b, _ in times), 2),
        "auto": "exact" if exact_is_faster(check_inputs(q, k, v), plan) else "plan",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu.json")
    arguments = parser.parse_args()
    plan, rows = fk.budget(arguments.slots), []
    print(f"{plan}\n{'length':>7} {'exact ms':>9} {'plan ms':>9} {'prepare':>9} {'exact/plan':>10}  auto")
    with torch.no_grad():
        for length in map(int, arguments.lengths.split(",")):
            row = measure(length, arguments.heads, plan, 15 if length <= 4096 else 5)
            rows.append(row)
            print(
                f"{length:>7} {row['exact_ms']:>9} {row['plan_ms']:>9} {row['prepare_ms']:>9} {row['ratio']:>10}"
                f"  {row['auto']}",
                flush=True,
            )
    last, before = rows[-1], rows[-2]
    growth = math.log(last["plan_ms"] / before["plan_ms"]) / math.log(last["length"] / before["length"])
    print(f"growth exponent of the plan's time over the last two lengths: {growth:.2f}")
    report = {
        "machine": machine(),
        "versions": versions(),
        "plan": plan.to_dict(),
        "heads": arguments.heads,
        "head_dim": 64,
        "growth": round(growth, 2),
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
