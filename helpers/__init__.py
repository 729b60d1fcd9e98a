"""What the notebooks share: recipes, data, models, training, measuring, tables and plots.

The planner is the package `tight_fit`, which this one imports and which imports nothing of it. What
lay here before is named by moved.tsv: an import of it ends in one sentence with its new place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NoReturn

# What was a module, and what was a name in one that is still there, each with its place today.
TABLE = Path(__file__).with_name("moved.tsv")
PLACES = dict(line.split("\t") for line in TABLE.read_text(encoding="utf8").splitlines()[1:])


def refuse(name: str) -> NoReturn:
    """Raises ImportError, in one sentence, for a module or a name that has another place today."""
    parts = {
        place if re.fullmatch(r"helpers\.\w+", place) else place.rpartition(".")[0]
        for old, place in PLACES.items()
        if old.startswith(f"{name}.")
    }
    place = ", ".join(sorted(parts)) if parts else PLACES[name]
    raise ImportError(
        f"{name} is {'in ' if parts else ''}{place} today: import it from there.", name=name
    )


class Finder(MetaPathFinder):
    """Asked first of all, so that it answers for old parts of what is one module today."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target=None
    ) -> ModuleSpec | None:
        """None for what was never here. Raises ImportError for what has moved.

        Python asks nobody for a part of a module that is no package. So what was a package, as
        `helpers.data`, is called one still, without a folder.
        """
        if fullname in PLACES:
            refuse(fullname)
        if not any(old.startswith(f"{fullname}.") for old in PLACES):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.submodule_search_locations is None:
            spec.submodule_search_locations = []
        return spec


def watch() -> None:
    """Let imports of what has moved say where it is. Twice is as good as once."""
    if not any(type(finder).__name__ == Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


watch()


def __getattr__(name: str):
    if f"{__name__}.{name}" in PLACES:
        refuse(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
