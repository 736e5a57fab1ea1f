"""The list of what is broken on purpose: every text to be broken is there, and what came of it is on record."""

import json
from pathlib import Path

import fewkeys as fk
from broken.breakages import BREAKAGES as KERNELS
from broken.promises import PROMISES

BREAKAGES = (*KERNELS, *PROMISES)

PACKAGE = Path(fk.__file__).parent
HERE = Path(__file__).parent
RECORD = {row["name"]: row for row in json.loads((HERE / "broken" / "results.json").read_text())}


def test_the_text_to_break_occurs_once():
    counts = {breakage.name: (PACKAGE / breakage.file).read_text().count(breakage.find) for breakage in BREAKAGES}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert [breakage.name for breakage in BREAKAGES if breakage.find == breakage.put] == []


def test_every_breakage_was_caught():
    """As `make broken` has recorded it."""
    for breakage in BREAKAGES:
        row = RECORD[breakage.name]
        assert set(row["laws"]) == {f"{law.file}: {law.chosen}" for law in breakage.laws} != set(), breakage.name
        assert all(verdict.startswith("caught") for verdict in row["laws"].values()), breakage.name
        assert all((HERE / law.path).is_file() for law in breakage.laws), breakage.name


def test_names_are_unique_and_the_record_is_of_these():
    assert sorted(RECORD) == sorted(breakage.name for breakage in BREAKAGES)
    assert len(BREAKAGES) == len(RECORD)
