"""Exercises with checks and hints.

`check("02.1", answer)` prints one line and never raises for an answer, given or not. With the
environment variable TIGHT_FIT_GRADE=1 a wrong or missing answer raises AssertionError with that
line, as nbgrader wants it. Where a teacher's program listens (`exercises.handout`), `check` hands
the answer out and gives no verdict: that program finds it, in a process of its own.

The exercises are in `exercises/nbNN.py`, registered by `@exercise` and loaded when first asked for.
What their tests compare with is in `exercises.comparisons`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import exercises
from exercises import handout

__all__ = ["check", "exercise", "Result", "load", "load_all", "verdict"]

NUMBER = re.compile(r"(\d\d)\.([1-9]\d*)")


@dataclass(frozen=True)
class Exercise:
    """One exercise as it is registered.

    number  "NN.k": the notebook and the exercise in it
    test    asserts about an answer, each assertion with a sentence on what is wrong
    hints   two or more; a wrong answer gets the next one, and the last one again
    why     one line on why it matters, for those who are right
    """

    number: str
    test: Callable[[Any], object]
    hints: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Result:
    """What a check found. Shows nothing at the end of a cell.

    passed    True, False, or None where there was no answer yet
    sentence  what was wrong
    error     what the answer raised, if it did
    """

    passed: bool | None
    sentence: str = ""
    error: Exception | None = None

    def _ipython_display_(self) -> None:
        """Nothing: the line is printed already."""


REGISTRY: dict[str, Exercise] = {}
_tries: dict[str, int] = {}  # wrong answers since the kernel started or the last right one


def exercise(number: str, hints: list[str], why: str) -> Callable:
    """Register the decorated function as the test of an exercise.

    The test takes the answer and asserts, each assertion with one sentence on what is wrong. It
    returns nothing. A wrong answer gets one hint, and the next wrong one the hint after it.

    Raises ValueError for a number that is no "NN.k", is taken or belongs in another module, for
    fewer than two hints, and for an empty `why`.
    """
    chapter = _chapter(number)
    if isinstance(hints, str) or len(hints) < 2 or not all(hints) or not why:
        raise ValueError(
            f"Exercise {number} needs a list of two or more hints and a line on why it matters."
        )

    def register(test: Callable[[Any], object]) -> Callable[[Any], object]:
        package, _, module = test.__module__.rpartition(".")
        if package == exercises.__name__ and module != f"nb{chapter}":
            home = f"{exercises.__name__}.nb{chapter}"
            raise ValueError(f"Exercise {number} belongs in {home}, not in {module}.")
        if number in REGISTRY:
            raise ValueError(f"Exercise {number} is registered twice: give each its own number.")
        REGISTRY[number] = Exercise(number, test, tuple(hints), why)
        return test

    return register


def check(number: str, answer: Any = None) -> Result:
    """Check an answer and print the verdict in one line.

    None, `...` and a function without a body (see `_is_missing`) are no answer yet. Where the
    answer is handed out, `passed` of the result is None, and a teacher's program finds out.

    Raises ValueError for an exercise that does not exist, and in strict mode (TIGHT_FIT_GRADE=1)
    AssertionError for an answer that is missing or wrong.
    """
    if handout.ADDRESS.exists():
        handout.hand_out(number, answer, _is_missing(answer))
        print(f"Exercise {number}: handed in.")
        return Result(None)
    asked = load(number)
    result = Result(None) if _is_missing(answer) else verdict(asked, answer)
    if result.passed:
        _tries.pop(number, None)
        print(f"Exercise {number}: right. {_sentence(asked.why)}")
        return result
    if result.passed is None:
        line = f"Exercise {number}: not answered yet."
    else:
        tries = _tries.get(number, 0)
        _tries[number] = tries + 1
        hint = asked.hints[min(tries, len(asked.hints) - 1)]
        line = f"Exercise {number}: not yet: {result.sentence} Hint: {_sentence(hint)}"
    if os.environ.get("TIGHT_FIT_GRADE", "0") not in ("", "0"):
        raise AssertionError(line) from result.error
    print(line)
    return result


def load(number: str) -> Exercise:
    """The exercise of that number. Raises ValueError if there is none."""
    chapter = _chapter(number)
    module = f"{exercises.__name__}.nb{chapter}"
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    if number not in REGISTRY:
        known = (
            ", ".join(name for name in sorted(REGISTRY) if name.startswith(f"{chapter}.")) or "none"
        )
        raise ValueError(f"There is no exercise {number}: notebook {chapter} has {known}.")
    return REGISTRY[number]


def load_all() -> dict[str, Exercise]:
    """Every exercise of every notebook by its number."""
    for module in pkgutil.iter_modules(exercises.__path__):
        importlib.import_module(f"{exercises.__name__}.{module.name}")
    return dict(sorted(REGISTRY.items()))


def verdict(asked: Exercise, answer: Any) -> Result:
    """Whether an answer that is there is right, and what is wrong with it. Prints nothing."""
    if not __debug__:
        raise RuntimeError("Exercises are checked by assert statements: run Python without -O.")
    import torch  # takes seconds, and handing an answer out does without

    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)  # the same draws at each check, whatever ran before
    try:
        returned = asked.test(answer)
    except AssertionError as error:
        return Result(False, _sentence(str(error) or "an assertion in your answer failed"))
    except Exception as error:  # whatever an answer does, the notebook goes on
        raised = f"{type(error).__name__}: {str(error).strip()}".rstrip(": ")
        return Result(False, _sentence(f"your answer raised {raised}"), error)
    finally:
        torch.set_rng_state(state)
    if returned is not None:
        raise TypeError(f"The test of exercise {asked.number} must assert, and return nothing.")
    return Result(True)


def _is_missing(answer: Any) -> bool:
    """Whether there is no answer yet: None, `...`, or a function without a body.

    A function has no body if its source holds nothing but `pass`, `...`, a docstring and
    `return None`; a lambda, if it gives None. The source is read, and not the byte code, which
    changes with every Python. Where there is no source (`exec`, a deleted file), a function
    counts as an answer. So do partial functions, builtins, objects that can be called,
    generators, coroutines, and `raise NotImplementedError`, which the verdict then names.
    """
    if answer is None or answer is ...:
        return True
    function = answer.__func__ if inspect.ismethod(answer) else answer
    if not isinstance(function, FunctionType):
        return False
    definitions = _definitions(function)
    return bool(definitions) and all(map(_has_no_body, definitions))


def _definitions(function: FunctionType) -> list[ast.FunctionDef | ast.Lambda]:
    """The definition of a function in its source: none without source, several if lambdas share
    a line and the names of their parameters."""
    code = function.__code__
    try:
        tree = ast.parse("".join(inspect.findsource(function)[0]))
    except (OSError, TypeError, IndexError, SyntaxError):
        return []
    definitions: list[ast.FunctionDef | ast.Lambda] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
            if code.co_name == "<lambda>" and code.co_firstlineno == node.lineno:
                if names == list(code.co_varnames[: code.co_argcount]):
                    definitions.append(node)
        elif isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            if code.co_firstlineno in (node.lineno, *(mark.lineno for mark in node.decorator_list)):
                definitions.append(node)
    return definitions


def _has_no_body(definition: ast.FunctionDef | ast.Lambda) -> bool:
    if isinstance(definition, ast.Lambda):
        return _is_none(definition.body)
    return all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        or (isinstance(statement, ast.Return) and _is_none(statement.value))
        for statement in definition.body
    )


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _chapter(number: str) -> str:
    match = NUMBER.fullmatch(number) if isinstance(number, str) else None
    if not match:
        raise ValueError(
            f"{number!r} is no exercise: give a string such as '02.1', notebook and exercise."
        )
    return match[1]


def _sentence(text: str) -> str:
    """One line of at most 300 characters that ends with a full stop."""
    line = " ".join(str(text).split())
    line = line if len(line) <= 300 else f"{line[:297]}..."
    return line if line.endswith((".", "!", "?")) else f"{line}."
