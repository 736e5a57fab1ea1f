"""The page of a report: whole, self-contained, and safe whatever the names are."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

import fewkeys as fk
from captures import captured
from fewkeys.integrations.compare import compare
from fewkeys.judge.row import WholeTime
from fewkeys.report.headline import headline
from fewkeys.report.page import save_page

BUDGET, MINE = "fewkeys budget", "</td><b>mine</b>"


class Page(HTMLParser):
    """The elements of a page, the cells of its tables by row, and all that it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.rows, self.fetched, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.rows += [[]] if tag == "tr" else []
        self.fetched += [value for name, value in attributes if name in ("src", "href", "data", "srcset")]

    def handle_data(self, data):
        self.text += data
        if self.rows and self.elements[-1] in ("th", "td"):
            self.rows[-1].append(data)


@pytest.fixture(scope="module")
def report():
    plans = {8: {"window": fk.Plan(fk.Window(8)), BUDGET: fk.budget(8)}, None: {"exact": fk.Plan(), MINE: fk.budget(8)}}
    return compare(captured(batches=1, size=1), plans)


def test_the_page_holds_every_row_and_every_head_and_asks_for_nothing(report, tmp_path):
    save_page(report, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [part.partition(",")[0] for part in page.fetched] == ["data:image/png;base64"]
    assert not {"script", "b"} & set(page.elements)
    assert headline(report) in page.text
    names = {row[0] for row in page.rows if row}
    assert {"exact", "window 8", f"{BUDGET} 8 *", MINE} <= names
    heads = report.row(BUDGET, 8).per_head["error"]
    maps = [row[1:] for row in page.rows if row and row[0].isdigit()]
    assert [f"{error:.2f}" for error in heads[0]] in maps
    errors = [row[2] for row in page.rows if row and row[0] in names and not row[0].isdigit()]
    assert f"{report.row('window', 8).error:.3f}" in errors


def test_a_page_has_the_times_of_whole_models_and_may_have_no_row(report, tmp_path):
    timed = replace(report, whole_times=[WholeTime(BUDGET, 8, 64, 3, 4.0, 5.0)])
    save_page(timed, tmp_path / "page.html")
    assert "ms at 64" in (tmp_path / "page.html").read_text(encoding="utf-8")
    save_page(replace(report, rows=[]), tmp_path / "page.html")
    assert "No method stayed within its budget." in (tmp_path / "page.html").read_text(encoding="utf-8")
