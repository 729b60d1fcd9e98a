"""Drawings of ideas: the SVG files of notebooks/drawings, each with a title and a description.

A colour always means the same thing, in curves of memory as well (blue parameters, vermilion
gradients, green optimizer states, yellow activations), and never stands alone: each kind of box
also has its own outline or hatching, for prints in grey and readers who see colours otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path(__file__).parents[1] / "notebooks" / "drawings"
WORDS = ("title", "desc")  # of an SVG file, for those who cannot see it
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Drawing:
    """A picture that a notebook shows, with words for those who cannot see it.

    svg    the file's text
    title  what it is a drawing of, from its <title>
    alt    what is to be seen, whole sentences, from its <desc>
    """

    svg: str
    title: str
    alt: str

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        data = {"image/svg+xml": self.svg, "text/plain": f"<schematic: {self.alt}>"}
        return data, {"image/svg+xml": {"alt": self.alt}}


def drawing(name: str) -> Drawing:
    """The drawing `name`, as the last line of a cell: drawing("02_micro_batches").

    Raises ValueError for a name that no file in notebooks/drawings has, and for a file without a
    title or a description.
    """
    names = sorted(path.stem for path in FOLDER.glob("*.svg"))
    if name not in names:
        raise ValueError(f"There is no drawing {name!r}: use one of {', '.join(names)}.")
    svg = (FOLDER / f"{name}.svg").read_text(encoding="utf8")
    picture = ElementTree.fromstring(svg)
    title, alt = (" ".join(picture.findtext(f"{SVG}{part}", "").split()) for part in WORDS)
    if not (title and alt):
        raise ValueError(f"{name}.svg needs a <title> and a <desc>: say what is to be seen.")
    return Drawing(svg, title, alt)
