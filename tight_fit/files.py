"""Files: a small one read with a bound, and several into a folder at once, all of them or none."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def small_text(path: Path, most: int) -> str:
    """The text of a file of at most `most` bytes. Waits for no pipe, and reads no device.

    Raises OSError, UnicodeDecodeError, and ValueError for what is no file or a larger one.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no file that can be read to its end: name an ordinary file.")
    if found.st_size > most:
        raise ValueError(
            f"{path} has {found.st_size:,} bytes, and at most {most:,} are read: name another file."
        )
    with open(path, "rb") as file:
        return file.read(most).decode("utf8")


def of_user(variable: str, on_mac: str, elsewhere: str) -> Path:
    """The folder of this user's for what the course and its command write.

    variable   of the environment that names the folder above it (XDG); not on Windows and Macs
    on_mac, elsewhere  the folder above it where nothing does
    """
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
    elif sys.platform == "darwin":
        base = os.path.expanduser(on_mac)
    else:
        base = os.environ.get(variable)
    return Path(base or os.path.expanduser(elsewhere)) / "tight-fit"


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
