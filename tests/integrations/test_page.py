"""The page of a report: whole, self-contained, and safe whatever the names are. `make browser` runs it in a browser."""

import json
import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest

from fewkeys.report.headline import headline
from fewkeys.report.page import PAGE, save_page
from pages import TOKENS, small


class Page(HTMLParser):
    """The elements of a page by their ids, the texts of its scripts, and all that it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.scripts, self.fetched, self.headings, self.cells = {}, {}, [], [], []
        self._id = self._tag = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self._tag = tag
        self._id = values.get("id", "code") if tag == "script" else None
        self.headings += [tag] if tag in ("h1", "h2") else []
        links = [values[name] for name in ("src", "href", "xlink:href", "data", "srcset") if name in values]
        self.fetched += [link for link in links if not link.startswith("#")]
        if "id" in values:
            self.ids[values["id"]] = tag

    def handle_data(self, data):
        if self._id:
            self.scripts[self._id] = self.scripts.get(self._id, "") + data
        if self._tag in ("th", "td"):
            self.cells.append(data)


@pytest.mark.parametrize("timed", [False, True])
def test_the_page_holds_all_there_is_and_asks_for_nothing(timed, tmp_path):
    report = small(timed)
    save_page(report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.fetched == []
    assert page.headings == ["h1", *["h2"] * 4]
    assert text.count("<svg") == 1 + timed
    assert (
        text.index(escape(headline(report))) < text.index('id="table"') < text.index("<svg") < text.index('id="heads"')
    )
    data = json.loads(page.scripts["data"])
    assert sorted(row["label"] for row in data["rows"]) == sorted(row.label for row in report.rows)
    row = next(row for row in data["rows"] if row["label"] == report.rows[1].label)
    assert row["kept"] == report.rows[1].kept
    assert row["heads"] == [
        [pytest.approx(error, rel=1e-3) for error in heads] for heads in report.rows[1].per_head["error"]
    ]
    assert data["sample"]["tokens"] == TOKENS
    assert all(any(cell.startswith(row.label) for cell in page.cells) for row in report.rows)
    # What the script looks up by its id is there.
    code = PAGE.read_text()
    assert set(re.findall(r'\$\("([\w-]+)"\)', code)) <= page.ids.keys()
    assert not re.search(r"https?://|fetch\(|innerHTML", code)


def test_name_error_and_time_are_the_first_columns(tmp_path):
    for timed, first in ((False, ["plan", "error", "ms", "slots"]), (True, ["plan", "error", "ms at 16", "ms at 64"])):
        save_page(small(timed), tmp_path / "page.html")
        names = re.findall(r'<th scope="col"><button type="button">([^<]*)', (tmp_path / "page.html").read_text())
        assert names[:4] == first


def test_kinds_from_a_file_are_no_html(tmp_path):
    report = small()
    save_page(replace(report, rows=[replace(row, kind='"><b id="x">') for row in report.rows]), tmp_path / "page.html")
    assert "x" not in Page((tmp_path / "page.html").read_text()).ids


def test_without_a_sample_or_rows_there_is_a_page(tmp_path):
    for report in (replace(small(), sample=None), replace(small(), rows=[])):
        save_page(report, tmp_path / "page.html")
        data = json.loads(Page((tmp_path / "page.html").read_text()).scripts["data"])
        assert (data["sample"] is None) == bool(report.rows)
