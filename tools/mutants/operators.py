"""The ways in which a mutant differs from the source: one small span of one file each.

The operators are those of the literature (DeMillo, Lipton and Sayward, "Hints on test data
selection", 1978; Offutt et al., "An experimental determination of sufficient mutant operators",
1996), as far as Python has them. What no test can be expected to see is left out: docstrings,
texts, annotations, decorators, what an exception says, and code for type checkers.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

NAME = "{file} {function}: {before} -> {text}"  # line numbers would change with every edit

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
# Keywords that decide how something is said, or that other systems have other defaults for.
SPOKEN = {"encoding", "newline", "errors", "flush", "file", "end", "sep", "stacklevel", "hint"}
SAID = {"print", "warn", "warning", "info", "debug", "write", "display", "_say", "say"}


@dataclass(frozen=True)
class Mutant:
    """One change: the bytes from `start` to `end` of the file become `text`."""

    file: str
    line: int
    operator: str
    start: int
    end: int
    before: str
    text: str
    function: str  # "" at the top of a module or a class: it runs when the module is imported

    @property
    def name(self) -> str:
        """What it is called in results.jsonl and equivalent.json."""
        return NAME.format_map(vars(self))

    def apply(self, source: bytes) -> bytes:
        """The file with the change. Raises ValueError where the file is another one by now."""
        if source[self.start : self.end].decode() != self.before:
            raise ValueError(f"{self.file} has changed since the mutants were drawn: draw again.")
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file, in the order of the file."""
    starts = [0]
    for row in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    found = []
    for node, new, operator, function in _changes(ast.parse(source), ""):
        start = starts[node.lineno - 1] + node.col_offset  # columns of ast count bytes of UTF-8
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(new)
        if isinstance(node, ast.expr):
            text = f"({text})"
        before = source[start:end].decode()
        if text.strip("()") != before.strip("()"):
            one = Mutant(file, node.lineno, operator, start, end, before, text, function)
            found.append(one)
    return found


def compiles(source: bytes) -> bool:
    """Whether a changed file is still Python."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _changes(node: ast.AST, function: str) -> Iterator[tuple]:
    """(node, what takes its place, operator, function) of everything below a node."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = f"{function}.{node.name}".lstrip(".")
    for old, new, operator in _of(node):
        yield old, new, operator, function
    for child in _children(node):
        yield from _changes(child, function)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What is below a node, without what no test can be expected to see."""
    skipped: list[ast.AST | None] = []
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        skipped = [*node.decorator_list, node.returns]
    elif isinstance(node, ast.ClassDef):
        skipped = [*node.decorator_list, *node.bases]
    elif isinstance(node, ast.arg | ast.AnnAssign):
        skipped = [node.annotation]
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        skipped = [node.test, *node.body]
    elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
        return
    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("__"):
        return
    elif isinstance(node, ast.Call) and _name(node.func) in SAID | {"cast", "TypeVar"}:
        return
    for child in ast.iter_child_nodes(node):
        if not any(child is one for one in skipped):
            yield child


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _of(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """(the node or its test, what takes its place, operator) for one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, _with(node, ops=[COMPARISONS[type(node.ops[0])]()]), "comparison"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _text(node):
        yield node, _with(node, op=ARITHMETIC[type(node.op)]()), "arithmetic"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, _with(node, op=other), "and/or"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, node.operand, "not dropped"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, ast.Constant(not node.value), "boolean"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, ast.Constant(node.value + 1), "off by one"
    elif isinstance(node, ast.IfExp):
        yield node, node.body, "branch forced"
        yield node, node.orelse, "branch forced"
    elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
        yield node.test, ast.Constant(True), "branch forced"
        yield node.test, ast.Constant(False), "branch forced"
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in SPOKEN:
                rest = [one for one in node.keywords if one is not keyword]
                yield node, _with(node, keywords=rest), "keyword dropped"
    elif isinstance(node, ast.Return) and not _is_none(node.value):
        yield node, ast.Return(ast.Constant(None)), "return dropped"
    elif _acts(node):
        yield node, ast.Pass(), "statement removed"


def _acts(node: ast.AST) -> bool:
    """Whether a statement does something that others may not notice at once when it is missing."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and _name(node.value.func) not in SAID
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(node, ast.Raise | ast.AugAssign | ast.Delete | ast.Break | ast.Continue)


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _text(node: ast.BinOp) -> bool:
    """Whether it joins or formats texts."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.JoinedStr | ast.Constant)]
    return any(isinstance(part, ast.JoinedStr) or isinstance(part.value, str) for part in parts)
