"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the package, and what they promise.

Each is followed in one process of its own: loading torch takes longer than the recipe.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fewkeys.native.build import COUNT
from native_cases import needs_compiler

ROOT = Path(__file__).parents[1]
FOLLOW_PARTS = """
import importlib, sys, tempfile, pytest, torch
from pathlib import Path
import fewkeys as fk
from fewkeys.core.validation import check_inputs
from fewkeys.cost.operations import plan_operations

parts, cases = {parts!r}, Path("tests/cases.py")
for _, table, case, *_ in parts:  # without its case a part is missed,
    try:
        importlib.import_module("test_project").test_the_table_of_cases_has_all_that_is_listed()
    except AssertionError:
        print("missed")
    cases.write_text(cases.read_text().replace(table + " = {{\\n", table + " = {{\\n    " + case, 1))
    for name in ("cases", "test_project"):
        del sys.modules[name]
# and with it all laws run over it.
laws = [f"tests/laws/test_law_{{law}}.py" for law in ("03_masked_is_deleted", "07_no_double_counting")]
failed = pytest.main(["tests/test_project.py", *laws, "-k", "third or single or listed", "-p", "no:cacheprovider"])

q, k, v = torch.randn(3, 1, 2, 300, 8).unbind()
for room, _, _, name, keep, rest in parts:
    assert name in dir(getattr(fk, room)) and getattr(getattr(fk, room), name).__doc__
    plan = fk.Plan(eval(keep), eval(rest), exact_if_faster=True)
    with tempfile.TemporaryDirectory() as folder:
        plan.save_pretrained(folder)
        assert fk.Plan.from_pretrained(folder) == plan
    assert fk.explain(q, k, v, plan=plan).reason
    assert plan_operations(check_inputs(q, k, v), plan) > plan_operations(check_inputs(q, k, v), fk.Plan(fk.Sinks(1)))
    actual = fk.attention(q, k, v, plan=plan, impl="torch")
    torch.testing.assert_close(actual, fk.attention(q, k, v, plan=plan, impl="reference"), rtol=1e-4, atol=1e-5)
sys.exit(failed)
"""
FOLLOW_WAY = """
import sys
sys.path.insert(0, "tests/laws")
import pytest, torch
torch.set_num_threads(1)  # as in the suite: the first call of a new process on several threads may round otherwise
import fewkeys as fk
import test_law_02_impls_agree as law
from cases import PLANS, SHAPES
from executors import WAYS, Way, ways

plan, shape = PLANS["leverage + window, drop, softmax"], SHAPES["grouped"]
actual = law.answers(plan, shape, torch.float32, grad=True)
assert "masked" in actual, list(actual)
law.assert_alike(actual, torch.float32)
assert Way("masked", torch.float32) in WAYS
assert Way("masked", torch.float32) in ways("leverage + window, drop, softmax", False)
assert "masked" not in law.answers(PLANS["leverage + window, means, softmax"], shape, torch.float32, grad=False)
with pytest.raises(ValueError, match="impl='masked': expected no stand-ins"):
    fk.attention(*shape.draw(), plan=PLANS["leverage + window, means, softmax"], impl="masked")
sys.exit(pytest.main(["tests/laws/test_law_03_masked_is_deleted.py", "-k", "masked-float32", "-p", "no:cacheprovider"]))
"""
FOLLOW_KERNEL = """
import sys, pytest, torch
from fewkeys.native import build

assert build.missing() is None, build.missing()
files = ["tests/kernels/test_native_longest.py", "tests/kernels/test_native_library.py"]
# Without optimisation, templates of the standard library are exported, too; there is no other build.
chosen = "not grow_linearly and not exported and not other_builds"
sys.exit(pytest.main([*files, "-k", chosen, "-p", "no:cacheprovider"]))
"""


def recipe_text(title):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    part = text[text.index(f"## Recipe: {title}\n") :]
    return part[: part.index("\n## ", 1)]


