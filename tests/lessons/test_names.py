"""Every dotted name that a lesson, a lab or a hint gives its reader is there to be imported."""

import json
import pkgutil
import re

import pytest

from exercises.check import load_all
from tools.course import NOTEBOOKS

NAME = re.compile(
    r"`((?:tight_fit|helpers|by_hand|exercises|torch|transformers|accelerate|peft)(?:\.\w+)+)"
)
PAGES = sorted(NOTEBOOKS.glob("**/[0-9][0-9]_*.ipynb"))


def exists(dotted):
    """Whether a dotted name is a module, a package, or a name that one of them has."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def missing(text):
    """The names that `text` gives in backticks and that do not exist."""
    return [name for name in NAME.findall(text) if not exists(name)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_names_in_the_text_exist(path):
    cells = json.loads(path.read_text(encoding="utf8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert missing("\n".join(texts)) == []


def test_names_in_hints_exist():
    told = [part for one in load_all().values() for part in (*one.hints, one.why)]
    assert missing("\n".join(told)) == []


def test_a_name_that_does_not_exist_is_found():
    text = "`torch.nn.Linear(4)`, `by_hand.tensor.Ring(transport)`, `helpers.no.x`"
    assert missing(text) == ["by_hand.tensor.Ring", "helpers.no.x"]
