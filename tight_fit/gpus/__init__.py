"""The GPUs that readers have, the memory on them that training cannot use, and the GPUs here.

This module imports without torch, so that the first cell of a notebook can choose a GPU before CUDA
starts.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tight_fit.checks import shown, whole
from tight_fit.units import GIB, MIB

if TYPE_CHECKING:
    import torch


class GPU(NamedTuple):
    """One kind of GPU.

    memory      bytes as PyTorch sees them (`torch.cuda.get_device_properties(0).total_memory`):
                less than the label says, because ECC and the driver take a part
    capability  compute capability, (major, minor); (0, 0) for a machine without a GPU
    """

    name: str
    memory: int
    capability: tuple[int, int]

    @property
    def bf16(self) -> bool:
        """Whether matrix products in bf16 run in hardware."""
        return self.capability >= (8, 0)


# Memory as PyTorch's own out-of-memory messages report it ("total capacity of X GiB"), capabilities
# from NVIDIA's list of CUDA GPUs. Drivers differ by some tens of MiB. The numbers of the T4, the
# RTX 4060 and the H200 were looked up in several public reports, the others are stated from memory,
# and none was read from a GPU.
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
MOST_CAPABLE = 20  # above every compute capability that there is
# Fraction of the tensors' peak that malloc keeps beside them on a CPU. On a GPU the allocator is
# simulated instead (memory/allocator.py).
MALLOC = 0.05


def cublas_workspace(gpu: GPU) -> int:
    """Bytes that cuBLAS takes from PyTorch's allocator; 0 without a GPU.

    They are the workspaces of two handles: that of the forward pass, and that of autograd's own
    thread.
    """
    if gpu.capability < (1, 0):
        return 0
    return 2 * (HOPPER_WORKSPACE if gpu.capability >= (9, 0) else WORKSPACE)


# A GPU given by its size alone, such as "8GB": which arithmetic it has is not known. Of a card sold
# with 8 GB PyTorch sees about 7.75 GiB, and less where ECC is on; 0.95 is below most of the table.
SEEN = 0.95
ANY = (8, 6)  # the compute capability assumed for it
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib|g)")
MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|gpu|sxm\d?|[^a-z0-9]")


def find(name: str) -> GPU:
    """The GPU of that name in any spelling, or of a size such as "8GB" (as sold) or "7.75GiB".

    Where a name fits several ("A100"), it is the one with the least memory (`matches`). Raises
    ValueError for another name, and asks whether a near one was meant.
    """
    found = matches(name)
    if found:
        return found[0]
    plain = {_plain(known): known for known in GPUS}
    asked = _plain(name) if isinstance(name, str) else ""
    inside = [known for key, known in plain.items() if asked and (asked in key or key in asked)]
    if asked.isdigit() and len(asked) < 4:
        inside = [f"{asked}GB", *inside[:3]]
    close = difflib.get_close_matches(asked, plain, 2, 0.6)
    near = inside or [plain[key] for key in close]
    question = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(GPUS)}."
    raise ValueError(
        f"gpu={shown(name)} is not known: {question} A size such as 8GB, or a GPU of your own, "
        "does too."
    )


def as_gpu(gpu: str | GPU) -> GPU:
    """The GPU itself, or the one of that name.

    Raises ValueError for an unknown name and for a `GPU` without memory, TypeError for anything
    else.
    """
    if isinstance(gpu, str):
        return find(gpu)
    if not isinstance(gpu, GPU):
        raise TypeError(f"gpu={shown(gpu)} must be a name, such as 'T4', or a GPU.")
    if not isinstance(gpu.name, str) or not gpu.name.strip() or not gpu.name.isprintable():
        raise TypeError(f"name={shown(gpu.name)} of a GPU must be a text of one line.")
    whole(f"memory of {shown(gpu.name)}", gpu.memory, MIB, 2**50)
    capability = gpu.capability
    if not isinstance(capability, tuple) or [type(part) for part in capability] != [int, int]:
        raise TypeError(
            f"capability={shown(capability)} must be two whole numbers, such as (8, 6)."
        )
    if not (0 <= capability[0] <= MOST_CAPABLE and 0 <= capability[1] <= 9):
        raise ValueError(
            f"capability={shown(capability)} is that of no GPU: the first number is from 0 to "
            f"{MOST_CAPABLE}, and the second from 0 to 9."
        )
    return gpu


def matches(name: str) -> list[GPU]:
    """The GPUs that a name means, the one with the least memory first; empty where it means none.

    Raises ValueError for a size that no GPU has.
    """
    if not isinstance(name, str):
        return []
    if name in GPUS:
        return [GPUS[name]]
    size = SIZE.fullmatch(name.strip().lower())
    if size:
        return [_of_size(float(size[1]), size[2])]
    asked = _plain(name)
    equal = [gpu for gpu in GPUS.values() if _plain(gpu.name) == asked]
    found = equal or [gpu for gpu in GPUS.values() if asked and _means(asked, gpu)]
    return sorted(found, key=lambda gpu: gpu.memory)


def _of_size(size: float, unit: str) -> GPU:
    name = f"{size:g}{'GiB' if unit == 'gib' else 'GB'}"
    if not 0.5 <= size <= 1024:
        raise ValueError(f"gpu={name!r} is no size of a GPU: give 0.5 to 1024 GB.")
    return GPU(name, int(size * GIB * (1 if unit == "gib" else SEEN)), ANY)


def _plain(name: str) -> str:
    """A name without makers, spaces and case."""
    return MAKERS.sub("", name.lower())


def _means(asked: str, gpu: GPU) -> bool:
    """Whether a name without makers is the GPU's but for its memory, or for the letters before."""
    plain, base = _plain(gpu.name), _plain(gpu.name.split("-")[0])
    label = re.fullmatch(r"(\d+)gi?b", asked.removeprefix(plain))
    if asked.startswith(plain) and label:  # "RTX 3060 12GB"
        return 0.85 < gpu.memory / (int(label[1]) * GIB) <= 1
    if asked == base or asked + "gb" == plain:  # "A100", "A100-40"
        return True
    number = len(asked) > 2 and asked[0].isdigit()  # "3060"; of "16" nobody knows what is meant
    return number and plain.endswith(asked) and plain[: -len(asked)].isalpha()


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
# Names the pretended GPU of a rehearsal (tools/pretend); what is written then is no record.
REHEARSAL = "TIGHT_FIT_REHEARSAL"


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
