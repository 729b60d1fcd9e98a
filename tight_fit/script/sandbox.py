"""What a planned program may not do: ask for input, make copies of itself, push to the hub.

Everything else that it does is undone by the isolation of its process (`tight_fit.isolation`). It
reaches no network, so that libraries of Hugging Face use what their caches hold, and what would be
pushed is not.
"""

from __future__ import annotations

import builtins
import errno
import io
import multiprocessing.process
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import huggingface_hub
import torch
from transformers import PreTrainedModel, Trainer

QUIET = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
COPIES = (  # functions that make copies of this process
    *((os, name) for name in ("fork", "forkpty")),
    (multiprocessing.process.BaseProcess, "start"),
)
UNREACHED = {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ConnectionError"}


SENDS = ("upload_folder", "upload_file", "create_commit", "create_branch", "create_tag")


class NotPlanned(Exception):
    """The program asks for something that a plan cannot give; the message is a sentence's end."""


def needs_the_network(error: BaseException | None) -> bool:
    """Whether a program failed because it reaches no network."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & UNREACHED) or "couldn't connect to 'https" in text_of(error)


def text_of(error: BaseException | None) -> str:
    """What an error says, in one line; a program's own may fail to say it."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return "(its text could not be made)"


@contextmanager
def alone(isolated: bool) -> Iterator[None]:
    """Inside, nothing is asked of a user or pushed, and the program stays one process.

    isolated  whether its process is: then libraries look only for what is on this machine
    """

    def no_input(prompt=""):
        raise NotPlanned("asks for input, and nobody is there to answer: give it as an argument")

    def no_process(*args, **kwargs):
        raise NotPlanned(
            "starts processes of its own: plan what one process does, with a single GPU"
        )

    def no_group(*args, **kwargs):
        raise NotPlanned(
            "joins a group of processes (init_process_group): plan one of its ranks with --ranks, "
            "such as --ranks 2"
        )

    def not_done(*args, run_as_future=False, **kwargs):
        done: Future = Future()
        done.set_result(None)
        return done if run_as_future else None

    def repository(*args, **kwargs):
        names = [name for name in (*args, kwargs.get("repo_id")) if isinstance(name, str)]
        return SimpleNamespace(repo_id=names[0] if names else "")

    grouped = torch.distributed.is_initialized()  # it is planned as one of its ranks
    with ExitStack() as patches:
        for owner, name, value in (
            (builtins, "input", no_input),
            (sys, "stdin", io.StringIO()),
            *((owner, name, no_process) for owner, name in COPIES),
            *(() if grouped else [(torch.distributed, "init_process_group", no_group)]),
            (PreTrainedModel, "push_to_hub", not_done),
            *(() if isolated else [(Trainer, "save_model", not_done)]),
            *((owner, name, repository) for owner, name in _everywhere("create_repo")),
            *((owner, name, not_done) for sends in SENDS for owner, name in _everywhere(sends)),
            *((os, name, _moving(getattr(os, name))) for name in ("rename", "replace")),
        ):
            if hasattr(owner, name):
                patches.enter_context(patch.object(owner, name, value))
        patches.enter_context(patch.dict(os.environ, QUIET))
        if isolated:
            patches.enter_context(patch.dict(os.environ, OFFLINE))
            patches.enter_context(patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True))
            if "datasets" in sys.modules:  # which reads the variable when it is imported
                config: Any = sys.modules["datasets.config"]
                patches.enter_context(patch.object(config, "HF_HUB_OFFLINE", True))
        yield


def _everywhere(name: str) -> Iterator[tuple[Any, str]]:
    """Where a function of the hub is: in its class, and under its name in whoever imported it."""
    yield huggingface_hub.HfApi, name
    function = getattr(huggingface_hub, name)
    for module in list(sys.modules.values()):
        if module is not None and vars(module).get(name) == function:
            yield module, name


def _moving(move: Callable) -> Callable:
    """`os.rename` that copies a folder which Linux' overlays do not move, as `mv` does."""

    def rename(source, target, **folders):
        try:
            move(source, target, **folders)
        except OSError as error:
            if error.errno != errno.EXDEV or folders or not os.path.isdir(source):
                raise
            shutil.copytree(source, target, symlinks=True)
            shutil.rmtree(source)

    return rename
