"""Every lab is optional, lists its sections, and has sections that stand alone.

A section is what stands under one heading of the second level. It may use what the cells of its
lab define before the first section, or under the heading "Imports", and what it defines itself; so
a reader runs these cells and that section and no other.
"""

import builtins
import re
import symtable

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.lessons import rules
from tests.lessons.rules import changes
from tools.course import NOTEBOOKS, opening

LABS = sorted((NOTEBOOKS / "labs").glob("[0-9][0-9]_*_lab.ipynb"))
FOR_ALL = "Imports"  # the heading that a lab may give to the cells which every section needs
UNLISTED = (FOR_ALL, "References")
KNOWN = {*dir(builtins), "__name__", "display", "get_ipython"}  # what a notebook has by itself
LISTED = re.compile(r"^- \*\*(.+?)\*\*", re.MULTILINE)
WRITTEN = re.compile(r"%%writefile (?:-a )?(\S+)")
LAUNCHED = re.compile(r"""launch\(\s*["'](\S+?\.py)["']""")


def sections(nb):
    """(code cells for all sections, {heading: code cells of the section}), in order."""
    shared, named = [], {}
    now = shared
    for cell in nb.cells:
        if cell.cell_type == "code":
            now.append(cell)
            continue
        for heading in headings(cell):
            now = shared if heading == FOR_ALL else named.setdefault(heading, [])
    return shared, named


def headings(cell):
    """The headings of the second level in a Markdown cell; code between fences has none."""
    text = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
    return [line[3:].strip() for line in text.splitlines() if line.startswith("## ")]


def names(cell):
    """(names that a cell defines, that it uses at once, that its functions and classes use)."""
    top = symtable.symtable(rules.plain(cell.source), "cell", "exec")
    defined = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    at_once = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    inside, tables = set(), top.get_children()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        inside |= {s.get_name() for s in table.get_symbols() if s.is_global()}
    return defined, at_once, inside


def stands_alone(nb):
    """Names and scripts that a section uses, and which it gets from another section only.

    What a cell uses at once must be there before or in that cell; what a function uses may come in
    a later cell of the section.
    """
    shared, named = sections(nb)
    for_all = KNOWN.union(*(names(cell)[0] for cell in shared))
    wrong = []
    for heading, cells in named.items():
        there, scripts, missing, inside = set(for_all), set(scripts_written(shared)), set(), set()
        for cell in cells:
            defined, at_once, later = names(cell)
            there |= defined
            inside |= later
            scripts |= set(scripts_written([cell]))
            missing |= at_once - there
            missing |= set(LAUNCHED.findall(cell.source)) - scripts
        missing |= inside - there
        wrong += [f"{heading!r} uses {name}, which it does not define" for name in sorted(missing)]
    return wrong


def scripts_written(cells):
    return [name for cell in cells for name in WRITTEN.findall(cell.source)]


def says_optional(nb):
    text = nb.cells[0].source
    return [] if "optional" in text else ["the first cell does not say that the lab is optional"]


def lists_sections(nb):
    """The first cell lists all sections in their order, each as `- **Name**: what it shows`."""
    listed = LISTED.findall(nb.cells[0].source)
    found = [
        heading
        for cell in nb.cells
        if cell.cell_type == "markdown"
        for heading in headings(cell)
        if heading not in UNLISTED
    ]
    return [] if listed == found else [f"it lists {listed}, and has the sections {found}"]


RULES = (stands_alone, says_optional, lists_sections, rules.columns)


def test_there_is_a_lab_for_each_lesson():
    lessons = sorted(path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    assert [path.stem for path in LABS] == [f"{lesson}_lab" for lesson in lessons]


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_lab(path):
    nb = nbformat.read(path, as_version=4)
    assert [fault for rule in RULES for fault in rule(nb)] == []


# A lab that breaks no rule, and what breaks each; test_lessons.py tries them.


def good():
    """A lab that breaks no rule."""
    first = (
        "# 02 Title: lab\n\nThis lab is **optional**.\n\n- **One**: it counts\n- **Two**: it adds"
    )
    cells = [
        new_markdown_cell(first),
        new_code_cell(opening.first_cell()),
        new_code_cell("import math\n\nfrom helpers.parallel import launch\n\nHALF = 0.5"),
        new_markdown_cell("Some words.\n\n## One"),
        new_code_cell("def root(x):\n    y = math.sqrt(x)\n    return y + later()"),
        new_markdown_cell("### A part\n\n```\n## no heading\n```"),
        new_code_cell(
            "def later():\n    return HALF\n\n\n%time root(2.0)\nparts = {n: n for n in 'ab'}"
        ),
        new_markdown_cell("More.\n\n## Two\n\nAnd more."),
        new_code_cell("%%writefile script.py\nprint(undefined)"),
        new_code_cell("x = HALF\nlaunch('script.py', ranks=2)\ndisplay([x for y in (1, 2)])"),
        new_markdown_cell("## References"),
    ]
    return new_notebook(cells=cells)


def adds(source):
    """A code cell at the end of the second section."""
    return lambda nb: nb.cells.insert(-1, new_code_cell(source))


BROKEN = [
    (stands_alone, adds("parts")),  # a name of another section
    (stands_alone, adds("root(2.0)")),  # its function
    (stands_alone, adds("def again():\n    return later()")),  # from within a function
    (stands_alone, adds("[part for part in parts]")),
    (stands_alone, adds("class Part:\n    size = len(parts)")),
    (stands_alone, adds("z = nowhere")),  # a name of no section
    (stands_alone, changes("HALF = 0.5", "")),
    (stands_alone, adds("launch('other.py', ranks=2)")),  # a script that it does not write
    (stands_alone, changes("%%writefile script.py\n", "%%writefile another.py\n")),
    (stands_alone, changes("### A part", "## A section")),  # `later` is now in the next section
    (stands_alone, changes("def root(x):", "now = parts\n\n\ndef root(x):")),  # defined after it
    (says_optional, changes("**optional**", "long")),
    (lists_sections, changes("- **Two**: it adds", "")),
    (lists_sections, changes("\n\n## Two", "\n\n## Due")),
    (lists_sections, changes("## References", "## Three")),
    (
        lists_sections,
        changes("- **One**: it counts\n- **Two**: it adds", "- **Two**: b\n- **One**: a"),
    ),
    (rules.columns, adds("z = 1" + " " * 100 + "# far")),
]


def test_cells_under_imports_are_for_all_sections():
    nb = good()
    nb.cells.insert(2, new_markdown_cell("## Imports"))
    assert stands_alone(nb) == []
