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
    report, sample = small()
    save_page(report, folder / "small.html", sample)
    save_page(report, folder / "bare.html")
    save_page(*((shown := small(timed=True))[0], folder / "timed.html", shown[1]))
    save_page(*((shown := large(report))[0], folder / "large.html", shown[1]))
    return folder


@pytest.fixture
def visit(browser, files):
    """Open a page offline; at the end nothing was complained about."""
    said, contexts = [], []

    def visit(name="small", width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.extend([request.url] if request.url.startswith("http") else []))
        page.goto((files / f"{name}.html").as_uri())
        page.wait_for_selector("#pareto .main-svg")
        if name != "bare":
            page.wait_for_selector("#keys")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert said == []


def rows(page):
    return page.locator("#table tbody tr")


def test_filters_filter_the_table_and_both_charts(visit):
    page = visit()
    assert rows(page).count() == 8
    page.get_by_label("window", exact=True).uncheck()
    assert rows(page).count() == 6
    for chart in ("pareto", "time"):
        names = page.evaluate(f"document.getElementById('{chart}').data.map((line) => line.name)")
        assert "window" not in names
        assert "fewkeys budget" in names
    page.get_by_label("8", exact=True).uncheck()
    assert page.locator("#table tbody th").all_inner_texts()[:2] == ["fewkeys budget 16 *", "moments 16"]
    assert "of 8 rows" in page.locator("#shown").inner_text()
    page.get_by_label("Methods: none").click()
    assert rows(page).count() == 0


def test_the_table_sorts_both_ways(visit):
    page = visit()
    column = page.locator("#table thead th", has_text="error")

    def errors():
        return [float(text) for text in page.locator("#table tbody td:nth-child(2)").all_inner_texts()]

    column.locator("button").click()
    assert (column.get_attribute("aria-sort"), errors()) == ("ascending", sorted(errors()))
    column.locator("button").press("Enter")
    assert (column.get_attribute("aria-sort"), errors()) == ("descending", sorted(errors(), reverse=True))


def test_a_click_on_a_head_shows_it_and_arrows_go_on(visit):
    page = visit()
    page.locator("#maps").get_by_label("layer 1, head 2").first.click()
    assert page.locator("#head-says").inner_text().startswith("Layer 1, head 2: error")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert page.locator("#head-says").inner_text().startswith("Layer 0, head 3: error")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("layer 0, head 3")


def test_two_plans_stand_side_by_side_with_what_a_query_keeps(visit):
    page = visit()
    page.get_by_label("Plan A", exact=True).select_option(label="window, 8 slots")
    page.get_by_label("Plan B", exact=True).select_option(label="fewkeys budget, 16 slots")
    page.get_by_label("Query (its position)").select_option(index=4)
    left, right = page.locator("#look .pair > div").all()
    assert "Plan A: window, 8 slots" in left.inner_text()
    assert "It drops the other keys." in left.inner_text()
    asked = int(page.evaluate("data.sample.queries[4]"))
    kept = left.locator(".tokens span").evaluate_all(
        "all => all.flatMap((one, j) => one.classList.contains('kept') ? [j] : [])"
    )
    assert kept == list(range(asked - 4, asked + 4))
    button = right.locator(".stand button").first
    button.click()
    assert right.locator(".tokens span.lit").count() == int(button.inner_text().split()[1])
    assert left.locator(".tokens span.lit").count() == 0
    weights = [float(text) for text in page.locator("#keys tbody td:nth-child(2)").all_inner_texts()]
    assert weights == sorted(weights, reverse=True)


def test_a_point_of_the_chart_says_what_it_is_and_becomes_plan_a(visit):
    page = visit()
    page.get_by_label("Methods: none").click()
    page.get_by_label("moments").check()
    point = page.locator("#time .scatterlayer .point").first
    point.hover(force=True)
    assert "moments, 16 slots" in page.locator("#time .hoverlayer").text_content()
    box = point.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "Plan A: moments" in page.locator("#look").inner_text()


