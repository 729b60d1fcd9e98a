"""The GPUs that readers have, the memory on them that training cannot use, and the GPUs here.

This module imports without torch, so that the first cell of a notebook can choose a GPU before CUDA
starts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from tight_fit.checks import shown
from tight_fit.gpus.calibration import REHEARSAL
from tight_fit.gpus.names import ANY, SEEN, as_gpu, find, matches
from tight_fit.gpus.table import GPU, GPUS, KNOWN
from tight_fit.units import MIB

if TYPE_CHECKING:
    import torch

__all__ = ["ANY", "GPU", "GPUS", "KNOWN", "REHEARSAL", "SEEN", "as_gpu", "find", "matches"]


# What takes memory beside tensors. Each is a stated assumption, and a term of its own in `Fit`.

# Bytes of the CUDA context and the loaded kernels: 300 to 600 MiB, depending on GPU and driver.
CONTEXT = 500 * MIB
# Bytes of NCCL's buffers and channels, outside PyTorch's allocator: 100 to 400 MiB, depending on
# its version and on the number of process groups.
NCCL = 200 * MIB
# Bytes of the workspace of one cuBLAS handle, on Hopper and on all other GPUs: the defaults of
# CUBLAS_WORKSPACE_CONFIG in PyTorch's notes on CUDA.
WORKSPACE = int(8.125 * MIB)
HOPPER_WORKSPACE = 32 * MIB
# Fraction of the tensors' peak: enough for 95 % of the reserved peaks that others measured with
# PyTorch 2.2 or later (docs/accuracy.md, where benchmarks/peaks/page.py derives it).
MARGIN = 0.02
# Fraction of the tensors' peak that malloc keeps beside them on a CPU. On a GPU the allocator is
# simulated instead (memory/allocator.py).
MALLOC = 0.05


def device_of(gpu: GPU) -> str:
    """What to plan for: "cuda", or "cpu" for a machine without a GPU (capability 0.0)."""
    return "cpu" if gpu.capability == (0, 0) else "cuda"


def cublas_workspace(gpu: GPU) -> int:
    """Bytes that cuBLAS takes from PyTorch's allocator; 0 without a GPU.

    They are the workspaces of two handles: that of the forward pass, and that of autograd's own
    thread.
    """
    if gpu.capability < (1, 0):
        return 0
    return 2 * (HOPPER_WORKSPACE if gpu.capability >= (9, 0) else WORKSPACE)


def here() -> GPU:
    """The first GPU of this machine; the machine itself, with its main memory, if it has none."""
    import torch  # takes seconds, and `find` does without it

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        capability = (properties.major, properties.minor)
        return GPU(properties.name, properties.total_memory, capability)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return GPU("this machine (no GPU)", memory, (0, 0))


# Which GPUs a process sees. CUDA reads CUDA_VISIBLE_DEVICES only once, when it starts, so GPUs must
# be hidden before the first CUDA call. BEFORE keeps what VISIBLE was before they were hidden, for
# the processes that this one starts; it is "" where VISIBLE was not set.
VISIBLE = "CUDA_VISIBLE_DEVICES"
BEFORE = "TIGHT_FIT_VISIBLE_BEFORE"
DRIVER = Path("/proc/driver/nvidia/gpus")  # on Linux, with one folder per GPU


def hide_all_but_first() -> int:
    """Hide all GPUs but the first from this process. Gives the number that were visible.

    With two GPUs, transformers' Trainer would silently switch to DataParallel, and every number of
    a notebook for one GPU would be another. Once CUDA has started, nothing is hidden any more.
    """
    given = os.environ.get(VISIBLE)
    visible = _in_driver() if given is None else [gpu for gpu in given.split(",") if gpu.strip()]
    torch = sys.modules.get("torch")
    if len(visible) > 1 and not (torch is not None and torch.cuda.is_initialized()):
        os.environ[BEFORE] = given or ""
        os.environ[VISIBLE] = visible[0]
    return len(visible)


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


def give_share(
    environment: MutableMapping[str, str], machine: int, machines: int, each: int
) -> None:
    """Leave a process to be started its `each` GPUs, in place, as one of several "machines".

    Where there are too few GPUs for all machines, none is left to any.
    """
    given = environment.get(VISIBLE)
    visible = _in_driver() if given is None else [gpu for gpu in given.split(",") if gpu.strip()]
    enough = len(visible) >= machines * each
    environment[VISIBLE] = ",".join(visible[machine * each :][:each]) if enough else ""


# Whether kernels run. torch.cuda.is_available() is true on GPUs that this build of PyTorch has no
# kernels for, such as a P100 with the wheels of today. Only a kernel shows it, and by then CUDA has
# started and the GPU can no longer be hidden; so the kernel runs in a process of its own.
NO_GPU = "no GPU found"
# For the import of torch, the start of CUDA and one kernel; from a cold disk that takes minutes.
PROBE_SECONDS = 180.0
PROBE = f"""
import torch
try:
    if torch.cuda.is_available():
        torch.zeros(8, device="cuda").add_(1).sum().item()
        print("usable")
    else:
        print({NO_GPU!r})
