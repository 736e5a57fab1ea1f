"""Plans against exact attention under one instruction set at a time: `python benchmarks/sets.py [--sets v2,v3]`.

A process for each set: `FEWKEYS_ISA` limits the kernels, and exact attention is limited to the same vectors by
`ATEN_CPU_CAPABILITY` (torch's own code), `MKL_ENABLE_INSTRUCTIONS` (products of matrices) and `ONEDNN_MAX_CPU_ISA`
(those of bfloat16). Whether they are obeyed is measured: what torch names as its vectors, and products of matrices a
millisecond with and without the switches. In every process exact attention, `budget(192, cohorts=1)` by kernels and by
torch's steps take turns: 4 heads of 64, one above 4,096 tokens, float32, forward, with gradients, and causal; figures
are medians of the turns, ratios medians of the ratios turn by turn (from 65,536 tokens on there is one turn).

Last, under the highest set: forward calls while another process keeps one core busy, median and slowest, as OpenMP's
threads wait by themselves and under `OMP_WAIT_POLICY=passive`.

Sets that are not measured keep what the JSON says of them.
"""

import argparse
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

RESULTS = Path(__file__).parent / "results" / "sets.json"
LIMITS = {
    "v2": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "v3": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "v4": {"ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
FORMS, LENGTHS = ("forward", "with gradients", "causal"), (1024, 4096, 16384, 65536)
SLOTS, DIM, HEADS, TURNS, SECONDS = 192, 64, 4, 15, 3.0
BUSY, BUSY_TURNS = (512, 1024, 2048), 40


def measure(busy: bool) -> dict[str, Any]:
    """What one process finds, under the set that its environment names."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import fewkeys as fk
    from fewkeys.bench.machine import machine, versions

    def calls(form: str, length: int, heads: int) -> dict[str, Any]:
        causal, backward = form == "causal", form == "with gradients"
        g = torch.Generator().manual_seed(0)
        tensors = [torch.randn(1, heads, length, DIM, generator=g).requires_grad_(backward) for _ in range(3)]
        plan = fk.budget(SLOTS, is_causal=causal, cohorts=1)

        def timed(attend: Any) -> float:
            start = perf_counter()
            with torch.set_grad_enabled(backward):
                output = attend(*tensors)
                if backward:
                    output.sum().backward()
            return 1000 * (perf_counter() - start)

        ways = {"exact": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal)}
        for name, impl in (("kernels", "native"), ("steps", "torch")):
            ways[name] = lambda q, k, v, impl=impl: fk.attention(q, k, v, plan=plan, is_causal=causal, impl=impl)
        return {name: lambda attend=attend: timed(attend) for name, attend in ways.items()}

    found: dict[str, Any] = {"machine": machine(), "versions": versions(), "rows": []}
    if busy:
        spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            for length in BUSY:
                each = {name: call for name, call in calls("forward", length, HEADS).items() if name != "steps"}
                times = {name: [call() for _ in range(BUSY_TURNS)] for name, call in each.items()}
                row = {name: {"median": median(own), "worst": max(own)} for name, own in times.items()}
                found["rows"].append({"length": length, "heads": HEADS, **row})
        finally:
            spin.kill()
        return found
    found["vectors"] = torch.backends.cpu.get_cpu_capability()
    for form, length in product(FORMS, LENGTHS):
        heads, least = 1 if length > 4096 else HEADS, 1 if length > 16384 else 3
        each = calls(form, length, heads)
        times: dict[str, list[float]] = {name: [] for name in each}
        for call in each.values() if least > 1 else ():
            call()
        start = perf_counter()
        while len(times["exact"]) < TURNS and (len(times["exact"]) < least or perf_counter() - start < SECONDS):
            for name, call in each.items():
                times[name].append(call())
        over = {name: median(a / b for a, b in zip(times["exact"], own, strict=True)) for name, own in times.items()}
        ms = {name: median(own) for name, own in times.items()}
        faster = median(a / b for a, b in zip(times["steps"], times["kernels"], strict=True))
        row = {"form": form, "length": length, "heads": heads, "ms": ms}
        found["rows"].append({**row, "exact_over": over, "steps_over_kernels": faster})
    return found


def child(name: str, what: str, limits: dict[str, str]) -> dict[str, Any]:
    """What a process of its own finds under a set."""
    command = [sys.executable, __file__, "--child", what]
    environment = {**os.environ, "FEWKEYS_ISA": name, **limits}
    found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(found)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", metavar="NAME,...", help="default: all of this machine")
    parser.add_argument("--busy", action="store_true", help="beside a busy core alone")
    parser.add_argument("--child", choices=("quiet", "busy", "rate"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child == "rate":
        import torch

        from fewkeys.bench.timing import measure_rates

        rate = measure_rates(torch.device("cpu"), torch.float32).operations_per_ms
        print(json.dumps({"vectors": torch.backends.cpu.get_cpu_capability(), "operations_per_ms": rate}))
        return
    if given.child:
        print(json.dumps(measure(given.child == "busy")))
        return
    from fewkeys.core.files import write_whole
    from fewkeys.native import sets

    here = [name for name in LIMITS if name in map(str, sets.possible())]
    chosen = [] if given.busy else given.sets.split(",") if given.sets else here
    result = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"sets": {}}
    switches = {"none": {}} | {name: LIMITS[name] for name in here}
    result["rates"] = {name: child(here[-1], "rate", how) for name, how in switches.items()}
    for name in chosen:
        result["sets"][name] = {"switches": LIMITS[name], **child(name, "quiet", LIMITS[name])}
        write_whole(RESULTS, json.dumps(result, indent=1) + "\n")
    if given.busy or not given.sets:
        policies = {"as it is": {}, "passive": {"OMP_WAIT_POLICY": "passive"}}
        result["busy"] = {name: child(here[-1], "busy", how) for name, how in policies.items()}
    write_whole(RESULTS, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
