"""A folder of a user's as a throw-away copy of it, at the same place in a tree of its own.

Small files are copied. Large ones, and what lies elsewhere, are links to what is there, so that
everything is read by the same relative paths, and only the copy can be written to.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable

SMALL = 1 << 22  # bytes of a file that is copied
COPIED = 1 << 26  # bytes that are copied of all files together
NAMES = 5_000  # files and folders that are named in the tree
_APART = {"/proc", "/sys", "/dev"}


class Mirror:
    """A tree below `root`, in which `place` says where a path of the user's is."""

    def __init__(self, root: str):
        self.root, self.names, self.bytes = root, NAMES, COPIED
        self.folders: set[str] = set()

    def place(self, path: str) -> str:
        return self.root + os.path.realpath(path)

    def own(self, path: str) -> str:
        """A path in the tree, where what is there can be written to; else the path itself."""
        here = self.root + path
        return here if os.path.exists(here) and os.path.realpath(here) == here else path

    def shallow(self, path: str) -> None:
        """Make a folder, and those above it, with links to what is in them.

        Raises OSError where it holds too much.
        """
        path = os.path.realpath(path)
        if path in self.folders:
            return
        if path != "/":
            self.shallow(os.path.dirname(path))
        here = self.root + path
        if os.path.islink(here):
            os.unlink(here)
        os.makedirs(here, exist_ok=True)
        self.folders.add(path)
        try:
            entries = os.listdir(path)
        except OSError:
            return  # not ours to read: what is asked for in it is made below
        self.names -= len(entries)
        if self.names < 0:
            raise OSError(f"{path} holds too many files for a copy of it")
        for name in entries:
            self._link(os.path.join(path, name))

    def deep(self, path: str) -> None:
        """Make a folder with copies of what is small; folders for which there is no room are links.

        Raises OSError where the folder alone holds too much.
        """
        top = os.path.realpath(path)
        device = os.stat(top).st_dev
        waiting = [top]
        for folder in waiting:
            if folder != top and len(os.listdir(folder)) > self.names:
                continue
            self.shallow(folder)
            for entry in self._entries(folder):
                inner = entry.path
                if entry.is_symlink():
                    self._keep_link(inner, top)
                elif entry.is_dir(follow_symlinks=False):
                    apart = inner in _APART or self.root.startswith(inner + os.sep)
                    marks = entry.stat(follow_symlinks=False)
                    if not apart and marks.st_dev == device and os.access(inner, os.R_OK | os.X_OK):
                        waiting.append(inner)
                else:
                    self._copy(inner, entry.stat(follow_symlinks=False))

    @staticmethod
    def _entries(folder: str) -> Iterable[os.DirEntry]:
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except OSError:
            return []

    def _link(self, path: str) -> None:
        here = self.root + path
        if not os.path.lexists(here):
            os.symlink(path, here)

    def _keep_link(self, path: str, top: str) -> None:
        """A relative link that stays in the folder leads into the copy."""
        to = os.readlink(path)
        inside = os.path.realpath(path).startswith(top.rstrip("/") + "/")
        if inside and not os.path.isabs(to):
            os.unlink(self.root + path)
            os.symlink(to, self.root + path)

    def _copy(self, path: str, marks: os.stat_result) -> None:
        if not stat.S_ISREG(marks.st_mode) or marks.st_size > min(SMALL, self.bytes):
            return
        if not os.access(path, os.R_OK):
            return
        here = self.root + path
        try:
            os.unlink(here)  # a link to the file itself: what is copied may not go through it
            shutil.copy2(path, here)
        except FileNotFoundError:
            return  # it is gone
        self.bytes -= marks.st_size

    def give_room(self, path: str, emptied: bool) -> None:
        """Before a file is written to: where it is a link out of the tree, make it a file."""
        path = os.path.abspath(path)
        if not path.startswith(self.root + os.sep) or not os.path.islink(path):
            return
        real = os.path.realpath(path)
        if real.startswith(self.root + os.sep) or not os.path.isfile(real):
            return
        os.unlink(path)
        if not emptied:
            shutil.copyfile(real, path)
