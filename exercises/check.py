"""Exercises with checks and hints.

`check("02.1", answer)` prints one line and never raises for an answer, given or not. With the environment
variable TIGHT_FIT_GRADE=1 a wrong or missing answer raises AssertionError with that line, so that a teacher
can grade by machine. The exercises are in `exercises/nbNN.py`, registered by `@exercise` and loaded
when first asked for.
"""

from __future__ import annotations

import copy
import dis
import importlib
import math
import os
import pkgutil
import random
import re
from dataclasses import dataclass
from typing import Any
from collections.abc import Callable, Iterable

import numpy as np
import torch

import exercises
from helpers import recipe

__all__ = [
    "check",
    "exercise",
    "Result",
    "close",
    "same",
    "agree",
    "only_changes",
    "load",
    "load_all",
]
NUMBER = re.compile(r"(\d\d)\.([1-9]\d*)")


@dataclass(frozen=True)
class Exercise:
    number: str
    test: Callable[[Any], None]
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
    """Register the decorated function as the test of an exercise: it takes the answer and asserts, each
    assertion with one sentence on what was wrong; it returns nothing. Hints: two or more, one a wrong try.

    Raises ValueError for a number that is no "NN.k", is taken or belongs in another module, or fewer hints.
    """
    chapter = _chapter(number)
    if isinstance(hints, str) or len(hints) < 2 or not all(hints) or not why:
        raise ValueError(
            f"Exercise {number} needs a list of two or more hints and a line on why it matters."
        )

    def register(test: Callable[[Any], None]) -> Callable[[Any], None]:
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
    """Check an answer and print the verdict in one line; None, `...` or a function without a body is none.

    Raises ValueError for an exercise that does not exist, and in strict mode (TIGHT_FIT_GRADE=1)
    AssertionError for an answer that is missing or wrong.
    """
    found = load(number)
    result = Result(None) if _is_missing(answer) else _verdict(found, answer)
    if result.passed:
        _tries.pop(number, None)
        print(f"Exercise {number}: right. {_sentence(found.why)}")
        return result
    if result.passed is None:
        hint, said = found.hints[0], "not answered yet."
    else:
        tries = _tries.get(number, 0)
        _tries[number] = tries + 1
        hint, said = found.hints[min(tries, len(found.hints) - 1)], f"not yet: {result.sentence}"
    line = f"Exercise {number}: {said} Hint: {_sentence(hint)}"
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


def close(
    answer: Any, truth: float, rel: float = 0.01, unit: str = "", what: str = "your answer"
) -> None:
    """Assert that a number (or a tensor of one element) lies within the share `rel` of the truth."""
    value = answer.item() if isinstance(answer, torch.Tensor) and answer.numel() == 1 else answer
    wanted = f"a number in {unit}" if unit else "a number"
    assert _is_number(value), f"{what} should be {wanted}, and is {_short(answer)}"
    value, truth = float(value), float(truth)
    assert math.isfinite(value), f"{what} is {value}, which is no finite number"
    if abs(value - truth) <= rel * (abs(truth) or 1):
        return
    said = f"{what}, {value:.6g}{f' {unit}' if unit else ''},"
    ratio = value / truth if truth else 0.0
    if unit == "GiB":
        for scale, other in ((2**30, "bytes"), (2**10, "MiB"), (2**30 / 1e9, "GB of 10^9 bytes")):
            mistaken = abs(ratio / scale - 1) <= min(rel, 0.02)
            assert not mistaken, f"{said} looks like {other}: give GiB of 2^30 bytes"
    assert ratio >= 0, f"{said} has the wrong sign"
    much = " by more than ten times" if truth and not 0.1 <= ratio <= 10 else ""
    assert False, f"{said} is too {'large' if value > truth else 'small'}{much}"


def same(
    answer: Any, truth: Any, rel: float = 1e-6, atol: float = 1e-8, what: str = "your answer"
) -> None:
    """Assert that an answer equals the truth: numbers within `rel` or `atol`, tensors and arrays by shape and
    value, lists and tuples item by item, dicts key by key, anything else by ==."""
    if isinstance(truth, np.ndarray):
        truth, answer = torch.as_tensor(truth), torch.as_tensor(answer)
    if isinstance(truth, torch.Tensor):
        assert isinstance(answer, torch.Tensor), (
            f"{what} should be a tensor, and is {_short(answer)}"
        )
        ours, theirs = tuple(answer.shape), tuple(truth.shape)
        assert ours == theirs, f"{what} has shape {ours} and not {theirs}"
        ours, theirs = (
            answer.detach().to("cpu", torch.float64),
            truth.detach().to("cpu", torch.float64),
        )
        assert torch.isfinite(ours).all() or not torch.isfinite(theirs).all(), (
            f"{what} holds NaN or infinity"
        )
        apart = (ours - theirs).abs().nan_to_num()
        assert torch.allclose(ours, theirs, rtol=rel, atol=atol, equal_nan=True), (
            f"{what} has the right shape and values that are off by up to {apart.max().item():.3g}"
        )
    elif isinstance(truth, (list, tuple)):
        kind = type(truth).__name__
        assert isinstance(answer, (list, tuple)), (
            f"{what} should be a {kind}, and is {_short(answer)}"
        )
        assert len(answer) == len(truth), f"{what} has {len(answer)} items and not {len(truth)}"
        for place, (one, other) in enumerate(zip(answer, truth)):
            same(one, other, rel, atol, f"item {place} of {what}")
    elif isinstance(truth, dict):
        assert isinstance(answer, dict), f"{what} should be a dict, and is {_short(answer)}"
        assert answer.keys() == truth.keys(), (
            f"{what} should have the keys {', '.join(map(str, truth))}"
        )
        for key in truth:
            same(answer[key], truth[key], rel, atol, f"{key!r} of {what}")
    elif _is_number(truth):
        if not (
            _is_number(answer) and (answer == truth or math.isnan(answer) and math.isnan(truth))
        ):
            close(answer, truth, max(rel, atol if not truth else atol / abs(truth)), what=what)
    else:
        assert bool(answer == truth), f"{what} is {_short(answer)}, which is not right"