def recipe(title):
    """The file of a recipe, and its pieces of code: the file, then the lines."""
    part = recipe_text(title)
    (path,) = re.findall(r"^   `(\S+\.py)`:$", part, re.M)
    return path, [textwrap.dedent(code) for code in re.findall(r"   ```python\n(.*?)   ```", part, re.S)]


@pytest.fixture
def copied(tmp_path):
    for folder in ("src", "tests", "experiments/sparsefinder/baselines"):  # the tests' cases read the last
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def follow(folder, code, **variables):
    paths = os.pathsep.join([str(folder / "src"), str(folder / "tests"), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PARTS = [
    ("a new selector", "select", "KEEP_CASES", "EveryNth", "fk.select.EveryNth(3)", "fk.Drop()"),
    ("a new rest", "rest", "REST_CASES", "OneMean", "fk.select.KeyNorm(9)", "fk.rest.OneMean()"),
]


@pytest.mark.long
def test_a_new_part_is_one_file_and_one_line(copied):
    parts = []
    for title, room, table, *more in PARTS:
        path, (code, line, case) = recipe(title)
        (copied / path).write_text(code)
        catalogue = copied / "src" / "fewkeys" / room / "__init__.py"
        catalogue.write_text(catalogue.read_text() + line)
        parts.append((room, table, case, *more))
    printed = follow(copied, FOLLOW_PARTS.format(parts=parts))
    assert printed.startswith("missed\nmissed\n")
    assert int(re.search(r"(\d+) passed", printed)[1]) > 20


@pytest.mark.long
def test_a_new_way_to_run_is_one_file_and_one_line(copied):
    path, (code, name, table) = recipe("a new way to run")
    (copied / path).write_text(code)
    for file, lines in (("core/impl.py", name), ("execute/dispatch.py", table)):
        place = copied / "src" / "fewkeys" / file
        text = place.read_text()
        for line in map(ast.unparse, ast.parse(lines).body):
            # A line takes the place of the one that begins as it does: with the same words up to what it lists.
            start = re.match(r".*?(import | = )", line)[0]
            assert len(re.findall(f"^{re.escape(start)}", text, re.M)) == 1, start
            text = re.sub(f"^{re.escape(start)}.*$", lambda _, new=line: new, text, flags=re.M)
        place.write_text(text)
    printed = follow(copied, FOLLOW_WAY)
    assert int(re.search(r"(\d+) passed", printed)[1]) > 10


PIECE = r"^   (?:In )?`([^`\n]+)`(?:, above `([^`\n]+)`)?:\n\n   ```\w+\n(.*?)^   ```"
"""A new file and what is in it; or a file that is there, a line of it, and what to put above that line."""


@pytest.mark.long
@needs_compiler
def test_a_new_kernel_is_a_header_and_its_declarations(copied):
    pieces = re.findall(PIECE, recipe_text("a new kernel in C++"), re.M | re.S)
    assert len(pieces) == 6
    for name, line, code in pieces:
        path, code = copied / name, re.sub("^   ", "", code, flags=re.M)
        assert path.exists() == bool(line), name
        text = path.read_text() if line else ""
        if line:
            assert text.count(f"\n{line}\n") == 1, (name, line)
            code = text.replace(f"\n{line}\n", f"\n{code}{line}\n")
        path.write_text(code)
    # Quick to compile: what it computes is the same.
    sets = copied / "src" / "fewkeys" / "native" / "sets.py"
    sets.write_text(sets.read_text().replace('"-O3"', '"-O0"'))
    # One build for all tests: that which counts.
    printed = follow(copied, FOLLOW_KERNEL, FEWKEYS_CACHE=str(copied / "cache"), **{COUNT: "1"})
    assert "longest" in (copied / "src" / "fewkeys" / "native" / "problems.h").read_text()
    assert int(re.search(r"(\d+) passed", printed)[1]) > 8
