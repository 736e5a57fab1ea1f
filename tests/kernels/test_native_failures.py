"""A kernel that cannot go on ends in a Python exception."""

import ctypes
import subprocess
import sys

import pytest
import torch

import fewkeys as fk
from fewkeys.cli import main
from fewkeys.native import build
from native_cases import MEANS, needs_compiler

pytestmark = needs_compiler

SCAN = fk.Plan(fk.KeyScan(30), fk.BlockMeans(3))  # whose gradients are torch's
PLANS = [(MEANS[0], False), (MEANS[3], False), (MEANS[5], False), (SCAN, True)]


@pytest.fixture
def kernels(monkeypatch):
    """Those that can be told to find no memory."""
    monkeypatch.setenv(build.COUNT, "1")
    library = build._library()
    fail_at = library.fewkeys_fail_at
    fail_at.argtypes = (ctypes.c_int64,)
    yield fail_at
    fail_at(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("plan", "is_causal", "gradient"),
    [(*case, gradient) for case in PLANS for gradient in (False, True) if not (gradient and case[0] == SCAN)],
    ids=str,
)
def test_no_memory_is_a_memory_error_wherever_it_happens(plan, is_causal, gradient, dtype, kernels):
    """Every buffer of every kernel is the one that cannot be had, once; afterwards all is as it was."""
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 300, 16, generator=draw).to(dtype) for heads in (4, 2, 2)]

    def run():
        leaves = [tensor.clone().requires_grad_(gradient) for tensor in tensors]
        output = fk.attention(*leaves, plan=plan, is_causal=is_causal, impl="native")
        if not gradient:
            return [output]
        return list(torch.autograd.grad(output.float().square().sum(), leaves))

    whole, failed, number = run(), 0, 1
    while True:
        kernels(number)
        try:
            actual = run()
        except MemoryError:
            failed += 1
        else:
            break
        number += 1 + number // 12
    kernels(0)
    assert failed > 5
    for one, other in zip(actual, whole, strict=True):
        assert torch.equal(one, other)


def test_too_many_threads_are_an_error_not_a_crash(capsys):
    assert main(["bench", "--lengths", "64", "--threads", "100000", "--out", "nowhere"]) == 2
    assert "--threads: expected a whole number from 1 to" in capsys.readouterr().err


@pytest.mark.long
def test_kernels_never_ask_for_more_threads_than_a_process_may_have():
    code = """
import torch, fewkeys as fk
from fewkeys.native import build
x = torch.randn(1, 1, 100, 16)
one = fk.attention(x, x, x, keep=fk.Window(9), impl="native")
torch.get_num_threads = lambda: 100_000
assert torch.equal(one, fk.attention(x, x, x, keep=fk.Window(9), impl="native"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
