"""What `make lab` saves: a widget with its state, or the picture beside it."""

import nbformat

from tools.lab.saving import STATE, VIEW, keep_pictures


def saved(forms, state):
    """The output of a cell after saving. forms: those beside the widget; state: of which models."""
    data = {VIEW: {"model_id": "mine"}, "text/plain": "words", **dict.fromkeys(forms, "seen")}
    cells = [nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", data)])]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("text"), *cells])
    if state is not None:
        notebook.metadata["widgets"] = {STATE: {"state": dict.fromkeys(state, {})}}
    model = {"type": "notebook", "content": notebook}
    keep_pictures(model=model, path="lab.ipynb", contents_manager=None)
    return set(notebook.cells[1].outputs[0].data)


def test_a_widget_whose_state_is_not_saved_leaves_its_picture():
    for state in (None, [], ["another"]):
        assert saved(["image/png"], state) == {"image/png", "text/plain"}
        assert saved(["text/html"], state) == {"text/html", "text/plain"}


def test_a_widget_with_its_state_or_without_a_picture_is_kept():
    assert VIEW in saved(["image/png"], ["mine"])
    assert VIEW in saved([], None)
