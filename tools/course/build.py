"""`make run` and `make notebooks`: execute what changed, and keep what ran to its end."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tight_fit.files import replace_all
from tools.course import BUILD, ROOT, clean, pages, tables
from tools.course.execute import execute
from tools.course.leftovers import unfinished

VARIABLES = ("TIGHT_FIT_PROFILE", "TIGHT_FIT_MIRROR", "CUDA_VISIBLE_DEVICES")


def run(paths: list[Path], command: str, build: Path = BUILD) -> None:
    """Execute what is not up to date, write build/html and build/runs, and print the tables.

    Raises Failed where a notebook does not run to its end.
    """
    os.environ.setdefault("TIGHT_FIT_PROFILE", "mini")
    keys = {path: fingerprint(path) for path in paths}
    beside = {page.stem for page in (build / "html").glob("*.html")} | {path.stem for path in paths}
    for path, key in keys.items():
        if _done(path, build) == key:
            print(f"{path.stem:32} up to date")
        else:
            _build(path, key, command, build, beside)
    pages.index(build, tables.every(build / "runs"))
    tables.show(paths, build / "runs")
    print(f"\nPages: {_short(build / 'html' / 'index.html')}")


def save(paths: list[Path], command: str) -> None:
    """Execute on the CPU, as on a machine without a GPU, and save in place, cleaned.

    Raises Failed where a notebook does not run to its end, and ValueError where an output names a
    path of this machine.
    """
    given = {"TIGHT_FIT_RUNS": "", "TIGHT_FIT_COMMAND": command}
    given |= {"TIGHT_FIT_PROFILE": "", "CUDA_VISIBLE_DEVICES": ""}
    for path in paths:
        notebook, _ = execute(path, given)
        clean.write(notebook, path)


def _build(path: Path, key: str, command: str, build: Path, beside: set[str]) -> None:
    build.mkdir(parents=True, exist_ok=True)
    with unfinished(build, "unfinished") as staging:
        environment = {"TIGHT_FIT_RUNS": str(staging), "TIGHT_FIT_COMMAND": command}
        notebook, seconds = execute(path, environment)
        page = pages.html(clean.clean(notebook), path, build / "html", beside)
        runs = {
            file.name: file.read_text(encoding="utf8") for file in sorted(staging.glob("*.json"))
        }
    note = _note(path, build)
    # After an interruption from here on, the notebook only runs again.
    note.unlink(missing_ok=True)
    replace_all(build / "html", {f"{path.stem}.html": page})
    replace_all(build / "runs", runs, old=(build / "runs").glob(f"{path.stem}.*.json"))
    done = {"key": key, "seconds": round(seconds, 1), "runs": sorted(runs)}
    replace_all(note.parent, {note.name: json.dumps(done, indent=1) + "\n"})


def _note(path: Path, build: Path) -> Path:
    return build / "done" / f"{path.stem}.json"


def _done(path: Path, build: Path) -> str | None:
    """The fingerprint that build/ was made from, or None where a page or run is missing."""
    try:
        note = json.loads(_note(path, build).read_text(encoding="utf8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    files = [
        build / "html" / f"{path.stem}.html",
        *(build / "runs" / name for name in note["runs"]),
    ]
    return note["key"] if all(file.is_file() for file in files) else None


def fingerprint(path: Path) -> str:
    """A digest of all that decides what a notebook shows.

    These are its cells, the code that it imports, the records, the versions of the libraries, and
    the variables that choose a profile and a device.
    """
    digest = hashlib.sha256(json.dumps(_cells(nbformat.read(path, as_version=4))).encode())
    for file in _inputs():
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    versions = sorted(f"{dist.name}=={dist.version}" for dist in importlib.metadata.distributions())
    settings = [f"{name}={os.environ.get(name)}" for name in VARIABLES]
    digest.update(json.dumps([versions, settings, platform.python_version()]).encode())
    return digest.hexdigest()


def _cells(notebook: NotebookNode) -> list:
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


def _inputs() -> Iterator[Path]:
    """The files beside the notebook itself that may change what it shows."""
    for name in ("tight_fit", "helpers", "by_hand", "exercises", "results"):
        for file in sorted((ROOT / name).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
