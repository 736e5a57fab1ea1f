"""Law 9: time and memory grow linearly in n; no n x n tensor for any plan without an oracle."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fewkeys as fk
from cases import CASES, CAUSAL_PLANS, PLANS
from largest import Largest

LINEAR = {n: p for n, p in PLANS.items() if not p.keep.is_oracle and not CASES[n].grows}


def cost(plan, n, is_causal):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=g) for _ in range(3))
    largest, flops = Largest(), FlopCounterMode(display=False)
    with torch.no_grad(), flops, largest:
        fk.attention(q, k, v, plan=plan, is_causal=is_causal, impl="torch")
    return largest.numel, flops.get_total_flops()


@pytest.mark.parametrize(
    ("plan", "is_causal"),
    [(p, False) for p in LINEAR.values()] + [(p, True) for n, p in CAUSAL_PLANS.items() if n in LINEAR],
    ids=[*LINEAR, *(f"{n}, causal" for n in CAUSAL_PLANS if n in LINEAR)],
)
def test_memory_and_operations_are_linear(plan, is_causal):
    small, large = cost(plan, 2048, is_causal), cost(plan, 8192, is_causal)
    assert large[0] <= 4.2 * small[0]
    assert large[1] <= 4.2 * small[1]
    assert large[0] < 8192 * 8192 / 8


def test_long_sequence_fits_in_a_gigabyte():
    """n = 65,536, budget 192, one head of 64: the peak above the inputs, in a process of its own."""
    code = """
import resource, torch, fewkeys as fk
q, k, v = (torch.randn(1, 1, 65536, 64) for _ in range(3))
with torch.no_grad():
    fk.attention(q[:, :, :512], k[:, :, :512], v[:, :, :512], plan=fk.budget(64).always())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fk.attention(q, k, v, plan=fk.budget(192).always())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**20  # kilobytes
