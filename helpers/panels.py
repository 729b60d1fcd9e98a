"""Panels: controls above a figure, which is drawn again when a control is moved.

    def draw(batch_size=16, length=256): ...  # returns a matplotlib Figure
    panel(draw, batch_size=[1, 2, 4, 8, 16, 32], length=(64, 512, 64))

A panel is one output with two forms: the live widget, and a picture for readers without a kernel
(GitHub, nbviewer, HTML pages). The picture shows the first settings, and below it stands "Run the
notebook to move the sliders: ...".

While a picture is made, the old one is grey and "planning ..." stands above it with the settings
that were asked for. Of several moves only the last is drawn, and a picture that was drawn before
comes back at once. When the kernel has ended, the panel says that its cell must run again.
"""

from __future__ import annotations

import asyncio
import base64
import html
import inspect
import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from tight_fit.command.alt_text import numbers
from tight_fit.command.told_apart import told_apart

PAD = 0.1  # inches around a figure
WAIT = 0.05  # seconds in which a later move of a control replaces an earlier one
MOST = 200  # pictures that a panel keeps
# Jupyter gives every widget the class jupyter-widgets-disconnected when its kernel has ended.
LOST = """<style>
.tight-fit-lost { display: none } .jupyter-widgets-disconnected .tight-fit-lost { display: block }
.tight-fit-planning { opacity: 0.4; filter: grayscale(1) }
</style><b class="tight-fit-lost">The kernel that drew this picture has ended, so the controls no
longer move it. Run the import cells and this cell again.</b>"""


@dataclass(frozen=True)
class View:
    """What a panel shows for one set of values.

    png   the bytes of the picture; None where drawing raised an error
    text  the error, in a sentence
    alt   the picture in words: those of its figure, or else its numbers
    """

    png: bytes | None = None
    text: str = ""
    alt: str = ""

    @property
    def html(self) -> str:
        """The error as a paragraph."""
        return f"<p><b>{html.escape(self.text)}</b></p>"


def panel(draw: Callable[..., Any], **controls: Any) -> Panel:
    """A panel that shows `draw(**values)`; the last line of a cell displays it.

    draw      a function that returns a matplotlib Figure, which is closed after drawing
    controls  one per parameter of `draw`: (min, max, step) for a slider, a list of choices, or True
              or False for a check box. A control starts at the default of its parameter in `draw`;
              without a default, in the middle of the range, at the first choice, or at the truth
              value given.

    An error in `draw` is shown in the panel, as one sentence. Raises TypeError or ValueError for
    anything that is no control.
    """
    return Panel(draw, controls)


