"""Pages of `make run`: one file each, which needs no network and links to its neighbours."""

import base64
import io
import re

import nbformat
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from helpers.plots import drawing
from tools.course import BUILD, ROOT, badges, pages
from tools.course.notebooks import every_notebook

LINK = re.compile(r'href="(?![a-z]+:|#)([^"#]*)')


def page(*texts, outputs=(), path=ROOT / "notebooks" / "02_a.ipynb", beside=()):
    cells = [new_markdown_cell(text) for text in texts]
    notebook = new_notebook(cells=[*cells, new_code_cell("1", outputs=list(outputs))])
    return pages.html(notebook, path, BUILD / "html", beside)


def test_nothing_is_loaded_from_elsewhere_and_formulas_are_mathml():
    badge = f"[![Open](https://colab.example/badge.svg)](https://colab.example) {badges.MARK}"
    shown = page(f"# Title\n\n{badge}\n\n$a_1 * b_2$ and $$\\frac{{a}}{{b}}$$, `$HOME * $PATH`")
    assert shown.count("<math") == 2 and "<mfrac>" in shown and "$HOME * $PATH" in shown
    assert "$a_1" not in shown and "badge.svg" not in shown and "MathJax" not in shown
    assert not re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//[^"]*"', shown)


def test_every_link_of_every_page_of_make_run_leads_somewhere():
    """As after `make run`: to the pages of the first lessons, and else to the repository."""
    made = {path.stem for path in every_notebook()[:3]}
    lost, led = [], set()
    for path in every_notebook():
        prose = [cell.source for cell in nbformat.read(path, 4).cells if "](" in cell.source]
        for link in LINK.findall(page(*prose, path=path, beside=made)):
            led |= {link}
            there = link.removesuffix(".html") in made or (BUILD / "html" / link).resolve().exists()
            lost += [] if there else [(path.name, link)]
    assert lost == [] and {"00_start_here.html", "../../docs/glossary.md"} <= led


def test_pictures_have_words():
    file = io.BytesIO()
    Figure().savefig(file)
    png = base64.b64encode(file.getvalue()).decode()
    given = {"image/png": {"alt": 'One "line" of steps'}}
    drawn, words = drawing("02_micro_batches")._repr_mimebundle_()
    shown = page(
        outputs=[
            new_output("display_data", {"image/png": png, "text/plain": "Two bars"}),
            new_output("display_data", {"text/plain": "no picture"}),
            new_output("display_data", drawn, metadata=words),
            new_output("display_data", {"image/png": png, "text/plain": "x"}, metadata=given),
        ]
    )
    left, drawing_s, right = re.findall(r'<img alt="([^"]*)"', shown)
    assert left == "Two bars" and right == "One &quot;line&quot; of steps"
    assert drawing_s == words["image/svg+xml"]["alt"]
