"""`torch.compile` for a model of a recipe."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def compiled(model: M) -> M:
    """The model itself, which from now on compiles its forward and backward pass when it is called.

    Raises RuntimeError, in one sentence, where a CPU's code cannot be compiled.
    """
    if next(model.parameters()).device.type == "cpu" and not (
        shutil.which("g++") or shutil.which("clang++")
    ):
        raise RuntimeError(
            "compile=True needs a C++ compiler on a CPU, and there is neither g++ nor clang++: "
            "install one, or leave compile out."
        )
    model.compile()
    return model


@contextmanager
def not_compiled(model: nn.Module) -> Iterator[None]:
    """Inside, a compiled model runs operation by operation, as it was written.

    A dispatch mode sees the operations of such a step alone; and batches of many sizes, as in an
    evaluation, would each be compiled.
    """
    if model._compiled_call_impl is None:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def compiling_when_called() -> Iterator[None]:
    """Inside, `torch.compile` of a function waits until the function is called for the first time.

    bitsandbytes, which peft imports as well, compiles some functions when it is imported. To do so
    PyTorch imports its compiler, which takes longer than all the rest; a plan calls none of them.
    """
    compile_now = torch.compile

    def later(function: Callable | None = None, **options: Any) -> Callable:
        if function is None:
            return partial(later, **options)
        made = cache(lambda: compile_now(function, **options))

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return made()(*args, **kwargs)

        return call

    with patch.object(torch, "compile", later):
        yield
