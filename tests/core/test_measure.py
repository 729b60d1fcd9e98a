"""Measuring, and giving memory back, in a real kernel as in a notebook."""

import gc
import weakref

import nbformat
import pytest
from nbclient import NotebookClient

from helpers import measure, models, train
from helpers.plan import plan
from helpers.recipe import Recipe

# Each cell holds the tensor in a way of notebooks: Out and _, the last error, its frames.
HOLD = [
    "import sys, weakref, torch\nfrom helpers.measure import release\n"
    "class Model:\n    def __init__(self): self.weights = torch.zeros(10**6)\n"
    "alive = []\ndef new():\n    model = Model(); alive.append(weakref.ref(model)); return model",
    "new()",  # a bare model on the last line: Out, _
    "def train_it():\n    model = new()\n    raise RuntimeError('CUDA out of memory.')\ntrain_it()",
    "held = [reference() is not None for reference in alive]",
    "new()",  # and one directly before
    "release()",
    "print(held, [reference() is not None for reference in alive])",
]


@pytest.mark.parametrize("numbered", [True, False])  # nbval runs cells without a number
def test_release_lets_go_of_what_a_kernel_holds(numbered):
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, HOLD)])
    notebook.cells[2].metadata["tags"] = ["raises-exception"]
    client = NotebookClient(notebook, timeout=600, kernel_name="python3")
    with client.setup_kernel():
        for place, cell in enumerate(notebook.cells):
            client.execute_cell(cell, place, store_history=numbered)
    assert notebook.cells[-1].outputs[0].text.strip() == "[True, True] [False, False, False]"


def test_measuring_keeps_nothing_of_what_it_measured(monkeypatch):
    alive, build = [], models.build

    def watched(*arguments):
        model = build(*arguments)
        alive.extend(weakref.ref(parameter) for parameter in model.parameters())
        return model

    monkeypatch.setattr(models, "build", watched)
    recipe = Recipe(model="vit", batch_size=2, precision="fp16", checkpointing=True)
    measured = measure.measure(recipe, train.encoded(recipe)["train"], "cpu")
    gc.collect()
    assert alive and not any(reference() is not None for reference in alive)
    assert (measured.allocated, measured.reserved, measured.device) == (None, None, None)
    assert measured.tracked.peak == plan(recipe, "cpu").peak
