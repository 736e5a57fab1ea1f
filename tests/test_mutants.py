"""The small changes of `tests/mutants`: each is one, what explains some still speaks of them, and the record."""

import json
from pathlib import Path

import pytest

import fewkeys as fk
from mutants.changes import changed, changes
from mutants.table import EQUIVALENT, ROOMS

PACKAGE, HERE = Path(fk.__file__).parent, Path(__file__).parent
TOY = '''
def close(a, b=3):
    """1 + 1"""
    if not a < b - 2 and a > -1:
        raise ValueError("1 < 2" + str(1))
    return max(a, b, key=True)
'''


def test_all_but_text_defaults_and_errors_is_changed_one_thing_at_a_time():
    found = changes(TOY)
    assert [(one.before, one.after) for one in found] == [
        ("2", "3"),
        ("b - 2", "b + 2"),
        ("a < b - 2", "a <= b - 2"),
        ("not a < b - 2", "a < b - 2"),
        ("-1", "-2"),
        ("a > -1", "a >= -1"),
        ("not a < b - 2 and a > -1", "not a < b - 2 or a > -1"),
        ("not a < b - 2 and a > -1", "not (not a < b - 2 and a > -1)"),
        ("True", "False"),
        ("max(a, b, key=True)", "min(a, b, key=True)"),
    ]
    codes = {next(x for x in changed(TOY, one.number, "toy").co_consts if hasattr(x, "co_code")) for one in found}
    assert len(codes) == len(found)


@pytest.mark.parametrize("room", ROOMS)
def test_files_and_tests_are_there(room):
    for pattern in ROOMS[room].files:
        assert list(PACKAGE.glob(pattern)), pattern
    own = [*ROOMS[room].tests, *(test for more in ROOMS[room].more.values() for test in more)]
    for test in own:
        file, _, function = test.partition("::")
        assert f"def {function}" in (HERE / file).read_text()


@pytest.mark.parametrize("start", EQUIVALENT)
def test_what_is_explained_is_there(start):
    file = start.partition(" ")[0]
    told = [f"{file} {one}" for one in changes((PACKAGE / file).read_text())]
    assert any(one.startswith(start) for one in told)


def test_the_record_has_few_that_are_missed():
    for room, found in json.loads((HERE / "mutants" / "results.json").read_text()).items():
        seen = found["noticed"] + len(found["missed"])
        assert seen + len(found["equivalent"]) == found["tried"] >= 20, room
        assert found["noticed"] >= 0.85 * seen, room
