"""The page in Chromium: `make browser`. Not part of `make test`, which may run where no browser is."""

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

from fewkeys.report.page import save_page
from pages import large, small

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert program, "install chromium, or name it in the environment variable CHROMIUM"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, report in {"small": small(), "timed": small(timed=True), "large": large(small())}.items():
        save_page(report, folder / f"{name}.html")
    return folder


@pytest.fixture
def visit(browser, files):
    """Open a page offline; at the end nothing was complained about."""
    said, contexts = [], []

    def visit(name="small", width=1280):
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((files / f"{name}.html").as_uri())
        page.wait_for_selector("#keys td")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert said == []


def test_the_table_sorts_both_ways(visit):
    page = visit()
    column = page.locator("#table thead th", has_text="error")

    def errors():
        return [float(text) for text in page.locator("#table tbody td:nth-child(2)").all_inner_texts()]

    column.locator("button").click()
    assert (column.get_attribute("aria-sort"), errors()) == ("ascending", sorted(errors()))
    column.locator("button").press("Enter")
    assert (column.get_attribute("aria-sort"), errors()) == ("descending", sorted(errors(), reverse=True))


def test_a_plan_a_head_and_a_query_are_chosen(visit):
    page = visit()
    page.get_by_label("Plan").select_option(label="window, 8 slots")
    page.get_by_label("layer 1, head 2").click()
    page.get_by_label("Query").select_option(index=2)
    assert page.locator("#says").inner_text().startswith("Layer 1, head 2, error")
    asked = int(page.evaluate("data.sample.queries[2]"))
    rows = page.locator("#keys tr").all_inner_texts()[1:]
    kept = {int(row.split("\t")[1]) for row in rows if row.endswith("\tkept")}
    seen = {int(row.split("\t")[1]) for row in rows}
    assert kept == seen & set(range(asked - 4, asked + 4))
    weights = [float(row.split("\t")[2]) for row in rows]
    assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["small", "timed", "large"])
def test_it_fits_the_screen(visit, files, name, width):
    page = visit(name, width)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert "mine" not in page.locator("b").all_text_contents()
    assert (files / f"{name}.html").stat().st_size < 3e6
