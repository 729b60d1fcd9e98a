"""What a planned program may not do: write to the disk, ask for input, start processes.

Files that it writes lie in a temporary folder, where it finds them again. Libraries of Hugging Face
may fill their caches, as they would in a real run. Models are not saved and nothing is pushed.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import inspect
import io
import multiprocessing.process
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import huggingface_hub
import pyarrow
import torch
from transformers import PreTrainedModel, Trainer

WRITES = set("wxa+")
FINDS = ("stat", "lstat", "readlink", "statvfs", "listdir", "scandir", "access")
MARKS = ("chmod", "chown", "lchown", "utime", "setxattr", "removexattr")
QUIET = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "GIT_OPTIONAL_LOCKS": "0",  # `git status` writes no index
}
# Programs that may be started, as they only read: with any arguments, or with these first ones.
READING: dict[str, frozenset[str]] = {
    "uname": frozenset(),
    "lscpu": frozenset(),
    "ldconfig": frozenset({"-p"}),
    "git": frozenset(
        "--version version rev-parse rev-list status log describe ls-files cat-file".split()
    ),
}
# Functions that start programs without `subprocess.Popen`, which is looked at more closely, or
# that take a program which is missing for a warning only, as the magic `%%bash` does.
STARTS = (
    (asyncio, "create_subprocess_exec"),
    (asyncio, "create_subprocess_shell"),
    *((os, name) for name in "system fork forkpty posix_spawn posix_spawnp".split()),
    *((os, f"exec{ending}") for ending in "l le lp lpe v ve vp vpe".split()),
    *((os, f"spawn{ending}") for ending in "l le lp lpe v ve vp vpe".split()),
    (multiprocessing.process.BaseProcess, "start"),
)


class NotPlanned(Exception):
    """The program asks for something that a plan cannot give; the message is a sentence's end."""


class NotStarted(NotPlanned, FileNotFoundError):
    """A program that was to be started; for code that does without it, it is not installed."""

    def __init__(self, command: str):
        super().__init__(
            f"starts another program ({command[:60]}), and a plan runs only the program itself: "
            "take it out, or guard it by an argument"
        )
        self.errno = errno.ENOENT


