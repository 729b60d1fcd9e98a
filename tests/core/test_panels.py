"""Panels: the static form stands by itself, the live form follows its controls, nothing leaks."""

import asyncio
import base64
import io
from pathlib import Path

import matplotlib
import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from PIL import Image

matplotlib.use("agg")
import matplotlib.pyplot as plt

from helpers import panels
from helpers.panels import panel
from tight_fit.command.alt_text import DescribedFigure

ROOT = Path(__file__).resolve().parents[2]
VIEW = "application/vnd.jupyter.widget-view+json"
LINE = "Run the notebook to move the sliders: batch size 16, length 256"
ALT = f"Values: 16 at a, 256 at b. {LINE}"  # a figure without words has its numbers


def draw(batch_size=16, length=256):
    figure, axes = plt.subplots(figsize=(5, 3))
    axes.bar(["a", "b"], [batch_size, length])
    return figure


def two():
    return panel(draw, batch_size=[4, 8, 16, 32], length=(64, 512, 64))


def test_the_bundle_holds_the_widget_and_a_picture_that_stands_alone():
    subject = two()
    bundle, metadata = subject._repr_mimebundle_()
    assert set(bundle) == {VIEW, "image/png", "text/plain"}
    assert bundle[VIEW]["model_id"] == subject.widget.model_id
    assert bundle["text/plain"] == LINE == repr(subject) and metadata["image/png"]["alt"] == ALT
    shown = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
    live = Image.open(io.BytesIO(subject.view.png))
    assert shown.height > live.height + 8  # the line is written below the picture
    below = shown.crop((0, live.height, shown.width, shown.height)).convert("L")
    assert below.getextrema()[0] < 150 and below.getextrema()[1] == 255
    assert repr(two()) == LINE and two().first == subject.first  # the same in every run


def test_a_control_moves_the_picture_and_no_figure_stays_open():
    mine = plt.figure()
    subject = two()
    first, start = subject.view.png, subject.first
    subject.controls["batch_size"].value = 32
    second = subject.view.png
    subject.controls["length"].value = 512
    assert len({first, second, subject.view.png}) == 3
    assert subject._image.value == subject.view.png
    assert subject.values == {"batch_size": 32, "length": 512}
    subject.controls["batch_size"].value, subject.controls["length"].value = 16, 256
    assert subject.view.png == first and subject.first is start
    assert plt.get_fignums() == [mine.number]  # somebody else's figure is not ours to close
    plt.close(mine)


def test_the_frame_never_shrinks_while_a_slider_moves():
    def titled(lines=3):
        figure = plt.figure(figsize=(3, 2))
        figure.text(0.5, 1.0, "\n".join("abc" for _ in range(lines)), va="bottom")
        return figure

    subject = panel(titled, lines=(1, 6, 1))
    sizes = []
    for lines in (1, 6, 2):
        subject.controls["lines"].value = lines
        sizes.append(Image.open(io.BytesIO(subject.view.png)).size)
    assert sizes[0][1] < sizes[1][1] == sizes[2][1]


@pytest.mark.parametrize("moved", [False, True])
def test_an_error_is_one_sentence_in_the_panel_and_its_figure_is_closed(moved):
    def fragile(rows=3, fine=False):
        plt.figure()
        if rows == 3:
            raise ValueError("accumulation=3 does not divide\nbatch_size=<16>")
        return plt.gcf()

    subject = panel(fragile, rows=[2, 3], fine=moved)
    if moved:
        subject.controls["rows"].value = 2
        assert subject._image.layout.display is None and subject._html.layout.display == "none"
        subject.controls["rows"].value = 3
    said = (
        "These settings give no picture "
        "(ValueError: accumulation=3 does not divide batch_size=<16>)."
    )
    assert subject.view.text == said and subject.view.png is None
    assert "batch_size=&lt;16&gt;" in subject._html.value
    assert subject._image.layout.display == "none"
    bundle, _ = subject._repr_mimebundle_()
    assert bundle["text/plain"].splitlines()[0] == said and "image/png" not in bundle
    assert plt.get_fignums() == []


def test_a_function_that_returns_nothing_is_told_so():
    assert "return its figure" in panel(lambda x=1: None, x=[1, 2]).view.text


def test_short_forms_and_where_they_start():
    forms = {  # {name: (what is given, the control that it makes, where it starts)}
        "whole": ((1, 64, 1), "IntSlider", 32),
        "share": ((0.0, 1.0, 0.25), "FloatSlider", 0.5),
        "gpu": (["T4", "A100"], "Dropdown", "T4"),
        "rows": ([1, 2], "SelectionSlider", 1),
        "on": (True, "Checkbox", True),
    }
    subject = panel(lambda **values: str(values), **{name: one[0] for name, one in forms.items()})
    for name, (_, kind, start) in forms.items():
        assert type(subject.controls[name]).__name__ == kind, name
        assert subject.values[name] == start and type(subject.values[name]) is type(start), name
    assert subject.line.endswith(": whole 32, share 0.5, gpu T4, rows 1, on yes")


