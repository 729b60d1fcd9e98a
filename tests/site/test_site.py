"""The site: every page in a real browser, without a network, in light and dark, wide and narrow."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from tools.course.notebooks import every_notebook
from tools.site.build import build
from tools.site.sources import in_prose, linked

LESSONS = {"02": Path("notebooks/02_gradient_accumulation.ipynb")}
WIDTHS = {"wide": (1400, 1000), "narrow": (390, 844)}
SHOWN = ("index.html", "notebooks/02_gradient_accumulation.html", "calculator/index.html")
SEEN_BY_AXE = (*SHOWN, "docs/techniques.html")
SERIOUS = ("serious", "critical")


def test_numbers_of_lessons_and_issues_become_links_but_not_in_code():
    text = "As before (02), (99) and `(02)`; see huggingface/peft#2171.\n```\n(02) a/b#1\n```\n"
    told = linked(text, Path("docs/glossary.md"), LESSONS)
    assert "([02](../notebooks/02_gradient_accumulation.ipynb)), (99) and `(02)`" in told
    assert "[huggingface/peft#2171](https://github.com/huggingface/peft/issues/2171)" in told
    assert told.endswith("```\n(02) a/b#1\n```\n")
    assert in_prose("a `a` [a](a) $a$", str.upper) == "A `a` [a](a) $a$"


# -- the whole site --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("built"))


def pages(site):
    return sorted(page for page in site.rglob("*.html") if "_static" not in page.parts)


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.ids, self.loaded = [], set(), []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given["id"]} if given.get("id") else set()
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img") and given.get("src"):
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") == "stylesheet":
            self.loaded.append(given["href"])


def test_every_link_of_every_page_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    read = {}
    for page in pages(site):
        read[page] = Links()
        read[page].feed(page.read_text(encoding="utf8"))
    lost = []
    for page, found in read.items():
        assert not [each for each in found.loaded if re.match("(https?:)?//", each)], page
        for link in found.links:
            parts = urlparse(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                lost.append((page.name, link))
    assert lost == []


def test_every_notebook_is_a_page_with_neighbours_formulas_and_a_copy_to_take(site):
    formulas = 0
    for path in every_notebook():
        place = path.relative_to(path.parents[2 if path.parent.name == "labs" else 1])
        page = (site / place).with_suffix(".html").read_text(encoding="utf8")
        assert 'rel="prev"' in page and 'rel="next"' in page, place
        assert f"files/{place.as_posix()}" in page, place
        copied = json.loads((site / "files" / place).read_text(encoding="utf8"))
        assert copied["nbformat"] == 4 and "MathJax" not in page, place
        formulas += page.count("<math")
    assert formulas > 100, "none is left as it was written"


def test_every_lesson_has_a_card_with_its_own_drawing(site, noted):
    shown = noted.open(site / "docs" / "lessons.html")
    drawings = shown.locator(".lesson img").evaluate_all(
        "all => all.map(one => [one.src.split('/').pop(), one.complete && one.naturalWidth > 0])"
    )
    lessons = [path.name[:2] for path in every_notebook() if path.parent.name == "notebooks"]
    assert [(name[:2], drawn) for name, drawn in drawings] == [(each, True) for each in lessons]


@pytest.mark.night
def test_every_page_opens_without_an_error_and_fits_a_phone(site, noted):
    noted.page.set_viewport_size({"width": 390, "height": 844})
    wide, bare = [], []
    for page in pages(site):
        shown = noted.open(page)
        if shown.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(page.name)
        if shown.evaluate("[...document.images].some((image) => !image.alt)"):
            bare.append(page.name)
    assert noted.wrong == [] and wide == [] and bare == []


@pytest.mark.parametrize("width", [390, 768, 1366])
def test_every_lesson_is_reached_by_the_menu_at_every_width(site, noted, width):
    noted.page.set_viewport_size({"width": width, "height": 844})
    shown = noted.open(site / "notebooks" / "02_gradient_accumulation.html")
    for button in shown.query_selector_all(".primary-toggle"):
        if button.is_visible():
            button.click()
            shown.wait_for_selector("dialog[open] a:has-text('03 Freezing')", state="visible")
    link = shown.locator("a:visible", has_text="03 Freezing").first
    link.click()
    shown.wait_for_url("**/03_freezing.html")
    for button in shown.query_selector_all(".secondary-toggle"):
        if button.is_visible():
            button.click()
            shown.wait_for_selector("dialog[open] a:has-text('Exercises')", state="visible")
    assert shown.locator("a:visible", has_text="Exercises").count() and noted.wrong == []


@pytest.mark.parametrize("width", [390, 768, 1366])
def test_cells_of_tables_stay_apart_and_code_keeps_its_lines(site, noted, width):
    noted.page.set_viewport_size({"width": width, "height": 844})
    for name in ("02_gradient_accumulation", "21_qlora"):
        shown = noted.open(site / "notebooks" / f"{name}.html")
        narrow = shown.evaluate(
            "[...document.querySelectorAll('.cell_output td, .cell_output th')].filter((cell) => "
            "parseFloat(getComputedStyle(cell).paddingLeft) < 4).length"
        )
        cut = shown.evaluate(
            "[...document.querySelectorAll('pre')].filter((code) => getComputedStyle(code)"
            ".whiteSpace !== 'pre' || (code.scrollWidth > code.clientWidth + 1 && "
            "getComputedStyle(code).overflowX === 'visible')).length"
        )
        assert (narrow, cut) == (0, 0)


def test_search_finds_the_lesson_of_a_technique_without_a_server(site, noted):
    shown = noted.open(site / "search.html", "?q=checkpointing")
    shown.wait_for_selector("#search-results li")
    assert "06 Gradient checkpointing" in shown.inner_text("#search-results")
    assert noted.wrong == []


def luminance(shown):
    colour = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3])


@pytest.mark.night
def test_pages_are_dark_where_the_reader_s_system_is(site, noted, shoot):
    for scheme in ("light", "dark"):
        noted.page.emulate_media(color_scheme=scheme)
        for place in SHOWN:
            shown = noted.open(site / place)
            if "calculator" in place:
                shown.wait_for_selector("#answer[aria-busy=false]")
            assert (luminance(shown) > 600) == (scheme == "light"), place
            shoot(f"{Path(place).with_suffix('').as_posix().replace('/', '-')}-{scheme}")
    assert noted.wrong == []


@pytest.mark.parametrize(
    "place, scheme, width",
    [
        *((place, scheme, "wide") for place in SEEN_BY_AXE for scheme in ("light", "dark")),
        *((place, "light", "narrow") for place in SEEN_BY_AXE),  # what scrolls there, has a focus
    ],
)
@pytest.mark.night
def test_axe_finds_nothing_serious(site, noted, place, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    noted.page.emulate_media(color_scheme=scheme)
    noted.page.set_viewport_size(dict(zip(("width", "height"), WIDTHS[width])))
    shown = noted.open(site / place)
    if "calculator" in place:
        shown.wait_for_selector("#answer[aria-busy=false]")
    # The theme's buttons go over to the dark colours in 0.15 s, which are read here at their end.
    shown.add_style_tag(content="* { transition: none !important }")
    found = axe.run(shown).response["violations"]
    assert [
        (each["id"], [node["target"] for node in each["nodes"]][:5])
        for each in found
        if each["impact"] in SERIOUS
    ] == []
