"""The list of what is broken on purpose: every text to be broken is there, and what came of it is on record."""

import json
from pathlib import Path

import pytest

import fewkeys as fk
from broken.breakages import BREAKAGES as KERNELS
from broken.promises import PROMISES

BREAKAGES = (*KERNELS, *PROMISES)

PACKAGE = Path(fk.__file__).parent
HERE = Path(__file__).parent
RECORD = {row["name"]: row for row in json.loads((HERE / "broken" / "results.json").read_text())}


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_the_text_to_break_occurs_once(breakage):
    text = (PACKAGE / breakage.file).read_text()
    assert text.count(breakage.find) == 1
    assert breakage.find != breakage.put


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_every_breakage_was_caught(breakage):
    """As `make broken` has recorded it."""
    row = RECORD[breakage.name]
    assert set(row["laws"]) == {f"{law.file}: {law.chosen}" for law in breakage.laws} != set()
    assert all(verdict.startswith("caught") for verdict in row["laws"].values())
    assert all((HERE / law.path).is_file() for law in breakage.laws)


def test_names_are_unique_and_the_record_is_of_these():
    assert sorted(RECORD) == sorted(breakage.name for breakage in BREAKAGES)
    assert len(BREAKAGES) == len(RECORD)
