"""Pages of `make run`: one file each, which needs no network and links to its neighbours."""

import base64
import io
import re

from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools.course import badges, pages

LINKS = "[02](02_gradient_accumulation.ipynb) [lab](labs/02_a_lab.ipynb) [back](../03_b.ipynb)"


def page(*texts, outputs=()):
    cells = [new_markdown_cell(text) for text in texts]
    return pages.html(new_notebook(cells=[*cells, new_code_cell("1", outputs=list(outputs))]))


def test_formulas_are_mathml_and_code_is_not():
    shown = page("The peak is $a_1 * b_2$, twice:\n\n$$\\frac{a}{b}$$\n\nand `$HOME * $PATH`")
    assert shown.count("<math") == 2 and "<mfrac>" in shown and "$HOME * $PATH" in shown
    assert "$a_1" not in shown and "<em>" not in shown


def test_nothing_is_loaded_from_elsewhere():
    badge = f"[![Open](https://colab.example/badge.svg)](https://colab.example) {badges.MARK}"
    shown = page(f"# Title\n\n{badge}\n\ntext")
    assert "badge.svg" not in shown and "MathJax" not in shown
    assert not re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//[^"]*"', shown)


def test_links_between_lessons_and_labs_lead_to_pages_in_one_folder():
    shown = page(LINKS)
    for name in ("02_gradient_accumulation", "02_a_lab", "03_b"):
        assert f'href="{name}.html"' in shown


def test_pictures_have_words():
    file = io.BytesIO()
    Figure().savefig(file)
    png = base64.b64encode(file.getvalue()).decode()
    given = {"image/png": {"alt": 'One "line" of steps'}}
    shown = page(
        outputs=[
            new_output("display_data", {"image/png": png, "text/plain": "Two bars"}),
            new_output("display_data", {"text/plain": "no picture"}),
            new_output("display_data", {"image/png": png, "text/plain": "x"}, metadata=given),
        ]
    )
    words = re.findall(r'<img alt="([^"]*)"', shown)
    assert words == ["Two bars", "One &quot;line&quot; of steps"]
