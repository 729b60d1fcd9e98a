"""The first code cell of every notebook: it finds the course's files, or fetches a release."""

from __future__ import annotations

import re
import tomllib

from helpers.setup import ROOT

# What hides the code of a cell in JupyterLab, in Colab and on Kaggle.
FOLDED = {
    "jupyter": {"source_hidden": True},
    "cellView": "form",
    "_kg_hide-input": True,
}
# An unpacking that was broken off lacks the file that it looks for, one of the last of a zip.
FIRST_CELL = """\
#@title Find the course's files, then check this machine
import glob, os, sys
places = ("", "../", "../../", "*/", "../input/*/", "../input/*/*/", "../input/*/*/*/")
files = [file for place in places for file in glob.glob(place + "tight_fit/units.py")]
{fetch}if not files:
    raise FileNotFoundError("Unpack the course's zip beside this notebook (Kaggle: attach it).")
sys.path.insert(0, os.path.abspath(files[0] + "/../.."))
from helpers.setup import home, setup; setup()"""
# Only where the project has an address. What was not fetched whole is hidden and fetched anew; Git
# compares what it gets with the commit's digest, so that nobody else's code runs.
FETCH = """\
fetch = "rm -rf .{name}; git init -q .{name} && timeout 300 git -C .{name} fetch -q --depth 1"
fetch += " {repository} {release}"
fetch += " && git -C .{name} checkout -q FETCH_HEAD && mv -T .{name} {name}"
if not files and not os.system(fetch):
    files = ["{name}/tight_fit/units.py"]
"""


def repository() -> str:
    """The project's public address from pyproject.toml, its only place; "" while it has none."""
    return _setting("repository").rstrip("/")


def release() -> str:
    """The commit of the release that notebooks fetch, from pyproject.toml; "" while there is none.

    Raises ValueError for what is no whole digest: a shortened one, or a tag, could be moved.
    """
    commit = _setting("release")
    if commit and not re.fullmatch("[0-9a-f]{40}", commit):
        raise ValueError(
            f"release = {commit!r} in pyproject.toml is no commit: write all 40 digits that "
            "`git rev-parse` says of the release's tag."
        )
    return commit


def _setting(name: str) -> str:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["tight-fit"][name]


def first_cell(address: str | None = None, commit: str | None = None) -> str:
    """The source of every notebook's first code cell.

    address  the project's, from which the cell fetches what it does not find; None takes
             `repository()`
    commit   the release that it fetches; None takes `release()`
    Without either nothing is fetched.
    """
    address = repository() if address is None else address
    commit = release() if commit is None else commit
    name = address.rsplit("/", 1)[-1]
    fetch = FETCH.format(repository=address, name=name, release=commit)
    return FIRST_CELL.format(fetch=fetch if address and commit else "")
