"""What a cell does where a package that it needs is not installed: it is left out, in one sentence.

A cell whose first statement is `needs("bitsandbytes")` does not run where bitsandbytes is missing.
A sentence stands in its place, and the notebook goes on. Later cells that use a name which only
this cell would have made are left out as well, so that no NameError follows and no older value of
that name is shown as if it were the new one.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import symtable
import sys
import sysconfig
from pathlib import Path
from typing import Any

from helpers.packages import old_torchao

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

    As the first statement of a notebook's cell it leaves the cell out where one of them is missing
    (`watch`). Everywhere else it raises ModuleNotFoundError, in one sentence, with what to install.
    "peft" works after it beside a torchao that is too old for it (`old_torchao`).
    """
    absent = missing(*modules)
    if absent:
        raise ModuleNotFoundError(
            f"This needs {_these(absent)}, which this machine lacks: run "
            f"`{_install(absent)}`, or go on without this part.",
            name=absent[0],
        )
    if "peft" in modules:
        old_torchao.pass_over()


def watch(shell: Any) -> None:
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
            why = f"it needs {_these(absent)}, which this machine lacks"
            why += f" ({_install(absent)})"
        elif unmade := sorted(used & set(self.lacking)):
            absent = self.lacking[unmade[0]]
            why = f"it uses `{unmade[0]}` of a cell that needs {_these(absent)}"
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


def _install(absent: list[str]) -> str:
    """The commands that bring what is missing."""
    system = [name for name in absent if name in PROGRAMS or name == HEADERS]
    named = {"apt-get": system, "pip": [name for name in absent if name not in system]}
    return " && ".join(
        f"{tool} install {' '.join(map(_project, names))}" for tool, names in named.items() if names
    )


def _these(modules: list[str]) -> str:
    return " and ".join(map(_project, modules))


def _project(module: str) -> str:
    """What pip calls a module's package, for those that the course uses."""
    return module.partition(".")[0].replace("_", "-")
