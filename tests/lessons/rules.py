"""What a lesson must be, so that a newcomer finishes it: each rule names what is wrong with one.

A rule is a function from a notebook to a list of faults. The limits count non-blank lines of code
without the common first cell, and all words of the Markdown cells.
"""

import ast
import io
import re
import tokenize

from nbformat.v4 import new_markdown_cell

from tools.course.lesson import CARD, HEADINGS

WORDS, LINES, CELL, COLUMNS, ASSERTS, REFERENCES = 1400, 200, 15, 100, 5, 8
EMPTY = "No record of this comparison"


def code(nb):
    return [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]


def own_code(nb):
    """The code cells after the common first one."""
    return code(nb)[1:]


def lines(source):
    return [line for line in source.splitlines() if line.strip()]


def markdown(nb):
    return "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")


def plain(source):
    """A cell without its magics; empty for a cell that is no Python."""
    if source.startswith(("%%", "!")):
        return ""
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)


def python(source):
    """The statements of a cell."""
    return ast.parse(plain(source))


def sections(nb):
    """{heading of the second level: its cells}, in order; Markdown is cut at its headings."""
    named, now = {}, []
    for cell in nb.cells:
        if cell.cell_type == "code":
            now.append(cell)
            continue
        for part in filter(None, re.split(r"^(?=## )", cell.source, flags=re.MULTILINE)):
            head = re.match(r"## (.+)$", part, re.MULTILINE)
            if head:
                now = named.setdefault(head[1].strip(), [])
            now.append(new_markdown_cell(part))
    return named


def length(nb):
    words, count = len(markdown(nb).split()), sum(len(lines(c.source)) for c in own_code(nb))
    asserts = sum(
        isinstance(node, ast.Assert) for c in own_code(nb) for node in ast.walk(python(c.source))
    )
    measured = (
        (words, WORDS, "words"),
        (count, LINES, "lines of code"),
        (asserts, ASSERTS, "asserts"),
    )
    return [f"{value} {what}, at most {most}" for value, most, what in measured if value > most]


def cells(nb):
    counts = [len(lines(cell.source)) for cell in own_code(nb)]
    return [f"a cell of {count} lines, at most {CELL}" for count in counts if count > CELL]


def columns(nb):
    return [
        f"a line of {len(line)} columns: {line[:60]}"
        for cell in code(nb)
        for line in cell.source.splitlines()
        if len(line) > COLUMNS
    ]


def statements(nb):
    """One statement per line, also after `if` and `for`."""
    wrong = []
    for cell in own_code(nb):
        seen = set()
        for node in ast.walk(python(cell.source)):
            if isinstance(node, ast.stmt) and not isinstance(node, ast.Pass):
                if node.lineno in seen:
                    wrong.append(f"two statements in one line: {cell.source.splitlines()[0]}")
                seen.add(node.lineno)
    return wrong


def strings(nb):
    """No string in pieces that Python joins."""
    wrong = []
    for cell in own_code(nb):
        was = None
        skip = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
        for token in tokenize.generate_tokens(io.StringIO(plain(cell.source)).readline):
            if token.type in skip:
                continue
            if token.type == tokenize.STRING and was == tokenize.STRING:
                wrong.append(f"a string in pieces: {token.string[:40]}")
            was = token.type
    return wrong


def anatomy(nb):
    found = list(sections(nb))
    if found == list(HEADINGS):
        return []
    return [f"its sections are {found}, and should be {list(HEADINGS)}"]


def opening(nb):
    """The first screen says what it is, what it buys, when not, the lines, and the minutes."""
    first = nb.cells[0].source
    wanted = ["**You will be able to**", "**In one line:**", "docs/glossary.md", "labs/"]
    wanted += ["| **Buys** |", "| **Not when** |", "minutes to read and run", "the exercises"]
    wanted += ["```"] if "**Paste**" not in first else []
    return [f"the first cell lacks {part!r}" for part in wanted if part not in first]


def schematic(nb):
    """A drawing with a description, in or before "The idea"."""
    named = sections(nb)
    early = [c for name in ("The problem", "The idea") for c in named.get(name, [])]
    texts = [
        "".join(output.get("data", {}).get("text/plain", ""))
        for cell in early
        for output in cell.get("outputs", [])
    ]
    if any(text.startswith("<schematic: ") for text in texts):
        return []
    return ["no schematic under The problem or The idea"]


def in_your_own_code(nb):
    """Complete code, executed: it imports, and it trains."""
    written = [c for c in sections(nb).get("In your own code", []) if c.cell_type == "code"]
    source = "\n".join(cell.source for cell in written)
    if not written or not all(cell.execution_count for cell in written):
        return ["In your own code has no executed code"]
    return [] if "import" in source else ["In your own code imports nothing"]


def card(nb):
    """When, from where, what to watch; the lines to paste stand here or on the first screen."""
    text = "\n".join(c.source for c in sections(nb).get("Decision card", []))
    wanted = CARD if "```" in nb.cells[0].source else (*CARD, "Paste")
    return [f"the decision card lacks {part!r}" for part in wanted if f"**{part}**" not in text]


def exercises(nb):
    """Three checks and one open task."""
    inside = sections(nb).get("Exercises", [])
    checks = sum(c.source.count("check(") for c in inside if c.cell_type == "code")
    faults = [] if checks == 3 else [f"{checks} exercises with checks, and not 3"]
    text = "\n".join(c.source for c in inside if c.cell_type == "markdown")
    return faults + ([] if "**Open task" in text else ["no open task"])


def references(nb):
    text = "\n".join(c.source for c in sections(nb).get("References", []))
    count = sum(line.startswith("- ") for line in text.splitlines())
    return [] if 1 <= count <= REFERENCES else [f"{count} references, 1 to {REFERENCES}"]


RULES = (
    length, cells, columns, statements, strings, anatomy, opening, schematic, in_your_own_code,
    card, exercises, references,
)  # fmt: skip


def changes(old, new):
    """A function that replaces a text of a notebook, to try a rule."""

    def change(nb):
        assert any(old in cell.source for cell in nb.cells), old
        for cell in nb.cells:
            cell.source = cell.source.replace(old, new)

    return change