def agree(
    answer: Any,
    truth: Callable,
    examples: Iterable[tuple],
    draw: Callable[[random.Random], tuple],
    times: int = 5,
    rel: float = 1e-6,
    atol: float = 1e-8,
) -> None:
    """Assert that a function gives what `truth` gives, for the examples (tuples of arguments) and for `times`
    more that `draw(rng)` makes. Each side gets its own copy of the arguments; the draws never change.

    Raises TypeError for arguments that are no tuple, ValueError where a constant would pass.
    """
    assert callable(answer), f"your answer should be a function, and is {_short(answer)}"
    rng, seen = random.Random(20240229), set()
    for arguments in [*examples, *(draw(rng) for _ in range(times))]:
        if not isinstance(arguments, tuple):
            raise TypeError("Examples and draws are tuples of arguments.")
        expected = truth(*copy.deepcopy(arguments))
        given = answer(*copy.deepcopy(arguments))
        shown = f"what your function gives for ({', '.join(map(_short, arguments))})"
        assert given is not None, f"{shown} is nothing: does it return its result?"
        same(given, expected, rel, atol, shown)
        seen.add(repr(expected))
    if len(seen) < 2:
        raise ValueError("Every example has the same answer: a constant would pass.")


def only_changes(answer: Any, before: recipe.Recipe, *fields: str) -> None:
    """Assert that the answer is a recipe that differs from `before` in exactly these fields."""
    assert isinstance(answer, recipe.Recipe), (
        f"your answer should be a Recipe, and is {_short(answer)}"
    )
    changed = set(recipe.difference(before, answer))
    extra, missing = sorted(changed - set(fields)), [name for name in fields if name not in changed]
    assert not extra, f"your recipe also changes {', '.join(extra)}, which should stay as before"
    assert not missing, f"your recipe leaves {', '.join(missing)} as before"


def _verdict(found: Exercise, answer: Any) -> Result:
    if not __debug__:
        raise RuntimeError("Exercises are checked by assert statements: run Python without -O.")
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(
        0
    )  # the same draws at each check, and the notebook's own undisturbed
    try:
        returned = found.test(answer)
    except AssertionError as error:
        return Result(False, _sentence(str(error) or "an assertion in your answer failed"))
    except Exception as error:  # whatever an answer does, the notebook goes on
        said = f"{type(error).__name__}: {str(error).strip()}".rstrip(": ")
        return Result(False, _sentence(f"your answer raised {said}"), error)
    finally:
        torch.set_rng_state(state)
    if returned is not None:
        raise TypeError(f"The test of exercise {found.number} must assert, and return nothing.")
    return Result(True)


def _is_missing(answer: Any) -> bool:
    """No answer: None, `...`, or a function whose body is only `...` or `pass`."""
    if answer is None or answer is ...:
        return True
    code = getattr(answer, "__code__", None)
    if code is None or code.co_flags & 0x2A0:  # generators and coroutines
        return False
    steps = list(dis.get_instructions(code))
    loads = [step.argval for step in steps if step.opname in ("LOAD_CONST", "RETURN_CONST")]
    names = {step.opname for step in steps}
    idle = {
        "RESUME",
        "NOP",
        "LOAD_CONST",
        "RETURN_VALUE",
        "RETURN_CONST",
        "COPY_FREE_VARS",
        "MAKE_CELL",
    }
    return names <= idle and loads == [None]


def _chapter(number: str) -> str:
    match = NUMBER.fullmatch(number) if isinstance(number, str) else None
    if not match:
        raise ValueError(
            f"{number!r} is no exercise: give a string such as '02.1', notebook and exercise."
        )
    return match[1]


def _is_number(value: Any) -> bool:
    return (
        hasattr(value, "__float__")
        and not isinstance(value, (bool, str, torch.Tensor))
        and getattr(value, "ndim", 0) == 0
    )


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if callable(value):
        return "a function"
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _sentence(text: str) -> str:
    """One line of at most 300 characters that ends with a full stop."""
    line = " ".join(str(text).split())
    line = line if len(line) <= 300 else f"{line[:297]}..."
    return line if line.endswith((".", "!", "?")) else f"{line}."
