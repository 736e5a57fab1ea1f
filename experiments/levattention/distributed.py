"""Bytes that a rank sends for attention over token shards, against an all-gather of all keys and values.

    torchrun --nproc-per-node 2 experiments/levattention/distributed.py --out OUT.json
    torchrun --nproc-per-node 4 experiments/levattention/distributed.py --out OUT.json

Each run replaces the rows of its number of ranks in OUT.json and prints them. Bytes are those of
`fewkeys.distributed.Communicator.bytes_sent`; "wire" is what the kernel counted on the loopback device meanwhile, per
rank, over what was counted here (other traffic on the machine adds to it). Differences are to one process on the whole
sequence: the universal sets must be equal; outputs and gradients are compared with `fewkeys.attention`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fewkeys as fk
import fewkeys.distributed as fkd
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json
from fewkeys.papers import levattention

HEADS, DIM, COUNT, BLOCK = 2, 64, 64, 1024
PLANS = {
    "leverage": fk.select.Leverage(COUNT),
    "key norm": fk.select.KeyNorm(COUNT),
    "random keys": fk.RandomKeys(COUNT),
}


def tokens(start: int, stop: int) -> list[Tensor]:
    """Queries, keys, values and directions of the loss of tokens start .. stop - 1, (1, HEADS, N, DIM) each.

    Keys: Gaussian in a metric with spectrum 1 to 1/16, of log-normal length, and one common offset.
    """
    spectrum = torch.logspace(0, -4, DIM, base=2)
    blocks = []
    for block in range(start // BLOCK, stop // BLOCK):
        g = torch.Generator().manual_seed(block)
        rows = torch.randn(4, 1, HEADS, BLOCK, DIM, generator=g)
        length = torch.randn(1, HEADS, BLOCK, 1, generator=g).mul(0.5).exp()
        rows[1] = rows[1] * spectrum * length + 0.25
        blocks.append(rows)
    return list(torch.cat(blocks, 3).unbind())


def wire() -> int | None:
    """Bytes sent on the loopback device since the machine started; None where the system does not say."""
    counters = Path("/proc/net/dev")
    if counters.is_file():
        for line in counters.read_text(encoding="utf-8").splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "lo":
                return int(numbers.split()[8])
    return None


def counted(call: Callable[[fkd.Communicator], Any]) -> tuple[Any, int, float | None]:
    """What the call returns, the bytes that this rank sent in it, and the kernel's count over all ranks' counts."""
    comm, meter = fkd.Communicator(timeout=600), fkd.Communicator(timeout=600)
    meter.all_gather(torch.zeros(1))
    before = wire()
    meter.all_gather(torch.zeros(1))
    result = call(comm)
    meter.all_gather(torch.zeros(1))
    after = wire()
    total = int(meter.all_reduce(torch.tensor(comm.bytes_sent)))
    return result, comm.bytes_sent, None if before is None or after is None else (after - before) / total


def largest(found: Tensor, expected: Tensor, comm: fkd.Communicator) -> float:
    """The largest difference of any rank over the largest entry of any rank."""
    difference = comm.all_reduce((found - expected).abs().amax(), "max")
    return float(difference / comm.all_reduce(expected.abs().amax(), "max"))


def measure(n: int) -> dict[str, Any]:
    """One row: n tokens over all ranks, in equal parts."""
    comm = fkd.Communicator(timeout=600)
    own = slice(comm.rank * n // comm.size, (comm.rank + 1) * n // comm.size)
    query, key, value, direction = tokens(own.start, own.stop)
    # Four times the mean score: a set that is neither empty nor everything, whatever n.
    row: dict[str, Any] = {"tokens": n, "ranks": comm.size, "eps": 4 * DIM / n}
    marked, row["universal_set_bytes"], _ = counted(lambda c: fkd.universal_set(key, row["eps"], group=c))
    outputs, gradients = {}, {}
    for name, keep in PLANS.items():
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        out, sent, ratio = counted(lambda c, keep=keep, x=leaves: fkd.attention(*x, keep=keep, group=c))
        row[f"{name}_bytes"], row[f"{name}_wire"] = sent, ratio
        outputs[name] = out.detach()
        gradients[name] = torch.autograd.grad((out * direction).sum(), leaves)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    _, row["leverage_training_bytes"], _ = counted(
        lambda c: (fkd.attention(*leaves, keep=PLANS["leverage"], group=c) * direction).sum().backward()
    )
    gathered, row["all_gather_bytes"], row["all_gather_wire"] = counted(
        lambda c: c.all_gather(torch.cat([key, value], -1))
    )
    del gathered
    row["ratio"] = row["all_gather_bytes"] / row["leverage_bytes"]
    compare(row, n, own, marked, outputs, gradients)
    return row


def compare(
    row: dict[str, Any],
    n: int,
    own: slice,
    marked: Tensor,
    outputs: dict[str, Tensor],
    gradients: dict[str, tuple[Tensor, ...]],
) -> None:
    """Adds the differences to one process: rank 0 computes on the whole sequence and hands the answers out."""
    comm = fkd.Communicator(timeout=600)
    whole = tokens(0, n) if comm.rank == 0 else []

    def shared(answer: Callable[[], Tensor]) -> Tensor:
        full = answer() if comm.rank == 0 else torch.zeros(1, HEADS, n, DIM)
        return comm.all_reduce(full)[:, :, own]

    def mask() -> Tensor:
        return levattention.universal_set(whole[1], row["eps"]).float().unsqueeze(-1).expand(-1, -1, -1, DIM)

    wrong = (shared(mask)[..., 0] > 0.5) != marked
    row["universal_set_differences"] = int(comm.all_reduce(wrong.sum()))
    row["universal_set_size"] = int(comm.all_reduce(marked.sum()))
    for name, keep in PLANS.items():
        answers: list[Tensor] = []
        if comm.rank == 0:
            leaves = [tensor.clone().requires_grad_() for tensor in whole[:3]]
            out = fk.attention(*leaves, keep=keep)
            answers = [out.detach(), *torch.autograd.grad((out * whole[3]).sum(), leaves)]
        found = [outputs[name], *gradients[name]]
        errors = [largest(f, shared(lambda i=i, a=answers: a[i]), comm) for i, f in enumerate(found)]
        row[f"{name}_output_difference"], row[f"{name}_gradient_difference"] = errors[0], max(errors[1:])


COLUMNS = {
    "tokens": "tokens",
    "ranks": "ranks",
    "universal set": "universal_set_bytes",
    "leverage": "leverage_bytes",
    "with backward": "leverage_training_bytes",
    "key norm": "key norm_bytes",
    "random": "random keys_bytes",
    "all K and V": "all_gather_bytes",
    "times fewer": "ratio",
    "set size": "universal_set_size",
    "set diff.": "universal_set_differences",
    "output diff.": "leverage_output_difference",
    "grad. diff.": "leverage_gradient_difference",
    "wire": "leverage_wire",
}


def printed(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1e}" if value < 0.01 else f"{value:,.2f}"


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows in place of those of the same number of ranks."""
    old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    rows = [*(row for row in old if row["ranks"] != rows[0]["ranks"]), *rows]
    sizes = {"batch": 1, "heads": HEADS, "dim": DIM, "value_dim": DIM, "dtype": "float32"}
    record = {
        "machine": machine(),
        "versions": versions(),
        "settings": {**sizes, "count": COUNT},
        "rows": sorted(rows, key=lambda row: (row["ranks"], row["tokens"])),
    }
    write_json(path.parent, path.name, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file; rows of other numbers of ranks stay")
    lengths = [2**e for e in range(12, 19)]
    parser.add_argument("--tokens", type=int, nargs="+", default=lengths, help="multiples of 4096")
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun --nproc-per-node RANKS (2 or 4)")
    if any(n < 4096 or n % 4096 for n in arguments.tokens):
        parser.error(f"--tokens: expected multiples of 4096, got {arguments.tokens}")
    dist.init_process_group("gloo")
    comm = fkd.Communicator()
    if 4096 % (comm.size * BLOCK):
        parser.error(f"expected 1, 2 or 4 ranks, got {comm.size}")
    rows = []
    if comm.rank == 0:
        print("  ".join(COLUMNS))
    for n in arguments.tokens:
        rows.append(measure(n))
        if comm.rank == 0:
            cells = [printed(rows[-1][key]).rjust(len(title)) for title, key in COLUMNS.items()]
            print("  ".join(cells), flush=True)
    if comm.rank == 0:
        save(arguments.out, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
