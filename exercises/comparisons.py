"""What the tests of exercises compare with. Each function asserts, with a sentence on the error.

A sentence says in which way an answer is wrong (too large, in MiB, of another shape), and never
what is right.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from by_hand.transport import threads
from tight_fit.checks import plain

__all__ = ["close", "same", "agree", "over_ranks", "whole_number", "letters"]


def close(
    answer: Any, truth: float, rel: float = 0.01, unit: str = "", what: str = "your answer"
) -> None:
    """Assert that a number (or a tensor of one element) is within `rel` * |truth| of the truth.

    `rel` is relative (0.01 is one in a hundred), and absolute where the truth is 0. `unit` is only
    for the sentence; for "GiB" the assertion also recognises bytes, MiB and GB of 10^9 bytes.
    `what` names the answer in the sentence. Raises AssertionError.
    """
    value = answer.item() if isinstance(answer, torch.Tensor) and answer.numel() == 1 else answer
    wanted = f"a number in {unit}" if unit else "a number"
    assert _is_number(value), f"{what} should be {wanted}, and is {_short(answer)}"
    value, truth = float(value), float(truth)
    assert math.isfinite(value), f"{what} is {value}, which is no finite number"
    if abs(value - truth) <= rel * (abs(truth) or 1):
        return
    subject = f"{what}, {value:.6g}{f' {unit}' if unit else ''},"
    ratio = value / truth if truth else 0.0
    if unit == "GiB":
        for scale, other in ((2**30, "bytes"), (2**10, "MiB"), (2**30 / 1e9, "GB of 10^9 bytes")):
            mistaken = abs(ratio / scale - 1) <= min(rel, 0.02)
            assert not mistaken, f"{subject} looks like {other}: give GiB of 2^30 bytes"
    assert ratio >= 0, f"{subject} has the wrong sign"
    much = " by more than ten times" if truth and not 0.1 <= ratio <= 10 else ""
    size = "large" if value > truth else "small"
    raise AssertionError(f"{subject} is too {size}{much}")


def whole_number(answer: Any, of: str) -> int:
    """The answer as an int, also where a division or a root has made a float of it, such as 4.0.

    `of` says what it counts, for the sentence. Raises AssertionError for anything else.
    """
    value = plain(answer)
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and value % 1 == 0
    assert right, f"your answer should be a whole number of {of}"
    return int(value)


def letters(answer: Any, known: str) -> set[str]:
    """A set of letters, given as a set, a list, a tuple or a text such as "BD" or "b, d".

    `known` holds the letters that the exercise names. Raises AssertionError for anything else.
    """
    right = isinstance(answer, (set, frozenset, list, tuple, str))
    assert right, 'your answer should be a set of letters, such as {"A", "B"}'
    found = {str(letter).strip().upper() for letter in answer if str(letter).strip(" ,")}
    assert found <= set(known), f"your answer should hold letters from {known[0]} to {known[-1]}"
    return found


def same(
    answer: Any, truth: Any, rel: float = 1e-6, atol: float = 1e-8, what: str = "your answer"
) -> None:
    """Assert that an answer equals the truth.

    Numbers are compared within `rel` (relative) or `atol` (absolute), tensors and arrays by shape
    and value in float64, lists and tuples item by item, dicts key by key, anything else by ==.
    `what` names the answer in the sentence. Raises AssertionError.
    """
    if isinstance(truth, np.ndarray):
        truth, answer = torch.as_tensor(truth), torch.as_tensor(answer)
    if isinstance(truth, torch.Tensor):
        assert isinstance(answer, torch.Tensor), (
            f"{what} should be a tensor, and is {_short(answer)}"
        )
        shape, wanted = tuple(answer.shape), tuple(truth.shape)
        assert shape == wanted, f"{what} has shape {shape} and not {wanted}"
        ours = answer.detach().to("cpu", torch.float64)
        theirs = truth.detach().to("cpu", torch.float64)
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
        for index, (given, expected) in enumerate(zip(answer, truth)):
            same(given, expected, rel, atol, f"item {index} of {what}")
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
    """Assert that a function returns what `truth` returns.

    Both are called with the examples (tuples of arguments) and with `times` more tuples that
    `draw(rng)` makes; the generator has a fixed seed, so the draws never change. Each side gets
    its own copy of the arguments. `rel` and `atol` as in `same`.

    Raises AssertionError for a difference, TypeError for arguments that are no tuple, and
    ValueError if all expected results are equal, because a constant would pass then.
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


def over_ranks(
    answer: Callable, arguments: list[tuple]
) -> tuple[list, list[int], list[int], list[tuple]]:
    """Run `answer(transport, *arguments[rank])` on as many ranks as there are tuples, in threads.

    Gives, with one item per rank: the results, the bytes sent, the messages sent, and the arguments
    as they are afterwards. Made for `exercises.handout.observe`.
    """
    results, transports = threads(
        len(arguments), lambda transport: answer(transport, *arguments[transport.rank])
    )
    sent = [transport.bytes_sent for transport in transports]
    return results, sent, [len(transport.sent) for transport in transports], arguments


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
