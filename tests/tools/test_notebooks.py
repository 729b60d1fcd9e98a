"""What a committed notebook must be: executed, in the course's form, labelled, without traces.

Each rule is a function from a notebook to what is wrong with it.
"""

import ast
import re
import subprocess

import nbformat
import pytest
from nbformat.v4 import new_notebook

from tests.lessons.rules import code, lines, plain
from tools.course import ROOT, badges, clean, opening
from tools.course.notebooks import every_notebook

PATHS = every_notebook()
# A number with a unit: 9.4 GiB, 12 %, 95\%, 2.1x, 3 seconds; not 16 × 256, which is a shape.
MEASURED = re.compile(
    r"\d\s*(?:[KMGT]i?B\b|kB\b|\\?%|×(?!\s*\d)|[xX]\b(?!\s*\d)|(?:m|µ)?s\b|seconds?\b)"
)
CITED = "<!-- cited -->"
ACCURACY = re.compile(r"accura", re.IGNORECASE)


def executed(nb):
    counts = [cell.execution_count for cell in code(nb)]
    right = counts and counts == list(range(1, len(counts) + 1))
    return [] if right else [f"execution counts are {counts}"]


def outputs(nb):
    return [output for cell in code(nb) for output in cell.outputs]


def errors(nb):
    """Errors, words on stderr, and widgets, which do nothing without their kernel."""
    wrong = ["widget state is saved"] if "widgets" in nb.metadata else []
    for output in outputs(nb):
        if output.output_type == "error":
            wrong.append(f"an error in an output: {output.ename}")
        if output.get("name") == "stderr" and output.text.strip():
            wrong.append(f"text on stderr: {output.text[:80]}")
        if clean.WIDGET in output.get("data", {}):
            wrong.append("a widget without its kernel")
    return wrong


def long_cells(nb, most=35):
    counts = [len(lines(cell.source)) for cell in code(nb)]
    return [f"a cell of {count} lines" for count in counts if count > most]


def compared(nb):
    cells = [cell for cell in code(nb) if "nbval-check-output" in cell.metadata.get("tags", [])]
    empty = ["an output is compared where there is none" for cell in cells if not cell.outputs]
    return empty if cells else ["no output is compared"]


def pictures(nb):
    kinds = {kind for output in outputs(nb) for kind in output.get("data", {})}
    return [] if kinds & {"image/png", "image/svg+xml"} else ["not one picture"]


def undescribed(nb):
    """Figures that a cell closes or shows by itself, so that they have no words beside them."""
    return [
        f"{call} leaves a figure without words: use plots.described"
        for cell in code(nb)
        for call in ("plt.close(", "plt.show(")
        if call in cell.source
    ]


def first_cell(nb):
    right = code(nb) and code(nb)[0].source == opening.first_cell()
    return [] if right else ["the first cell is not the common one"]


# A number of the first screen, with its unit.
SHOWN = re.compile(r"\d[\d.,]*\s*(?:[KMGT]i?B\b|kB\b|%|(?:m|µ)?s\b|seconds?\b)")


def first_screen(nb):
    """Numbers of the first cell, but cited ones, that no output below holds on every machine."""
    rows = [r for r in nb.cells[0].source.splitlines() if not r.rstrip(" |").endswith(CITED)]
    numbers = SHOWN.findall("\n".join(rows))
    fixed = [c for c in code(nb) if "nbval-check-output" in c.metadata.get("tags", [])]
    said = " ".join(str(cell.outputs) for cell in fixed)
    return [
        f"a number of the first screen that no output below shows: {number}"
        for number in numbers
        if not re.search(rf"(?<![\d.,]){re.escape(number)}", said)
    ]


def prose(nb):
    """Numbers with a unit in Markdown, but for lines that cite them, and for the first screen."""
    texts = [cell.source for cell in nb.cells[1:] if cell.cell_type == "markdown"]
    rows = [row for text in texts for row in text.splitlines()]
    rows = [row for row in rows if not row.rstrip(" |").endswith(CITED)]
    rows = [re.sub(r"\]\([^)]*\)|https?://\S+", "]", row) for row in rows]
    return [
        f"a number that no code made: {row.strip()[:80]}" for row in rows if MEASURED.search(row)
    ]


def random_accuracy(nb):
    """Outputs with an accuracy that do not say that the recipe or run has random weights."""
    random, wrong = set(), []
    for cell in code(nb):
        uses = _uses_random(cell.source, random)
        said = "\n".join(
            text
            for number, where, text in clean.texts(new_notebook(cells=[cell]))
            if where == "output"
        )
        if uses and ACCURACY.search(said) and "random weights" not in said:
            wrong.append(f"an accuracy of random weights without a label: {said.strip()[:80]!r}")
    return wrong


def _uses_random(source, random):
    """Whether code names weights="random" or a name bound to it; adds the names that it binds."""
    uses = False
    for statement in ast.parse(plain(source)).body:
        inside = list(ast.walk(statement))
        names = [node for node in inside if isinstance(node, ast.Name)]
        given = any(
            isinstance(node, ast.keyword)
            and node.arg == "weights"
            and isinstance(node.value, ast.Constant)
            and node.value.value == "random"
            for node in inside
        )
        if given or random & {node.id for node in names if isinstance(node.ctx, ast.Load)}:
            uses = True
            random |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
            random |= {node.name for node in inside if isinstance(node, ast.FunctionDef)}
    return uses


RULES = [
    executed, errors, clean.paths, long_cells, compared, pictures, undescribed,
    first_cell, first_screen, prose, random_accuracy,
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook(path):
    text = path.read_text(encoding="utf8")
    nb = nbformat.reads(text, as_version=4)
    nbformat.validate(nb)
    assert [fault for rule in RULES for fault in rule(nb)] == []
    cleaned = nbformat.writes(clean.clean(nb))
    assert cleaned.rstrip("\n") + "\n" == text, "`make notebooks N=NN` cleans it"


def test_badges_are_fresh():
    assert not [path.name for path in badges.stale()], "run `make badges`"


# What fetches or opens this project: an address that names it, a badge, a clone, an installation.
WAY_HERE = re.compile(
    r"https?://[^\s\"')\]]*tight[-_]?fit[^\s\"')\]]*"
    r"|https?://(?:colab\.research\.google|(?:www\.)?kaggle)\.com/(?:github|kernels)[^\s\"')\]]*"
    r"|git clone(?: -\S+)* +(?:https?:|git@)\S+|\"clone\"[^\n]*https?:[^\n]*"
    r"|git\+(?:https?|ssh|git)://\S+",
    re.IGNORECASE,
)
# Programs and tests that hold such words, and no address of their own.
TEMPLATES = {
    "tools/course/badges.py",
    "tests/tools/test_notebooks.py",
}


def test_no_address_but_the_setting_s_leads_to_this_project():
    """Whoever owns an address that notebooks fetch runs code on every reader's machine."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("This is no checkout: git names no files here.")
    owner = opening.repository().removeprefix("https://github.com/")  # badges name it without it
    read, strange = 0, {}
    for name in set(listed.stdout.splitlines()) - TEMPLATES:
        if (ROOT / name).suffix in {".ipynb", ".md", ".py", ".toml", ".cff", ".js", ".html"}:
            ways = WAY_HERE.findall((ROOT / name).read_text(encoding="utf8"))
            if others := [way for way in ways if not owner or owner not in way]:
                strange[name] = others
            read += 1
    assert read > 300, "git named too few files"
    assert strange == {}, (
        "name the address in pyproject.toml ([tool.tight-fit] repository) and run `make badges`"
    )
