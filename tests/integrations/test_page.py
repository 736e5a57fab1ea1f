"""The page of a report: whole, self-contained, and safe whatever the names are."""

import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest

from fewkeys.report.headline import headline, recommended
from fewkeys.report.page import save_page
from pages import small


class Page(HTMLParser):
    """The tags of a page, the texts of its cells and summaries, and all that it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.fetched, self.tags, self.cells, self.summaries = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        links = [values[name] for name in ("src", "href", "xlink:href", "data", "srcset") if name in values]
        self.fetched += [link for link in links if not link.startswith("#")]

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("th", "td"):
            self.cells.append(data)
        if self.tags and self.tags[-1] == "summary":
            self.summaries.append(data)


def read(report, path):
    save_page(report, path)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("timed", [False, True])
def test_the_page_holds_all_there_is_and_asks_for_nothing(timed, tmp_path):
    report = small(timed)
    text = read(report, tmp_path / "page.html")
    page = Page(text)
    assert page.fetched == []
    assert not {"script", "b", "button"} & set(page.tags)
    assert [tag for tag in page.tags if tag in ("h1", "h2")] == ["h1", *["h2"] * 3]
    assert text.count("<svg") == 1 + timed
    assert text.index(escape(headline(report))) < text.index("<table") < text.index("<svg") < text.index("<details")
    assert all(any(cell.startswith(row.label) for cell in page.cells) for row in report.rows)
    assert sorted(page.summaries) == sorted(f"{row.label}: {row.plan}" for row in report.rows)
    assert not re.search(r"https?://|fetch\(|innerHTML", re.sub("<svg.*?</svg>", "", text, flags=re.DOTALL))


def test_every_head_has_its_error_and_the_recommended_plan_is_open(tmp_path):
    report = small()
    (shown,) = re.findall("<details open>.*?</details>", read(report, tmp_path / "page.html"), re.DOTALL)
    row = recommended(report)
    assert escape(row.label) in shown
    numbers = re.findall(r"(\d+)%\)\">([\d.]+)", shown)
    assert [number for _, number in numbers] == [f"{error:.2f}" for heads in row.per_head["error"] for error in heads]
    shades = [float(shade) for shade, _ in numbers]
    assert max(shades) == 70
    assert shades.index(70) == [error for heads in row.per_head["error"] for error in heads].index(
        max(max(heads) for heads in row.per_head["error"])
    )


def test_name_error_and_time_are_the_first_columns(tmp_path):
    for timed, first in ((False, ["plan", "error", "ms", "slots"]), (True, ["plan", "error", "ms at 16", "ms at 64"])):
        assert re.findall(r'<th scope="col">([^<]*)', read(small(timed), tmp_path / "page.html"))[:4] == first


def test_kinds_from_a_file_are_no_html(tmp_path):
    report = small()
    odd = replace(report, rows=[replace(row, kind='"><b id="x">') for row in report.rows])
    assert "b" not in Page(read(odd, tmp_path / "page.html")).tags


def test_without_rows_there_is_a_page(tmp_path):
    assert "<details" not in read(replace(small(), rows=[]), tmp_path / "page.html")
