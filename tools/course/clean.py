"""Remove from a notebook what must not reach the repository.

This is what tells of the machine that ran it, and widgets, which do nothing without a kernel.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tight_fit.files import replace_all
from tools.course import ROOT, opening

WIDGET = "application/vnd.jupyter.widget-view+json"
# The text form of a widget: "HBox(children=(...))", or a progress bar "vit:   0%|    | 0/60".
REPR = re.compile(r"[A-Z]\w*\(.*\)|.*\d+%\|.*\|.*", re.DOTALL)
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# An absolute path of any machine starts with one of these folders (Linux, macOS, Colab, Kaggle), or
# with the letter of a Windows drive.
FOLDERS = (
    "home|root|Users|tmp|usr|opt|etc|var|mnt|media|srv|private|Volumes|content|kaggle|work|"
    "workspace|data|scratch|nix|builds?|app|github|lib|lib64|bin|boot|dev|proc|run|sbin|sys"
)
PATH = re.compile(rf"(?<![\w.:/])(?:/(?:{FOLDERS})/[\w.]+|[A-Z]:\\\w+)")


def clean(notebook: NotebookNode) -> NotebookNode:
    """The same notebook, changed in place: metadata has kernel, language and tags; no widgets.

    The first cell stays folded.
    """
    notebook.metadata = NotebookNode(
        kernelspec=NotebookNode(KERNEL), language_info=NotebookNode(name="python")
    )
    for cell in notebook.cells:
        folded = opening.FOLDED if cell.source == opening.first_cell() else {}
        tags = {"tags": cell.metadata.tags} if cell.metadata.get("tags") else {}
        cell.metadata = NotebookNode({**tags, **folded})
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_still, cell.outputs) if output is not None]
    return notebook


def _still(output: NotebookNode) -> NotebookNode | None:
    """An output without its widget, or None where nothing of use is left beside it."""
    if WIDGET not in output.get("data", {}):
        return output
    del output.data[WIDGET]
    if REPR.fullmatch("".join(output.data.get("text/plain", ""))):
        del output.data["text/plain"]
    return output if output.data else None


def texts(notebook: NotebookNode) -> Iterator[tuple[int, str, str]]:
    """(cell index, "source" or "output", text) of all that a reader can read, without images."""
    for index, cell in enumerate(notebook.cells):
        yield index, "source", cell.source
        for output in cell.get("outputs", []):
            yield from ((index, "output", text) for text in _readable(output))


def _readable(output: NotebookNode) -> list[str]:
    if "data" in output:
        return ["".join(value) for kind, value in output.data.items() if kind.startswith("text/")]
    return ["".join(output.get("text", ""))] + ["\n".join(output.get("traceback", []))]


def paths(notebook: NotebookNode) -> list[str]:
    """Absolute paths in it, each with its cell: "cell 3, output: ..."."""
    here = {str(ROOT), str(Path.home()), sys.prefix, os.path.realpath(tempfile.gettempdir())}
    here.discard("/")
    named = []
    for index, where, text in texts(notebook):
        hit = PATH.search(text)
        if hit or any(folder in text for folder in here):
            named.append(f"cell {index}, {where}: {hit[0] if hit else 'a folder of this machine'}")
    return named


def write(notebook: NotebookNode, path: Path) -> None:
    """Clean and write, whole or not at all.

    Raises ValueError where the notebook names an absolute path of a machine.
    """
    named = paths(clean(notebook))
    if named:
        raise ValueError(
            f"{path.name} names an absolute path ({named[0]}): it is not written; "
            "print another text there."
        )
    nbformat.validate(notebook)
    replace_all(path.parent, {path.name: nbformat.writes(notebook).rstrip("\n") + "\n"})


def rewrite(path: Path) -> None:
    """Clean a notebook in place, without executing it."""
    before = path.read_text(encoding="utf8")
    write(nbformat.reads(before, as_version=4), path)
    same = path.read_text(encoding="utf8") == before
    print(f"{path.name}: {'clean already' if same else 'cleaned'}")
