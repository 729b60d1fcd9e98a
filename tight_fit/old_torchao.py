"""An old torchao, of which the course uses nothing, does not keep peft from making adapters.

From release 0.19 on, peft raises ImportError wherever it finds a torchao before 0.16, also for
layers that have nothing to do with it. Colab comes with torchao 0.10.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from typing import Any

LEAST = 0, 16  # what peft takes


def release() -> str | None:
    """The installed torchao's release where peft refuses it, as "0.10.0"; else None."""
    try:
        found = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        return None
    return found if tuple(map(int, re.findall(r"\d+", found)[:2])) < LEAST else None


def pass_over() -> None:
    """Let peft take a torchao that is too old for it as one that is not installed.

    Where torchao has been imported, a layer may be one of its own, and peft raises as before. Does
    nothing where torchao is missing or new enough. Twice is as good as once.
    """
    if importlib.util.find_spec("torchao") is None:
        return
    from peft import import_utils

    ask: Any = import_utils.is_torchao_available
    if getattr(ask, "__module__", None) == __name__:
        return

    def is_torchao_available() -> bool:
        try:
            return ask()
        except ImportError:
            if "torchao" in sys.modules:
                raise
            return False

    for name, module in list(sys.modules.items()):
        if name.startswith("peft.") and vars(module).get("is_torchao_available") is ask:
            module.is_torchao_available = is_torchao_available  # type: ignore[attr-defined]
