"""Cards that readers have, and what of their memory a training run cannot use."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

from helpers.units import GIB, MIB


class GPU(NamedTuple):
    """`memory` in bytes as PyTorch sees it (`torch.cuda.get_device_properties(0).total_memory`), which is less than
    the label: ECC and the driver take their part. `bf16`: matrix products in bf16 run in hardware."""

    name: str
    memory: int
    capability: tuple[int, int]

    @property
    def bf16(self) -> bool:
        return self.capability >= (8, 0)


# Totals as PyTorch's own out-of-memory messages report them ("total capacity of X GiB"), capabilities from NVIDIA's
# list of CUDA GPUs. Drivers differ by some tens of MiB. T4, RTX 4060 and H200 were looked up in several public reports,
# the others are stated from memory; none was read off a card.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("GTX 1650", int(3.81 * GIB), (7, 5)),
        GPU("RTX 4060 Laptop", int(7.75 * GIB), (8, 9)),
        GPU("RTX 3060", int(11.76 * GIB), (8, 6)),
        GPU("T4", int(14.56 * GIB), (7, 5)),
        GPU("P100", int(15.89 * GIB), (6, 0)),
        GPU("V100-16GB", int(15.77 * GIB), (7, 0)),
        GPU("L4", int(22.03 * GIB), (8, 9)),
        GPU("RTX 3090", int(23.69 * GIB), (8, 6)),
        GPU("RTX 4090", int(23.64 * GIB), (8, 9)),
        GPU("V100-32GB", int(31.74 * GIB), (7, 0)),
        GPU("A100-40GB", int(39.39 * GIB), (8, 0)),
        GPU("A100-80GB", int(79.14 * GIB), (8, 0)),
        GPU("H100", int(79.10 * GIB), (9, 0)),
        GPU("H200", int(139.80 * GIB), (9, 0)),
    )
}

# What is on the card besides tensors. Stated assumptions, each a term of its own in `Fit`.
CONTEXT = 500 * MIB  # CUDA context and loaded kernels; 300 to 600 MiB by card and driver
NCCL = (
    200 * MIB
)  # its buffers and channels, outside PyTorch's allocator; 100 to 400 MiB by version and number of groups
WORKSPACE = int(
    8.125 * MIB
)  # of one cuBLAS handle but on Hopper: the default of CUBLAS_WORKSPACE_CONFIG in PyTorch's notes
HOPPER_WORKSPACE = 32 * MIB
MARGIN = 0.02  # share of the tensors' peak: about what plans miss the reserved peak of a real T4 by in the mean (published.py)
MALLOC = 0.05  # share of the tensors' peak that a CPU's malloc keeps beside them; CUDA's allocator is simulated (allocator.py)


def cublas_workspace(gpu: GPU) -> int:
    """Bytes cuBLAS keeps, from PyTorch's allocator, for two handles: the forward pass's and autograd's own thread's."""
    if gpu.capability < (1, 0):
        return 0
    return 2 * (HOPPER_WORKSPACE if gpu.capability >= (9, 0) else WORKSPACE)


def find(name: str) -> GPU:
    """The card of that name. Raises ValueError naming the cards there are."""
    if name not in GPUS:
        raise ValueError(
            f"card={name!r} is not known: use one of {', '.join(GPUS)}, or a Card of your own."
        )
    return GPUS[name]


def here() -> GPU:
    """The GPU of this machine, or the machine itself where there is none (its memory is then what tensors live in)."""
    import torch  # takes seconds, and a name is looked up without it

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return GPU(found.name, found.total_memory, (found.major, found.minor))
    return GPU(
        "this machine (no GPU)", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), (0, 0)
    )


# Which GPUs a process may see. CUDA reads CUDA_VISIBLE_DEVICES once, when it starts, so what is hidden
# here must be hidden before the first CUDA call. BEFORE remembers it for processes that this one starts.
VISIBLE = "CUDA_VISIBLE_DEVICES"
BEFORE = (
    "TIGHT_FIT_VISIBLE_BEFORE"  # what VISIBLE was before GPUs were hidden; "" where it was unset
)
DRIVER = Path("/proc/driver/nvidia/gpus")  # one folder a GPU, on Linux: counts them without CUDA


def hide_all_but_first() -> int:
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


def hide_all() -> None:
    """Hide every GPU, from this process and from those that it starts."""
    os.environ.pop(BEFORE, None)
    os.environ[VISIBLE] = ""


def some_hidden() -> bool:
    """Whether `hide_all_but_first` hid GPUs that other processes may use."""
    return BEFORE in os.environ


def show_all(environment: MutableMapping[str, str]) -> None:
    """Undo `hide_all_but_first` in the environment of a process to be started, in place."""
    before = environment.pop(BEFORE, None)
    if before is None:
        return
    if before:
        environment[VISIBLE] = before
    else:
        environment.pop(VISIBLE, None)
