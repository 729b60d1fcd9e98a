"""argparse with errors of one line, and types of arguments that refuse what is out of bounds."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """argparse, with errors of one line, after which the command exits with 2.

    An option must be written whole, and once: of two values the first would be lost in silence.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **{"allow_abbrev": False} | more)

    def parse_known_args(  # type: ignore[override]  # its overloads are those of argparse
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse's. Refuses an option that is given twice."""
        given = list(sys.argv[1:] if args is None else args)
        seen: dict[str, str] = {}  # what an option sets -> the name it was given by
        for word in given[: given.index("--")] if "--" in given else given:
            name = word.partition("=")[0]
            action = self._option_string_actions.get(name)
            if action is None:
                continue
            if action.dest in seen:
                earlier = seen[action.dest]
                twice = "twice" if earlier == name else f"as {earlier} and as {name}"
                self.error(f"{name} is given {twice}: give it once.")
            seen[action.dest] = name
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, what may have been meant, and where examples are."""
        message = re.sub(r"'([^']{57})[^']{200,}'", r"'\1...'", message)  # a value without an end
        text = message if message.endswith((".", "?")) else f"{message}."
        text += _meant(message, self._option_string_actions)
        self.exit(2, f"{self.prog}: error: {text} ({self.prog} --help shows examples.)\n")


def _meant(message: str, options: Collection[str]) -> str:
    """A question about what is near to an unknown option or choice, "" where nothing is."""
    choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if choice:
        return did_you_mean(choice[1], re.findall(r"[^\s,']+", choice[2]))
    unknown = re.search(r"unrecognized arguments: (-[^\s=]+)", message)
    return did_you_mean(unknown[1], options) if unknown else ""


def did_you_mean(typed: str, known: Collection[str]) -> str:
    """ " Did you mean ...?", or "" where none of the `known` names is near to what was typed."""
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(typed.lower(), lower, 1, 0.7)
    return f" Did you mean {lower[near[0]]}?" if near else ""


def integer(typed: str) -> int:
    """A type for `add_argument`: a whole number in plain digits, whose bounds are checked later."""
    if not re.fullmatch(r"[+-]?[0-9]{1,40}", typed):
        shown = typed if len(typed) <= 40 else f"{typed[:37]}..."
        raise argparse.ArgumentTypeError(f"{shown!r} is no whole number.")
    return int(typed)


def price(typed: str) -> float:
    """A type for `add_argument`: a finite number of at least 0, in any currency."""
    try:
        value = float(typed)
    except ValueError:
        value = nan
    if not 0 <= value < inf:
        shown = typed if len(typed) <= 40 else f"{typed[:37]}..."
        raise argparse.ArgumentTypeError(f"{shown} must be a number of at least 0.")
    return value


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """A type for `add_argument`: whole numbers from `least` to `most`, both included."""

    def parse(typed: str) -> int:
        value = int(typed) if re.fullmatch(r"[+-]?[0-9]{1,40}", typed) else None
        if value is None or not least <= value <= most:
            shown = typed if len(typed) <= 40 else f"{typed[:37]}..."
            raise argparse.ArgumentTypeError(
                f"{shown!r} is no whole number from {least:,} to {most:,}."
            )
        return value

    return parse


def new_file(typed: str) -> Path:
    """A type for `add_argument`: a file that can be written, checked before any work starts."""
    if not typed.strip():
        raise argparse.ArgumentTypeError("the name of a file is needed, and it is empty.")
    if why := no_place(typed):
        raise argparse.ArgumentTypeError(f"{typed} {why}.")
    path = Path(typed)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{typed} is a folder: name a file.")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{typed} cannot be written: there is no folder {path.parent}."
        )
    _check_writable(path if path.exists() else path.parent, typed)
    return path


def new_folder(typed: str) -> Path:
    """A type for `add_argument`: a folder that can be written, or made; checked before any work."""
    if not typed.strip():
        raise argparse.ArgumentTypeError("the name of a folder is needed, and it is empty.")
    if why := no_place(typed):
        raise argparse.ArgumentTypeError(f"{typed} {why}.")
    path = Path(typed)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{typed} is a file: name a folder.")
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{typed} cannot be made: {there} is a file.")
    _check_writable(there, typed)
    return path


def no_place(typed: str) -> str:
    """ "", or why a text names no place on this machine's disks, as the end of a sentence."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", typed):
        return "is an address, and nothing is sent there: name a folder of this machine"
    if re.match(r"\$[A-Za-z_{]", typed) and not os.path.lexists(typed):
        return "begins with a variable, which nobody expands here: write what it stands for"
    return ""


def _check_writable(path: Path, typed: str) -> None:
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{typed} cannot be written: {path} is read-only; choose another place."
        )