class Overlay:
    """A temporary folder that takes what is written elsewhere, and knows what was removed.

    gone  paths that the program has removed or moved: what lies there is not found any more
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.gone: set[str] = set()
        self._stat = os.lstat
        home = os.path.expanduser("~")
        caches = [
            os.environ.get("HF_HOME", os.path.join(home, ".cache", "huggingface")),
            os.environ.get("HF_DATASETS_CACHE", ""),
            os.environ.get("HF_HUB_CACHE", ""),
        ]
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        free = [str(folder), "/dev", "/proc", *caches]
        self.free = tuple(
            whole(place) for place in free if place for whole in (os.path.realpath, os.path.abspath)
        )

    def written(self, path: Any, folder: int | None = None) -> Any:
        """Where a file that is to be written lies; its folder is there.

        folder  descriptor of the folder from which a relative path counts
        """
        target = self.target(path, folder)
        if target is None:
            return path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        return target

    def changed(self, path: Any, folder: int | None = None) -> Any:
        """As `written`, with a copy of what the file holds so far."""
        there, target = self.found(path, folder), self.written(path, folder)
        if there != target and self.is_there(there):
            shutil.copyfile(there, target)
        return target

    def found(self, path: Any, folder: int | None = None) -> Any:
        """Where a file lies: here if it was written or is gone, else where it is."""
        target = self.target(path, folder)
        if target is None:
            return path
        if self.is_there(target) or self._is_gone(target):
            return target
        return target[len(str(self.folder)) :] if folder is not None else path

    def is_there(self, path: Any) -> bool:
        """Whether there is anything at this very path."""
        try:
            self._stat(path)
        except (OSError, ValueError):
            return False
        return True

    def forget(self, target: str) -> None:
        """Find nothing any more of what lies where `target`, a path of `target()`, stands for."""
        self.gone.add(target)

    def _is_gone(self, target: str) -> bool:
        return any(target == place or target.startswith(place + os.sep) for place in self.gone)

    def target(self, path: Any, folder: int | None = None) -> str | None:
        """The place in this folder for a path; None for one at which programs may write."""
        if isinstance(path, int) or path is None:
            return None
        name = os.fsdecode(os.fspath(path))
        whole = os.path.abspath(os.path.join(_path_of(folder), name))
        if any(whole == place or whole.startswith(place + os.sep) for place in self.free):
            return None
        return str(self.folder) + whole


def _path_of(folder: int | None) -> str:
    """The path of an open folder, "" for None."""
    if folder is None:
        return ""
    if sys.platform == "darwin":
        import fcntl

        found = fcntl.fcntl(folder, fcntl.F_GETPATH, bytes(1024))
        return os.fsdecode(found.rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{folder}")


@contextmanager
def files_in(overlay: Overlay) -> Iterator[None]:
    """Inside, what Python code writes, removes and moves is done in the overlay."""
    open_file, open_low, make, names = builtins.open, os.open, os.mkdir, os.listdir
    remove_tree = shutil.rmtree

    def open_(file, mode="r", *args, **kwargs):
        if {"a", "+"} & set(mode) and "w" not in mode:
            return open_file(overlay.changed(file), mode, *args, **kwargs)
        place = overlay.written if WRITES & set(mode) else overlay.found
        return open_file(place(file), mode, *args, **kwargs)

    def open_by_flags(path, flags, *args, dir_fd=None, **kwargs):
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        place = overlay.changed if writes else overlay.found
        return open_low(place(path, dir_fd), flags, *args, dir_fd=dir_fd, **kwargs)

    def finding(function: Callable) -> Callable:
        def call(path=".", *args, **kwargs):
            return function(overlay.found(path, kwargs.get("dir_fd")), *args, **kwargs)

        return call

    def removing(function: Callable) -> Callable:
        def call(path, *args, **kwargs):
            folder = kwargs.get("dir_fd")
            target, here = overlay.target(path, folder), overlay.found(path, folder)
            if target is None or here == target:
                function(here, *args, **kwargs)
            elif function is remove_tree:
                overlay.is_there(here) or function(here, *args, **kwargs)
            else:
                _may_be_removed(here, function is not remove_folder, names)
            if target is not None:
                overlay.forget(target)

        return call

    def rename(source, target, *, src_dir_fd=None, dst_dir_fd=None):
        own = overlay.target(source, src_dir_fd)
        here, there = overlay.found(source, src_dir_fd), overlay.written(target, dst_dir_fd)
        if _in(str(overlay.folder), here) or (own is None and there is target):
            move(here, there, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        else:
            _copy(here, there)
        if own is not None:
            overlay.forget(own)

    def link(source, target, *, src_dir_fd=None, dst_dir_fd=None, follow_symlinks=True):
        _copy(overlay.found(source, src_dir_fd), overlay.written(target, dst_dir_fd))

    def symlink(source, target, target_is_directory=False, *, dir_fd=None):
        return make_link(source, overlay.written(target, dir_fd), dir_fd=dir_fd)

    def truncate(path, length):
        return cut(overlay.changed(path), length)

    def unchanged(function: Callable) -> Callable:
        """What changes how a file is marked: only those of the program's own."""

        def call(path, *args, **kwargs):
            folder = kwargs.get("dir_fd")
            here = overlay.found(path, folder)
            if overlay.target(path, folder) in (None, here) or not overlay.is_there(here):
                return function(here, *args, **kwargs)

        return call

    def mkdir(path, mode=0o777, *, dir_fd=None):
        if overlay.is_there(overlay.found(path, dir_fd)):
            raise FileExistsError(17, "File exists", os.fspath(path))
        return make(overlay.written(path, dir_fd), mode, dir_fd=dir_fd)

    move, make_link, cut, remove_folder = os.rename, os.symlink, os.truncate, os.rmdir
    with ExitStack() as patches:
        for owner, name, value in (
            (builtins, "open", open_),
            (io, "open", open_),
            (os, "open", open_by_flags),
            (os, "mkdir", mkdir),
            *((os, name, finding(getattr(os, name))) for name in FINDS if hasattr(os, name)),
            *((os, name, unchanged(getattr(os, name))) for name in MARKS if hasattr(os, name)),
            (pyarrow, "memory_map", finding(pyarrow.memory_map)),  # data sets with a `cache_dir`
            *((os, name, removing(getattr(os, name))) for name in ("remove", "unlink", "rmdir")),
            *((os, name, rename) for name in ("rename", "replace")),
            (os, "link", link),
            (os, "symlink", symlink),
            (os, "truncate", truncate),
            (shutil, "rmtree", removing(remove_tree)),
        ):
            patches.enter_context(patch.object(owner, name, value))
        patches.enter_context(patch.object(tempfile, "tempdir", str(overlay.temporary)))
        patches.enter_context(patch.dict(os.environ, {"TMPDIR": str(overlay.temporary)}))
        yield