@pytest.mark.parametrize(
    "controls, error",
    [
        *(({"batch_size": given}, TypeError) for given in ((1, 2), 5, "abc")),
        *(({"batch_size": given}, ValueError) for given in ((9, 2, 1), (1, 9, 0), [1])),
        *(({"batch_size": given}, ValueError) for given in ([1, 2], (1, 9, 1))),  # without the 16
        ({}, ValueError),
    ],
)
def test_what_is_no_control_is_refused_in_one_sentence(controls, error):
    with pytest.raises(error) as caught:
        panel(draw, **controls)
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", "itself."))


def test_what_cannot_draw_is_refused():
    with pytest.raises(TypeError, match="function that draws"):
        panel("figure", x=[1, 2])


def test_what_was_drawn_comes_back_without_drawing():
    drawn = []

    def counted(rows=1):
        drawn.append(rows)
        return draw(rows)

    subject = panel(counted, rows=[1, 2, 3])
    before = len(drawn)
    for rows in (2, 3, 2, 3, 2):
        subject.controls["rows"].value = rows
    assert drawn[before:] == [2, 3]
    assert subject._state.value == "rows 2" and "planning" not in subject._image._dom_classes


def test_of_moves_in_a_browser_only_the_last_is_drawn_and_the_old_picture_is_grey():
    drawn = []

    def slow(rows=1):
        drawn.append(rows)
        return draw(rows)

    async def dragged():
        subject = panel(slow, rows=(1, 9, 1))
        before, old = len(drawn), subject.view
        for rows in range(2, 9):
            subject.controls["rows"].set_state({"value": rows})  # as from a browser
            assert "tight-fit-planning" in subject._image._dom_classes
            assert subject._state.value == f"<i>planning ... rows {rows}</i>"
            assert subject.view is old
        await asyncio.sleep(4 * panels.WAIT)
        assert drawn[before:] == [8] and subject._state.value == "rows 8"
        assert "tight-fit-planning" not in subject._image._dom_classes

    asyncio.run(dragged())


def test_the_old_picture_never_stands_below_the_new_settings():
    subject, told = two(), []
    subject._state.observe(lambda change: told.append(subject._image.value), "value")
    subject.controls["length"].value = 512
    assert told == [subject.view.png]


def test_a_panel_says_that_its_kernel_has_ended_and_its_picture_has_words():
    def worded(rows=1):
        figure = plt.figure(FigureClass=DescribedFigure)
        figure.alt = "Two bars."
        return figure

    subject = panel(worded, rows=[1, 2])
    said = subject.widget.children[1].value  # between the control and the settings of the picture
    assert "jupyter-widgets-disconnected" in said and "this cell again" in said
    _, metadata = subject._repr_mimebundle_()
    assert metadata["image/png"]["alt"].startswith("Two bars. Run the notebook")


CELLS = [
    """
%matplotlib inline
import matplotlib.pyplot as plt
from helpers.panels import panel

def draw(batch_size=16, length=256):
    figure, axes = plt.subplots()
    axes.bar(["a", "b"], [batch_size, length])
    return figure

subject = panel(draw, batch_size=[4, 8, 16, 32], length=(64, 512, 64))
subject""",
    """
before = subject._image.value
subject.controls["length"].value = 512
assert subject._image.value != before and subject._image.value[:4] == b"\\x89PNG"
""",
    """
control = subject.controls["batch_size"]   # what a browser sends when a slider is dragged
data = {"method": "update", "state": {"index": 0}, "buffer_paths": []}
message = {"content": {"data": data}, "buffers": []}
control.comm.handle_msg(message)
print(subject.values, plt.get_fignums())
""",
]


def test_in_a_real_kernel():
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in CELLS]
    )
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", store_widget_state=False,
        resources={"metadata": {"path": str(ROOT)}},
    ).execute()  # fmt: skip
    shown, moved, dragged = (cell.outputs for cell in notebook.cells)
    assert len(shown) == 1 and shown[0].output_type == "execute_result"
    assert set(shown[0].data) == {VIEW, "image/png", "text/plain"}
    assert shown[0].data["text/plain"] == LINE
    assert moved == []  # no second picture below, neither from the draw nor from the inline backend
    assert [output.text for output in dragged] == ["{'batch_size': 4, 'length': 512} []\n"]
    picture = "".join(shown[0].data["image/png"].split())
    for committed in (
        False,
        True,
    ):  # an HTML page without a kernel, before and after the view is removed
        if committed:
            del shown[0].data[VIEW]
        page, _ = HTMLExporter(template_name="classic").from_notebook_node(notebook)
        assert picture in "".join(page.split()) and f'alt="{ALT}"' in page
