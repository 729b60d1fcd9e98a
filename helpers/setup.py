"""The first cell of every notebook.

It installs what is missing, checks versions, chooses a GPU, and says which profile runs. Importing
this module imports neither torch nor anything else outside Python itself: it must run before torch
does, and must be able to say that torch is missing.
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import platform
import re
import sys
import tomllib
import warnings
from pathlib import Path

from helpers.packages import install, installed, leave_out_cells, problems
from tight_fit import gpus, old_torchao
from tight_fit.packages import needs

__all__ = ["FOLDED", "first_cell", "home", "needs", "repository", "say", "setup"]

ROOT = home = Path(__file__).resolve().parent.parent  # the course's folder
# The environment variables that Colab and Kaggle set in their own kernels.
HOSTS = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")
# No notebook runs without these.
ESSENTIAL = {"torch", "transformers", "datasets", "numpy", "pandas", "matplotlib"}
# Turns off the progress bars and the advice of other libraries, which would fill a notebook.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
# What hides the code of a cell in JupyterLab, in Colab and on Kaggle.
FOLDED = {
    "jupyter": {"source_hidden": True},
    "cellView": "form",
    "_kg_hide-input": True,
}
LIBRARIES = r"(accelerate|bitsandbytes|datasets|deepspeed|lightning|peft|torch|transformers)\b"
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


def setup() -> None:
    """Prepare this kernel for a notebook, and say in two or three lines what it runs on.

    A GPU that cannot run a kernel is hidden before CUDA starts, so that torch itself finds none.
    Raises RuntimeError, in one sentence, for a Python or a library that is too old or missing.
    """
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    if (ROOT / "mirror").is_dir():  # of a bundle
        os.environ.setdefault("TIGHT_FIT_MIRROR", str(ROOT / "mirror"))
    if hosted() and installed("packaging") and not install():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what no network answers is asked only once
    absent = complain()
    count = gpus.hide_all_but_first()
    usable, why = gpus.probe()  # in another process: here CUDA must not start yet
    unusable = not usable and why != gpus.NO_GPU
    if unusable:
        gpus.hide_all()
    _inline()
    _hush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        torch.cuda.is_available()  # warns, once, where the driver is too old; the profile says it

    from helpers import profile

    chosen = profile.choose()
    if chosen.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints a line when it looks
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name).split('+')[0]}"
        for name in ("torch", "transformers")
    )
    device = "the GPU" if chosen.device == "cuda" else "the CPU"
    print(f"Python {platform.python_version()}, {versions}, on {device}.")
    models = {"mini": "the small bundled models", "full": "the full models"}[chosen.name]
    print(f"Profile {chosen.name}: {models} ({chosen.reason}).")
    notes = [f"{'; '.join(absent)}: cells that need it are left out"] if absent else []
    if old := old_torchao.release():
        notes.append(
            f"peft refuses the installed torchao {old}, which the course does not use, so its "
            "cells hide it from peft (elsewhere: `pip install -U torchao`)"
        )
    if unusable and why not in chosen.reason:
        notes.append(why)
    if count > 1 and not unusable:
        notes.append(
            f"one of {count} GPUs is used, as Trainer would split every batch over all of them"
        )
    if chosen.name == "full" and not _hub_has_weights():
        notes.append(
            "the hub does not answer, so full models start from random weights, and every accuracy "
            "says so"
        )
    if notes:
        print(f"Mind: {'; '.join(notes)}.")
    _settle()


def _settle() -> None:
    """Exempt what the imports made, which stays for good, from garbage collection.

    Measuring memory collects garbage often, so this saves time. It is done once per kernel, before
    there is a model, because an object that is exempt is never freed if it is part of a cycle.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def say(text: str) -> None:
    """Show a sentence whose numbers the code has just computed, as Markdown.

    Where there is no notebook it is printed as text.
    """
    if _shell() is None:
        print(text)
        return
    from IPython.display import display

    display({"text/markdown": text, "text/plain": text}, raw=True)


def hosted() -> bool:
    """Whether this is Colab or Kaggle, where every start has only what the host installed."""
    return any(name in os.environ for name in HOSTS)


def complain() -> list[str]:
    """The libraries that only a part of the course needs and that are wrong here, each in words.

    Raises RuntimeError, with what to do, when the course cannot run at all.
    """
    remedy = (
        "run `pip install -r requirements.txt` in the course's folder (without internet, attach a "
        "bundle: `make bundle`), then restart the kernel"
    )
    if sys.version_info < (3, 11):  # noqa: UP036, as a notebook is opened in any Python
        raise RuntimeError(
            f"This is Python {platform.python_version()} and the course needs 3.11: choose another "
            "kernel."
        )
    if not installed("packaging"):  # nearly every library brings it
        raise RuntimeError(f"The libraries of the course are not installed: {remedy}.")
    wrong = problems()
    if ESSENTIAL & set(wrong):
        raise RuntimeError(f"{'; '.join(wrong.values())}: {remedy}.")
    return list(wrong.values())


def _hub_has_weights() -> bool:
    from helpers import models
    from tight_fit.models import hub

    return hub.available("model", models.REPOS["deberta"]) is not None


def _shell():
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _inline() -> None:
    """Show figures in the page, in the course's style."""
    from helpers import plots

    if _shell() is not None:
        _shell().run_line_magic("matplotlib", "inline")
        leave_out_cells(_shell())
    plots.style()


def _hush() -> None:
    import datasets
    import transformers

    # What libraries will change one day is news for their authors, and each other's.
    for kind in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=kind, module=LIBRARIES)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # On a CPU it would ask for a package that the course does not use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