def _in(folder: str, path: Any) -> bool:
    return os.path.abspath(os.fsdecode(os.fspath(path))).startswith(folder + os.sep)


def _copy(source: Any, target: Any) -> None:
    """Copy a file or a folder to where it is moved or linked; the source stays."""
    if os.path.isdir(source) and not os.path.islink(source):
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _may_be_removed(path: Any, file: bool, names: Callable) -> None:
    """Raise what the system raises where a user's file or folder is removed as the other."""
    is_folder = os.path.isdir(path) and not os.path.islink(path)
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
    if file and is_folder:
        raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
    if not file and not is_folder:
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
    if not file and names(path):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", path)


def _only_reads(command: list[str]) -> bool:
    """Whether a command of `READING` changes nothing."""
    name, words = os.path.basename(command[0]) if command else "", command[1:]
    if name == "git":
        while words[:1] == ["-C"]:
            words = words[2:]
        if any(word.startswith("--ou") for word in words):  # git log --output=FILE
            return False
    first = READING.get(name)
    return first is not None and (not first or words[:1] != [] and words[0] in first)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, nothing is asked of a user, saved, pushed, or done in other processes."""

    def no_input(prompt=""):
        raise NotPlanned("asks for input, and nobody is there to answer: give it as an argument")

    def no_process(*args, **kwargs):
        raise NotPlanned(
            "starts processes of its own: plan what one process does, with a single GPU"
        )

    def no_group(*args, **kwargs):
        raise NotPlanned(
            "joins a group of processes (init_process_group): plan it as a single process"
        )

    start = subprocess.Popen.__init__
    signature = inspect.signature(start)

    def popen(process, *args, **kwargs):
        given = signature.bind(process, *args, **kwargs).arguments
        command = given["args"]
        words = [command] if isinstance(command, (str, bytes, os.PathLike)) else [*command]
        typed = [os.fsdecode(word) for word in words]
        if given.get("shell") or given.get("executable") or not _only_reads(typed):
            raise NotStarted(" ".join(typed))
        return start(process, *args, **kwargs)

    def not_done(*args, **kwargs):
        return None

    def repository(hub, repo_id="", **kwargs):
        return SimpleNamespace(repo_id=repo_id)

    hub = huggingface_hub.HfApi
    with ExitStack() as patches:
        for owner, name, value in (
            (builtins, "input", no_input),
            (sys, "stdin", io.StringIO()),
            *((owner, name, no_process) for owner, name in STARTS),
            (subprocess.Popen, "__init__", popen),
            (torch.distributed, "init_process_group", no_group),
            (PreTrainedModel, "push_to_hub", not_done),
            (Trainer, "save_model", not_done),
            (hub, "create_repo", repository),
            (hub, "upload_folder", not_done),
            (hub, "upload_file", not_done),
            (hub, "create_commit", not_done),
        ):
            if hasattr(owner, name):
                patches.enter_context(patch.object(owner, name, value))
        patches.enter_context(patch.dict(os.environ, QUIET))
        yield
