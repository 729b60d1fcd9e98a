"""Which line of the user's own program is running, and in which module of a model."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple
from unittest.mock import patch

from torch import nn

_LIBRARIES = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OURS = str(Path(__file__).parents[1])  # this package
# Files of libraries in which no reader looks for the cause: they call what he wrote.
_PLUMBING = ("/torch/", "/accelerate/", "/lightning_fabric/", "/peft/tuners/tuners_utils")


class Origin(NamedTuple):
    """Where a tensor was made.

    line     "train.py:84" of the user's program; "" where none of its lines was running
    deepest  the line of the model's code, such as "modeling_bert.py:222"; "" where there is none
    module   class of the innermost module that was running; "" outside of modules
    """

    line: str
    deepest: str
    module: str


class UserCode:
    """Tells the user's files from libraries.

    script  the program; files in and below its folder count as the user's, too
    cell    True: `script` is a name that stands for the code of a notebook's cells
    """

    def __init__(self, script: str, cell: bool = False):
        self.script, self.cell = script, cell
        self.folder = "" if cell else str(Path(script).resolve().parent)
        self.modules: list[nn.Module] = []  # that are running now, innermost last
        self._names: dict[CodeType, tuple[str, str]] = {}

    def line(self) -> str:
        """The innermost line of the user's program that is running, "" for none."""
        return self.origin().line

    def line_of(self, frame: FrameType | None) -> str:
        """The innermost line of the user's program that a frame was called from, "" for none."""
        while frame is not None:
            kind, name = self._name(frame.f_code)
            if kind == "user":
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def origin(self) -> Origin:
        """Where the code is that called the function which calls this one."""
        frame: FrameType | None = sys._getframe(2)
        line = deepest = ""
        while frame is not None:
            kind, name = self._name(frame.f_code)
            if kind == "user":
                line = f"{name}:{frame.f_lineno}"
                break
            if kind == "model" and not deepest:
                deepest = f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        module = type(self.modules[-1]).__name__ if self.modules else ""
        return Origin(line, deepest or line, module)

    def _name(self, code: CodeType) -> tuple[str, str]:
        """("user", "model" or "", name of the file)."""
        known = self._names.get(code)
        if known is None:
            file = code.co_filename
            name = Path(file).name
            if self.is_users(file):
                known = "user", self.name_of(file)
            elif file.startswith((_OURS, "<")) or any(part in file for part in _PLUMBING):
                known = "", name
            else:
                known = ("model" if file.startswith(_LIBRARIES) else ""), name
            self._names[code] = known
        return known

    def name_of(self, file: str) -> str:
        """The user's file as a report names it: "train.py", or "cell" for a notebook's cells."""
        return "cell" if self._is_cell(file) else Path(file).name

    def _is_cell(self, file: str) -> bool:
        return self.cell and (file == self.script or "ipykernel" in file or "<ipython" in file)

    def is_users(self, file: str) -> bool:
        """Whether a file is the user's own."""
        if file == self.script or self._is_cell(file):
            return True
        if self.cell:
            return False
        return (
            file.startswith(self.folder)
            and not file.startswith(_LIBRARIES)
            and not file.startswith(_OURS)
        )

    @contextmanager
    def watching_modules(self) -> Iterator[None]:
        """Inside, `modules` holds the modules that are running.

        Their frames could be searched instead, but to read the local names of a frame keeps alive
        the tensors that they refer to.
        """
        call = nn.Module.__call__
        running = self.modules

        def noted_call(module, *args, **kwargs):
            running.append(module)
            try:
                return call(module, *args, **kwargs)
            finally:
                running.pop()

        with patch.object(nn.Module, "__call__", noted_call):
            yield
