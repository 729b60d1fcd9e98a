"""The style that all schematics share: boxes, arrows and labels on a plain canvas.

A colour always means the same thing, in curves of memory as well (blue parameters, vermilion
gradients, green optimizer states, yellow activations), and never stands alone: each kind of box
also has its own outline or hatching, so that a print in grey, or a reader with a colour vision
deficiency, loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

DPI = 110
TEXT = "#222222"
PALE = "#F7F7F7"


class Kind(NamedTuple):
    """How a kind of box is drawn: colours of face and outline, hatching, style of the outline."""

    face: str
    edge: str
    hatch: str = ""
    line: str = "-"


KINDS = {
    "plain": Kind("white", "#555555"),  # any operation or object
    "kept": Kind("#F7D58C", "#B97A00"),  # activations: what is held in memory for a while
    "dropped": Kind("white", "#999999", line=":"),  # not held in memory
    "again": Kind("#FCEBC8", "#B97A00", hatch="//"),  # computed a second time
    "trained": Kind("#9CC9E8", "#0072B2"),  # parameters that change
    "frozen": Kind("#E3E3E3", "#777777", hatch=".."),  # parameters that do not change
    "gradient": Kind("#F2B995", "#D55E00"),
    "state": Kind("#A6DDC8", "#009E73", hatch="--"),  # optimizer states
    "waiting": Kind(PALE, "#BBBBBB", hatch="xx"),  # time or memory without use
    "rank 0": Kind("#9CC9E8", "#0072B2"),
    "rank 1": Kind("#F2B995", "#D55E00", hatch="//"),
    "rank 2": Kind("#A6DDC8", "#009E73", hatch="\\\\"),
    "rank 3": Kind("#E7C3DA", "#A5548A", hatch=".."),
}


class Drawing:
    """A schematic, which a notebook shows as a picture with a description for those who cannot
    see it.

    width, height  of the canvas in units of your choice; (0, 0) is at the bottom left
    alt            one or two sentences that say what the picture shows
    inches         width of the picture; its height follows from the canvas
    """

    def __init__(self, width: float, height: float, alt: str, inches: float = 8.5):
        if not alt.strip():
            raise ValueError("A schematic needs a description: give alt a sentence.")
        self.alt = alt
        size = (inches, inches * height / width)
        self.figure = Figure(figsize=size, dpi=DPI)
        self.figure.set_layout_engine("none")  # the canvas fills the figure
        FigureCanvasAgg(self.figure)  # pyplot never sees it, so nothing shows it twice
        self.axis: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axis.set(xlim=(0, width), ylim=(0, height))
        self.axis.axis("off")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        kind: str = "plain",
        size: float = 9,
    ) -> None:
        """A rectangle whose lower left corner is (x, y), with text of `size` points in its middle.

        Raises ValueError for a kind that is not in `KINDS`.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is no kind of box: use one of {', '.join(KINDS)}.")
        face, edge, hatch, line = KINDS[kind]
        outline: dict[str, Any] = {
            "facecolor": face,
            "edgecolor": edge,
            "linestyle": line,
            "linewidth": 1.2,
        }
        self.axis.add_patch(Rectangle((x, y), width, height, hatch=hatch, zorder=2, **outline))
        if text:
            back = {"facecolor": face, "edgecolor": "none", "pad": 1} if hatch else None
            self.text(x + width / 2, y + height / 2, text, size=size, box=back)

    def row(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        texts: Sequence[str],
        kinds: str | Sequence[str] = "plain",
        gap: float = 0,
        size: float = 9,
    ) -> None:
        """Boxes of one size side by side, `gap` apart, one per text."""
        each = [kinds] * len(texts) if isinstance(kinds, str) else kinds
        for index, (text, kind) in enumerate(zip(texts, each, strict=True)):
            self.box(x + index * (width + gap), y, width, height, text, kind, size)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 9,
        align: str = "center",
        bold: bool = False,
        box: dict | None = None,
    ) -> None:
        """Text whose middle (or left or right end, by `align`) is at (x, y)."""
        weight = "bold" if bold else "normal"
        style: dict[str, Any] = {
            "fontsize": size,
            "color": TEXT,
            "weight": weight,
            "zorder": 4,
            "bbox": box,
        }
        self.axis.text(x, y, text, ha=align, va="center", linespacing=1.25, **style)

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        text: str = "",
        bend: float = 0.0,
        dashed: bool = False,
        colour: str = "#444444",
        size: float = 8.5,
    ) -> None:
        """An arrow between two points, with a label beside its middle; `bend` curves it."""
        line: dict[str, Any] = {
            "linestyle": "--" if dashed else "-",
            "linewidth": 1.3,
            "color": colour,
        }
        curve = f"arc3,rad={bend}"
        arrow = FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, connectionstyle=curve, zorder=3, **line
        )
        self.axis.add_patch(arrow)
        if text:
            middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
            back = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.9}
            self.text(*middle, text, size=size, box=back)

    def brace(self, start: float, end: float, y: float, text: str, size: float = 9) -> None:
        """A bracket under what lies between `start` and `end`, with text below it."""
        height = 0.02 * self.axis.get_ylim()[1]
        corners = ([start, start, end, end], [y + height, y, y, y + height])
        self.axis.plot(*corners, color="#444444", linewidth=1)
        self.text((start + end) / 2, y - 2.2 * height, text, size=size)

    def legend(self, x: float, y: float, named: dict[str, str], step: float) -> None:
        """Small boxes with a word each, from (x, y) to the right, `step` apart: {kind: word}."""
        high = 0.05 * self.axis.get_ylim()[1]
        wide = 0.03 * self.axis.get_xlim()[1]
        for index, (kind, word) in enumerate(named.items()):
            left = x + index * step
            self.box(left, y, wide, high, kind=kind)
            self.text(left + 1.3 * wide, y + high / 2, word, size=8.5, align="left")

    def png(self) -> bytes:
        """The picture."""
        file = BytesIO()
        self.figure.savefig(file, format="png", dpi=DPI, facecolor="white")
        return file.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = {"image/png": self.png(), "text/plain": f"<schematic: {self.alt}>"}
        return data, {"image/png": {"alt": self.alt}}
