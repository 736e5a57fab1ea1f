"""The compiled library itself: what it exports, that Python reads its structs right, and what it counts."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import fewkeys as fk
from fewkeys.core.graph import Graph
from fewkeys.core.validation import check_inputs
from fewkeys.execute.native import forward
from fewkeys.execute.problem import Problem
from fewkeys.native import build, sets, tensors
from native_cases import needs_compiler

pytestmark = needs_compiler
HERE = Path(build.__file__).parent


def test_no_source_includes_another():
    for file in HERE.iterdir():
        if file.suffix in (".cpp", ".h"):
            assert not re.search(r'#include ".*\.cpp"', file.read_text()), file.name


def test_every_file_is_in_the_namespace():
    for file in HERE.iterdir():
        if file.suffix in (".cpp", ".h"):
            assert "namespace fewkeys {" in file.read_text(), file.name


@pytest.mark.skipif(not shutil.which("nm"), reason="no nm")
def test_only_entry_points_are_exported():
    listed = subprocess.run(["nm", "-D", "--defined-only", str(build.place())], capture_output=True, text=True)
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert len(names) > 10
    # The templates of the standard library are visible by its own word.
    assert not [name for name in names if not name.startswith(("fewkeys_", "_ZNSt", "_ZSt"))]


def test_fields_are_those_of_the_header():
    assert tensors.STRUCTS["Coding"]._fields_ == [
        ("key", tensors.Rows),
        *((name, ctypes.c_void_p) for name in ("sign", "middle", "spread", "packed", "sigma")),
        *((name, ctypes.c_int64) for name in ("heads", "keys", "dim", "wide", "blocks")),
    ]
    assert dict(tensors.STRUCTS["ScanAttend"]._fields_)["of"] is tensors.STRUCTS["Scan"]
    assert dict(tensors.STRUCTS["Clustered"]._fields_)["tilt"] is ctypes.c_float
    with pytest.raises(TypeError, match="Coding: expected fields of the struct, got rows, weights"):
        tensors.STRUCTS["Coding"](weights=1, rows=2, dim=3)


def test_structs_are_as_large_as_in_the_library(tmp_path):
    names = re.findall(r"^struct (\w+) \{", (HERE / "problems.h").read_text(), re.MULTILINE)
    lines = "".join(f'std::printf("%zu\\n", sizeof(fewkeys::{name}));' for name in names)
    source = f'#include <cstdio>\n#include "problems.h"\nint main() {{ {lines} }}\n'
    (tmp_path / "sizes.cpp").write_text(source)
    command = [*sets.compiler(), "-std=c++17", f"-I{HERE}", "sizes.cpp", "-o", "sizes"]
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout.split()
    structs = [tensors.Rows if name == "Rows" else tensors.STRUCTS[name] for name in names]
    assert len(names) > 10
    assert dict(zip(names, map(int, printed), strict=True)) == {
        name: ctypes.sizeof(struct) for name, struct in zip(names, structs, strict=True)
    }


def test_what_is_read_may_have_gaps_and_what_is_written_may_not():
    gaps = torch.zeros(2, 6)[:, ::2]
    args = tensors.STRUCTS["Clustered"](unit=gaps)
    assert args.unit != gaps.data_ptr()
    assert args.alive[0].is_contiguous()
    with pytest.raises(ValueError, match=r"^Clustered.centre: expected a contiguous tensor to write to$"):
        tensors.STRUCTS["Clustered"](centre=gaps)


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setenv(build.COUNT, "1")
    assert build.missing() is None
    build.counters()


def test_other_builds_do_not_count(monkeypatch):
    monkeypatch.delenv(build.COUNT, raising=False)
    with pytest.raises(RuntimeError, match="set FEWKEYS_COUNT=1"):
        build.counters()


def test_attention_is_counted(counting):
    """One tile that sees itself: scores, masks, weights and sums of 32 keys for 32 queries, values filled up to 16; and
    the weight of what each query's cohort adds, which is nothing.
    """
    q, k, v = torch.randn(3, 1, 1, 32, 8)
    x = check_inputs(q, k, v)
    forward.attend(Problem(x, Graph(x, (31, 31)), None, fk.Softmax()))
    assert build.counters()["multiply_adds"] == 32 * 32 * (8 + 1 + 1 + 16) + 32


def test_arithmetic_and_memory_grow_linearly(counting):
    """Law 9 for compiled code: four times the tokens, at most a little more than four times the work."""
    actual = []
    for tokens in (2048, 8192):
        q, k, v = torch.randn(3, 1, 1, tokens, 16, generator=torch.Generator().manual_seed(0))
        build.counters()
        fk.attention(q, k, v, plan=fk.budget(64), impl="native")
        actual.append(build.counters())
    for name in ("multiply_adds", "bytes"):
        assert 0 < actual[1][name] < 4.5 * actual[0][name], (name, actual)
