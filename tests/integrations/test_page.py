"""The page of a report: whole, self-contained, and safe whatever the names are. `make browser` runs it in a browser."""

import base64
import gzip
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fewkeys.judge.sample import Sample
from fewkeys.report.page import ASSETS, save_page
from pages import TOKENS, small


class Page(HTMLParser):
    """The elements of a page by their ids, the texts of its scripts, and all that it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.labels, self.scripts, self.fetched, self.headings = {}, [], {}, [], []
        self._id = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self._id = values.get("id", "code") if tag == "script" else None
        self.headings += [tag] if tag in ("h1", "h2") else []
        self.labels += [values["aria-labelledby"]] if "aria-labelledby" in values else []
        self.fetched += [values[name] for name in ("src", "href", "data", "srcset") if name in values]
        if "id" in values:
            self.ids[values["id"]] = tag

    def handle_data(self, data):
        if self._id:
            self.scripts[self._id] = self.scripts.get(self._id, "") + data


@pytest.fixture(scope="module")
def made():
    return small()


def test_the_page_holds_all_there_is_and_asks_for_nothing(made, tmp_path):
    report, sample = made
    save_page(report, tmp_path / "page.html", sample)
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.fetched == ["#rows"]
    assert set(page.labels) <= page.ids.keys()
    assert page.headings == ["h1", *["h2"] * 5]
    data = json.loads(page.scripts["data"])
    assert [(row["name"], row["budget"]) for row in data["rows"]] == [(row.name, row.budget) for row in report.rows]
    assert data["rows"][1]["heads"] == [
        [pytest.approx(error, rel=1e-3) for error in heads] for heads in report.rows[1].per_head["error"]
    ]
    assert data["sample"]["tokens"] == TOKENS
    (tmp_path / "sample").write_bytes(gzip.decompress(base64.b64decode(page.scripts["sample"])))
    assert Sample.load(tmp_path / "sample").tensors.keys() == sample.tensors.keys()
    # What the scripts look up by its id is there, or they make it.
    code = "".join(path.read_text() for path in ASSETS.glob("*.js"))
    assert set(re.findall(r'\$\("([\w-]+)"\)', code)) <= page.ids.keys() | {"query"}
    assert not re.search(r"https?://|fetch\(|innerHTML", code)


def test_without_a_sample_there_is_a_page_and_a_wrong_one_is_refused(made, tmp_path):
    report, sample = made
    save_page(report, tmp_path / "page.html")
    assert json.loads(Page((tmp_path / "page.html").read_text()).scripts["data"])["sample"] is None
    with pytest.raises(ValueError, match=r"^sample: expected one of 3 layers"):
        save_page(replace(report, layers=3), tmp_path / "other.html", sample)
    with pytest.raises(ValueError, match=r"^sample: expected 1 rows"):
        save_page(replace(report, rows=report.rows[:1]), tmp_path / "other.html", sample)
