"""The list of what is broken on purpose: every text to be broken is there, and what came of it is on record."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

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


def test_every_law_chooses_tests(request):
    """Of the files that this run collects."""
    options = request.config.option
    if options.keyword or options.quick:
        pytest.skip("this run chooses tests itself")
    names = defaultdict(list)
    for item in request.session.items:
        names[item.path].append(item.nodeid.lower())
    empty = []
    for law in {law for breakage in BREAKAGES for law in breakage.laws}:
        words = re.sub(r"[^\s()]+", lambda word: _meaning(word[0]), law.chosen.lower())
        collected = names.get(HERE / law.path)
        if collected and words and not any(eval(words, {"name": name}) for name in collected):
            empty.append(law)
    assert empty == []


def _meaning(word):
    return word if word in {"and", "or", "not"} else f"({word!r} in name)"


def test_names_are_unique_and_the_record_is_of_these():
    assert sorted(RECORD) == sorted(breakage.name for breakage in BREAKAGES)
    assert len(BREAKAGES) == len(RECORD)