def test_it_opens_with_a_sentence_pictures_and_a_query_whose_kept_keys_are_seen(visit):
    page = visit("timed")
    assert page.locator("h1").inner_text().startswith("Up to about 80 tokens use exact attention; for")
    heights = [page.locator(place).bounding_box()["y"] for place in ("h1", "#time", "#filters", "#table")]
    assert heights == sorted(heights)
    assert heights[1] < 300
    assert page.locator("#table tbody th").all_inner_texts()[:3] == [
        "exact",
        "fewkeys budget 8 *",
        "fewkeys budget 16 *",
    ]
    lines = page.evaluate("document.getElementById('time').data.map((line) => [line.name, line.y])")
    assert lines == [
        ["fewkeys budget, 8 slots", [2, 4, 8]],
        ["fewkeys budget, 16 slots", [3, 6, 12]],
        ["exact", [1, 5, 32]],
    ]
    box = page.locator("#look .tokens").first
    frame = box.bounding_box()
    for place in (".asked", ".kept"):
        token = box.locator(place).first.bounding_box()
        assert frame["y"] <= token["y"] <= frame["y"] + frame["height"]
    heavy = page.evaluate(
        "at('exact', state.layer, state.head, state.query)"
        ".filter((w, j) => w >= 327 && view(state.plans[0]).kept[j]).length"
    )
    assert heavy >= 5


def test_a_star_marks_the_best_at_each_number_of_slots(visit):
    stars = [name for name in visit().locator("#table tbody th").all_inner_texts() if name.endswith("*")]
    assert stars == ["fewkeys budget 8 *", "fewkeys budget 16 *"]


@pytest.mark.parametrize("name", ["small", "timed"])
def test_a_phone_shows_name_error_and_time_first(visit, name):
    page = visit(name, width=390)
    frame = page.locator("#rows .scroll").bounding_box()
    head = page.locator("#table thead th")
    seen = [
        one.inner_text()
        for one in head.all()
        if (box := one.bounding_box()) and box["x"] + box["width"] <= frame["x"] + frame["width"] + 1
    ]
    assert [text.strip(" ↑") for text in seen[:2]] == ["plan", "error"]
    assert seen[2:5] == (["ms", "speed", "slots"] if name == "small" else ["ms", "ms at 16", "ms at 256"])
    times = page.locator("#table tbody td:nth-child(3)").all_inner_texts()
    assert all(float(text.replace(",", "")) > 0 for text in times)
    keys = page.locator("#look .scroll")
    assert keys.evaluate("(box) => box.scrollWidth <= box.clientWidth")


@pytest.mark.parametrize("width", [390, 1280])
def test_names_of_lines_cover_no_point(visit, width):
    page = visit("timed", width=width)
    name = page.locator("#time .annotation-text", has_text="budget").bounding_box()
    points = [one.bounding_box() for one in page.locator("#time .scatterlayer .point").all()]
    assert len(points) == 9
    for point in points:
        across = point["x"] < name["x"] + name["width"] and name["x"] < point["x"] + point["width"]
        assert not (across and point["y"] < name["y"] + name["height"] and name["y"] < point["y"] + point["height"])


def test_no_two_methods_look_alike(visit):
    looks = visit().evaluate("methods.map((name) => Object.values(data.looks[name]).join())")
    assert len(set(looks)) == len(looks) == 6


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)])
def test_it_fits_the_screen_and_can_be_read(visit, scheme, width):
    page = visit(width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (light == "rgb(255, 255, 255)") == (scheme == "light")
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    controls = page.locator("input, select, button")
    names = controls.evaluate_all("all => all.map((one) => one.labels?.length || one.ariaLabel || one.textContent)")
    assert len(names) > 30
    assert all(names)
    assert "mine" not in page.locator("b").all_text_contents()


def test_without_a_sample_it_says_so(visit):
    assert "without a sample" in visit("bare").locator("#look").inner_text()


def test_twelve_layers_of_twelve_heads_are_light_and_quick(visit, files):
    assert (files / "large.html").stat().st_size < 15e6
    page = visit("large")
    (paint,) = page.evaluate("performance.getEntriesByName('first-paint').map((one) => one.startTime)")
    assert paint < 2000
