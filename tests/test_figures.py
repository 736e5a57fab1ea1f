"""Every figure between marks in a page is what the JSON of its run says; `python -m docs.figures` writes them."""

import re

import pytest
from docs.figures.__main__ import FIGURES, MARK, PAGES, filled, main
from docs.figures.sources import table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name + "/" + page.name)
def test_pages_say_what_their_json_says(page):
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, "stale: run `python -m docs.figures`"
    assert text.count("<!-- =") == text.count("<!-- / -->") == len(MARK.findall(text)), "a mark without its other half"
    inline = re.search(r"^<!-- =\S+ -->(?!\n)", text, re.M)
    assert inline is None, "a mark that begins a line ends the paragraph"


def test_every_figure_is_shown_somewhere():
    named = {mark["name"] for page in PAGES for mark in MARK.finditer(page.read_text(encoding="utf-8"))}
    assert named == set(FIGURES)


def test_a_stale_figure_is_written_anew():
    figures = {"a.b": lambda: "31.1", "rows": lambda: table(["x"], [["|q|"]])}
    page = "It is <!-- =a.b -->30<!-- / --> times:\n\n<!-- =rows -->\n\nold\n\n<!-- / -->\n"
    new = "It is <!-- =a.b -->31.1<!-- / --> times:\n\n<!-- =rows -->\n\n| x |\n| --- |\n| \\|q\\| |\n\n<!-- / -->\n"
    assert filled(page, figures) == filled(new, figures) == new
    with pytest.raises(ValueError, match=r"^<!-- =none -->: expected a name of docs/figures, got none$"):
        filled("<!-- =none -->1<!-- / -->", figures)


def test_check_names_the_stale_page_and_writes_nothing(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- =demo.budget -->9<!-- / -->", encoding="utf-8")
    monkeypatch.setattr("docs.figures.__main__.PAGES", [page])
    monkeypatch.setattr("docs.figures.__main__.ROOT", tmp_path)
    assert main(["--check"]) == 1
    assert capsys.readouterr().out == "stale: page.md\n"
    assert page.read_text(encoding="utf-8") == "<!-- =demo.budget -->9<!-- / -->"
    assert main([]) == 0
    assert page.read_text(encoding="utf-8") != "<!-- =demo.budget -->9<!-- / -->"
    assert main(["--check"]) == 0