class Panel:
    """See `panel`, which makes one.

    controls  {name: widget}
    view      what is shown now
    first     what readers without a kernel see: the picture of the first settings
    line      the line below that picture
    widget    the whole panel as one widget
    """

    def __init__(self, draw: Callable[..., Any], controls: dict[str, Any]):
        if not callable(draw):
            raise TypeError(f"A panel needs a function that draws, not {draw!r}.")
        if not controls:
            raise ValueError("A panel without controls is a picture: call the function itself.")
        starts = {
            name: parameter.default
            for name, parameter in inspect.signature(draw).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        self._draw = draw
        self._views: dict[str, View] = {}  # what was drawn already, by the values
        self._waiting: asyncio.TimerHandle | None = None
        self._box: Bbox | None = None  # the frame of the figures so far, in inches
        self._start = {name: _start(name, given, starts) for name, given in controls.items()}
        self.line = f"Run the notebook to move the sliders: {_written(self._start)}"
        self.first = self._render(self._start, caption=self.line)
        self.view = self.first
        self.controls = {
            name: _widget(name, given, self._start[name]) for name, given in controls.items()
        }
        self._image = ipywidgets.Image(
            format="png",
            layout={"max_width": "100%", "object_fit": "contain", "align_self": "flex-start"},
        )
        self._html, self._state = ipywidgets.HTML(), ipywidgets.HTML()
        for control in self.controls.values():
            control.observe(self._moved, "value")
        self._show()
        shown = [ipywidgets.HTML(LOST), self._state, self._image, self._html]
        self.widget = ipywidgets.VBox([*self.controls.values(), *shown])

    @property
    def values(self) -> dict[str, Any]:
        """{name: the present value of its control}."""
        return {name: control.value for name, control in self.controls.items()}

    def _moved(self, change: dict[str, Any]) -> None:
        """A control has another value: show it at once, or say that it is being planned.

        What a browser sends is drawn a moment later, unless another move comes before.
        """
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        loop = _loop() if getattr(change["owner"], "_property_lock", None) else None
        if loop is None or repr(self.values) in self._views:
            self._show()
            return
        self._image.add_class("tight-fit-planning")
        self._html.add_class("tight-fit-planning")
        self._state.value = f"<i>planning ... {html.escape(_written(self.values))}</i>"
        self._waiting = loop.call_later(WAIT, self._show)

    def _show(self) -> None:
        """Draw the present values. The picture is replaced as a whole, so that nothing flickers."""
        self._waiting = None
        key = repr(self.values)
        self.view = self._views.get(key) or self._render(self.values)
        if self.view.png is not None:
            if len(self._views) >= MOST and key not in self._views:
                self._views.clear()
            self._views[key] = self.view
            self._image.value = self.view.png
        else:
            self._html.value = self.view.html
        self._image.layout.display = None if self.view.png is not None else "none"
        self._html.layout.display = "none" if self.view.png is not None else None
        # These come last, so that the old picture never stands below the new settings.
        self._state.value = html.escape(_written(self.values))
        self._image.remove_class("tight-fit-planning")
        self._html.remove_class("tight-fit-planning")

    def _render(self, values: dict[str, Any], caption: str = "") -> View:
        """Draw, turn the figure into bytes, and close every figure that was opened."""
        before = set(plt.get_fignums())
        try:
            drawn = self._draw(**values)
            if not isinstance(drawn, Figure):
                raise TypeError("the drawing function must return its figure")
            alt = getattr(drawn, "alt", "")
            if not alt:
                told_apart(drawn)
                alt = numbers(drawn)
            return View(self._png(drawn, caption), alt=alt)
        except Exception as error:  # in the callback of a widget it would only reach a log
            reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":. ")
            return View(text=f"These settings give no picture ({reason}).")
        finally:
            for number in set(plt.get_fignums()) - before:
                plt.close(number)

    def _png(self, figure: Figure, caption: str) -> bytes:
        """The figure as a PNG, with everything that goes beyond its frame, and the caption below.

        The frame never becomes smaller from one drawing to the next, so that the picture stays in
        its place while a slider moves.
        """
        plt.close(figure)
        width, height = figure.get_size_inches()
        figure.draw_without_rendering()
        frame = Bbox.from_extents(0, 0, width, height)
        box = Bbox.union([figure.get_tightbbox(), frame, *([self._box] if self._box else [])])
        self._box = box
        if caption:
            lines = textwrap.wrap(caption, max(20, int(width * 72 / 9 / 0.55)))
            below = (box.y0 - PAD) / height
            note = figure.text(0, below, "\n".join(lines), fontsize=9, color="0.35", va="top")
            note.set_in_layout(False)
            box = Bbox.union(
                [box, note.get_window_extent().transformed(figure.dpi_scale_trans.inverted())]
            )
        file = io.BytesIO()
        figure.savefig(
            file,
            format="png",
            dpi=figure.dpi,
            bbox_inches=box.padded(PAD),
            metadata={"Software": None},
        )
        return file.getvalue()

    def _repr_mimebundle_(
        self, include=None, exclude=None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The live widget and the picture of the first settings, for Jupyter to choose from."""
        alt = f"{self.first.alt} {self.line}".strip()
        bundle: dict[str, Any] = {"text/plain": repr(self)}
        if self.first.png is not None:
            bundle["image/png"] = base64.b64encode(self.first.png).decode()
        else:
            bundle["text/html"] = f"<div>{self.first.html}<p>{html.escape(self.line)}</p></div>"
        bundle["application/vnd.jupyter.widget-view+json"] = {
            "version_major": 2,
            "version_minor": 0,
            "model_id": self.widget.model_id,
        }
        return bundle, {"image/png": {"alt": alt}} if self.first.png is not None else {}

    def __repr__(self) -> str:
        return f"{self.first.text}\n{self.line}".strip()


def _loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs now, as in a notebook's kernel; None elsewhere."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _start(name: str, given: Any, starts: dict[str, Any]) -> Any:
    """The value at which a control starts.

    starts  the defaults of the parameters of the drawing function

    Raises TypeError or ValueError, in one sentence, for anything that is no control.
    """
    if isinstance(given, bool):
        return starts.get(name, given)
    if isinstance(given, list):
        if len(given) < 2:
            raise ValueError(
                f"{name}={given!r} leaves nothing to choose: give two or more choices."
            )
        value = starts.get(name, given[0])
        if value not in given:
            raise ValueError(f"{name} starts at {value!r}, which is not among its choices.")
        return value
    numbers = isinstance(given, tuple) and all(isinstance(part, (int, float)) for part in given)
    if not numbers or len(given) != 3:
        raise TypeError(
            f"{name}={given!r} is no control: give (min, max, step), a list, or True or False."
        )
    low, high, step = given
    if not (low < high and 0 < step <= high - low):
        raise ValueError(
            f"{name}={given!r} is no range: "
            "give (min, max, step) with min < max and a step within it."
        )
    value = starts.get(name, low + (high - low) / 2 // step * step)
    if not low <= value <= high:
        raise ValueError(
            f"{name} starts at {value!r}, which is outside its range from {low} to {high}."
        )
    return int(value) if all(isinstance(part, int) for part in given) else float(value)


def _widget(name: str, given: Any, value: Any) -> Any:
    """The ipywidgets widget for a control."""
    style = {"description": name.replace("_", " "), "style": {"description_width": "initial"}}
    if isinstance(given, bool):
        return ipywidgets.Checkbox(value=value, indent=False, **style)
    if isinstance(given, list):
        numbers = all(
            isinstance(choice, (int, float)) and not isinstance(choice, bool) for choice in given
        )
        kind = ipywidgets.SelectionSlider if numbers else ipywidgets.Dropdown
        return kind(options=[(_label(choice), choice) for choice in given], value=value, **style)
    low, high, step = given
    kind = ipywidgets.IntSlider if isinstance(value, int) else ipywidgets.FloatSlider
    return kind(value=value, min=low, max=high, step=step, **style)


def _written(values: dict[str, Any]) -> str:
    """Values as a reader would write them, each after the name of its control."""
    return ", ".join(f"{name.replace('_', ' ')} {_label(value)}" for name, value in values.items())


def _label(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
