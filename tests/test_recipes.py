"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the package, and what they promise."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAWS = ("03_masked_is_deleted", "07_no_double_counting", "10_round_trips")
PROMISES = """
import sys, tempfile, torch, fewkeys as fk
from fewkeys.core.validation import check_inputs
from fewkeys.cost.operations import plan_operations

assert {name!r} in fk.__all__ and fk.{name}.__doc__
plan = fk.Plan({keep}, {rest}, exact_if_faster=True)
q, k, v = torch.randn(3, 1, 2, 300, 8).unbind()
with tempfile.TemporaryDirectory() as folder:
    plan.save_pretrained(folder)
    assert fk.Plan.from_pretrained(folder) == plan
assert fk.explain(q, k, v, plan=plan).reason
assert plan_operations(check_inputs(q, k, v), plan) > plan_operations(check_inputs(q, k, v), fk.Plan(fk.Sinks(1)))
found = fk.attention(q, k, v, plan=plan, impl="torch")
torch.testing.assert_close(found, fk.attention(q, k, v, plan=plan, impl="reference"), rtol=1e-4, atol=1e-5)
"""


def recipe(title):
    """The file of a recipe, and the three pieces of code: file, line, case."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    part = text[text.index(f"## Recipe: {title}\n") :]
    part = part[: part.index("\n## ", 1)]
    (path,) = re.findall(r"^   `(\S+\.py)`:$", part, re.M)
    return path, [textwrap.dedent(code) for code in re.findall(r"   ```python\n(.*?)   ```", part, re.S)]


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(folder, *arguments):
    paths = os.pathsep.join([str(folder / "src"), str(folder / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SELECTOR = ("a new selector", "select", "KEEP_CASES", "third", "EveryNth", "fk.EveryNth(3)", "fk.Drop()")
REST = ("a new rest", "rest", "REST_CASES", "single", "OneMean", "fk.KeyNorm(9)", "fk.OneMean()")


@pytest.mark.parametrize(("title", "room", "table", "word", "name", "keep", "rest"), [SELECTOR, REST])
def test_a_new_part_is_one_file_and_one_line(title, room, table, word, name, keep, rest, copied):
    path, (code, line, case) = recipe(title)
    (copied / path).write_text(code)
    catalogue, cases = copied / "src" / "fewkeys" / room / "__init__.py", copied / "tests" / "cases.py"
    catalogue.write_text(catalogue.read_text() + line)
    table_test = "test_the_table_of_cases_has_all_that_is_listed"
    # Without its case the part is missed,
    with pytest.raises(AssertionError, match=name):
        run(copied, "-m", "pytest", "tests/test_project.py", "-k", table_test)
    # and with it all laws run over it.
    text = cases.read_text()
    cases.write_text(text.replace(f"{table} = {{\n", f"{table} = {{\n    {case}", 1))
    laws = [f"tests/laws/test_law_{law}.py" for law in LAWS]
    done = run(copied, "-m", "pytest", "tests/test_project.py", *laws, "-k", f"{word} or listed or members")
    assert int(re.search(r"(\d+) passed", done)[1]) > 10
    run(copied, "-c", PROMISES.format(name=name, keep=keep, rest=rest))
