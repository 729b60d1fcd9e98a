"""Panels: the static form stands by itself, the live form follows its controls, nothing leaks."""

import asyncio

import matplotlib
import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

matplotlib.use("agg")
import matplotlib.pyplot as plt

from helpers import panels
from helpers.panels import panel
from tests.small import ROOT
from tight_fit.command.alt_text import DescribedFigure

VIEW = "application/vnd.jupyter.widget-view+json"
LINE = "Run the notebook to move the sliders: batch size 16, length 256"
ALT = f"Values: 16 at a, 256 at b. {LINE}"  # a figure without words has its numbers


def draw(batch_size=16, length=256):
    figure, axes = plt.subplots(figsize=(5, 3))
    axes.bar(["a", "b"], [batch_size, length])
    return figure


SLIDERS = {"batch_size": [4, 8, 16, 32], "length": (64, 512, 64)}


def test_a_control_moves_the_picture_and_no_figure_stays_open():
    drawn, told, mine = [], [], plt.figure()

    def counted(batch_size=16, length=256):
        drawn.append({"batch_size": batch_size, "length": length})
        return draw(batch_size, length)

    subject = panel(counted, **SLIDERS)
    subject._state.observe(lambda change: told.append(subject._image.value), "value")
    first, start = subject.view.png, subject.first
    assert panel(counted, **SLIDERS).first == start  # the same in every run
    before = len(drawn)
    subject.controls["batch_size"].value = 32
    second = subject.view.png
    assert told == [second]  # the old picture never stands below the new settings
    subject.controls["length"].value = 512
    assert len({first, second, subject.view.png}) == 3
    assert subject._image.value == subject.view.png
    assert subject.values == {"batch_size": 32, "length": 512} == drawn[-1]
    subject.controls["length"].value, subject.controls["batch_size"].value = 256, 16
    assert subject.view.png == first and subject.first is start
    assert len(drawn) == before + 2  # what was drawn comes back without drawing
    assert plt.get_fignums() == [mine.number]  # somebody else's figure is not ours to close
    plt.close(mine)


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
    said = "(ValueError: accumulation=3 does not divide batch_size=<16>)."
    assert subject.view.text.endswith(said) and subject.view.png is None
    assert "batch_size=&lt;16&gt;" in subject._html.value
    assert subject._image.layout.display == "none"
    bundle, _ = subject._repr_mimebundle_()
    assert said in bundle["text/plain"].splitlines()[0] and "image/png" not in bundle
    assert plt.get_fignums() == []


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


def test_a_picture_keeps_the_words_of_its_figure():
    def worded(rows=1):
        figure = plt.figure(FigureClass=DescribedFigure)
        figure.alt = "Two bars."
        return figure

    _, metadata = panel(worded, rows=[1, 2])._repr_mimebundle_()
    assert metadata["image/png"]["alt"].startswith("Two bars. Run the notebook")


@pytest.mark.parametrize(
    "given, error",
    [
        *((given, TypeError) for given in ((1, 2), 5, "abc")),
        *((given, ValueError) for given in ((9, 2, 1), (1, 9, 0), [1])),
        *((given, ValueError) for given in ([1, 2], (1, 9, 1))),  # without the 16
    ],
)
def test_what_is_no_control_is_refused_in_one_sentence(given, error):
    with pytest.raises(error) as caught:
        panel(draw, batch_size=given)
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", "itself."))


def test_what_cannot_draw_is_refused():
    with pytest.raises(TypeError, match="function that draws"):
        panel("figure", x=[1, 2])
    with pytest.raises(ValueError):
        panel(draw)
    assert "return its figure" in panel(lambda x=1: None, x=[1, 2]).view.text


def test_of_moves_in_a_browser_only_the_last_is_drawn_and_the_old_picture_is_grey():
    drawn = []

    def counted(rows=1):
        drawn.append(rows)
        return draw(rows)

    async def dragged():
        subject = panel(counted, rows=(1, 9, 1))
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
control.comm.handle_msg({"content": {"data": data}, "buffers": []})
print(subject.values, plt.get_fignums())
""",
]


def test_in_a_real_kernel():
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, CELLS)])
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", store_widget_state=False,
        resources={"metadata": {"path": str(ROOT)}},
    ).execute()  # fmt: skip
    (shown,), moved, dragged = (cell.outputs for cell in notebook.cells)
    assert shown.output_type == "execute_result" and shown.data["text/plain"] == LINE
    assert set(shown.data) == {VIEW, "image/png", "text/plain"}
    assert moved == []  # no second picture below, neither from the draw nor from the inline backend
    assert [output.text for output in dragged] == ["{'batch_size': 4, 'length': 512} []\n"]
    picture = "".join(shown.data["image/png"].split())
    for _ in range(2):  # an HTML page without a kernel, before and after the view is removed
        page, _ = HTMLExporter(template_name="classic").from_notebook_node(notebook)
        assert picture in "".join(page.split()) and f'alt="{ALT}"' in page
        shown.data.pop(VIEW, None)
