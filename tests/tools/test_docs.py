"""The pages for people name only files, modules, names, links and make targets that exist."""

import re
from pathlib import Path

import pytest

from tests.lessons.test_names import exists
from tests.small import ROOT
from tests.test_architecture import LAYERS
from tools.course.clean import PATH

NOT_CHECKED = ("checked-programs.md",)  # it names files of other repositories
PAGES = [
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "results/README.md")
    if path.name not in NOT_CHECKED
]
KEPT = sorted(
    path
    for folder in ("docs", "results", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".csv", ".json", ".md")
)
MOST_WORDS = 1500  # of a page of docs/; its rows of data lie in data/
FEWER_WORDS = {"accuracy.md": 1200, "gpu-time.md": 1200}
FOLDERS = ("tight_fit", "helpers", "by_hand", "exercises", "benchmarks", "tools")
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf8"), re.M))


def text_of(page: Path) -> str:
    """A page without what the changelog's tables name as it was before."""
    text = page.read_text(encoding="utf8")
    if page.name == "CHANGELOG.md":
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.M)
        text = text.replace("python -m helpers.course", "").replace("python -m helpers.choose", "")
    return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    """Modules and names, links and files, targets of make."""
    text = text_of(page)
    named = re.findall(rf"`(?:python -m )?((?:{'|'.join(FOLDERS)})(?:\.\w+)+)", text)
    assert [name for name in named if not name.endswith(".py") and not exists(name)] == []
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    files = re.findall(r"`((?:docs|tests|notebooks|" + "|".join(FOLDERS) + r")/[\w./-]*)`", text)
    assert [file for file in files if "NN" not in file and not (ROOT / file).exists()] == []
    code = re.findall(r"`[^`\n]+`|^make .*", text, re.M)
    assert set(re.findall(r"\bmake ([a-z-]+)\b", "\n".join(code))) <= TARGETS


def test_the_architecture_page_draws_the_layers_that_are_tested():
    rows = re.findall(
        r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs/architecture.md").read_text("utf8"), re.M
    )
    layers: dict[int, set[str]] = {}
    for number, packages in rows:
        layers.setdefault(int(number), set()).update(re.findall(r"[\w/]+", packages))
    assert [layers[number] for number in sorted(layers)] == list(LAYERS)


def test_docstrings_name_rooms_of_the_planner_as_they_are_today():
    """Such as `layouts.facts.facts_of`: `tight_fit.` is left out there."""
    rooms = {path.parent.name for path in ROOT.glob("tight_fit/*/__init__.py")}
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        for name in re.findall(
            r"`([a-z]+\.(?!json\b)[a-z_]+\.\w+)`", file.read_text(encoding="utf8")
        )
        if name.partition(".")[0] in rooms and not exists(f"tight_fit.{name}")
    ]
    assert wrong == []


def test_what_is_kept_names_no_path_of_a_machine():
    for path in KEPT:
        for line in path.read_text(encoding="utf8").splitlines():
            assert not PATH.search(line), (path.name, line[:200])


def test_the_hours_of_a_week_are_those_that_its_lessons_say():
    text = (ROOT / "docs" / "teaching.md").read_text(encoding="utf8")
    weeks = re.findall(r"^\| (\d+) \| (.*?) \| ([\d.]+) \|", text, re.M)
    total = 0.0
    for week, lessons, hours in weeks:
        minutes = 0
        for path in re.findall(r"\(\.\./(notebooks/\d\d_\w+\.ipynb)\)", lessons):
            said = (ROOT / path).read_text(encoding="utf8")
            match = re.search(r"About (\d+) minutes to read and run, (\d+) for the exercises", said)
            assert match, path
            minutes += int(match[1]) + int(match[2])
        minutes += 60 if "a review" in lessons else 0
        assert float(hours) == round(minutes / 30) / 2, week
        total += float(hours)
    assert len(weeks) == 10 and f"exercises together: {total:g}," in text.replace("\n", " ")


def test_a_page_of_docs_is_a_page():
    for page in (ROOT / "docs").glob("*.md"):
        words, most = len(page.read_text("utf8").split()), FEWER_WORDS.get(page.name, MOST_WORDS)
        if page.name != "glossary.md":  # a list of words
            assert words <= most, f"{page.name}: {words} words, rows of data belong into docs/data"
