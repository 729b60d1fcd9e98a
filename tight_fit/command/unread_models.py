"""The files of all models, which transformers reads twice when it is imported, read when needed.

transformers finds in their text which names it has: 1,644 files of 5.17, for a plan of one model.
`put_off` is for the command's own process. From then on only those of its Auto classes are read,
and all others as soon as something is asked for that is not among them.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

READ = ("auto", "bloom")  # folders of transformers.models; PEFT asks for a class of BLOOM


def put_off(utils: Any) -> None:
    """Change transformers.utils.import_utils, before anything has been taken from it.

    A release in which these names differ reads everything, as it does by itself.
    """
    lazy: Any = getattr(utils, "_LazyModule", None)
    define: Any = getattr(utils, "define_import_structure", None)
    read: Any = getattr(utils, "create_import_structure_from_path", None)
    if lazy is None or not hasattr(define, "__wrapped__") or not hasattr(read, "__wrapped__"):
        return
    models = os.path.join(os.path.dirname(os.path.dirname(utils.__file__)), "models")
    everything: Any = cache(read.__wrapped__)  # theirs keeps 128 folders, fewer than there are

    def read_few(path: str | os.PathLike[str]) -> dict[str, Any]:
        if os.fspath(path) not in (models, os.path.join(models, "__init__.py")):
            return everything(path)
        with os.scandir(models) as entries:
            folders = [entry for entry in entries if entry.is_dir() and entry.name[0] != "_"]
        return {
            entry.name: everything(entry.path) if entry.name in READ else {} for entry in folders
        }

    class Models(lazy):
        """A module of transformers whose names were read in part, until one is missing."""

        def __init__(self, name: str, file: str, structure: dict, *rest: Any, **options: Any):
            super().__init__(name, file, structure, *rest, **options)
            if name in ("transformers", "transformers.models"):
                self.__dict__["_few"] = structure
                del self.__dict__["__all__"]

        def __getattr__(self, name: str) -> Any:
            if "_few" not in vars(self) or name in self._class_to_module or name in self._objects:
                return super().__getattr__(name)
            if name.startswith("__") and name != "__all__":  # who looks through all modules asks
                raise AttributeError(name)
            if os.path.exists(os.path.join(self.__path__[0], f"{name}.py")):
                return super().__getattr__(name)  # Python imports it where this finds none
            if os.path.isdir(os.path.join(self.__path__[0], name)):
                return import_module(f"{self.__name__}.{name}")
            self._read_all()
            return getattr(self, name)

        def __dir__(self) -> list[str]:
            if "_few" in vars(self):
                self._read_all()
            return super().__dir__()

        def _read_all(self) -> None:
            few = self.__dict__.pop("_few")
            utils.create_import_structure_from_path = everything
            within = "models" if self.__name__ == "transformers" else None
            whole = define.__wrapped__(models, within)
            for backends, names in few.items():
                whole.setdefault(backends, {}).update(names)
            made: ModuleType = lazy(self.__name__, self.__file__, whole, self.__spec__)
            for name, value in vars(made).items():
                if name == "__all__" or not (name.startswith("__") or name == "_objects"):
                    self.__dict__[name] = value

    utils.create_import_structure_from_path = read_few
    utils._LazyModule = Models
