"""Several files into a folder at once: all of them or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def replace_all(folder: Path, texts: Mapping[str, str], old: Iterable[Path] = ()) -> None:
    """Write {file name: text} to a folder, which is made if necessary, and remove its `old` files.

    After an error of any kind, which is raised again, the folder is as it was before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as staging:
        new, kept = Path(staging, "new"), Path(staging, "kept")
        new.mkdir()
        kept.mkdir()
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf8")
        leaving = {path.name for path in old} | {name for name in texts if (folder / name).exists()}
        try:
            for name in leaving:
                os.replace(folder / name, kept / name)
            for name in texts:
                os.replace(new / name, folder / name)
        except BaseException:
            for name in texts:
                if not (new / name).exists():
                    (folder / name).unlink(missing_ok=True)
            for path in kept.iterdir():
                os.replace(path, folder / path.name)
            raise
