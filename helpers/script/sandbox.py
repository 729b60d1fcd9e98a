"""What a planned program may not do: write to the disk, ask for input, start processes.

Files that it writes lie in a temporary folder, where it finds them again. Libraries of Hugging Face
may fill their caches, as they would in a real run. Models are not saved and nothing is pushed.
"""

from __future__ import annotations

import builtins
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
import safetensors.torch
import torch
from transformers import PreTrainedModel, Trainer

WRITES = set("wxa+")
FINDS = ("stat", "statvfs", "listdir", "scandir", "access", "chmod", "utime")
QUIET = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
ALLOWED_COMMANDS = {"git", "uname", "ldconfig", "lscpu", "sysctl"}


class NotPlanned(Exception):
    """The program asks for something that a plan cannot give; the message is a sentence's end."""


class Overlay:
    """A temporary folder that takes what is written elsewhere."""

    def __init__(self, folder: Path):
        self.folder = folder
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
        self.free = tuple(os.path.realpath(place) for place in free if place)

    def written(self, path: Any) -> Any:
        """Where a file that is to be written lies; its folder is there."""
        target = self._target(path)
        if target is None:
            return path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        return target

    def found(self, path: Any) -> Any:
        """Where a file lies: here if it was written, else where it is."""
        target = self._target(path)
        return target if target is not None and self._is(target) else path

    def _is(self, path: str) -> bool:
        try:
            self._stat(path)
        except OSError:
            return False
        return True

    def _target(self, path: Any) -> str | None:
        if isinstance(path, int) or path is None:
            return None
        whole = os.path.abspath(os.fsdecode(os.fspath(path)))
        if any(whole == place or whole.startswith(place + os.sep) for place in self.free):
            return None
        return str(self.folder) + whole


@contextmanager
def files_in(overlay: Overlay) -> Iterator[None]:
    """Inside, what Python code writes goes to the overlay."""
    open_file, open_low = builtins.open, os.open

    def open_(file, mode="r", *args, **kwargs):
        if WRITES & set(mode):
            there = overlay.found(file)
            file = overlay.written(file)
            if ("a" in mode or "+" in mode) and there != file and _exists(there):
                shutil.copyfile(there, file)
        else:
            file = overlay.found(file)
        return open_file(file, mode, *args, **kwargs)

    def open_by_flags(path, flags, *args, **kwargs):
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        path = overlay.written(path) if writes else overlay.found(path)
        return open_low(path, flags, *args, **kwargs)

    def finding(function: Callable) -> Callable:
        def call(path=".", *args, **kwargs):
            return function(overlay.found(path), *args, **kwargs)

        return call

    def removing(function: Callable) -> Callable:
        def call(path, *args, **kwargs):
            here = overlay.found(path)
            if here != path or overlay.written(path) == path:
                return function(here, *args, **kwargs)

        return call

    def moving(function: Callable) -> Callable:
        def call(source, target, *args, **kwargs):
            return function(overlay.found(source), overlay.written(target), *args, **kwargs)

        return call

    def mkdir(path, *args, **kwargs):
        if _exists(overlay.found(path)):
            raise FileExistsError(17, "File exists", os.fspath(path))
        return make(overlay.written(path), *args, **kwargs)

    make = os.mkdir
    with ExitStack() as patches:
        for owner, name, value in (
            (builtins, "open", open_),
            (io, "open", open_),
            (os, "open", open_by_flags),
            (os, "mkdir", mkdir),
            *((os, name, finding(getattr(os, name))) for name in FINDS if hasattr(os, name)),
            (pyarrow, "memory_map", finding(pyarrow.memory_map)),  # data sets with a `cache_dir`
            *((os, name, removing(getattr(os, name))) for name in ("remove", "unlink", "rmdir")),
            *((os, name, moving(getattr(os, name))) for name in ("rename", "replace")),
            (shutil, "rmtree", removing(shutil.rmtree)),
        ):
            patches.enter_context(patch.object(owner, name, value))
        patches.enter_context(patch.object(tempfile, "tempdir", str(overlay.temporary)))
        patches.enter_context(patch.dict(os.environ, {"TMPDIR": str(overlay.temporary)}))
        yield


def _exists(path: Any) -> bool:
    try:
        os.lstat(path)
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def alone(line: Callable[[], str]) -> Iterator[None]:
    """Inside, nothing is asked of a user, saved, pushed, or done in other processes.

    line  says which line of the program is running
    """

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

    def popen(process, args, *rest, **kwargs):
        command = args.split()[0] if isinstance(args, str) else os.fspath([*args][0])
        if line() and os.path.basename(os.fsdecode(command)) not in ALLOWED_COMMANDS:
            raise FileNotFoundError(2, "A plan starts no other program", command)
        return start(process, args, *rest, **kwargs)

    def not_done(*args, **kwargs):
        return None

    def repository(hub, repo_id="", **kwargs):
        return SimpleNamespace(repo_id=repo_id)

    hub = huggingface_hub.HfApi
    with ExitStack() as patches:
        for owner, name, value in (
            (builtins, "input", no_input),
            (sys, "stdin", io.StringIO()),
            (multiprocessing.process.BaseProcess, "start", no_process),
            (subprocess.Popen, "__init__", popen),
            (os, "system", no_process),
            (os, "fork", no_process),
            (torch.distributed, "init_process_group", no_group),
            (torch, "save", not_done),
            (safetensors.torch, "save_file", not_done),
            (safetensors.torch, "save_model", not_done),
            (PreTrainedModel, "save_pretrained", not_done),
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
