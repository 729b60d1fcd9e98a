"""Which GPUs this process may see. Importing this imports nothing but Python's own modules.

CUDA reads CUDA_VISIBLE_DEVICES once, when it starts, so what is hidden here must be hidden before
the first CUDA call. Another variable remembers what was hidden, for processes that this one starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
BEFORE = (
    "TIGHT_FIT_VISIBLE_BEFORE"  # what VISIBLE was before GPUs were hidden; "" where it was unset
)
DRIVER = Path("/proc/driver/nvidia/gpus")  # one folder a GPU, on Linux: counts them without CUDA


def use_one() -> int:
    """Hide all GPUs but the first from this process, and give the number that were visible.

    Why: with two T4s, transformers' Trainer silently switches to DataParallel, and every number of
    a one-GPU notebook would be another. Once CUDA has started, nothing is hidden any more.
    """
    given = os.environ.get(VISIBLE)
    if given is None:
        count = len(list(DRIVER.glob("*"))) if DRIVER.is_dir() else 0
        gpus = [str(number) for number in range(count)]
    else:
        gpus = [gpu for gpu in given.split(",") if gpu.strip()]
    torch = sys.modules.get("torch")
    if len(gpus) > 1 and not (torch is not None and torch.cuda.is_initialized()):
        os.environ[BEFORE] = given or ""
        os.environ[VISIBLE] = gpus[0]
    return len(gpus)


def use_none() -> None:
    """Hide every GPU, from this process and from those that it starts."""
    os.environ.pop(BEFORE, None)
    os.environ[VISIBLE] = ""


def some_hidden() -> bool:
    """Whether `use_one` hid GPUs that other processes may use."""
    return BEFORE in os.environ


def show_all(environment: MutableMapping[str, str]) -> None:
    """Undo `use_one` in the environment of a process to be started, in place."""
    before = environment.pop(BEFORE, None)
    if before is None:
        return
    if before:
        environment[VISIBLE] = before
    else:
        environment.pop(VISIBLE, None)
