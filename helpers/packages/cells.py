"""What a cell does where a package that it needs is not installed: it is left out, in one sentence.

A cell whose first statement is `needs("bitsandbytes")` does not run where bitsandbytes is missing.
A sentence stands in its place, and the notebook goes on. Later cells that use a name which only
this cell would have made are left out as well, so that no NameError follows and no older value of
that name is shown as if it were the new one.
"""

from __future__ import annotations

import ast
import symtable
from typing import Any

from tight_fit.packages import install_line, missing, named


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