except Exception as error:  # no kernels for this GPU, a driver too old, no memory left: all differ
    print((str(error).strip() or type(error).__name__).splitlines()[0])
"""
_probed: tuple[bool, str] | None = None


def probe() -> tuple[bool, str]:
    """(whether a CUDA kernel really runs here, one line that says why not and what to do).

    The first call starts a process that runs a kernel on the first visible GPU, for at most
    PROBE_SECONDS; later calls give its answer again. Where nothing points to a GPU no process is
    started.
    """
    global _probed
    if _probed is None:
        if not _seems_to_be_here():
            return False, NO_GPU
        _probed = _run_probe()
    return _probed


def _seems_to_be_here() -> bool:
    given = os.environ.get(VISIBLE)
    if given is not None:
        return given.strip() not in ("", "-1")
    if _in_driver() or shutil.which("nvidia-smi"):
        return True
    torch = sys.modules.get("torch")  # it also knows GPUs of other makers, by the same functions
    return torch is not None and torch.cuda.is_available()


def _in_driver() -> list[str]:
    """The numbers of the GPUs that the driver lists, without CUDA."""
    count = len(list(DRIVER.glob("*"))) if DRIVER.is_dir() else 0
    return [str(number) for number in range(count)]


def _run_probe() -> tuple[bool, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        answer = f"no kernel finished within {PROBE_SECONDS:.0f} seconds"
    else:
        lines = done.stdout.strip().splitlines()
        answer = lines[-1] if lines else f"the test of it ended with exit status {done.returncode}"
    if answer == "usable":
        return True, ""
    if answer == NO_GPU:
        return False, NO_GPU
    return False, (
        f"there is a GPU, but it cannot run this PyTorch ({answer}); on Kaggle choose the T4 "
        "accelerator, elsewhere install a PyTorch built for this GPU"
    )


def device(wanted: object = None) -> torch.device:
    """The device that a user names, as torch does; None takes the GPU if there is one.

    Raises ValueError or TypeError, in one sentence, for a name that is unknown, and for a device
    that this machine lacks or cannot use.
    """
    import torch

    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choose = "use 'cuda' for a GPU, 'cpu', or leave it out to take the GPU if there is one"
    if not isinstance(wanted, (str, torch.device)):
        raise TypeError(f"device={shown(wanted)} must be a name: {choose}.")
    try:
        found = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"device={shown(wanted)} is not known: {choose}.") from None
    try:
        torch.empty(1, device=found).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0].partition(". ")[0].rstrip(".")[:120]
        raise ValueError(f"device={str(found)!r} cannot be used here ({why}): {choose}.") from None
    return found
