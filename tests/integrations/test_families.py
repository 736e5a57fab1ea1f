"""What docs/families.md says of every family is what happens."""

import json

import pytest

pytest.importorskip("transformers")

from experiments.families.models import FAMILIES
from experiments.families.run import PAGE, RESULTS, key, page
from experiments.families.trial import trial

KNOWN = json.loads(RESULTS.read_text())["families"]


@pytest.mark.parametrize("family", FAMILIES, ids=key)
def test_a_family(family):
    assert trial(family) == KNOWN[key(family)]


def test_the_page_is_of_these_results():
    """But for the version that it names."""
    made, written = (text.splitlines() for text in (page(KNOWN), PAGE.read_text()))
    assert [line for line in made if "transformers 5" not in line] == [
        line for line in written if "transformers 5" not in line
    ]
    assert not any("WRONG" in (said or "") for row in KNOWN.values() for said in row.values())
