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


def test_formulas_are_mathml_and_code_is_not():
    shown = page("The peak is $a_1 * b_2$, twice:\n\n$$\\frac{a}{b}$$\n\nand `$HOME * $PATH`")
    assert shown.count("<math") == 2 and "<mfrac>" in shown and "$HOME * $PATH" in shown
    assert "$a_1" not in shown and "<em>" not in shown


def test_nothing_is_loaded_from_elsewhere():
    badge = f"[![Open](https://colab.example/badge.svg)](https://colab.example) {badges.MARK}"
    shown = page(f"# Title\n\n{badge}\n\ntext")
    assert "badge.svg" not in shown and "MathJax" not in shown
    assert not re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//[^"]*"', shown)


def test_links_lead_to_pages_of_the_same_run_and_else_to_the_repository():
    text = "[03](03_b.ipynb) [lab](labs/02_a_lab.ipynb) [04](04_c.ipynb#x) [w](../docs/glossary.md)"
    assert LINK.findall(page(text, beside={"03_b", "02_a_lab"})) == [
        "03_b.html",
        "02_a_lab.html",
        "../../notebooks/04_c.ipynb",
        "../../docs/glossary.md",
    ]
    lab = ROOT / "notebooks" / "labs" / "02_a_lab.ipynb"
    assert LINK.findall(page("[02](../02_a.ipynb)", path=lab, beside={"02_a"})) == ["02_a.html"]


def test_every_link_of_every_page_of_make_run_leads_somewhere():
    """As after `make run`: the pages of the first lessons, and no others."""
    made = {path.stem for path in every_notebook()[:3]}
    lost = []
    for path in every_notebook():
        prose = [cell.source for cell in nbformat.read(path, 4).cells if "](" in cell.source]
        for link in LINK.findall(page(*prose, path=path, beside=made)):
            there = link.removesuffix(".html") in made or (BUILD / "html" / link).resolve().exists()
            lost += [] if there else [(path.name, link)]
    assert lost == []


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
