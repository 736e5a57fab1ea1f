"""What tests of compiled kernels share."""

import os
import shutil

import pytest
import torch

from fewkeys.native import build

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)) or os.environ.get(build.SWITCH) == "0", reason="no C++ compiler"
)
CLOSE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}


def without(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEWKEYS_NATIVE", "0")
        return call()
