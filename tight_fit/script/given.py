"""What is given to be planned: a program's file, what it imports, and the rank that it is."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tight_fit.gpus import VISIBLE
from tight_fit.packages import missing

if TYPE_CHECKING:
    from tight_fit.script.ranks import ProgramRank

SECONDS = 600  # of CPU time, for one run of the program
HEAVY = ("accelerate", "bitsandbytes", "datasets", "lightning_fabric", "peft")  # to import


def check(script: str) -> None:
    """Raises FileNotFoundError or ValueError for what is no Python program, in one sentence."""
    if not script.strip():
        raise ValueError("the name of the program is empty: name a .py file.")
    path = Path(script)
    if path.is_dir():
        raise ValueError(f"{script} is a folder: name the program, a .py file.")
    if not path.is_file():
        raise FileNotFoundError(f"{script} is not there: name the program, a .py file.")
    if path.suffix == ".ipynb":
        raise ValueError(
            f"{script} is a notebook: write %load_ext tight_fit and %%plan above its training "
            "cell, or make a program of it with jupyter nbconvert --to script."
        )
    try:
        compile(path.read_bytes(), script, "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        at = f"{path.name}:{line}" if line else path.name
        raise ValueError(f"{at} is not Python: {getattr(error, 'msg', error)}.") from None


def rank_of(ranks: int | None) -> ProgramRank | None:
    """The rank that is asked for, by a number of ranks or by torchrun's environment, if any."""
    from tight_fit.script.ranks import ProgramRank

    told = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    if all(number.isdecimal() for number in told):
        number, there = map(int, told)
        if ranks is None and number < there:
            return ProgramRank(number, there)
        if ranks is not None and number < ranks:
            return ProgramRank(number, ranks)
    return None if ranks is None else ProgramRank(0, ranks)


@contextmanager
def importing() -> Iterator[None]:
    """Inside, imports start no CUDA, with which no copy of this process could work."""
    from unittest.mock import patch  # imports asyncio, which no other command needs

    gc.disable()  # nothing that is imported is garbage, and looking for it takes time
    try:
        with patch.dict(os.environ, {VISIBLE: ""}):
            yield
    finally:
        gc.enable()


def load_what_is_mentioned(script: str, arguments: tuple[str, ...]) -> None:
    """Import what the program imports and takes long, once for all of its runs.

    bitsandbytes as well where an argument names it: its layers must be known beforehand. So must
    accelerate's search of a batch size and the kernels of TRL.
    """
    text = Path(script).read_text(encoding="utf8", errors="replace")
    wanted = {name for name in HEAVY if re.search(rf"^\s*(from|import)\s+{name}\b", text, re.M)}
    if re.search(r"bitsandbytes|load_in_[48]bit|8bit|bnb", text + " ".join(arguments)):
        wanted.add("bitsandbytes")
    if re.search(r"(find_executable|auto_find)_batch_size", text + " ".join(arguments)):
        wanted.add("accelerate")
    with importing():
        for name in sorted(wanted):
            if not missing(name):
                import_module(name)
        if re.search(r"^\s*(from|import)\s+trl\b", text, re.M):
            with suppress(ImportError):  # older ones have none
                import_module("trl.kernels.chunked_divergence")
