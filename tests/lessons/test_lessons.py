"""Every lesson keeps a lesson's limits and anatomy, and every rule finds what breaks it."""

import re
from functools import partial

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.lessons import rules, test_labs
from tools.course import NOTEBOOKS, opening

LESSONS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lesson(path):
    nb = nbformat.read(path, as_version=4)
    assert [fault for rule in rules.RULES for fault in rule(nb)] == []


ONE_GPU = [path for path in LESSONS if path.name[:2] <= "12" or path.name[:2] == "17"]
NOT_FUSED = "11"  # Fabric cannot clip what a fused optimizer unscales: lab 11 shows it


@pytest.mark.parametrize("path", ONE_GPU, ids=lambda path: path.stem)
def test_loops_take_the_adamw_that_is_planned(path):
    """The default one holds four more bytes per parameter in its step than the plans say."""
    if path.name.startswith(NOT_FUSED):
        return
    made = re.compile(r"torch\.optim\.AdamW\((?!model\.parameters\(\), \*\*options\)).*")
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    assert [call for call in made.findall(text) if "fused=True" not in call] == []


def good():
    """A notebook that breaks no rule."""
    drawing = new_output(
        "display_data", {"image/svg+xml": "<svg/>", "text/plain": "<schematic: two boxes>"}
    )
    screen = (
        "# 02 Title\n\n**You will be able to** do it.\n\n**In one line:** do it.\n\n"
        "| | |\n|---|---|\n| **Buys** | room |\n| **Not when** | it fits |\n\n"
        "```python\nx\n```\n\n40 minutes to read and run, 30 for the exercises. "
        "[glossary](../docs/glossary.md), [lab](labs/02_title_lab.ipynb)"
    )
    cells = [new_markdown_cell(screen), new_code_cell(opening.first_cell())]
    for heading in rules.HEADINGS:
        cells.append(new_markdown_cell(f"## {heading}"))
        if heading == "The idea":
            cells.append(new_code_cell('drawing("02_idea")', outputs=[drawing]))
        if heading == "In your own code":
            cells.append(new_code_cell("import torch\n\n%time\ntorch.ones(1)"))
        if heading == "Decision card":
            cells[-1].source += "\n\n" + "\n".join(f"**{part}** x" for part in rules.CARD)
        if heading == "Exercises":
            cells += [new_code_cell(f'check("02.{k}", None)') for k in (1, 2, 3)]
            cells.append(new_markdown_cell("**Open task.** Predict."))
        if heading == "References":
            cells[-1].source += "\n\n- One"
    for count, cell in enumerate((c for c in cells if c.cell_type == "code"), 1):
        cell.execution_count = count
    return new_notebook(cells=cells)


def adds(source):
    return lambda nb: nb.cells.append(new_code_cell(source))


def says(text):
    return lambda nb: nb.cells.append(new_markdown_cell(text))


without = partial(rules.changes, new="")


def unexecuted(nb):
    rules.sections(nb)["In your own code"][-1].execution_count = None


BROKEN = [
    (rules.length, says("word " * 1400)),
    (rules.length, lambda nb: [adds("x = 1\n" * 15)(nb) for _ in range(15)]),
    (rules.length, adds("assert True\n" * 6)), (rules.cells, adds("x = 1\n" * 16)),
    (rules.columns, adds("x = 1" + " " * 100 + "# far")), (rules.statements, adds("x = 1; y = 2")),
    (rules.statements, adds("if True: y = 2")), (rules.strings, adds('print("in " "pieces")')),
    (rules.anatomy, says("## Verify")), (rules.anatomy, without("## The idea")),
    (rules.opening, without("**In one line:**")), (rules.opening, without("docs/glossary.md")),
    (rules.opening, without("| **Not when** |")),
    (rules.opening, without("minutes to read and run")),
    (rules.schematic, lambda nb: [cell.update(outputs=[]) for cell in rules.code(nb)]),
    (rules.in_your_own_code, unexecuted), (rules.in_your_own_code, without("import torch")),
    (rules.card, without("**Watch**")),
    (rules.card, lambda nb: nb.cells[0].update(source=nb.cells[0].source.replace("```", ""))),
    (rules.exercises, without('check("02.3", None)')), (rules.exercises, without("**Open task.**")),
    (rules.references, without("- One")),
    (rules.references, says("## References\n\n" + "- One\n" * 9)),
]  # fmt: skip


GOOD_AND_BROKEN = [(rules.RULES, good, BROKEN), (test_labs.RULES, test_labs.good, test_labs.BROKEN)]
KINDS = ("lesson", "lab")


@pytest.mark.parametrize("all_rules, make, broken", GOOD_AND_BROKEN, ids=KINDS)
def test_a_good_one_breaks_no_rule_and_every_rule_is_tried(all_rules, make, broken):
    assert [fault for rule in all_rules for fault in rule(make())] == []
    assert {rule for rule, _ in broken} == set(all_rules)


@pytest.mark.parametrize(
    "make, rule, breaks",
    [(make, rule, breaks) for _, make, broken in GOOD_AND_BROKEN for rule, breaks in broken],
)
def test_a_rule_finds_what_breaks_it(make, rule, breaks):
    nb = make()
    breaks(nb)
    assert rule(nb)
