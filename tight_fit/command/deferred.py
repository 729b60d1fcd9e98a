"""An import that transformers makes for all models and no plan needs, put off until it is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "scipy.optimize"  # a tenth of the time of all imports
FUNCTION = "linear_sum_assignment"  # the losses of detection models match boxes by it


class _Deferred(ModuleType):
    """Stands for the module: what is taken from it but for one function imports it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # who looks through all modules asks
            raise AttributeError(name)
        return _later if name == FUNCTION else getattr(_real(), name)


def _real() -> ModuleType:
    if isinstance(sys.modules.get(NAME), _Deferred):
        del sys.modules[NAME]
    return import_module(NAME)


def _later(*args: Any, **kwargs: Any) -> Any:
    return getattr(_real(), FUNCTION)(*args, **kwargs)


@contextmanager
def matching_deferred() -> Iterator[None]:
    """Inside, modules that import that function get one that imports it when it is called."""
    found = find_spec(NAME) if NAME not in sys.modules and find_spec("scipy") else None
    if found is not None:
        sys.modules[NAME] = module = _Deferred(NAME)
        module.__path__ = list(found.submodule_search_locations or ())  # others are found there
    try:
        yield
    finally:
        if isinstance(sys.modules.get(NAME), _Deferred):
            del sys.modules[NAME]
