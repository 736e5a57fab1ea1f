"""Causal attention over token shards against ring attention: bytes and time, measured and modelled.

    torchrun --nproc-per-node 2 benchmarks/sharded.py
    torchrun --nproc-per-node 4 benchmarks/sharded.py
    python benchmarks/sharded.py --model

Each torchrun replaces the rows of its number of ranks in benchmarks/results/sharded.json: `fewkeys.distributed` with
`budget(256)` and exact ring attention (Liu, Zaharia, Abbeel, 2023: keys and values go round, every rank attends to one
shard after the other), in turns, one head of 64 dimensions, float32, one thread a rank. Times are medians, of the
slowest rank; bytes are those that a rank sends, the most of any.

`--model` measures in one process what a token, a pair and a byte cost on this machine, checks the model against the
rows of two ranks, and writes its predictions for many ranks and tokens to benchmarks/results/sharded_model.json;
`python -m docs.figures` puts both into docs/distributed.md:

    ring      pair n^2 / R + (R - 1) (latency + bytes of a shard / bandwidth)         the last rank attends to all
    fewkeys   scan n + attend n / R + (R - 1) (latency + bytes of the past / bandwidth)   the past goes rank to rank
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

import fewkeys as fk
import fewkeys.distributed as fkd
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import read_json, write_json

RESULTS = Path(__file__).parent / "results"
SLOTS, DIM, TURNS = 256, 64, 3
PLAN = fk.budget(SLOTS, is_causal=True, memory="constant")
LENGTHS = (4096, 16384, 65536)
RANKS, TOKENS = (8, 64, 256, 1024), (10**5, 10**6, 10**7, 10**8)


def tokens(n):
    """Queries, keys and values of one head."""
    return torch.randn(3, 1, 1, n, DIM, generator=torch.Generator().manual_seed(0)).unbind()


def exact(query, key, value, is_causal):
    """Attention and the logarithm of each query's sum of exponentials."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, is_causal=is_causal)[:2]


def ring(query, key, value, comm):
    """Exact causal attention: keys and values go round the ring, partial results are merged by their sums."""
    rank, size = comm.rank, comm.size
    block = torch.stack([key, value])
    output, total = exact(query, key, value, True)
    for step in range(1, size):
        incoming = torch.empty_like(block)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, block, (rank + 1) % size),
                dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
            ]
        )
        for work in works:
            work.wait()
        comm.bytes_sent += block.numel() * block.element_size()
        block = incoming
        if rank - step < 0:
            continue  # these tokens come later
        part, sums = exact(query, block[0], block[1], False)
        both = torch.logaddexp(total, sums)
        output = output * (total - both).exp().unsqueeze(-1) + part * (sums - both).exp().unsqueeze(-1)
        total = both
    return output


def few(query, key, value, comm):
    return fkd.attention(query, key, value, keep=PLAN.keep, rest=PLAN.rest, is_causal=True, group=comm)


def measure(comm):
    """Rows of this number of ranks."""
    rows = []
    for n in LENGTHS:
        whole = tokens(n)
        block = [tensor.chunk(comm.size, 2)[comm.rank].contiguous() for tensor in whole]
        works, times, sent = {"fewkeys": few, "ring": ring}, {"fewkeys": [], "ring": []}, {}
        for turn in range(TURNS + 1):
            for name, work in works.items():
                inner = fkd.Communicator(timeout=600)
                dist.barrier()
                start = perf_counter()
                out = work(*block, inner)
                seconds = comm.all_reduce(torch.tensor(perf_counter() - start), "max")
                sent[name] = int(comm.all_reduce(torch.tensor(inner.bytes_sent), "max"))
                if turn:
                    times[name].append(float(seconds))
                elif name == "fewkeys":
                    one = fk.attention(*whole, plan=PLAN.never_exact(), is_causal=True)
                    difference = (out - one.chunk(comm.size, 2)[comm.rank]).abs().amax()
                    difference = float(comm.all_reduce(difference, "max"))
        row = {"ranks": comm.size, "tokens": n, "difference": difference}
        for name in works:
            row |= {f"{name}_seconds": median(times[name]), f"{name}_bytes": sent[name]}
        rows.append(row)
        if comm.rank == 0:
            print(json.dumps(row), flush=True)
    return rows


