"""Small notebooks, runs and models for the tests."""

import subprocess
import sys
from pathlib import Path

import torch

from helpers.recipe import Recipe
from helpers.record import Run

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments, **options):
    """A process of this Python that has ended, started in the repository: what it printed."""
    usual = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 900}
    return subprocess.run([sys.executable, *map(str, arguments)], **usual | options)


def configured(kind, width, layers, heads, inner, vocabulary, **more):
    """A configuration of transformers, by the sizes that most of its classes call alike."""
    return kind(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner, vocab_size=vocabulary, **more,
    )  # fmt: skip


def without_dropout(model):
    """The model without dropout: then two ways to train it differ in their arithmetic only."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"


def a_run(name="00_small/before", **fields):
    """A Run of two steps with made-up figures; `fields` go into its recipe."""
    recipe = Recipe(model="vit", steps=2, **fields)
    return Run(
        name=name,
        recipe=recipe,
        environment={"device": "cpu", "name": "x86_64"},
        plan={"target": "cpu", "peak": 2**20, "at_peak": {}, "flops": {}},
        memory={
            "tracked": 2**20, "allocated": None, "reserved": None, "device": None, "at_peak": {},
        },
        losses=[2.0, 1.0],
        seconds=[0.1, 0.1],
        rows=[16, 16],
        skipped=[],
        accuracy=0.5,
        train_rows=100,
        test_rows=10,
        date="2026-01-01T00:00:00+00:00",
        command="a test",
    )  # fmt: skip


def writing(*runs):
    """A cell that writes these runs as a notebook's record.run does."""
    return (
        "import os\nfrom pathlib import Path\nfolder = Path(os.environ['TIGHT_FIT_RUNS'])\n"
        + "\n".join(
            f"(folder / {(run.name.replace('/', '.') + '.json')!r}).write_text({run.to_json()!r})"
            for run in runs
        )
    )


BEFORE, AFTER = a_run(), a_run("00_small/after", accumulation=2)


def notebook(folder, *sources, name="00_small"):
    """Write a notebook with these code cells into the folder. Returns its path."""
    import nbformat  # here, as the ranks of the tests need none of it and it is slow to import
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    path = folder / f"{name}.ipynb"
    cells = [
        new_markdown_cell("# Small\n\nSee [the next](01_next.ipynb): $a^2$."),
        *map(new_code_cell, sources),
    ]
    nbformat.write(new_notebook(cells=cells), str(path))
    return path


HEAD = "import os, sys\nsys.path.insert(0, '..')\nfrom exercises.check import check"


def submission(path, *sources):
    """Write what a student hands in: a notebook that checks its answers. Returns its path."""
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook

    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=[*map(new_code_cell, (HEAD, *sources))]), path)
    return path


def files_in(folder):
    """{relative path: bytes} of every file below the folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
