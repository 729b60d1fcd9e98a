"""Which modules can be imported here, and in one sentence what to install for the others.

Nothing but Python itself is imported: this is asked before PyTorch is there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from tight_fit import old_torchao

COMPILE = "torch.compile"
# What may stand among the modules and is none, by the name of its package in Debian and Ubuntu:
# compilers, with those programs of which one is enough, and Python's headers.
PROGRAMS = {"g++": ("g++", "clang++"), "gcc": ("gcc", "clang")}
HEADERS = "python3-dev"


def missing(*modules: str) -> list[str]:
    """Those of the named modules, such as "lightning_fabric", that cannot be imported here.

    "torch.compile" stands for what inductor compiles with: on a GPU Triton, which compiles a file
    of C itself, and elsewhere a compiler of C++; both read Python.h. "g++" stands for the latter
    alone, for code that stays on the CPU.
    """
    parts = [part for name in modules for part in _parts(name)]
    return [part for part in dict.fromkeys(parts) if not _is_here(part)]


def _parts(name: str) -> tuple[str, ...]:
    if name == COMPILE and _on_gpu():
        return "triton", "gcc", HEADERS
    return ("g++", HEADERS) if name in (COMPILE, "g++") else (name,)


def _on_gpu() -> bool:
    """Whether torch, if it is imported, compiles for a GPU; for a pretended one it does not."""
    torch = sys.modules.get("torch")
    pretended = os.environ.get("TIGHT_FIT_REHEARSAL")  # gpus.REHEARSAL
    return torch is not None and torch.cuda.is_available() and not pretended


def _is_here(name: str) -> bool:
    if name in PROGRAMS:
        return any(map(shutil.which, PROGRAMS[name]))
    if name == HEADERS:
        return Path(sysconfig.get_path("include"), "Python.h").is_file()
    return importlib.util.find_spec(name) is not None


def needs(*modules: str) -> None:
    """Say that what follows needs these modules, by the names under which they are imported.

    As the first statement of a cell of the course's notebooks it leaves the cell out where one of
    them is missing. Everywhere else it raises ModuleNotFoundError, in one sentence, with what to
    install. "peft" works after it beside a torchao that is too old for it (`old_torchao`).
    """
    absent = missing(*modules)
    if absent:
        raise ModuleNotFoundError(
            f"This needs {named(absent)}, which this machine lacks: run "
            f"`{install_line(absent)}`, or go on without this part.",
            name=absent[0],
        )
    if "peft" in modules:
        old_torchao.pass_over()


def install_line(absent: list[str]) -> str:
    """The commands that bring what is missing, such as "pip install peft"."""
    system = [name for name in absent if name in PROGRAMS or name == HEADERS]
    named = {"apt-get": system, "pip": [name for name in absent if name not in system]}
    return " && ".join(
        f"{tool} install {' '.join(map(_project, names))}" for tool, names in named.items() if names
    )


def named(modules: list[str]) -> str:
    """The packages of these modules, in words."""
    return " and ".join(map(_project, modules))


def _project(module: str) -> str:
    """What pip calls a module's package, for those that the course uses."""
    return module.partition(".")[0].replace("_", "-")