def clock(work):
    times = []
    for _ in range(TURNS):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


def costs():
    """Seconds per pair, per token of the scan and of attending, in one process with one thread."""
    n = 16384
    q, k, v = tokens(n)
    inputs = fk.core.validation.check_inputs(q, k, v, is_causal=True)
    graph = PLAN.keep.select(inputs)

    def prepare():
        # Asked for, or the means would be made while attending.
        return PLAN.rest.prepare(inputs, graph, PLAN.weights).states

    pair = clock(lambda: exact(q[:, :, : n // 4], k, v, False)) / (n // 4 * n)
    whole = clock(lambda: fk.attention(q, k, v, plan=PLAN.never_exact(), is_causal=True)) / n
    scan = clock(prepare) / n
    return {"pair": pair, "scan": scan, "attend": whole - scan}


def wire(comm):
    """Latency and bandwidth between two ranks, from messages of two sizes."""
    seconds = []
    for count in (1, 2**22):
        row = torch.zeros(count)
        times = []
        for _ in range(9):
            dist.barrier()
            start = perf_counter()
            if comm.rank == 0:
                comm.send(row, 1)
                comm.receive(row, 1)
            elif comm.rank == 1:
                comm.receive(row, 0)
                comm.send(row, 0)
            times.append((perf_counter() - start) / 2)
        seconds.append(median(times))
    return {"latency": seconds[0], "bandwidth": 4 * 2**22 / (seconds[1] - seconds[0])}


def predict(cost, carry, ranks, n):
    """Seconds of both, and the bytes that a rank sends."""
    shard = 2 * 4 * DIM * n / ranks
    hop = partial(lambda size: cost["latency"] + size / cost["bandwidth"])
    return {
        "ranks": ranks,
        "tokens": n,
        "ring_seconds": cost["pair"] * n * n / ranks + (ranks - 1) * hop(shard),
        "fewkeys_seconds": cost["scan"] * n + cost["attend"] * n / ranks + (ranks - 1) * hop(carry),
        "ring_bytes": (ranks - 1) * shard,
        "fewkeys_bytes": carry,
    }


def model():
    report = read_json(RESULTS, "sharded.json")
    cost = {**costs(), **report["wire"]}
    carry = max(row["fewkeys_bytes"] for row in report["rows"])
    checked = []
    for row in report["rows"]:
        if row["ranks"] == 2:
            expected = predict(cost, carry, 2, row["tokens"])
            for name in ("ring", "fewkeys"):
                measured, modelled = row[f"{name}_seconds"], expected[f"{name}_seconds"]
                checked.append({"method": name, "tokens": row["tokens"], "measured": measured, "modelled": modelled})
    predictions = [predict(cost, carry, ranks, n) for n in TOKENS for ranks in RANKS]
    results = {"costs": cost, "checked": checked, "predictions": predictions}
    write_json(RESULTS, "sharded_model.json", {**results, "machine": machine(), "versions": versions()})
    print(json.dumps(results, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="fit and predict from the measured rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model:
        model()
        return
    dist.init_process_group("gloo")
    comm = fkd.Communicator(timeout=600)
    rows, between = measure(comm), wire(comm) if comm.size > 1 else {}
    if comm.rank == 0:
        path = RESULTS / "sharded.json"
        old = read_json(RESULTS, "sharded.json") if path.is_file() else {"rows": [], "wire": between}
        kept = [row for row in old["rows"] if row["ranks"] != comm.size]
        results = {
            "rows": sorted([*kept, *rows], key=lambda row: (row["ranks"], row["tokens"])),
            "wire": between if comm.size == 2 else old["wire"],
            "settings": {"slots": SLOTS, "dim": DIM, "heads": 1, "turns": TURNS},
        }
        write_json(RESULTS, "sharded.json", {**results, "machine": machine(), "versions": versions()})
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
