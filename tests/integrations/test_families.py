"""What docs/families.md says of every type of model is what happens."""

import json
import os
import random
from datetime import date

import pytest

pytest.importorskip("transformers")

from experiments.families.build import kinds
from experiments.families.run import PAGE, RESULTS, count, page
from experiments.families.trial import FLAG, UNTRIED, trial

FILE = json.loads(RESULTS.read_text())
TABLE = FILE["families"]
KINDS = {str(kind): kind for kind in kinds() if UNTRIED not in TABLE.get(str(kind), {UNTRIED: "new"})}
WRONG_FLAGS = sorted(name for name in KINDS if TABLE[name][FLAG])
SEED = os.environ.get("FEWKEYS_SEED", str(date.today()))
"""The types that are tried change with the day; FEWKEYS_SEED repeats those of another one."""
SAMPLES = [(WRONG_FLAGS, 6), (sorted(set(KINDS) - set(WRONG_FLAGS)), 12)]
TRIED = [name for names, count in SAMPLES for name in random.Random(SEED).sample(names, count)]


@pytest.mark.parametrize("name", TRIED)
def test_a_type(name):
    assert trial(KINDS[name]) == TABLE[name], f"FEWKEYS_SEED={SEED}"


def test_nothing_fails_and_most_types_are_tried():
    equal, _, failed, _ = count(TABLE)
    assert not failed
    assert equal > 300


def test_the_page_is_of_these_results():
    assert page(TABLE, FILE["transformers"]) == PAGE.read_text()
